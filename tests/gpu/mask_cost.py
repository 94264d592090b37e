"""Prints the cost of a verify pass in one attention layer on a GPU: its mask, plan and kernel.

    PYTHONPATH=tests python tests/gpu/mask_cost.py [--page-size 1] [--heads 64,8,128]

Per pass of ``support.passes``: building the flat mask, packing it to bits, planning (which packs),
running; the same without a mask (aliased); and the kernel on the draft alone, a plain prefill of
the same tokens. All layers share one mask and plan; the kernel runs in each.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from sglang_parse.core.layout import RequestLayout, VerifyLayout
from sglang_parse.core.mask import flat_mask
from support import paged_inputs
from support.flashinfer_kernel import Kernel
from support.paged_inputs import Heads, PagedInputs
from support.passes import PASSES
from support.timing import milliseconds

COLUMNS = (
    *("rows", "build", "pack", "plan", "run"),
    *("alias-plan", "alias-run"),
    *("draft-plan", "draft-run"),
)


def draft_alone(layout: VerifyLayout) -> VerifyLayout:
    """The same requests without their questions."""
    return VerifyLayout.of(
        [RequestLayout(request.prefix_len, request.num_draft_rows) for request in layout.requests]
    )


def costs(kernel: Kernel, layout: VerifyLayout, heads: Heads, page_size: int) -> list[float]:
    """In the order of ``COLUMNS``."""
    import flashinfer

    def tensors(of: VerifyLayout) -> list:
        return paged_inputs.random_tensors(of, heads, torch.bfloat16, "cuda", 0)

    def plan_and_run(inputs: PagedInputs) -> list[float]:
        wrapper = kernel.planned(inputs)
        plan = milliseconds(lambda: kernel.planned(inputs))
        return [plan, milliseconds(lambda: kernel.run(wrapper, inputs))]

    batch = tensors(layout)
    masked = paged_inputs.masked(batch, page_size, flat_mask)
    indptr = torch.tensor(layout.mask_indptr, dtype=torch.int32, device="cuda")
    build = milliseconds(lambda: flat_mask(layout, "cuda"))
    pack = milliseconds(  # as a plan does it: a block of threads for each request
        lambda: flashinfer.segment_packbits(masked.custom_mask, indptr, bitorder="little")
    )
    plain = paged_inputs.masked(tensors(draft_alone(layout)), page_size, flat_mask)
    return [
        float(layout.num_rows),
        *(build, pack, *plan_and_run(masked)),
        *plan_and_run(paged_inputs.aliased(batch)),
        *plan_and_run(replace(plain, custom_mask=None)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--heads", default="64,8,128", help="query heads, KV heads, head_dim")
    options = parser.parse_args()
    heads = Heads(*map(int, options.heads.split(",")))
    kernel = Kernel(torch.empty(1 << 30, dtype=torch.uint8, device="cuda"))
    print(f"{torch.cuda.get_device_name()}, {heads}, page size {options.page_size}; ms")
    print(f"{'pass':24}", *(f"{name:>10}" for name in COLUMNS))
    for name, requests in PASSES.items():
        found = costs(kernel, VerifyLayout.of(requests), heads, options.page_size)
        print(f"{name:24}", f"{found[0]:10.0f}", *(f"{value:10.3f}" for value in found[1:]))


if __name__ == "__main__":
    main()
