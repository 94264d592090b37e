"""A line of the doctor's table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

OK, WARNING, FAILS, NOT_CHECKED = "ok", "warning", "fails", "not checked"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one thing.

    Attributes:
        check: what was looked at.
        status: "ok", "warning" (it works, but not as it could), "fails" (it will not work), or
            "not checked".
        found: in words.
        fix: what to do; "" where nothing is to be done.
    """

    check: str
    status: str
    found: str
    fix: str = ""


class Trouble(Exception):
    """What a look found wrong and nothing in ``startup`` has a rule for.

    Args:
        status: ``WARNING`` or ``FAILS``.
    """

    def __init__(self, found: str, fix: str, status: str = FAILS) -> None:
        super().__init__(found)
        self.found, self.fix, self.status = found, fix, status


def examine(check: str, look: Callable[[], str]) -> Finding:
    """A look as a line: what it returns was found, what it raises is wrong."""
    try:
        return Finding(check, OK, look())
    except Trouble as trouble:
        return Finding(check, trouble.status, trouble.found, trouble.fix)
    except Exception as error:  # noqa: BLE001 - whatever is broken here is what is asked about
        return refused(check, error)


def refused(check: str, error: Exception) -> Finding:
    """An error as a line. Those of ``startup`` bring their fix along: behind "Fix:", or, of
    settings and questions, behind the last semicolon."""
    found, _, fix = str(error).removeprefix("PARSE: ").partition("Fix: ")
    if not fix and "; " in found:
        found, _, fix = found.rpartition("; ")
    return Finding(check, FAILS, found.strip().removesuffix(".") or repr(error), fix.strip())
