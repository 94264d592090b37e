"""The HTTP app of a process of ``--tokenizer-worker-num``, which SGLang starts without plugins.

SGLang imports it by the name that ``SGLANG_HTTP_SERVER_APP_PATH`` gives; ``checks`` sets it.
"""

from __future__ import annotations

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.entrypoints.http_server import app  # noqa: E402

__all__ = ["app"]
