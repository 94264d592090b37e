"""Runtime changes to stock SGLang: one file each, one ledger entry each (README.md here).

``register_all`` hands them to SGLang, which applies them after every plugin has run and only
logs failures; ``assert_applied`` therefore runs in the worker's constructor and stops the server.
"""

from __future__ import annotations

from sglang_parse.patches import (
    cli_flags,
    draft_path,
    kv_by_phase,
    kv_copy_cpu,
    meta_info,
    request_options,
    rotary_cpu,
)
from sglang_parse.patches.base import Patch, PatchError

PATCHES: tuple[Patch, ...] = (
    cli_flags.PATCH,
    draft_path.PATCH,
    kv_by_phase.PATCH,
    kv_copy_cpu.PATCH,
    meta_info.PATCH,
    request_options.PATCH,
    rotary_cpu.PATCH,
)


def register_all() -> None:
    """Register every patch this machine needs."""
    for patch in PATCHES:
        if patch.is_needed():
            patch.register()


def assert_applied() -> None:
    """Raises: PatchError, naming every needed patch that is not in force."""
    failed = [patch.name for patch in PATCHES if patch.is_needed() and not patch.is_applied()]
    if failed:
        raise PatchError(
            f"PARSE: patches {failed} are not in force; SGLang would run unpatched. "
            "The log above has the reason (search 'Failed to apply hooks')"
        )
