"""Features that stock SGLang lacks on a CPU: LoRA and its own speculation (EAGLE3, STANDALONE)."""

from __future__ import annotations

from sglang_parse.patches.base import Patch
from sglang_parse.patches.cpu import (
    draft_steps_cpu,
    gloo_cpu,
    guard_cpu,
    kv_copy_cpu,
    lora_cpu,
    req_to_token_cpu,
    rotary_cpu,
    shared_head_cpu,
    tree_cpu,
    verify_sampling_cpu,
)

MODULES = (
    *(draft_steps_cpu, gloo_cpu, guard_cpu, kv_copy_cpu, lora_cpu),
    *(req_to_token_cpu, rotary_cpu, shared_head_cpu, tree_cpu, verify_sampling_cpu),
)
PATCHES: tuple[Patch, ...] = tuple(module.PATCH for module in MODULES)
