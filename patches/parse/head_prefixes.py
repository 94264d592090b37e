"""Cached prefixes that are valid for the EAGLE-3 head's KV (ledger: head_prefixes)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_parse.algorithm import is_parse
from sglang_parse.core.config import ParseConfig
from sglang_parse.patches.base import Patch, around


def _build(original: Callable, *, spec_algorithm: Any, **kwargs: Any) -> Any:
    if is_parse(spec_algorithm) and ParseConfig.from_env().proposer:
        spec_algorithm = SpeculativeAlgorithm.EAGLE3
    return original(spec_algorithm=spec_algorithm, **kwargs)


PATCH = Patch(
    "head_prefixes",
    {"sglang.srt.mem_cache.kv_cache_builder.build_kv_cache": around(_build)},
    why="an EAGLE-3 head's KV at a position depends on the next token. The radix cache matches "
    "prefixes up to the first token that differs, so the last position of a match holds the next "
    "token of the request that wrote it, and the head proposed worse tokens at the start of the "
    "answer (one step more in six of eight answers of the demo pair). For its own EAGLE-3 SGLang "
    "matches bigrams.",
    how="on PARSE servers with a head the cache is built as for EAGLE-3: a match is one token "
    "shorter. Nothing else that is built depends on the algorithm. Others call the original.",
    removed_when="an algorithm can state whether its prefixes are matched by bigrams.",
)
