"""PARSE's flags on SGLang's command line (ledger: cli_flags)."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import Any

from sglang_parse.algorithm import NAME, names_parse
from sglang_parse.core import config
from sglang_parse.patches.base import Patch, after, around

logger = logging.getLogger(__name__)
_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"


def _add_flags(_result: None, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
    config.add_cli_args(parser)


def _publish_settings(original: Callable, cls: type, args: argparse.Namespace) -> Any:
    settings = config.config_from_namespace(args)
    if settings is not None:
        settings.to_env()
        if settings.model_fields_set and not names_parse(args):
            logger.warning(
                "PARSE: %s without --speculative-algorithm %s: this server runs without PARSE.",
                *(", ".join(map(config.flag, sorted(settings.model_fields_set))), NAME),
            )
    return original(cls, args)


PATCH = Patch(
    "cli_flags",
    {
        f"{_SERVER_ARGS}.add_cli_args": after(_add_flags),
        f"{_SERVER_ARGS}.from_cli_args": around(_publish_settings),
    },
    why="`ServerArgs` has no fields for plugins, so SGLang would reject `--parse-...` as unknown.",
    how="adds the flags to SGLang's parser; their values reach the other processes in one "
    "environment variable. Where PARSE is not the algorithm a warning says so.",
    removed_when="plugins can declare flags.",
)
