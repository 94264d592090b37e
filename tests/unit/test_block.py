"""Blocks: what a forward's rows are, what is kept of it, and which plan pays."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sglang_parse.core.block import (
    NO_TOKEN,
    Block,
    DraftLayout,
    Masks,
    block_of,
    keep,
)
from sglang_parse.core.mask import dense_mask
from sglang_parse.core.policy.layout_choice import layouts_for

pytestmark = pytest.mark.unit

VOCAB, MASK_ID = 97, 96
PLANS = [DraftLayout(size, masks) for size in (2, 4, 8) for masks in (Masks.LAST, Masks.EVERY)]
LAST, EVERY = DraftLayout(4, Masks.LAST), DraftLayout(4, Masks.EVERY)


# -- rows -----------------------------------------------------------------------


def test_masks_behind_the_last_row():
    block = block_of(LAST, written=9, known=10, candidates=[5, 6, 7], room=100)
    assert block.layout.positions() == [9, 10, 11, 12, 13, 14, 15]
    assert (block.layout.num_draft_rows, block.layout.visible_lens) == (7, ())  # plainly causal
    assert block.token_ids([4], MASK_ID) == [4, 5, 6, 7, MASK_ID, MASK_ID, MASK_ID]
    assert block.logits_rows == (0, 1, 2, 3, 4, 5, 6)
    assert block.layout.num_rows - 1 == LAST.rows_behind == 6


def test_masks_behind_every_row():
    block = block_of(EVERY, written=9, known=10, candidates=[5, 6, 7], room=100)
    assert block.layout.positions() == [9, 10, 11, 12] + [10, 11, 12, 11, 12, 13] + [
        *(12, 13, 14),
        *(13, 14, 15),
    ]
    assert block.layout.visible_lens == (1, 2, 3, 4)
    assert block.layout.num_rows - 1 == EVERY.rows_behind == 15


def test_tokens_without_kv_come_first():
    """After the target wrote three tokens the draft's KV lacks them, and the last one."""
    block = block_of(LAST, written=5, known=9, candidates=(), room=100)
    assert block.token_ids([1, 2, 3, 4], MASK_ID) == [1, 2, 3, 4, MASK_ID, MASK_ID, MASK_ID]
    assert block.layout.positions() == [5, 6, 7, 8, 9, 10, 11]
    assert (block.logits_rows, block.num_real) == ((3, 4, 5, 6), 1)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("room", range(1, 12))
def test_no_row_stands_for_a_token_behind_the_budget(plan: DraftLayout, room: int):
    block = block_of(plan, written=9, known=10, candidates=range(plan.size - 1), room=room)
    assert max(block.layout.positions()) < 9 + room
    assert len(block.candidates) == min(plan.size, room) - 1
    assert block.layout.num_rows <= 1 + plan.rows_behind


def test_one_token_a_forward_is_a_block_too():
    (one,) = layouts_for(1, allow_one_token=True)
    block = block_of(one, written=9, known=10, candidates=(), room=5)
    assert (block.layout.num_rows, one.rows_behind) == (1, 0)
    assert keep(block, [3]).token_ids == (3,)


# -- what is kept ---------------------------------------------------------------


def accepted_block(plan: DraftLayout, choices: Sequence[int]):
    block = block_of(plan, written=9, known=10, candidates=[5, 6, 7], room=100)
    return keep(block, choices)


def test_all_candidates_hold():
    kept = accepted_block(LAST, [5, 6, 7, 8, 91, 92, 93])
    assert (kept.token_ids, kept.candidates) == ((5, 6, 7, 8), (91, 92, 93))


def test_the_first_unequal_choice_ends_the_block_and_is_kept():
    kept = accepted_block(LAST, [5, 9, 7, 8, 91, 92, 93])
    assert (kept.token_ids, kept.candidates) == ((5, 9), ())


def test_masks_behind_every_row_propose_wherever_the_block_ends():
    masks = [10, 11, 12, 20, 21, 22, 30, 31, 32, 40, 41, 42]
    assert accepted_block(EVERY, [1, 6, 7, 8, *masks]).candidates == (10, 11, 12)
    assert accepted_block(EVERY, [5, 9, 7, 8, *masks]).candidates == (20, 21, 22)
    assert accepted_block(EVERY, [5, 6, 7, 8, *masks]).candidates == (40, 41, 42)


@pytest.mark.parametrize("place", range(7))
def test_a_token_that_could_not_be_computed_is_a_fault(place: int):
    choices = [5, 6, 7, 8, 91, 92, 93]
    choices[place] = NO_TOKEN
    kept = accepted_block(LAST, choices)
    assert kept.is_faulty
    assert kept.token_ids == kept.candidates == ()


