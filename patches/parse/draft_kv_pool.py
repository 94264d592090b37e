"""The KV pool is sized for every model that keeps KV in it (ledger: draft_kv_pool)."""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_model, get_parallel, get_spec

from sglang_parse.algorithm import is_parse
from sglang_parse.patches.base import Hook, hook_patch

_CONFIGURATOR = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"


def _add_drafts(cell_size: int, _configurator: Any, kvc: Any, *_: Any) -> int:
    """Bytes of one slot in the target's KV pool, and in those that share its slot numbers."""
    if kvc.is_draft_worker or not is_parse(kvc.spec_algorithm):
        return cell_size
    from sglang_parse.startup.models import kv_bytes_per_token, slot_sharers

    dtypes = get_model().kv_cache_dtype, get_spec().speculative_draft_kv_cache_dtype
    return cell_size + sum(
        kv_bytes_per_token(model, dtypes[0], get_parallel().attn_tp_size, dtypes[1])
        for model in slot_sharers(kvc.server_args)
    )


PATCH = hook_patch(
    "draft_kv_pool",
    {
        f"{_CONFIGURATOR}._compute_cell_size": Hook(_add_drafts, HookType.AFTER, ("self", "kvc")),
    },
    why="SGLang divides the memory that is left by what a slot takes in the target's KV pool, "
    "and counts the draft's pool only for its own algorithms. Under PARSE the draft's "
    "KV, and an EAGLE-3 head's, came on top: out of memory at start.",
    how="adds their bytes per slot, for PARSE's target only, by SGLang's own formula for "
    "draft models and in the dtype SGLang resolves for a draft.",
    removed_when="an algorithm can say which pools share the target's slot numbers.",
)
