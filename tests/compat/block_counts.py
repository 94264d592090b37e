"""Lower bounds of a block's cost relative to a decode step of the draft model.

    PYTHONPATH=. python tests/compat/block_counts.py

No GPU was asked: a forward takes at least its bytes over the card's bandwidth, and its operations
over its rate. The card's two numbers are its makers'.
"""

from __future__ import annotations

from sglang_parse.core.policy.layout_choice import layouts_for
from sglang_parse.limit.device import Card, Work, step_work, verify_work
from sglang_parse.limit.shape import Shape, shape_names

H100 = Card(bandwidth=3.35e12, rate=989e12)
"""SXM, bf16 without sparsity."""
BF16_BYTES = 2
CONTEXT = 2048
SIZES = (4, 8)
REQUESTS = (1, 8, 32)


def floor_ms(work: Work, card: Card = H100) -> float:
    return 1e3 * max(work.bytes / card.bandwidth, work.flops / card.rate)


def ratios(shape: Shape, size: int, num_requests: int) -> dict[str, tuple[int, float]]:
    """Masks -> (rows of a forward, its floor over that of a step)."""
    step = floor_ms(step_work(shape, num_requests, CONTEXT, BF16_BYTES))
    found = {}
    for plan in layouts_for(size, allow_one_token=False):
        block = plan.rows(CONTEXT)
        work = verify_work(shape, block, num_requests, block.num_rows, BF16_BYTES)
        found[plan.masks.value] = (num_requests * block.num_rows, floor_ms(work) / step)
    return found


def main() -> None:
    print(
        "| draft | size | requests | masks after every row: rows, x a step | after the last row |"
    )
    print("|---|---|---|---|---|")
    for name in shape_names():
        shape = Shape.read(name)
        if shape.num_weights > 2e9:
            continue
        for size in SIZES:
            for num_requests in REQUESTS:
                found = ratios(shape, size, num_requests)
                cells = [f"{found[key][0]}, {found[key][1]:.2f}" for key in ("every", "last")]
                print(f"| {name} | {size} | {num_requests} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