def write(
    plan: DraftLayout, next_token, guess, start: list[int], count: int
) -> tuple[list[int], int]:
    """``count`` tokens behind ``start`` and the forwards they took.

    ``next_token(text)`` is the model's one-token choice, ``guess(text, depth)`` its masks'.
    """
    text, candidates, forwards, end = list(start), (), 0, len(start) + count
    while len(text) < end:
        block = block_of(
            plan,
            written=len(text) - 1,
            known=len(text),
            candidates=candidates,
            room=end - len(text),
        )
        seen = [text + list(block.candidates[:row]) for row in range(block.num_real)]
        choices = [next_token(part) for part in seen]
        for row, count in block.masks:
            choices += [guess(seen[row], depth) for depth in range(1, count + 1)]
        kept = keep(block, choices)
        text, candidates = text + list(kept.token_ids), kept.candidates
        forwards += 1
    assert len(text) == end
    return text, forwards


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("share_right", [0.0, 0.7, 1.0])
def test_the_text_is_the_models_own(plan: DraftLayout, share_right: float):
    rng = random.Random(3)

    def next_token(text: Sequence[int]) -> int:
        return (31 * text[-1] + 7 * text[-2] + len(text)) % 61

    def guess(text: Sequence[int], depth: int) -> int:
        ahead = list(text)
        for _ in range(depth + 1):
            ahead.append(next_token(ahead))
        return ahead[-1] if rng.random() < share_right else 60

    one_by_one, forwards = write(DraftLayout(1, Masks.NONE), next_token, guess, [1, 2], 50)
    assert forwards == 50
    text, forwards = write(plan, next_token, guess, [1, 2], 50)
    assert text == one_by_one
    if share_right == 1.0:  # the first forward has no candidates yet
        assert forwards == 1 + -(-49 // plan.size)
    elif share_right == 0.0:
        assert 40 < forwards <= 50  # 60 is right now and then


def test_sampled_text_is_distributed_as_the_models_own():
    """Three tokens of a model that draws, against the exact probabilities of all 27 texts."""
    rng = random.Random(11)

    def odds(text: Sequence[int]) -> list[int]:
        return [1 + (text[-1] + 2 * len(text)) % 3, 2, 1 + text[-1] % 2]

    def draw(text: Sequence[int]) -> int:
        return rng.choices(range(3), odds(text))[0]

    def guess(text: Sequence[int], depth: int) -> int:
        return (len(text) + depth) % 3

    count = 20_000
    for plan in (LAST, EVERY):
        seen = Counter(tuple(write(plan, draw, guess, [0], 3)[0][1:]) for _ in range(count))
        distance = 0.0
        for a in range(3):
            for b in range(3):
                for c in range(3):
                    exact = 1.0
                    for text, token in (([0], a), ([0, a], b), ([0, a, b], c)):
                        exact *= odds(text)[token] / sum(odds(text))
                    distance += abs(seen[a, b, c] / count - exact) / 2
        assert distance < 0.02  # 27 texts: 0.011 is expected of a right one


# -- a real model ---------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.15,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config).float().eval()


@torch.inference_mode()
def block_logits(model: Qwen3ForCausalLM, text: Sequence[int], block: Block) -> torch.Tensor:
    """[rows, vocab] of a block behind ``text``: its context is fed with it, causally."""
    layout, written = block.layout, block.layout.prefix_len
    ids = [*text[:written], *block.token_ids(text[written:], MASK_ID)]
    positions = [*range(written), *layout.positions()]
    mask = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    mask[:written, :written] = torch.ones(written, written).tril().bool()
    mask[written:] = dense_mask(layout)
    output = model(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([positions]),
        attention_mask=mask[None, None],
    )
    return output.logits[0, written:]


@torch.inference_mode()
def causal_logits(model: Qwen3ForCausalLM, ids: Sequence[int]) -> torch.Tensor:
    """[vocab] behind ``ids``, fed as ordinary text."""
    return model(input_ids=torch.tensor([list(ids)])).logits[0, -1]


@pytest.mark.parametrize("masks", [Masks.LAST, Masks.EVERY])
def test_every_depth_is_what_a_causal_forward_with_masks_says(model, masks: Masks):
    """Depth 0 is the text's own next token; depth d has d mask tokens behind the text: PARD's."""
    text = [3, 14, 15, 9, 26, 5, 35]
    plan = DraftLayout(5, masks)
    block = block_of(plan, written=4, known=7, candidates=[8, 9, 7, 9], room=100)
    logits = block_logits(model, text, block)
    for row in range(block.num_real):
        expected = causal_logits(model, text + list(block.candidates[:row]))
        torch.testing.assert_close(logits[block.num_pending - 1 + row], expected)
    rows = iter(block.logits_rows[block.num_real :])
    for row, count in block.masks:
        seen = text + list(block.candidates[:row])
        for depth in range(1, count + 1):
            expected = causal_logits(model, seen + [MASK_ID] * depth)
            torch.testing.assert_close(logits[next(rows)], expected)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_models_greedy_text(model, plan: DraftLayout):
    """What the model writes in blocks is what it writes one token at a time."""

    def next_token(text: Sequence[int]) -> int:
        return int(causal_logits(model, text).argmax())

    def guess(text: Sequence[int], depth: int) -> int:
        return int(causal_logits(model, list(text) + [MASK_ID] * depth).argmax())

    start = [5, 6, 7]
    one_by_one, _ = write(DraftLayout(1, Masks.NONE), next_token, guess, start, 10)
    assert write(plan, next_token, guess, start, 10)[0] == one_by_one
