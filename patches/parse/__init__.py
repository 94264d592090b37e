"""Changes that PARSE needs beyond SGLang's registries, on every device."""

from __future__ import annotations

from sglang_parse.patches.base import Patch
from sglang_parse.patches.parse import (
    arrivals,
    chat_messages,
    cli_flags,
    decode_graphs,
    decode_log,
    draft_kv_marks,
    draft_kv_pool,
    draft_models,
    empty_events,
    head_prefixes,
    kv_by_phase,
    latent_passes,
    lora_admitted,
    memory_release,
    meta_info,
    ollama_streams,
    pass_logits,
    port,
    predictions,
    request_bounds,
    request_options,
    sampling_mask,
    start_checks,
    start_errors,
    state_pool,
    stops,
    streamed_text,
    tool_blocks,
    weight_updates,
    whole_batches,
)

MODULES = (
    *(arrivals, chat_messages, cli_flags, decode_graphs, decode_log, draft_kv_marks),
    *(draft_kv_pool, draft_models, empty_events, head_prefixes, kv_by_phase, latent_passes),
    *(lora_admitted, memory_release, meta_info, ollama_streams, pass_logits, port, predictions),
    *(request_bounds, request_options, sampling_mask, start_checks, start_errors, state_pool),
    *(stops, streamed_text, tool_blocks, weight_updates, whole_batches),
)
PATCHES: tuple[Patch, ...] = tuple(module.PATCH for module in MODULES)
