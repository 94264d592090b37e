"""FlashInfer's paged prefill on the rows of verification passes, each layout against fp32.

Needs torch, FlashInfer and pytest, no SGLang. That the inputs are right is shown on the CPU by
``tests/unit/test_paged_inputs.py``; here the kernel is what is tested.
"""

from __future__ import annotations

import pytest
import torch

from sglang_parse.core.layout import RequestLayout, VerifyLayout
from sglang_parse.core.mask import flat_mask
from support import paged_inputs
from support.flashinfer_kernel import Kernel
from support.paged_inputs import Heads, RequestTensors
from support.passes import PASSES

# A group of n query heads shares one KV head: Qwen3-32B 8, Llama 3 8B 4, Qwen2.5-7B 7.
HEADS = (Heads(8, 8, 128), Heads(32, 8, 128), Heads(64, 8, 128), Heads(28, 4, 128))


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    pytest.importorskip("flashinfer")
    # Twice what SGLang sets aside: split-k of 68 requests over long prefixes.
    return Kernel(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))


def tensors(
    name: str, heads: Heads, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[RequestTensors], float]:
    """The requests of a pass, and how far rounding to ``dtype`` may take a row and head.

    See ``worst_error``: rounding comes to 0.4 eps, one wrong column to several.
    """
    batch = paged_inputs.random_tensors(
        VerifyLayout.of(PASSES[name]), heads, dtype, "cuda", seed=len(name)
    )
    return batch, torch.finfo(dtype).eps


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("name", PASSES)
def test_masked_pass(kernel: Kernel, name: str, heads: Heads, page_size: int):
    batch, rounding = tensors(name, heads)
    answer = kernel(paged_inputs.masked(batch, page_size, flat_mask))
    assert paged_inputs.worst_error(answer, paged_inputs.expected(batch)) < rounding


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("name", PASSES)
def test_aliased_pass(kernel: Kernel, name: str, heads: Heads):
    batch, rounding = tensors(name, heads)
    answer = kernel(paged_inputs.aliased(batch))
    assert paged_inputs.worst_error(answer, paged_inputs.expected(batch)) < rounding


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", PASSES)
def test_one_pass_is_k_separate_ones(kernel: Kernel, name: str, page_size: int):
    """The kernel against itself: a plan of its own for each question, plainly causal."""
    batch, rounding = tensors(name, Heads(32, 8, 128))
    packed = kernel(paged_inputs.masked(batch, page_size, flat_mask))
    alone = torch.cat([kernel(one) for one in paged_inputs.separate(batch, page_size)])
    assert paged_inputs.worst_error(packed, alone) < 2 * rounding  # both were rounded


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [(Heads(16, 4, 64), torch.bfloat16), (Heads(16, 4, 128), torch.float16)],
    ids=["head_dim 64", "fp16"],
)
@pytest.mark.parametrize("name", ["ragged", "long draft"])
def test_kernels_that_are_compiled_first(
    kernel: Kernel, name: str, heads: Heads, dtype: torch.dtype
):
    """Minutes each with nvcc, unless the cache has them."""
    batch, rounding = tensors(name, heads, dtype)
    reference = paged_inputs.expected(batch)
    masked = kernel(paged_inputs.masked(batch, 1, flat_mask))
    assert paged_inputs.worst_error(masked, reference) < rounding
    aliased = kernel(paged_inputs.aliased(batch))
    assert paged_inputs.worst_error(aliased, reference) < rounding


def one_cut_early(layout: VerifyLayout, device: torch.device) -> torch.Tensor:
    """The mask of a pass whose first question misses one column."""
    first = layout.requests[0]
    early = RequestLayout(
        first.prefix_len,
        first.num_draft_rows,
        (first.visible_lens[0] - 1, *first.visible_lens[1:]),
        first.question_lens,
    )
    return flat_mask(VerifyLayout.of([early, *layout.requests[1:]]), device)


@pytest.mark.parametrize("name", ["usual", "both long"])
def test_a_cut_one_column_early_is_told_apart(kernel: Kernel, name: str):
    """Among ten thousand columns too: the tests above can fail."""
    batch, rounding = tensors(name, Heads(32, 8, 128))
    answer = kernel(paged_inputs.masked(batch, 1, one_cut_early))
    assert paged_inputs.worst_error(answer, paged_inputs.expected(batch)) > 2 * rounding
