"""What stays of blocks on the device is what ``block.keep`` says on the host."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_parse.core.block import NO_TOKEN, Block, DraftLayout, Masks, block_of, keep, wide_rows
from sglang_parse.core.block_accept import ChainState, accept_blocks, accepted_block

pytestmark = pytest.mark.unit

MASK_ID = 61


def wide_choices(plan: DraftLayout, block: Block, choices: list[int], fill: list[int]) -> list[int]:
    """``choices`` of a block's rows, in a forward of as many candidates as there can be."""
    real, masks = choices[: block.num_real], iter(choices[block.num_real :])
    if plan.masks is Masks.LAST:
        wide = [*real, *masks]
        return [*wide, *fill[: 2 * plan.size - 1 - len(wide)]]
    wide = [*real, *fill[: plan.size - len(real)]]
    proposed = {row: [next(masks) for _ in range(count)] for row, count in block.masks}
    for row in range(plan.size):
        wide += proposed.get(row, fill[: plan.size - 1])
    return wide


@st.composite
def cases(
    draw: st.DrawFn,
) -> tuple[DraftLayout, list, list[Block], list[list[int]], list[list[int]]]:
    """Few token ids, so that candidates hold now and then; some could not be computed."""
    tokens = st.integers(NO_TOKEN, 3) if draw(st.booleans()) else st.integers(0, 2)
    size, masks = draw(st.integers(2, 5)), draw(st.sampled_from([Masks.LAST, Masks.EVERY]))
    plan, blocks, chosen, wide = DraftLayout(size, masks), [], [], []
    for _ in range(draw(st.integers(1, 3))):
        candidates = draw(st.lists(st.integers(0, 2), max_size=size - 1))
        written = draw(st.integers(0, 20))
        block = block_of(
            plan, written=written, known=written + 1, candidates=candidates, room=size * size
        )
        count = len(block.logits_rows)
        chosen.append(draw(st.lists(tokens, min_size=count, max_size=count)))
        # What stands in the places of candidates that are missing may say anything.
        fill = draw(st.lists(st.integers(0, 3), min_size=2 * size, max_size=2 * size))
        wide.append(wide_choices(plan, block, chosen[-1], fill))
        blocks.append(block)
    return plan, blocks, chosen, wide


def ahead_of(plan: DraftLayout, blocks: list[Block]) -> ChainState:
    padded = [
        [*block.candidates, *[MASK_ID] * (plan.size - 1 - len(block.candidates))]
        for block in blocks
    ]
    return ChainState(
        torch.tensor([block.layout.prefix_len for block in blocks]),
        torch.full((len(blocks),), 7),
        torch.tensor(padded),
        torch.tensor([len(block.candidates) for block in blocks]),
    )


@given(cases())
def test_it_is_what_stays_on_the_host(case: tuple):
    plan, blocks, chosen, wide = case
    before = ahead_of(plan, blocks)
    after, records = accept_blocks(plan.masks, before, torch.tensor(wide), MASK_ID)
    for i, (block, choices) in enumerate(zip(blocks, chosen, strict=True)):
        expected = keep(block, choices)
        found = accepted_block(records[i].tolist())
        assert (found.token_ids, found.candidates) == (expected.token_ids, expected.candidates)
        assert found.is_faulty == expected.is_faulty
        if found.is_faulty:
            assert all(torch.equal(a[i], b[i]) for a, b in zip(after, before, strict=True))
            continue
        count = len(expected.candidates)
        masks = [MASK_ID] * (plan.size - 1 - count)
        assert int(after.starts[i]) == block.layout.prefix_len + len(expected.token_ids)
        assert int(after.last[i]) == expected.token_ids[-1]
        assert after.candidates[i].tolist() == [*expected.candidates, *masks]
        assert int(after.num_candidates[i]) == count


@given(cases())
def test_rows_of_a_block_among_the_rows_of_a_wide_one(case: tuple):
    """A block that the host laid out is read as one that it did not."""
    plan, blocks, chosen, _ = case
    before = ahead_of(plan, blocks)
    wide = [
        [choices[row] for row in wide_rows(plan, block)]
        for block, choices in zip(blocks, chosen, strict=True)
    ]
    _, records = accept_blocks(plan.masks, before, torch.tensor(wide), MASK_ID)
    for block, choices, record in zip(blocks, chosen, records.tolist(), strict=True):
        assert accepted_block(record) == keep(block, choices)


@pytest.mark.parametrize("masks", [Masks.LAST, Masks.EVERY], ids=lambda masks: masks.value)
@pytest.mark.parametrize("share_right", [0.0, 0.7, 1.0])
def test_texts_of_blocks_that_nobody_reads(masks: Masks, share_right: float):
    """Two requests at once, one of which begins with candidates: each text is the model's own."""
    rng, size, num_blocks = random.Random(3), 4, 12

    def next_token(text: list[int]) -> int:
        return (31 * text[-1] + 7 * text[-2] + len(text)) % 61

    def foresee(text: list[int], depth: int) -> int:
        ahead = list(text)
        for _ in range(depth + 1):
            ahead.append(next_token(ahead))
        return ahead[-1] if rng.random() < share_right else 60

    def chosen(text: list[int], candidates: list[int], count: int) -> list[int]:
        seen = [text + candidates[:row] for row in range(size)]
        if masks is Masks.EVERY:
            behind = [foresee(part, depth) for part in seen for depth in range(1, size)]
            return [*map(next_token, seen), *behind]
        real = [next_token(part) for part in seen[: count + 1]]
        return real + [foresee(seen[count], depth) for depth in range(1, 2 * size - 1 - count)]

    texts = [[1, 2], [3, 4, 5]]
    known = [[], [next_token(texts[1])]]
    ahead = ChainState(
        torch.tensor([len(text) - 1 for text in texts]),
        torch.tensor([text[-1] for text in texts]),
        torch.tensor([[*part, *[MASK_ID] * (size - 1 - len(part))] for part in known]),
        torch.tensor([len(part) for part in known]),
    )
    expected = [list(text) for text in texts]
    for text in expected:
        while len(text) < 80:
            text.append(next_token(text))
    for _ in range(num_blocks):
        parts = zip(texts, ahead.candidates.tolist(), ahead.num_candidates.tolist(), strict=True)
        choices = torch.tensor([chosen(*part) for part in parts])
        ahead, records = accept_blocks(masks, ahead, choices, MASK_ID)
        for text, record in zip(texts, records.tolist(), strict=True):
            text.extend(accepted_block(record).token_ids)
        assert ahead.starts.tolist() == [len(text) - 1 for text in texts]
        assert ahead.last.tolist() == [text[-1] for text in texts]
    for text, own in zip(texts, expected, strict=True):
        assert text == own[: len(text)]
        if share_right == 1.0:
            assert len(text) > (num_blocks - 1) * size
