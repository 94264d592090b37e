"""Checks, and the lines of the doctor's table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from sglang_parse.startup.report import parts

Check = tuple[str, Callable[[], str]]
"""Name, and a function that returns what it found or raises what is wrong."""
OK, WARNING, FAILS, NOT_CHECKED = "ok", "warning", "fails", "not checked"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: ok, warning (works, but badly), fails, or not checked."""

    check: str
    status: str
    found: str
    fix: str = ""


class Problem(Exception):
    """A failed check that is not one of ``startup``'s."""

    def __init__(self, found: str, fix: str, status: str = FAILS) -> None:
        super().__init__(found)
        self.found, self.fix, self.status = found, fix, status


def not_checked(why: str) -> NoReturn:
    raise Problem(why, "", NOT_CHECKED)


def warn_if(is_bad: bool, found: str, fix: str) -> str:
    """Returns what was found; raises it as a warning if it is bad."""
    if is_bad:
        raise Problem(found, fix, WARNING)
    return found


def simulated(fraction: float) -> NoReturn:
    found = f"acceptance is simulated ({fraction:g}): answers are meaningless"
    fix = "unset SGLANG_PARSE_SIMULATE_ACCEPTANCE, unless this is a benchmark"
    raise Problem(found, fix, WARNING)


def run_check(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, OK, check())
    except Problem as problem:
        return Finding(name, problem.status, problem.found, problem.fix)
    except Exception as error:  # noqa: BLE001 - any error is a finding
        return Finding(name, FAILS, *parts(error))
