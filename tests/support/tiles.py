"""Counts the query tiles of a verify pass in an attention kernel, and the columns they load.

FlashInfer's FA2 (``prefill.cuh``, 0.7): tiles of 128 packed rows, one per row and query head of a
KV head. Without a mask a tile loads the columns visible to its last row; with a mask it loads all.
SGLang's Triton extend kernel: tiles of 128 rows of one query head, which load all context columns
and the new rows up to the tile's last. It tests the mask among new rows only
(``SKIP_PREFIX_CUSTOM_MASK`` of ``extend_attention.py``, true by default), but the mask's rows still
have full KV length, so its context columns occupy memory and are never read.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_parse.core.layout import VerifyLayout

TILE = 128


@dataclass(frozen=True)
class Counts:
    """Counts of one attention layer and one KV head.

    Attributes:
        tiles: query tiles.
        columns: KV entries loaded by all tiles.
        mask_bytes: size of the mask, shared by all layers.
        tested: mask entries that the tiles read.
    """

    tiles: int
    columns: int
    mask_bytes: int
    tested: int = 0


def flashinfer(layout: VerifyLayout, heads_per_kv_head: int, *, is_masked: bool) -> Counts:
    tiles = columns = 0
    if is_masked:
        for request in layout.requests:
            own = -(-request.num_rows * heads_per_kv_head // TILE)
            tiles, columns = tiles + own, columns + own * request.kv_len
        return Counts(tiles, columns, layout.mask_size, tested=TILE * columns)
    for sequence in layout.pseudo_sequences():
        own = -(-sequence.num_rows * heads_per_kv_head // TILE)
        for tile in range(own):
            last_row = -(-(tile + 1) * TILE // heads_per_kv_head)
            columns += sequence.context_len + min(last_row, sequence.num_rows)
        tiles += own
    return Counts(tiles, columns, 0)


def triton(layout: VerifyLayout, heads_per_kv_head: int, *, is_masked: bool) -> Counts:
    if is_masked:
        runs = [(request.num_rows, request.prefix_len) for request in layout.requests]
    else:
        runs = [(sequence.num_rows, sequence.context_len) for sequence in layout.pseudo_sequences()]
    tiles = columns = new_columns = 0
    for num_rows, context in runs:
        for start in range(0, num_rows, TILE):
            tiles += heads_per_kv_head
            columns += heads_per_kv_head * context
            new_columns += heads_per_kv_head * min(start + TILE, num_rows)
    if not is_masked:
        return Counts(tiles, columns + new_columns, 0)
    return Counts(tiles, columns + new_columns, layout.mask_size, tested=TILE * new_columns)


KERNELS = {"flashinfer": flashinfer, "triton": triton}
