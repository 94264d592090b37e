"""Command lines of servers, taken apart into flags with their values."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from sglang_parse.doctor.finding import Problem

Parsed = TypeVar("Parsed")


@cache
def parser() -> argparse.ArgumentParser:
    """SGLang's, with the flags of PARSE."""
    load_plugins()
    made = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(made)
    return made


def grouped(words: Sequence[str], is_flag: Callable[[str], object]) -> list[list[str]]:
    """Groups flags with their values, after groups of one word before the first flag."""
    groups: list[list[str]] = []
    for word in words:
        if is_flag(word) or not groups or not is_flag(groups[-1][0]):
            groups.append([])
        groups[-1].append(word)
    return groups


def captured(parse: Callable[[Sequence[str]], Parsed], words: Sequence[str]) -> Parsed:
    """Parses words. Raises: Problem, with argparse's error."""
    try:
        with contextlib.redirect_stderr(stderr := io.StringIO()):
            return parse(words)
    except SystemExit:
        # Printed: usage, then "sglang serve: error: ...".
        raise Problem(stderr.getvalue().strip().rpartition("error: ")[2], "") from None


def words_of(launch_command: str, info: Mapping[str, Any]) -> list[str]:
    """Words of a running server's command line, which SGLang joins with spaces.

    Words up to the next known flag are one value. A flag with several values has those that the
    server reports in its /server_info, ``info``, or one per word.
    """
    words: list[str] = []
    for flag, *values in grouped(launch_command.split(" "), _action):
        action = _action(flag)
        if action is None or "=" in flag:
            words.append(" ".join([flag, *values]))
            continue
        if action.nargs in ("+", "*"):
            reported = info.get(action.dest)
            whole = list(map(str, reported)) if isinstance(reported, list) else values
            values = whole if " ".join(whole) == " ".join(values) else values
        elif values:
            values = [" ".join(values)]
        words += [flag, *values]
    return words


def _action(word: str) -> argparse.Action | None:
    """Returns what a flag sets; it may be abbreviated, or have its value in the same word."""
    flag, known = word.partition("=")[0], parser()._option_string_actions
    longer = [name for name in known if name.startswith(flag)]
    return known.get(longer[0] if len(longer) == 1 else flag)
