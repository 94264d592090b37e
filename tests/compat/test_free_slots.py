"""KV slots of several requests are freed together as SGLang frees those of each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_parse.engine.schedule import free_slots

pytestmark = pytest.mark.compat

ALLOCATED = (64, 33, 48, 32, 96)
KEPT = (17, 33, 0, 40, 95)
"""Slots of each request, and how many it keeps."""


def cache_of(page_size: int) -> Any:
    """Rows of pages in no order, which SGLang's allocator has given away."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

    num_pages = len(ALLOCATED) * 96 // page_size
    sizes = num_pages * page_size, torch.bfloat16, "cpu", None
    if page_size == 1:
        allocator = TokenToKVPoolAllocator(*sizes, need_sort=False)
    else:
        allocator = PagedTokenToKVPoolAllocator(sizes[0], page_size, *sizes[1:], need_sort=False)
    allocator.free_pages = allocator.free_pages[:0]
    pages = 1 + torch.randperm(num_pages, generator=torch.Generator().manual_seed(page_size))
    slots = pages[:, None] * page_size + torch.arange(page_size)
    table = slots.view(len(ALLOCATED), -1).to(torch.int32)

    class Cache(SimpleNamespace):
        free_kv_row = BasePrefixCache.free_kv_row

    pool = SimpleNamespace(req_to_token=table)
    return Cache(token_to_kv_pool_allocator=allocator, req_to_token_pool=pool)


def requests(page_size: int) -> list[Any]:
    """Whole pages are allocated."""
    lengths = [-(-length // page_size) * page_size for length in ALLOCATED]
    none = {"get_evicted_seqlen": lambda _: 0, "swa_dead_lo": lambda _: 0}
    return [
        SimpleNamespace(kv=SimpleNamespace(req_pool_idx=row, kv_allocated_len=length, **none))
        for row, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("page_size", [1, 16])
def test_as_many_calls_free_the_same(page_size: int):
    cache, each, reqs = cache_of(page_size), cache_of(page_size), requests(page_size)
    before = [req.kv.kv_allocated_len for req in reqs]
    free_slots(cache, [*zip(reqs, KEPT, strict=True)])
    kept = [-(-length // page_size) * page_size for length in KEPT]
    for req, start, end in zip(reqs, kept, before, strict=True):
        if start < end:
            each.free_kv_row(req.kv, [(start, end)])
        assert req.kv.kv_allocated_len == min(start, end)
    found, expected = (
        one.token_to_kv_pool_allocator.free_pages.sort().values for one in (cache, each)
    )
    assert torch.equal(found, expected)
    assert len(found) == sum(max(0, e - s) for s, e in zip(kept, before, strict=True)) // page_size


def test_nothing_to_free():
    cache, reqs = cache_of(1), requests(1)
    free_slots(cache, [(req, 96) for req in reqs])
    assert not len(cache.token_to_kv_pool_allocator.free_pages)
