"""What SGLang's own code plans for a causal pass of targets that only a GPU runs.

Llama 4's chunks on FA3, and the indexer of DeepSeek V3.2 and GLM-5. Run by ``test_unproved``, in a
process of its own because FA3's module wants the kernels' library, which wants a driver.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

sys.modules["sgl_kernel"] = mock.MagicMock()

from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend  # noqa: E402
from sglang.srt.layers.attention.index_topk_share import IndexTopKShareState  # noqa: E402
from sglang.srt.layers.attention.local_attention import LocalAttentionMetadataBuilder  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402

from sglang_parse.attention.flash_attention import ParseFlashAttentionBackend  # noqa: E402
from sglang_parse.attention.spec_input import ParseVerifyInput, forward_mode_of  # noqa: E402
from sglang_parse.core.layout import RequestLayout, VerifyLayout  # noqa: E402

CHUNK = 8
PASS = VerifyLayout.of([RequestLayout(13, 9), RequestLayout(3, 2), RequestLayout(30, 1)])
"""One of its drafts crosses the end of a chunk; the last request only decodes."""


def batch_of(layout: VerifyLayout, mode: str, slots: torch.Tensor) -> Any:
    """A pass in SGLang's terms. ``slots``: [requests, columns]."""
    rows = torch.tensor([request.num_rows for request in layout.requests])
    lengths = torch.tensor([request.kv_len for request in layout.requests])
    prefixes = [request.prefix_len for request in layout.requests]
    return ForwardBatch(
        forward_mode=ForwardMode[mode],
        batch_size=len(rows),
        input_ids=torch.zeros(layout.num_rows, dtype=torch.int64),
        req_pool_indices=torch.arange(len(slots)),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        seq_lens_sum=int(lengths.sum()),
        out_cache_loc=torch.zeros(layout.num_rows, dtype=torch.int64),
        extend_seq_lens=rows,
        extend_seq_lens_cpu=rows.tolist(),
        extend_prefix_lens=torch.tensor(prefixes),
        extend_prefix_lens_cpu=prefixes,
        spec_info=ParseVerifyInput(layout=layout, custom_mask=None, select_index=rows),
    )


def planned_chunks(mode: str) -> Any:
    """What SGLang's FA3 plans for layers with attention in chunks, and the pass's slots."""
    slots = torch.randperm(3 * 64, generator=torch.Generator().manual_seed(0)).view(3, 64).int()
    backend = object.__new__(ParseFlashAttentionBackend)
    builder = LocalAttentionMetadataBuilder(
        attention_chunk_size=CHUNK,
        page_size=1,
        max_context_len=64,
        device=torch.device("cpu"),
        swa_translate=None,
    )
    vars(backend).update(
        **{"device": "cpu", "page_size": 1, "topk": 1, "is_prefill_aware_swa": False},
        **{"use_sliding_window_kv_pool": False, "_kv_shard_pool": None, "max_context_len": 64},
        local_attn_builder=builder,
        req_to_token_pool=SimpleNamespace(req_to_token=slots),
        kv_index_translator=SimpleNamespace(is_translating=False),
    )
    backend.init_forward_metadata(batch_of(PASS, mode, slots))
    return backend.forward_metadata.local_attn_metadata, slots


def check_chunks() -> None:
    """A row sees its chunk up to itself, under the mode of a causal pass and under no other."""
    plan, slots = planned_chunks(forward_mode_of(PASS).name)
    starts, lengths = plan.local_query_start_loc.tolist(), plan.local_seqused_k.tolist()
    seen = []
    for chunk, (first, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        for row in range(first, end):  # causal: the last row sees all columns
            num_seen = lengths[chunk] - (end - 1 - row)
            seen.append(plan.local_block_table[chunk, :num_seen].tolist())
    expected = [
        slots[index, position // CHUNK * CHUNK : position + 1].tolist()
        for index, request in enumerate(PASS.requests)
        for position in range(request.prefix_len, request.kv_len)
    ]
    assert seen == expected
    assert planned_chunks("DRAFT_EXTEND_V2")[0] is None


def check_indexer() -> None:
    """It scores what a row may see, under the mode of a causal pass and under no other; nothing of
    an MTP head is looked for."""
    slots = torch.zeros(3, 64, dtype=torch.int32)
    backend = object.__new__(DeepseekSparseAttnBackend)
    backend.device, backend.speculative_num_draft_tokens = "cpu", None
    batch = batch_of(PASS, forward_mode_of(PASS).name, slots)
    (starts, ends), requests = backend._cal_indexer_k_start_end(batch)
    offsets = [0, *torch.tensor([one.kv_len for one in PASS.requests]).cumsum(0).tolist()]
    places = [
        (index, offsets[index], offsets[index] + position + 1)
        for index, request in enumerate(PASS.requests)
        for position in range(request.prefix_len, request.kv_len)
    ]
    found = zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True)
    assert list(found) == places
    share = IndexTopKShareState(batch, None)
    assert not share.should_publish
    other = batch_of(PASS, "DRAFT_EXTEND_V2", slots)
    assert backend._cal_indexer_k_start_end(other) == (None, None)


if __name__ == "__main__":
    check_chunks()
    print("chunks right")
    check_indexer()
    print("indexer right")
