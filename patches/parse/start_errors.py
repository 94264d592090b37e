"""A refused start ends with one line (ledger: start_errors)."""

from __future__ import annotations

import argparse
import logging
import sys
from functools import partial
from typing import Any

from sglang_parse.patches.base import Patch, after, before, log_filter
from sglang_parse.startup import report

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_SCHEDULER = "sglang.srt.managers.scheduler"


def _shorten_usage(_result: None, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
    parser.error = partial(report.usage_error, parser)  # type: ignore[method-assign]


def _shorten_tracebacks(*_: Any, **__: Any) -> None:
    sys.excepthook = report.show_uncaught


class SchedulerError(logging.Filter):
    """Shows PARSE's own errors without the traceback, unless another error caused them."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = sys.exc_info()[1]
        if error is not None and report.is_ours(error) and error.__cause__ is None:
            record.msg, record.args = report.one_line(error), ()
        return True


PATCH = Patch(
    "start_errors",
    {
        f"{_SERVER_ARGS}.add_cli_args": after(_shorten_usage),
        f"{_SERVER_ARGS}.from_cli_args": before(_shorten_tracebacks),
        f"{_SCHEDULER}.logger": log_filter(_SCHEDULER, SchedulerError()),
    },
    why="the sentence with the fix is hard to find: SGLang shows a refused start below a "
    "traceback, and an unknown flag below 40,000 characters of usage.",
    how="on servers started from the command line, `sys.excepthook` shows errors that PARSE raises "
    "as one line; where PARSE is the algorithm or a `--parse-...` flag is concerned, the parser "
    "leaves out the usage and suggests the nearest flag; the scheduler logs PARSE's errors without "
    "traceback.",
    removed_when="SGLang shows errors of start-up checks without traceback.",
)
