"""What stock SGLang lacks on a CPU: LoRA, and its own speculation (EAGLE3, STANDALONE)."""

from __future__ import annotations

from sglang_parse.patches.base import Patch
from sglang_parse.patches.cpu import (
    draft_slots_cpu,
    draft_steps_cpu,
    gloo_cpu,
    guard_cpu,
    kv_copy_cpu,
    lora_cpu,
    rotary_cpu,
    slot_table_cpu,
    tree_cpu,
    verify_sampling_cpu,
)

PATCHES: tuple[Patch, ...] = (
    draft_slots_cpu.PATCH,
    draft_steps_cpu.PATCH,
    gloo_cpu.PATCH,
    guard_cpu.PATCH,
    kv_copy_cpu.PATCH,
    lora_cpu.PATCH,
    rotary_cpu.PATCH,
    slot_table_cpu.PATCH,
    tree_cpu.PATCH,
    verify_sampling_cpu.PATCH,
)
