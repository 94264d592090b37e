"""Runtime changes to stock SGLang: one file each, with its entry in the ledger (README.md here).

``register_all`` hands them to SGLang, which applies them after every plugin has run and only
logs failures. ``assert_applied`` therefore runs before PARSE's worker is created, and on a CPU
before a stock speculative worker is (guard_cpu), and stops the server.
"""

from __future__ import annotations

import multiprocessing

from sglang_parse.patches import cpu, parse
from sglang_parse.patches.base import Patch, PatchError, on_cpu_only
from sglang_parse.startup.compat import Symbol

PATCHES: tuple[Patch, ...] = (*parse.PATCHES, *cpu.PATCHES)


def needed() -> list[Patch]:
    """Returns the patches that this process needs; those of ``cpu`` without an accelerator only."""
    in_launcher = multiprocessing.parent_process() is None
    here = PATCHES if on_cpu_only() else parse.PATCHES
    return [patch for patch in here if in_launcher or not patch.launcher_only]


def symbols() -> list[Symbol]:
    """Returns what they change, for ``compat.check_symbols``."""
    return [symbol for patch in needed() for symbol in patch.symbols]


def register_all() -> None:
    """Registers every needed patch."""
    for patch in needed():
        patch.register()


def assert_applied(*, cpu_only: bool = False) -> None:
    """Raises PatchError, naming every needed patch that is not in force.

    Args:
        cpu_only: check only what stock SGLang needs on a CPU.
    """
    wanted = cpu.PATCHES if cpu_only else needed()
    if failed := [patch.name for patch in wanted if not patch.is_applied()]:
        raise PatchError(
            f"PARSE: patches {failed} are not in force: SGLang would run unpatched. "
            "Fix: see the reason in the log above (search 'Failed to apply hooks')"
        )
