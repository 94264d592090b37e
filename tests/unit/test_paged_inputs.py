"""The GPU tests' inputs on the CPU: three layouts, attended as documented, one answer."""

import dataclasses

import pytest
import torch

from sglang_parse.core.layout import RequestLayout, VerifyLayout
from sglang_parse.core.mask import flat_mask
from support import paged_inputs
from support.paged_inputs import Heads, PagedInputs

pytestmark = pytest.mark.unit

RAGGED = VerifyLayout.of(
    [
        RequestLayout(0, 1),
        RequestLayout(37, 20, (0, 7, 7, 20, 3), (4, 1, 6, 2, 3)),
        RequestLayout(5, 1),  # only continues
        RequestLayout(0, 16, (16,), (5,)),
        RequestLayout(64, 33, (16, 33), (15, 16)),
    ]
)
EXACT = 1e-5
"""Of ``worst_error`` in fp32."""


def random_batch(heads: Heads, layout: VerifyLayout = RAGGED) -> list:
    return paged_inputs.random_tensors(layout, heads, torch.float32, "cpu", seed=3)


def error(batch: list, inputs: PagedInputs) -> float:
    return paged_inputs.worst_error(paged_inputs.attend(inputs), paged_inputs.expected(batch))


@pytest.mark.parametrize("heads", [Heads(4, 4, 16), Heads(6, 2, 8), Heads(8, 1, 16)], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
def test_three_layouts_one_answer(heads, page_size):
    batch = random_batch(heads)
    assert error(batch, paged_inputs.masked(batch, page_size, flat_mask)) < EXACT
    assert error(batch, paged_inputs.aliased(batch)) < EXACT
    alone = [paged_inputs.attend(one) for one in paged_inputs.separate(batch, page_size)]
    assert len(alone) == sum(1 + len(request.question_lens) for request in RAGGED.requests)
    assert paged_inputs.worst_error(torch.cat(alone), paged_inputs.expected(batch)) < EXACT


def test_the_rows_of_an_aliased_pass_are_the_masked_ones_in_order():
    batch = random_batch(Heads(2, 1, 8))
    one, other = paged_inputs.masked(batch, 1, flat_mask), paged_inputs.aliased(batch)
    assert torch.equal(one.queries, other.queries)


@pytest.mark.parametrize("wrong", ["a column more", "a column less", "a cut one early", "pages"])
def test_what_is_wrong_is_told_apart(wrong):
    """By far: the GPU tests allow for the rounding of bf16."""
    batch = random_batch(Heads(8, 2, 16), VerifyLayout.of([RequestLayout(1000, 40, (30,), (3,))]))
    inputs = paged_inputs.masked(batch, 16, flat_mask)
    mask = inputs.custom_mask.view(43, 1043)
    if wrong == "a column more":
        mask[42, 1035] = True
    elif wrong == "a column less":
        mask[42, 500] = False
    elif wrong == "a cut one early":
        mask[40:, 1029] = False
    else:
        pages = inputs.kv_indices.clone()
        pages[[3, 4]] = pages[[4, 3]]  # of no consequence: the context is seen whole
        assert error(batch, dataclasses.replace(inputs, kv_indices=pages)) < EXACT
        pages[-1] = pages[0]
        inputs = dataclasses.replace(inputs, kv_indices=pages)
    assert error(batch, inputs) > 2 * torch.finfo(torch.bfloat16).eps


def test_a_slot_nobody_wrote_is_told_apart():
    batch = random_batch(Heads(4, 2, 16))
    inputs = paged_inputs.masked(batch, 16, flat_mask)
    unwritten = dataclasses.replace(inputs, last_page_len=inputs.last_page_len.clamp(min=2))
    assert not torch.equal(unwritten.last_page_len, inputs.last_page_len)
    sizes = unwritten.qo_indptr.diff() * torch.tensor(unwritten.kv_lens())
    all_seen = torch.ones(int(sizes.sum()), dtype=torch.bool)
    assert error(batch, dataclasses.replace(unwritten, custom_mask=all_seen)) > 0.5
