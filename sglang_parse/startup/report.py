"""Start errors as a user reads them: one line with setting, value and fix."""

from __future__ import annotations

import argparse
import sys
from difflib import get_close_matches
from types import TracebackType
from typing import NoReturn

from sglang_parse.core.config import flag


def is_ours(error: BaseException | None) -> bool:
    """Whether PARSE raised an error of its own, whose text is complete without a traceback."""
    return type(error).__module__.startswith(f"{__package__.partition('.')[0]}.")


def parts(error: BaseException) -> tuple[str, str]:
    """Returns what an error of PARSE's found, and the fix.

    The fix follows "Fix:", or, in errors of settings and questions, the last semicolon. Errors of
    several settings have one in each line.
    """
    found, _, fix = str(error).removeprefix("PARSE: ").partition("Fix: ")
    if not fix and "; " in found and "\n" not in found:
        found, _, fix = found.rpartition("; ")
    return found.strip().removesuffix(".") or repr(error), fix.strip()


def one_line(error: BaseException) -> str:
    found, fix = parts(error)
    return f"PARSE: {found}. Fix: {fix}" if fix else f"PARSE: {found}"


def show_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """A ``sys.excepthook`` that shows PARSE's own errors as one line; Python exits with 1."""
    if is_ours(error):
        sys.stderr.write(f"{one_line(error)}\n")
    else:
        sys.__excepthook__(kind, error, traceback)


def is_asked_for(words: str) -> bool:
    """Whether a command line, or a message about it, names PARSE or one of its flags."""
    return flag("") in words or "PARSE" in words.upper().split()


def usage_error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Replaces ``parser.error``: SGLang's usage of 40,000 characters is left out for PARSE."""
    if not is_asked_for(f"{message} {' '.join(sys.argv)}"):
        argparse.ArgumentParser.error(parser, message)
    flags = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
    known = [*parser._option_string_actions]
    near = [match for flag in flags for match in get_close_matches(flag, known, 1)]
    hint = f": did you mean {', '.join(near)}?" if near and "unrecognized" in message else ""
    parser.exit(2, f"{parser.prog}: error: {message}{hint}\n")
