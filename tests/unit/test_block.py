"""Blocks: the rows of a forward, what is accepted of it, and the text that comes of both."""

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from sglang_parse.core.block import NO_TOKEN, BlockKind, Masks, block_kinds
from sglang_parse.core.block_accept import (
    ChainState,
    accept_blocks,
    accepted_block,
    chain_ids,
    propose,
)
from sglang_parse.core.doubt import UNITS, level_of
from sglang_parse.core.layout import RequestLayout
from sglang_parse.core.phases import RequestPolicy
from sglang_parse.core.request import RequestState
from sglang_parse.core.simulation import BLOCK_ENV_VAR
from support.reference import dense_mask

pytestmark = pytest.mark.unit

VOCAB, MASK_ID = 97, 96
KINDS = [BlockKind(size, masks) for size in (2, 4, 8) for masks in (Masks.LAST, Masks.EVERY)]
LAST, EVERY = BlockKind(4, Masks.LAST), BlockKind(4, Masks.EVERY)
HEAD = BlockKind(4, Masks.HEAD)


# -- rows -----------------------------------------------------------------------


def test_masks_after_the_last_row():
    rows = LAST.rows(9)
    assert rows.positions() == [9, 10, 11, 12, 13, 14, 15]
    assert rows.is_causal
    assert rows.num_rows - 1 == LAST.lookahead_rows == 6


def test_masks_after_every_row():
    rows = EVERY.rows(9)
    assert rows.positions() == [9, 10, 11, 12] + [10, 11, 12, 11, 12, 13] + [
        *(12, 13, 14),
        *(13, 14, 15),
    ]
    assert rows.visible_lens == (1, 2, 3, 4)
    assert rows.num_rows - 1 == EVERY.lookahead_rows == 15


def test_one_token_per_forward_is_a_row():
    (one,) = block_kinds(1, allow_one_token=True)
    assert (one.rows(9).num_rows, one.lookahead_rows) == (1, 0)


def test_a_head_needs_slots_for_its_steps():
    """All of four tokens are accepted; its second and third proposal stand behind them."""
    rows = HEAD.rows(9)
    assert (rows.num_rows, rows.is_causal, HEAD.lookahead_rows) == (4, True, 5)
    assert [BlockKind(n, Masks.HEAD).lookahead_rows for n in (1, 2, 3)] == [0, 1, 3]


# -- acceptance -----------------------------------------------------------------


def state_of(
    kind: BlockKind, text: Sequence[int], candidates: Sequence[int], num_known: int = 0
) -> ChainState:
    padded = [*candidates, *[MASK_ID] * (kind.size - 1 - len(candidates))]
    numbers = ([len(text) - 1], [text[-1]], [padded], [len(candidates)], [num_known])
    return ChainState(*(torch.tensor(part, dtype=torch.int64) for part in numbers))


def accept_rows(
    kind: BlockKind, state: ChainState, choices: torch.Tensor, proposed: torch.Tensor | None = None
) -> tuple[ChainState, torch.Tensor]:
    surprisals = choices[:, : kind.size] * UNITS // 8
    return accept_blocks(kind.masks, state, choices, surprisals, MASK_ID, proposed)


def accept(
    kind: BlockKind,
    choices: Sequence[int],
    candidates: Sequence[int] = (5, 6, 7),
    num_known: int = 0,
) -> tuple[list[int], list[int]]:
    """The newly accepted tokens of one block, and the next candidates."""
    state = state_of(kind, [4], candidates, num_known)
    _, records = accept_rows(kind, state, torch.tensor([choices]))
    accepted, _, proposed = accepted_block(records[0].tolist())
    return list(accepted), list(proposed)


def test_all_candidates_hold():
    assert accept(LAST, [5, 6, 7, 8, 91, 92, 93]) == ([5, 6, 7, 8], [91, 92, 93])


def test_the_first_unequal_choice_ends_the_block_and_is_accepted():
    assert accept(LAST, [5, 9, 7, 8, 91, 92, 93]) == ([5, 9], [])


