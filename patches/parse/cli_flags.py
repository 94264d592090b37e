"""PARSE's own flags on SGLang's command line (ledger: cli_flags)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.core import config
from sglang_parse.patches.base import Hook, hook_patch

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"


def _add_flags(_result: None, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
    config.add_cli_args(parser)


def _publish_settings(original: Callable, *args: Any, **kwargs: Any) -> Any:
    # A classmethod: the namespace is the last positional argument or a keyword.
    namespace = kwargs.get("args", args[-1] if args else None)
    if isinstance(namespace, argparse.Namespace):
        settings = config.config_from_namespace(namespace)
        if settings is not None:
            settings.to_env()
    return original(*args, **kwargs)


PATCH = hook_patch(
    "cli_flags",
    {
        f"{_SERVER_ARGS}.add_cli_args": Hook(_add_flags, HookType.AFTER, ("parser",)),
        f"{_SERVER_ARGS}.from_cli_args": Hook(_publish_settings, HookType.AROUND, ("args",)),
    },
    why="`ServerArgs` accepts no fields of a plugin, so `--parse-...` would be unknown.",
    how="adds the flags to SGLang's parser; what was parsed goes to the other processes as "
    "one environment variable.",
    removed_when="plugins can declare flags.",
)
