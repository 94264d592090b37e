"""KV slots allocated by each request's phase (ledger: kv_by_phase)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.runtime_context import get_spec

from sglang_parse.algorithm import is_parse, names_parse
from sglang_parse.context import process_context
from sglang_parse.patches.base import Patch, around, before


def _prepare(original: Callable, batch: Any) -> None:
    if is_parse(batch.spec_algorithm):
        process_context().running_pipeline().plan(batch)
    else:
        original(batch)


def _slots_required(original: Callable, self: Any, requests: Any, page_size: int) -> int:
    if is_parse(self.spec_algorithm):
        return process_context().running_pipeline().slots_required(self, requests, page_size)
    return original(self, requests, page_size)


def _free_lookahead(req: Any, tree_cache: Any, **_: Any) -> None:
    if names_parse(get_spec()) and req.kv.holds_kv:
        process_context().running_pipeline().free_lookahead(req, tree_cache)


PATCH = Patch(
    "kv_by_phase",
    {
        "sglang.srt.mem_cache.common.release_kv_cache": before(_free_lookahead),
        "sglang.srt.speculative.spec_utils.spec_prepare_for_decode": around(_prepare),
        "sglang.srt.managers.schedule_batch.ScheduleBatch"
        "._new_tokens_required_next_decode_spec_v2": around(_slots_required),
    },
    why="SGLang reserves twice the draft window for every speculating request at all times. "
    "PARSE's demand depends on the phase (the next draft chunk; draft and questions for one verify "
    "pass; one token), and a standing reserve takes slots from the prefix cache. "
    "Where a request ends, SGLang takes all of its allocated slots for tokens with KV: the next "
    "turn of a streaming session read what a verify pass or an EAGLE-3 proposal had left there.",
    how="for PARSE batches, slots are counted and allocated by each request's phase, and those "
    "without a committed token are freed before SGLang releases a request; other batches call the "
    "original.",
    upstream="https://github.com/sgl-project/sglang/issues/32459 and "
    "https://github.com/sgl-project/sglang/issues/32574 (the cost of such reserves)",
    removed_when="an algorithm can count and allocate its own slots.",
)