def test_masks_after_the_last_candidate_propose():
    """Masks in the places of missing candidates are the first after the last one."""
    assert accept(LAST, [5, 8, 91, 92, 93, 94, 95], [5]) == ([5, 8], [91, 92, 93])


def test_masks_after_every_row_propose_wherever_the_block_ends():
    masks = [10, 11, 12, 20, 21, 22, 30, 31, 32, 40, 41, 42]
    assert accept(EVERY, [1, 6, 7, 8, *masks])[1] == [10, 11, 12]
    assert accept(EVERY, [5, 9, 7, 8, *masks])[1] == [20, 21, 22]
    assert accept(EVERY, [5, 6, 7, 8, *masks])[1] == [40, 41, 42]


def test_known_text_is_not_chosen_again():
    """The model would not have written 5 and 6; what follows 6 is new."""
    masks = [10, 11, 12, 20, 21, 22, 30, 31, 32, 40, 41, 42]
    assert accept(EVERY, [1, 2, 9, 8, *masks], num_known=2) == ([9], [30, 31, 32])
    assert accept(EVERY, [1, 2, 7, 8, *masks], num_known=2) == ([7, 8], [40, 41, 42])
    assert accept(LAST, [1, 8, 91, 92, 93, 94, 95], [5], num_known=1) == ([8], [91, 92, 93])


@pytest.mark.parametrize("place", range(7))
def test_a_block_with_a_token_that_could_not_be_computed_is_not_accepted(place: int):
    choices = [5, 6, 7, 8, 91, 92, 93]
    choices[place] = NO_TOKEN
    assert accept(LAST, choices)[0] == []


@pytest.mark.parametrize("wanted", [1, 2.5, 4.9, 8])
@pytest.mark.parametrize("masks", [Masks.LAST, Masks.EVERY])
def test_blocks_add_as_many_tokens_as_simulated(
    masks: Masks, wanted: float, monkeypatch: pytest.MonkeyPatch
):
    """Random choices confirm next to nothing. With masks after the last row, a block behind one
    with a refused candidate has none to accept."""
    monkeypatch.setenv(BLOCK_ENV_VAR, str(wanted))
    kind = BlockKind(8, masks)
    num_rows, state, added = kind.rows(0).num_rows, state_of(kind, [4], []), []
    for _ in range(400):
        choices = torch.randint(VOCAB, (1, num_rows))
        had_candidates = int(state.num_candidates) > 0
        state, records = accept_rows(kind, state, choices)
        tokens = accepted_block(records[0].tolist())[0]
        assert tokens == choices[0, : len(tokens)].tolist()
        if had_candidates:
            added.append(len(tokens))
        else:
            assert len(tokens) == 1
    assert {*added} <= {int(wanted), int(wanted) + (wanted % 1 > 0)}
    assert sum(added) / len(added) == pytest.approx(wanted, rel=0.08)
    assert len(added) >= (399 if masks is Masks.EVERY else 200)


@st.composite
def cases(draw: st.DrawFn) -> tuple[BlockKind, list[tuple[list[int], int]], list[list[int]]]:
    """Few token ids, so that candidates hold now and then; some could not be computed."""
    tokens = st.integers(NO_TOKEN, 3) if draw(st.booleans()) else st.integers(0, 2)
    size, masks = draw(st.integers(2, 5)), draw(st.sampled_from([Masks.LAST, Masks.EVERY]))
    kind = BlockKind(size, masks)
    num_rows, num_reqs = kind.rows(0).num_rows, draw(st.integers(1, 3))
    lists = [draw(st.lists(st.integers(0, 2), max_size=size - 1)) for _ in range(num_reqs)]
    known = [draw(st.integers(0, len(candidates))) for candidates in lists]
    row = st.lists(tokens, min_size=num_rows, max_size=num_rows)
    return kind, [*zip(lists, known, strict=True)], [draw(row) for _ in range(num_reqs)]


