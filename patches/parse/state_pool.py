"""Recurrent states are not kept for every draft token (ledger: state_pool)."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_schedule, get_spec

from sglang_parse.algorithm import is_parse, names_parse
from sglang_parse.patches.base import Patch, after
from sglang_parse.startup.states import copies_bytes


def _skip_under_parse(skips: bool) -> bool:  # noqa: FBT001 - SGLang's result
    return skips or names_parse(get_spec())


def _reserve_copies(rest_gb: float, self: Any, *_: Any) -> float:
    """The copies lie beside SGLang's pool."""
    if not is_parse(self.spec_algorithm):
        return rest_gb
    schedule, hybrid = get_schedule(), self.mambaish_config
    num_fit = schedule.max_mamba_cache_size // self._calculate_mamba_ratio()
    num_reqs = min(schedule.max_running_requests, num_fit)
    return rest_gb - copies_bytes(hybrid, num_reqs) / (1 << 30)


_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"
PATCH = Patch(
    "state_pool",
    {
        f"{_CONFIGURATOR}._pd_prefill_skips_mamba_spec_state": after(_skip_under_parse),
        f"{_CONFIGURATOR}.KVCacheConfigurator._handle_max_mamba_cache": after(_reserve_copies),
    },
    why="for every speculative algorithm SGLang keeps the state of a hybrid model behind each of "
    "`speculative_num_draft_tokens` tokens of each request, so that a target verify step can "
    "return to any: 19 GB a request for Qwen3.5-27B and 128 draft tokens. PARSE copies one state "
    "per draft before a pass, and no step of its is a target verify step.",
    how="under PARSE SGLang's pool has one state a request, as without speculation and as on "
    "servers that only prefill; the memory of PARSE's copies is not given to the KV pool.",
    removed_when="an algorithm can state how many states it needs.",
)
