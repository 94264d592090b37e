"""KV slots that get other tokens have no draft KV (ledger: draft_kv_marks)."""

from __future__ import annotations

from typing import Any

from sglang_parse.context import process_context
from sglang_parse.patches.base import Patch, after


def _note_allocated(slots: Any, self: Any, *_: Any, **__: Any) -> None:
    pipeline = process_context().pipeline
    if slots is not None and pipeline is not None:
        pipeline.note_allocated(self, slots)


_ALLOCATORS = "sglang.srt.mem_cache.allocator"
_PAGED = f"{_ALLOCATORS}.paged.PagedTokenToKVPoolAllocator"
PATCH = Patch(
    "draft_kv_marks",
    dict.fromkeys(
        (
            f"{_ALLOCATORS}.token.TokenToKVPoolAllocator.alloc",
            *(f"{_PAGED}.{name}" for name in ("alloc", "alloc_extend", "alloc_decode")),
        ),
        after(_note_allocated),
    ),
    why="the draft model's KV lies under the target's slot numbers, and PARSE knows by a mark "
    "which slots have it. SGLang gives slots to prefills, and to tokens whose KV it copies: from "
    "the host (hierarchical cache), from another server (disaggregation), from another store. It "
    "tells no worker, so such slots kept the marks of their last owners, and the draft model read "
    "KV of other tokens: the text stayed right, and drafts were worthless.",
    how="a slot loses its mark when it is allocated.",
    removed_when="a worker is told which slots get other tokens.",
)
