"""KV slots allocated by each request's phase (ledger: kv_by_phase)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_parse.algorithm import is_parse
from sglang_parse.context import process_context
from sglang_parse.patches.base import Patch, around


def _prepare(original: Callable, batch: Any) -> None:
    if is_parse(batch.spec_algorithm):
        process_context().running_pipeline().plan(batch)
    else:
        original(batch)


def _slots_required(original: Callable, self: Any, requests: Any, page_size: int) -> int:
    if is_parse(self.spec_algorithm):
        return process_context().running_pipeline().slots_required(self, requests, page_size)
    return original(self, requests, page_size)


PATCH = Patch(
    "kv_by_phase",
    {
        "sglang.srt.speculative.spec_utils.spec_prepare_for_decode": around(_prepare),
        "sglang.srt.managers.schedule_batch.ScheduleBatch"
        "._new_tokens_required_next_decode_spec_v2": around(_slots_required),
    },
    why="SGLang reserves twice the draft window for every speculating request at all times. "
    "PARSE's demand depends on the phase (the next draft chunk; draft and questions for one verify "
    "pass; one token), and a standing reserve takes slots from the prefix cache.",
    how="for PARSE batches, slots are counted and allocated by each request's phase; other "
    "batches call the original.",
    upstream="https://github.com/sgl-project/sglang/issues/32459 and "
    "https://github.com/sgl-project/sglang/issues/32574 (the cost of such reserves)",
    removed_when="an algorithm can count and allocate its own slots.",
)
