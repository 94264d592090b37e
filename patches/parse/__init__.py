"""What PARSE needs of SGLang beyond its registries, on every device."""

from __future__ import annotations

from sglang_parse.patches.base import Patch
from sglang_parse.patches.parse import (
    arrivals,
    cli_flags,
    decode_graphs,
    decode_log,
    draft_kv_pool,
    draft_path,
    head_prefixes,
    kv_by_phase,
    lora_admitted,
    memory_release,
    meta_info,
    request_bounds,
    request_options,
    sampling_mask,
    stop_order,
    weight_updates,
    whole_batches,
)

PATCHES: tuple[Patch, ...] = (
    arrivals.PATCH,
    cli_flags.PATCH,
    decode_graphs.PATCH,
    decode_log.PATCH,
    draft_kv_pool.PATCH,
    draft_path.PATCH,
    head_prefixes.PATCH,
    kv_by_phase.PATCH,
    lora_admitted.PATCH,
    memory_release.PATCH,
    meta_info.PATCH,
    request_bounds.PATCH,
    request_options.PATCH,
    sampling_mask.PATCH,
    stop_order.PATCH,
    weight_updates.PATCH,
    whole_batches.PATCH,
)
