"""An EAGLE-3 head's KV in a cached prefix is right for whoever finds it (ledger: head_prefixes)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_parse.algorithm import is_parse
from sglang_parse.core.config import ParseConfig
from sglang_parse.patches.base import Hook, hook_patch


def _build(original: Callable, *, spec_algorithm: Any, **kwargs: Any) -> Any:
    if is_parse(spec_algorithm) and ParseConfig.from_env().uses_eagle3:
        spec_algorithm = SpeculativeAlgorithm.EAGLE3
    return original(spec_algorithm=spec_algorithm, **kwargs)


PATCH = hook_patch(
    "head_prefixes",
    {
        "sglang.srt.mem_cache.kv_cache_builder.build_kv_cache": Hook(
            _build, HookType.AROUND, ("spec_algorithm",)
        ),
    },
    why="an EAGLE-3 head's KV at a position depends on the token behind it. The radix cache "
    "hands out prefixes up to the first token that differs, so the last of them has the first "
    "writer's next token in it; of a prompt that differs from a cached one the head then guessed "
    "worse at the answer's start (a step more in six of eight answers of the demo pair). For its "
    "own EAGLE-3 SGLang compares pairs of tokens.",
    how="on PARSE servers with a head the cache is built as for EAGLE-3: a prefix ends one token "
    "earlier. Nothing else of what is built depends on the algorithm. Others call the original.",
    removed_when="an algorithm can say whether its cached prefixes are of pairs.",
)
