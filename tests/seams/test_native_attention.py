"""The masked CPU backend against attention written out by hand."""

from types import SimpleNamespace

import pytest
import torch

from sglang_parse.layout import RequestLayout, VerifyLayout
from sglang_parse.mask import flat_mask, may_attend

pytestmark = pytest.mark.seams

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 8, 64


def _by_hand(query, keys, values, layout, slots):
    """One request's output, row by row, head by head."""
    rows = []
    for row in range(layout.num_rows):
        seen = [c for c in range(layout.kv_len) if may_attend(layout, row, c)]
        heads = []
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            k = keys[slots[seen], kv_head]
            weights = torch.softmax(k @ query[row, head] / DIM**0.5, dim=0)
            heads.append(weights @ values[slots[seen], kv_head])
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def test_ragged_masked_pass_equals_attention_by_hand():
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch  # noqa: F401

    from sglang_parse.attention.native import MaskedTorchNativeBackend
    from sglang_parse.spec_input import ParseVerifyInput

    torch.manual_seed(0)
    layout = VerifyLayout.of(
        [
            RequestLayout(5, 4, (2, 4), (2, 3)),
            RequestLayout(3, 1),
            RequestLayout(0, 3, (1, 2, 3), (1, 1, 2)),
        ]
    )
    keys, values = torch.randn(SLOTS, KV_HEADS, DIM), torch.randn(SLOTS, KV_HEADS, DIM)
    order = torch.randperm(SLOTS)
    table = torch.zeros(8, 32, dtype=torch.int32)
    pool_indices = torch.tensor([6, 1, 3])
    new_slots, taken = [], 0
    for index, request in zip(pool_indices, layout.requests, strict=True):
        slots = order[taken : taken + request.kv_len]
        taken += request.kv_len
        table[index, : request.kv_len] = slots.to(torch.int32)
        new_slots.append(slots[request.prefix_len :])
    pool = SimpleNamespace(
        get_key_buffer=lambda _: keys,
        get_value_buffer=lambda _: values,
        set_kv_buffer=lambda _layer, loc, k, v: (
            keys.__setitem__(loc.loc, k.view(-1, KV_HEADS, DIM)),
            values.__setitem__(loc.loc, v.view(-1, KV_HEADS, DIM)),
        ),
    )
    runner = SimpleNamespace(
        device="cpu",
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=pool,
    )
    backend = MaskedTorchNativeBackend(runner)
    forward_batch = SimpleNamespace(
        spec_info=ParseVerifyInput(
            layout=layout, custom_mask=flat_mask(layout), select_index=torch.tensor([0])
        ),
        req_pool_indices=pool_indices,
        out_cache_loc=torch.cat(new_slots),
    )
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        qk_head_dim=DIM,
        v_head_dim=DIM,
        scaling=DIM**-0.5,
    )
    rows = layout.num_rows
    q = torch.randn(rows, HEADS * DIM)
    k, v = torch.randn(rows, KV_HEADS * DIM), torch.randn(rows, KV_HEADS * DIM)
    backend.init_forward_metadata(forward_batch)
    output = backend.forward_extend(q, k, v, layer, forward_batch)
    assert torch.equal(keys[forward_batch.out_cache_loc], k.view(-1, KV_HEADS, DIM))
    query = q.view(rows, HEADS, DIM)
    for i, request in enumerate(layout.requests):
        span = slice(layout.qo_indptr[i], layout.qo_indptr[i + 1])
        slots = table[pool_indices[i]].long()
        expected = _by_hand(query[span], keys, values, request, slots)
        torch.testing.assert_close(output[span], expected, atol=1e-5, rtol=1e-5)


def test_a_mask_made_for_other_lengths_is_refused():
    from sglang_parse.spec_input import ParseVerifyInput

    layout = VerifyLayout.of([RequestLayout(2, 2)])
    with pytest.raises(ValueError, match="mask has 3 entries, the layout needs 8"):
        ParseVerifyInput(
            layout=layout,
            custom_mask=torch.ones(3, dtype=torch.bool),
            select_index=torch.tensor([0]),
        )
