"""The KV pool is sized for the draft's KV, too (ledger: draft_kv_pool)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.runtime_context import get_model, get_parallel, get_schedule, get_spec

from sglang_parse.algorithm import is_parse, names_parse
from sglang_parse.patches.base import Patch, after, around
from sglang_parse.startup.families import Attention, attention_of
from sglang_parse.startup.models import slot_sharers

_CONFIGURATOR = "sglang.srt.model_executor.pool_configurator"


def _add_drafts(cell_size: int, _self: Any, kvc: Any, *_: Any) -> int:
    return _with_drafts(cell_size, kvc)


def _with_drafts(cell_size: int, kvc: Any) -> int:
    """Adds the bytes that one slot takes in the KV pools sharing the target's slot numbers."""
    if kvc.is_draft_worker or not is_parse(kvc.spec_algorithm):
        return cell_size
    dtypes = get_model().kv_cache_dtype, get_spec().speculative_draft_kv_cache_dtype
    return cell_size + sum(
        kv_bytes_per_token(model, dtypes[0], get_parallel().attn_tp_size, dtypes[1])
        for model in slot_sharers(resolved_view(kvc.server_args))
    )


def kv_bytes_per_token(
    model: Any, kv_dtype: str, tp_size: int, draft_kv_dtype: str | None = None
) -> int:
    """Returns the bytes of one token's KV on one rank, by SGLang's formulas.

    Args:
        model: a ``ModelConfig``.
        kv_dtype: ``--kv-cache-dtype``. "auto" is the model's dtype, also for a checkpoint with
            FP8 KV: the result is then twice as much.
        tp_size: ranks that the KV heads are split over.
        draft_kv_dtype: ``--speculative-draft-kv-cache-dtype``, for a draft; None if unset.
    """
    from sglang.srt.mem_cache.kv_cache_configurator import calculate_mla_kv_cache_dim
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
    from sglang.srt.speculative.dflash_utils import dflash_draft_cell_size_per_token

    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=kv_dtype,
        model=None,
        model_dtype=model.dtype,
        is_draft_worker=True,
        is_dflash=False,
        speculative_draft_attention_backend=None,
        speculative_draft_kv_cache_dtype=draft_kv_dtype,
    )
    num_mtp = model.num_nextn_predict_layers if model.is_draft_model else None
    if attention_of(model) is Attention.LATENT:  # one head, on every rank
        size = calculate_mla_kv_cache_dim(model_config=model, kv_cache_dtype=dtype)
        return size * (num_mtp or model.num_attention_layers) * dtype.itemsize
    if model.is_hybrid_swa:  # all slots in both pools (the patch ``draft_models``)
        head_dims = model.head_dim + model.v_head_dim, model.swa_head_dim + model.swa_v_head_dim
        full = len(model.full_attention_layer_ids) * model.get_num_kv_heads(tp_size)
        windows = len(model.swa_attention_layer_ids) * model.get_swa_num_kv_heads(tp_size)
        return (full * head_dims[0] + windows * head_dims[1]) * dtype.itemsize
    return dflash_draft_cell_size_per_token(
        draft_model_config=model,
        draft_num_layers=num_mtp or model.num_hidden_layers,
        draft_kv_cache_dtype=dtype,
        tp_size=tp_size,
    )


def _count_passes(original: Callable, **sizes: Any) -> int:
    """Slots of a window pool that as many requests as may run can hold. Between two evictions each
    keeps the eviction interval, what its last pass has output, and the lookahead of the next."""
    spec = get_spec()
    if not names_parse(spec):
        return original(**sizes)
    longest_pass, num_reqs = spec.speculative_num_draft_tokens, get_schedule().max_running_requests
    one = {"speculative_num_draft_tokens": 1, "max_speculative_num_draft_tokens": 1}
    with spec.override(**one):
        return original(**sizes) + 2 * longest_pass * num_reqs


PATCH = Patch(
    "draft_kv_pool",
    {
        f"{_CONFIGURATOR}.DefaultPoolConfigurator._compute_cell_size": after(_add_drafts),
        # What a target with two pools adds to the bytes of a slot of the larger one.
        f"{_CONFIGURATOR}._dflash_draft_cell_size": after(_with_drafts),
        f"{_CONFIGURATOR}.compute_swa_request_cap": around(_count_passes),
    },
    why="SGLang divides the free memory by the bytes of one slot in the target's KV pool, and "
    "adds a draft's pool only for its own algorithms. Under PARSE the KV of the draft model and "
    "of a head came on top: out of memory at start. Without a prefix cache it sizes the "
    "window pool of a target with two for the eviction interval times the draft tokens, which is "
    "meant for steps of a few: 155,776 slots a request for passes of 1,217.",
    how="adds their bytes per slot, for PARSE's target only, by SGLang's own formula for draft "
    "models and in the dtype that SGLang resolves for a draft. A request's window is sized for the "
    "interval and two passes.",
    removed_when="an algorithm can state which pools share the target's slot numbers.",
)
