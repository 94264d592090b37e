"""Lower bounds of a block's cost relative to a decode step of the draft model.

    PYTHONPATH=. python tests/compat/block_counts.py

No GPU was asked: a forward takes at least its bytes over the card's bandwidth, and its operations
over its rate. The card's two numbers are its makers'.
"""

from __future__ import annotations

from sglang_parse.core.block import layouts_for
from sglang_parse.core.layout import RequestLayout
from sglang_parse.limit.shape import Shape, shape_names

BYTES_PER_S, FLOPS_PER_S = 3.35e12, 989e12
"""H100 SXM, bf16 without sparsity."""
BF16_BYTES = 2
CONTEXT = 2048
SIZES = (4, 8)
REQUESTS = (1, 8, 32)


def floor_ms(shape: Shape, rows: int, kv_tokens: int, pairs: int) -> float:
    """Lower bound of a forward of a dense decoder, with logits of every row.

    Args:
        kv_tokens: tokens whose keys and values are read.
        pairs: ones in the mask.
    """
    one = shape.config
    inputs = 0 if one.tie_word_embeddings else shape.vocab * one.hidden_size
    weights = shape.num_weights - inputs
    num_bytes = BF16_BYTES * (weights + shape.kv_per_token * kv_tokens)
    scores = 4 * one.num_hidden_layers * one.num_attention_heads * one.head_dim * pairs
    return 1e3 * max(num_bytes / BYTES_PER_S, (2 * weights * rows + scores) / FLOPS_PER_S)


def attended_pairs(layout: RequestLayout) -> int:
    return sum(
        rows.num_rows * rows.context_len + rows.num_rows * (rows.num_rows + 1) // 2
        for rows in layout.pseudo_sequences()
    )


def ratios(shape: Shape, size: int, num_requests: int) -> dict[str, tuple[int, float]]:
    """Masks -> (rows of a forward, its floor over that of a step)."""
    step = floor_ms(shape, num_requests, *[CONTEXT * num_requests] * 2)
    found = {}
    for plan in layouts_for(size, allow_one_token=False):
        block = plan.rows(CONTEXT)
        rows, kv, pairs = (
            num_requests * count for count in (block.num_rows, block.kv_len, attended_pairs(block))
        )
        found[plan.masks.value] = (rows, floor_ms(shape, rows, kv, pairs) / step)
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
