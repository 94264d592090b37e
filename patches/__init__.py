"""Runtime changes to stock SGLang: one file each, with its entry in the ledger (README.md here).

``register_all`` hands them to SGLang, which applies them after every plugin has run and only
logs failures; ``assert_applied`` therefore runs before PARSE's worker is made, and on a CPU before
a stock speculative one is (guard_cpu), and stops the server.
"""

from __future__ import annotations

from sglang_parse.patches import cpu, parse
from sglang_parse.patches.base import Patch, PatchError, on_cpu_only
from sglang_parse.startup.seams import Seam

PATCHES: tuple[Patch, ...] = (*parse.PATCHES, *cpu.PATCHES)


def seams() -> list[Seam]:
    """What the patches this machine needs change, for ``compat.check``."""
    return [seam for patch in PATCHES if patch.is_needed() for seam in patch.seams]


def register_all() -> None:
    """Register every patch this machine needs."""
    for patch in PATCHES:
        if patch.is_needed():
            patch.register()


def assert_applied(*, cpu_only: bool = False) -> None:
    """Raises: PatchError, naming every needed patch that is not in force.

    ``cpu_only``: look only at what a CPU needs to run stock SGLang, with PARSE or without.
    """
    wanted = [p for p in PATCHES if p.is_needed is on_cpu_only or not cpu_only]
    failed = [patch.name for patch in wanted if patch.is_needed() and not patch.is_applied()]
    if failed:
        raise PatchError(
            f"PARSE: patches {failed} are not in force; SGLang would run unpatched. "
            "The log above has the reason (search 'Failed to apply hooks')"
        )
