"""Test-only SGLang plugin: adds the source of docs/development.md, "Add a source", to a server's.

The file that it is read from is named in ``TOY_SOURCE``; without that variable the plugin does
nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


def register() -> None:
    if "TOY_SOURCE" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    build = "sglang_parse.engine.build.build_sources"
    HookRegistry.register(build, add_source, HookType.AROUND)


def add_source(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """The line of ``build_sources``, behind the other sources."""
    from sglang_parse.engine.sources.chain import SourceChain

    page = Path(os.environ["TOY_SOURCE"]).read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?class EchoSource.*?)```", page, re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(code, "echo.py", "exec"), found)
    chain = original(*args, **kwargs)
    return SourceChain([*chain._sources, found["EchoSource"]()])