@given(cases())
def test_it_is_what_a_loop_over_candidates_accepts(case: tuple):
    kind, lists, choices = case
    size = kind.size
    parts = [state_of(kind, [7] * (i + 1), *one) for i, one in enumerate(lists)]
    before = ChainState(*(torch.cat(part) for part in zip(*parts, strict=True)))
    after, records = accept_rows(kind, before, torch.tensor(choices))
    for i, ((candidates, known), chosen) in enumerate(zip(lists, choices, strict=True)):
        accepted, levels, proposed = accepted_block(records[i].tolist())
        assert levels == [level_of(token * UNITS // 8) for token in accepted]
        if NO_TOKEN in chosen:
            assert not accepted
            assert all(torch.equal(a[i], b[i]) for a, b in zip(after, before, strict=True))
            continue
        matched = known
        while matched < len(candidates) and candidates[matched] == chosen[matched]:
            matched += 1
        first = size + matched * (size - 1) if kind.masks is Masks.EVERY else matched + 1
        next_candidates = chosen[first : first + size - 1]
        if kind.masks is Masks.LAST and matched < len(candidates):
            next_candidates = []
        assert list(accepted) == chosen[known : matched + 1]
        assert list(proposed) == next_candidates
        padding = [MASK_ID] * (size - 1 - len(next_candidates))
        assert int(after.starts[i]) == i + matched + 1
        assert int(after.last[i]) == accepted[-1]
        assert int(after.num_known[i]) == 0
        assert after.candidates[i].tolist() == [*next_candidates, *padding]
        assert int(after.num_candidates[i]) == len(next_candidates)


# -- a head ---------------------------------------------------------------------


class CountingHead:
    """Proposes each token's successor. It sees hidden states that tell their positions: the draft
    model's, and from its second forward on its own, which are negative."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[list[int]], list[int], list[list[float]]]] = []

    def __call__(self, ids: torch.Tensor, starts: torch.Tensor, hidden: torch.Tensor) -> tuple:
        self.seen.append((ids.tolist(), starts.tolist(), hidden[:, :, 0].tolist()))
        places = starts[:, None] + torch.arange(ids.shape[1])
        return ids + 1, -places[:, :, None].float()


def propose_after(
    size: int, candidates: Sequence[int], choices: Sequence[int], num_known: int = 0
) -> tuple[list[int], list[int], CountingHead]:
    """What a block accepts and proposes next, behind a text of 10 tokens."""
    kind, head = BlockKind(size, Masks.HEAD), CountingHead()
    state, chosen = state_of(kind, range(10), candidates, num_known), torch.tensor([choices])
    proposed = propose(head, state, chosen, torch.arange(9.0, 9 + size).view(1, size, 1))
    _, records = accept_rows(kind, state, chosen, proposed)
    accepted, _, following = accepted_block(records[0].tolist())
    return list(accepted), list(following), head


def test_a_head_goes_on_behind_what_is_accepted():
    accepted, proposed, head = propose_after(4, [20, 30, 40], [20, 50, 60, 70])
    assert (accepted, proposed) == ([20, 50], [51, 52, 53])
    first, second, third = head.seen
    # Its row of a token has the next one; what follows the accepted ones does not matter.
    assert (first[0][0][:2], first[1:]) == ([20, 50], ([9], [[9, 10, 11, 12]]))
    assert second == ([[51]], [11], [[-10]])
    assert third == ([[52]], [12], [[-11]])


def test_after_known_text_a_head_sees_that_text():
    """The model would not have written 20."""
    accepted, proposed, head = propose_after(3, [20], [1, 50, 60], num_known=1)
    assert (accepted, proposed) == ([50], [51, 52])
    assert head.seen[0][0][0][:2] == [20, 50]


def test_one_token_per_forward_keeps_the_heads_kv_complete():
    accepted, proposed, head = propose_after(1, [], [7])
    assert (accepted, proposed) == ([7], [])
    assert head.seen == [([[7]], [9], [[9]])]


def test_a_head_sees_tokens_where_one_could_not_be_computed():
    accepted, _, head = propose_after(2, [20], [NO_TOKEN, 5])
    assert not accepted
    assert min(head.seen[0][0][0]) >= 0


# -- text -----------------------------------------------------------------------

Chooser = Callable[[list[int], list[int]], list[int]]
"""Text and candidates -> the choice of every row of a block."""


def chooser(kind: BlockKind, next_token: Callable, guess: Callable) -> Chooser:
    """``next_token(text)`` is the model's one-token choice, ``guess(text, depth)`` its masks'."""
    size = kind.size

    def choose(text: list[int], candidates: list[int]) -> list[int]:
        seen = [text + candidates[:row] for row in range(len(candidates) + 1)]
        if kind.masks is Masks.LAST:
            num_masks = 2 * size - 2 - len(candidates)
            return [*map(next_token, seen), *(guess(seen[-1], d + 1) for d in range(num_masks))]
        seen += [text] * (size - len(seen))  # unused places
        guesses = [guess(part, depth) for part in seen for depth in range(1, size)]
        return [*map(next_token, seen), *guesses]

    return choose


def write(kind: BlockKind, choose: Chooser, start: list[int], count: int) -> tuple[list, int]:
    """At least ``count`` tokens after ``start``, and the forwards they took."""
    text, forwards, state = list(start), 0, state_of(kind, start, [])
    while len(text) < len(start) + count:
        candidates = state.candidates[0, : int(state.num_candidates)].tolist()
        choices = torch.tensor([choose(text, candidates)])
        state, records = accept_rows(kind, state, choices)
        text += accepted_block(records[0].tolist())[0]
        forwards += 1
        assert (int(state.starts), int(state.last)) == (len(text) - 1, text[-1])
    return text, forwards


def one_by_one(next_token: Callable, start: list[int], count: int) -> list[int]:
    text = list(start)
    for _ in range(count):
        text.append(next_token(text))
    return text


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
def test_the_text_equals_the_models(kind: BlockKind, right: float):
    rng = random.Random(3)

    def next_token(text: Sequence[int]) -> int:
        return (31 * text[-1] + 7 * text[-2] + len(text)) % 61

    def guess(text: list[int], depth: int) -> int:
        return one_by_one(next_token, text, depth + 1)[-1] if rng.random() < right else 60

    text, forwards = write(kind, chooser(kind, next_token, guess), [1, 2], 50)
    assert text == one_by_one(next_token, [1, 2], len(text) - 2)
    if right == 1.0:  # the first forward has no candidates yet
        assert forwards == 1 + -(-49 // kind.size)
    elif right == 0.0:
        assert 40 < forwards <= 50  # 60 is right now and then


def test_sampled_text_has_the_models_distribution():
    """Three tokens of a model that draws, against the exact probabilities of all 27 texts."""
    rng = random.Random(11)

    def odds(text: Sequence[int]) -> list[int]:
        return [1 + (text[-1] + 2 * len(text)) % 3, 2, 1 + text[-1] % 2]

    def draw(text: Sequence[int]) -> int:
        return rng.choices(range(3), odds(text))[0]

    def guess(text: Sequence[int], depth: int) -> int:
        return (len(text) + depth) % 3

    count = 4_000
    for kind in (LAST, EVERY):
        choose = chooser(kind, draw, guess)
        seen = Counter(tuple(write(kind, choose, [0], 3)[0][1:4]) for _ in range(count))
        distance = 0.0
        for a in range(3):
            for b in range(3):
                for c in range(3):
                    exact = 1.0
                    for text, token in (([0], a), ([0, a], b), ([0, a, b], c)):
                        exact *= odds(text)[token] / sum(odds(text))
                    distance += abs(seen[a, b, c] / count - exact) / 2
        assert distance < 0.045  # 27 texts: 0.025 is expected of a right one


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
def block_logits(
    model: Qwen3ForCausalLM, text: Sequence[int], candidates: Sequence[int], rows: RequestLayout
) -> torch.Tensor:
    """[rows, vocab] of a block after ``text``: its context is fed with it, causally."""
    prefix_len = rows.prefix_len
    num_masks = rows.kv_len - len(text) - len(candidates)
    ids = [*text, *candidates, *[MASK_ID] * num_masks]
    positions = [*range(prefix_len), *rows.positions()]
    mask = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    mask[:prefix_len, :prefix_len] = torch.ones(prefix_len, prefix_len).tril().bool()
    mask[prefix_len:] = dense_mask(rows)
    output = model(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([positions]),
        attention_mask=mask[None, None],
    )
    return output.logits[0, prefix_len:]


@torch.inference_mode()
def causal_logits(model: Qwen3ForCausalLM, ids: Sequence[int]) -> torch.Tensor:
    """[vocab] after ``ids``, fed as ordinary text."""
    return model(input_ids=torch.tensor([list(ids)])).logits[0, -1]


@pytest.mark.parametrize("masks", [Masks.LAST, Masks.EVERY])
def test_every_depth_is_what_a_causal_forward_with_masks_predicts(model, masks: Masks):
    """Depth 0 is the text's own next token; depth d has d mask tokens after the text: PARD's."""
    text, candidates = [3, 14, 15, 9, 26, 5, 35], [8, 9, 7, 9]
    logits = block_logits(model, text, candidates, BlockKind(5, masks).rows(len(text) - 1))
    rows = iter(logits)
    for row in range(5):
        expected = causal_logits(model, text + candidates[:row])
        torch.testing.assert_close(next(rows), expected)
    for row in range(5) if masks is Masks.EVERY else [4]:
        for depth in range(1, 5):
            expected = causal_logits(model, text + candidates[:row] + [MASK_ID] * depth)
            torch.testing.assert_close(next(rows), expected)
    assert next(rows, None) is None


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_models_greedy_text(model, kind: BlockKind):
    """Parallel drafts equal drafts token by token."""

    def choose(text: list[int], candidates: list[int]) -> list[int]:
        rows = kind.rows(len(text) - 1)
        return block_logits(model, text, candidates, rows).argmax(-1).tolist()

    def next_token(text: Sequence[int]) -> int:
        return int(causal_logits(model, text).argmax())

    text, _ = write(kind, choose, [5, 6, 7], 10)
    assert text == one_by_one(next_token, [5, 6, 7], len(text) - 3)


# -- tokens in flight -----------------------------------------------------------


@given(
    size=st.sampled_from([2, 4, 8]),
    drafts=st.lists(
        st.tuples(
            st.integers(1, 24),  # what there is room for
            st.lists(st.tuples(st.integers(1, 8), st.integers(0, 7)), min_size=3, max_size=3),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_the_tokens_of_blocks_lie_on_the_device_as_the_host_will_have_them(size: int, drafts: list):
    """Of each request a draft up to its budget, or as far as three blocks go, and candidates."""
    drawn, records, expected = iter(range(1, 10_000)), [], []
    for room, blocks in drafts:
        state, own = RequestState(RequestPolicy(0.5)), []
        state.verify_ahead(99)
        state.launch_draft(3 * size)
        for num_new, num_proposed in blocks:
            counts = min(num_new, size), min(num_proposed, size - 1)
            own.append([*counts, *(next(drawn) for _ in range(3 * size - 1))])
            accepted, levels, candidates = accepted_block(own[-1])
            levels = [0] * len(levels)
            state.add_draft(accepted, room, num_launched=size, levels=levels, candidates=candidates)
        records.append(own)
        expected.append(state.draft.compared_ids)
        assert (state.num_draft_inflight, state.draft.num_ahead) == (0, 0)
    found = chain_ids(torch.tensor(records), torch.tensor([room for room, _ in drafts])).tolist()
    for ids, wanted in zip(found, expected, strict=True):
        assert ids[: len(wanted)] == wanted
