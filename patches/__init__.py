"""Runtime changes to stock SGLang: one file each, one ledger entry each (README.md here).

``register_all`` hands them to SGLang, which applies them after every plugin has run and only
logs failures; ``assert_applied`` therefore runs in the worker's constructor, and on a CPU before a
stock speculative worker is made (guard_cpu), and stops the server.
"""

from __future__ import annotations

from sglang_parse.patches import (
    cli_flags,
    decode_graphs,
    decode_log,
    draft_kv_pool,
    draft_path,
    draft_slots_cpu,
    draft_steps_cpu,
    gloo_cpu,
    guard_cpu,
    kv_by_phase,
    kv_copy_cpu,
    kv_log,
    lora_admitted,
    lora_cpu,
    memory_release,
    meta_info,
    request_options,
    rotary_cpu,
    sampling_mask,
    slot_table_cpu,
    stop_order,
    tree_cpu,
    verify_sampling_cpu,
    weight_updates,
    whole_batches,
)
from sglang_parse.patches.base import Patch, PatchError, on_cpu_only

PATCHES: tuple[Patch, ...] = (
    cli_flags.PATCH,
    decode_graphs.PATCH,
    decode_log.PATCH,
    draft_kv_pool.PATCH,
    draft_path.PATCH,
    draft_slots_cpu.PATCH,
    draft_steps_cpu.PATCH,
    gloo_cpu.PATCH,
    guard_cpu.PATCH,
    kv_by_phase.PATCH,
    kv_copy_cpu.PATCH,
    kv_log.PATCH,
    lora_admitted.PATCH,
    lora_cpu.PATCH,
    memory_release.PATCH,
    meta_info.PATCH,
    request_options.PATCH,
    rotary_cpu.PATCH,
    sampling_mask.PATCH,
    slot_table_cpu.PATCH,
    stop_order.PATCH,
    tree_cpu.PATCH,
    verify_sampling_cpu.PATCH,
    weight_updates.PATCH,
    whole_batches.PATCH,
)


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
