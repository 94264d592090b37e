"""KV slots by what each request does next, not a standing reserve (ledger: kv_by_phase)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.algorithm import is_parse
from sglang_parse.context import process_context
from sglang_parse.patches.base import Hook, hook_patch


def _prepare(original: Callable, batch: Any) -> None:
    if not is_parse(batch.spec_algorithm):
        original(batch)
        return
    process_context().running_pipeline().plan(batch)


def _tokens_required(original: Callable, batch: Any, requests: Any, page_size: int) -> int:
    if not is_parse(batch.spec_algorithm):
        return original(batch, requests, page_size)
    return process_context().running_pipeline().slots_required(batch, requests, page_size)


PATCH = hook_patch(
    "kv_by_phase",
    {
        "sglang.srt.speculative.spec_utils.spec_prepare_for_decode": Hook(
            _prepare, HookType.AROUND, ("batch",)
        ),
        "sglang.srt.managers.schedule_batch.ScheduleBatch"
        "._new_tokens_required_next_decode_spec_v2": Hook(
            _tokens_required, HookType.AROUND, ("self", "requests", "page_size")
        ),
    },
    why="SGLang reserves twice the draft window for every speculating request at all times. "
    "PARSE needs different amounts by phase (the next burst; draft and questions for one "
    "pass; one token), and a standing reserve takes room from the prefix cache.",
    how="for PARSE batches, slots are allocated and counted by each request's phase; other "
    "batches call the original.",
    upstream="https://github.com/sgl-project/sglang/issues/32459 and "
    "https://github.com/sgl-project/sglang/issues/32574 (the cost of such reserves)",
    removed_when="an algorithm can answer both questions itself.",
)
