"""FlashInfer's Python code on the CPU, with stand-ins for its compiled kernels.

The stand-ins answer from what reaches the kernels, so this shows that ``tests/gpu`` calls
FlashInfer rightly, packed mask and all.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.core.layout import RequestLayout, VerifyLayout
from sglang_parse.core.mask import flat_mask
from support import paged_inputs
from support.flashinfer_kernel import Kernel
from support.paged_inputs import Heads, PagedInputs

pytestmark = pytest.mark.compat

BATCH = paged_inputs.random_tensors(
    VerifyLayout.of(
        [
            RequestLayout(37, 20, (0, 7, 20), (4, 1, 6)),
            RequestLayout(5, 1),
            RequestLayout(0, 16, (16,), (5,)),
        ]
    ),
    Heads(4, 2, 16),
    torch.float32,
    "cpu",
    seed=1,
)
CAUSAL, CUSTOM = 1, 2
"""FlashInfer's ``MaskMode``."""


def segment_packbits(bits, indptr, packed_indptr, bitorder, packed) -> None:
    """8 entries per byte, the first in the lowest bit; each request starts at a new byte."""
    assert bitorder == "little"
    for i in range(len(indptr) - 1):
        own = bits[int(indptr[i]) : int(indptr[i + 1])].to(torch.uint8)
        own = torch.nn.functional.pad(own, (0, -len(own) % 8)).view(-1, 8)
        bytes_ = (own << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)
        packed[int(packed_indptr[i]) : int(packed_indptr[i + 1])] = bytes_


def unpacked(packed: torch.Tensor, indptr: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The mask in a kernel: entry n of request i is bit n % 8 of byte indptr[i] + n // 8."""
    parts = []
    for start, size in zip(indptr.tolist(), sizes, strict=False):
        entry = torch.arange(size)
        parts.append((packed[start + entry // 8] >> (entry % 8).to(torch.uint8)) & 1)
    return torch.cat(parts).bool()


def paged_run(_float, _int, _plan, q, key, value, qo_indptr, kv_indptr, indices, last, out, *rest):
    mask_mode, mask, mask_indptr = rest[1], rest[5], rest[6]
    inputs = PagedInputs(q, key, value, qo_indptr, kv_indptr, indices, last)
    if mask_mode == CUSTOM:
        rows = qo_indptr.diff().tolist()
        sizes = [n * kv_len for n, kv_len in zip(rows, inputs.kv_lens(), strict=True)]
        read = unpacked(mask, mask_indptr, sizes)
        inputs = PagedInputs(q, key, value, qo_indptr, kv_indptr, indices, last, read)
    else:
        assert mask_mode == CAUSAL
    out.copy_(paged_inputs.attend(inputs))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    from flashinfer import prefill

    modules = SimpleNamespace(plan=lambda *_: "planned", paged_run=paged_run)
    monkeypatch.setattr(prefill, "get_batch_prefill_module", lambda *_: modules)
    packbits = sys.modules["flashinfer.quantization.packbits"]  # a function has its name
    packing = SimpleNamespace(segment_packbits=segment_packbits)
    monkeypatch.setattr(packbits, "get_quantization_module", lambda: packing)
    monkeypatch.setattr(prefill, "device_support_pdl", lambda _: False)
    empty = torch.empty

    def unpinned(*args, **kwargs) -> torch.Tensor:
        return empty(*args, **(kwargs | {"pin_memory": False}))

    monkeypatch.setattr(torch, "empty", unpinned)  # memory is pinned for a GPU
    return Kernel(torch.empty(1024, dtype=torch.uint8))


@pytest.mark.parametrize("page_size", [1, 16])
def test_kernel_inputs(kernel: Kernel, page_size: int):
    reference = paged_inputs.expected(BATCH)
    masked = kernel(paged_inputs.masked(BATCH, page_size, flat_mask))
    assert paged_inputs.worst_error(masked, reference) < 1e-5
    alone = [kernel(one) for one in paged_inputs.separate(BATCH, page_size)]
    assert paged_inputs.worst_error(torch.cat(alone), reference) < 1e-5


def test_kernel_inputs_without_a_mask(kernel: Kernel):
    answer = kernel(paged_inputs.aliased(BATCH))
    assert paged_inputs.worst_error(answer, paged_inputs.expected(BATCH)) < 1e-5
