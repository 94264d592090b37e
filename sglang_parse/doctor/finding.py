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
    """A look as a line: what it returns was found, what it raises is wrong.

    The errors of ``startup`` bring their fix along, behind "Fix:".
    """
    try:
        return Finding(check, OK, look())
    except Trouble as trouble:
        return Finding(check, trouble.status, trouble.found, trouble.fix)
    except Exception as error:  # noqa: BLE001 - whatever is broken here is what is asked about
        found, _, fix = str(error).removeprefix("PARSE: ").partition("Fix: ")
        if not fix:  # of settings and questions: "what is; what to do"
            found, _, fix = found.rpartition("; ") if "; " in found else (found, "", "")
        found = found.strip().removesuffix(".") or repr(error)
        return Finding(check, FAILS, found, fix.strip())
