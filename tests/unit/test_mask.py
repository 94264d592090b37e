"""Masks and positions, compared with a golden case and with separate prompts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_parse.attention.alias import kv_offsets, page_table, paged_rows
from sglang_parse.core.layout import RequestLayout, VerifyLayout
from sglang_parse.core.mask import (
    flat_mask,
    flat_mask_at,
    may_attend,
    qlen_only_mask,
    split_flat_mask,
)
from support.reference import dense_mask

pytestmark = pytest.mark.unit

# Four draft rows in two segments, two questions of two tokens, as in the docs.
GOLDEN_LAYOUT = RequestLayout(
    prefix_len=3, num_draft_rows=4, visible_lens=(2, 4), question_lens=(2, 2)
)
GOLDEN = """
    1 . . . . . . .
    1 1 . . . . . .
    1 1 1 . . . . .
    1 1 1 1 . . . .
    1 1 . . 1 . . .
    1 1 . . 1 1 . .
    1 1 1 1 . . 1 .
    1 1 1 1 . . 1 1
"""


def rows_of_text(text: str) -> list[list[bool]]:
    return [[mark == "1" for mark in line.split()] for line in text.strip().splitlines()]


def predicate_mask(layout: RequestLayout) -> list[list[bool]]:
    return [
        [may_attend(layout, row, column) for column in range(layout.kv_len)]
        for row in range(layout.num_rows)
    ]


def separate_prompts(layout: RequestLayout) -> list[list[tuple[str, ...]]]:
    """Returns for each row the named tokens of a separate prompt that ends with it."""
    context = [("context", str(i)) for i in range(layout.prefix_len)]
    draft = [("draft", str(i)) for i in range(layout.num_draft_rows)]
    prompts = [context + draft[: i + 1] for i in range(layout.num_draft_rows)]
    for k, (visible_len, length) in enumerate(
        zip(layout.visible_lens, layout.question_lens, strict=True)
    ):
        question = [("question", str(k), str(i)) for i in range(length)]
        prompts += [context + draft[:visible_len] + question[: i + 1] for i in range(length)]
    return prompts


def column_names(layout: RequestLayout) -> list[tuple[str, ...]]:
    """Returns the named token of each column."""
    context = [("context", str(i)) for i in range(layout.prefix_len)]
    return context + [prompt[-1] for prompt in separate_prompts(layout)]


@st.composite
def request_layouts(draw) -> RequestLayout:
    num_draft_rows = draw(st.integers(1, 12))
    num_questions = draw(st.integers(0, 6))
    cuts = st.lists(st.integers(0, num_draft_rows), min_size=num_questions, max_size=num_questions)
    lens = st.lists(st.integers(1, 5), min_size=num_questions, max_size=num_questions)
    return RequestLayout(
        prefix_len=draw(st.integers(0, 20)),
        num_draft_rows=num_draft_rows,
        visible_lens=tuple(draw(cuts)),
        question_lens=tuple(draw(lens)),
    )


BATCHES = st.lists(request_layouts(), min_size=1, max_size=3).map(VerifyLayout.of)


def test_golden_mask():
    golden = rows_of_text(GOLDEN)
    assert qlen_only_mask(GOLDEN_LAYOUT).tolist() == golden
    with_context = [[True] * 3 + row for row in golden]
    assert dense_mask(GOLDEN_LAYOUT).tolist() == with_context
    assert predicate_mask(GOLDEN_LAYOUT) == with_context


def test_golden_rows():
    assert GOLDEN_LAYOUT.positions() == [3, 4, 5, 6, 5, 6, 7, 8]
    assert GOLDEN_LAYOUT.question_starts == (4, 6)
    assert GOLDEN_LAYOUT.verdict_rows == (5, 7)
    assert (GOLDEN_LAYOUT.num_rows, GOLDEN_LAYOUT.kv_len) == (8, 11)


def test_golden_batch():
    plain = RequestLayout(prefix_len=5, num_draft_rows=1)
    batch = VerifyLayout.of([plain, GOLDEN_LAYOUT, plain])
    assert batch.qo_indptr == [0, 1, 9, 10]
    assert batch.positions() == [5, 3, 4, 5, 6, 5, 6, 7, 8, 5]
    assert batch.mask_size == 6 + 88 + 6
    flat = flat_mask(batch)
    assert flat[:6].all()
    assert flat[6:94].tolist() == dense_mask(GOLDEN_LAYOUT).flatten().tolist()
    assert flat[94:].all()


@settings(max_examples=40)
@given(BATCHES)
def test_rows_attend_as_in_separate_prompts(batch):
    for layout in batch.requests:
        prompts, names = separate_prompts(layout), column_names(layout)
        expected = [[name in prompt for name in names] for prompt in prompts]
        assert dense_mask(layout).tolist() == expected
        assert predicate_mask(layout) == expected
        assert layout.positions() == [len(prompt) - 1 for prompt in prompts]


@settings(max_examples=40)
@given(BATCHES)
def test_the_flat_mask_concatenates_dense_masks(batch):
    flat = flat_mask(batch)
    assert flat.dtype == torch.bool
    assert flat.numel() == batch.mask_size
    parts = split_flat_mask(flat, batch)
    for part, layout in zip(parts, batch.requests, strict=True):
        assert torch.equal(part, dense_mask(layout))
    offset = 0
    for layout in batch.requests:
        row, column = layout.num_rows - 1, layout.kv_len - 1
        assert flat[offset + row * layout.kv_len + column]  # a row attends to itself
        offset += layout.num_rows * layout.kv_len


@settings(max_examples=40)
@given(BATCHES)
def test_causal_requests_need_no_mask(batch):
    causal = [layout for layout in batch.requests if layout.is_causal]
    assert batch.is_causal == (len(causal) == len(batch.requests))
    for layout in causal:
        everything = torch.ones(layout.num_rows, layout.kv_len, dtype=torch.bool)
        assert torch.equal(dense_mask(layout), everything.tril(layout.prefix_len))
    assert not GOLDEN_LAYOUT.is_causal


@settings(max_examples=40)
@given(BATCHES)
def test_rows_of_a_batch(batch):
    assert batch.qo_indptr[-1] == batch.num_rows == len(batch.positions())
    for layout in batch.requests:
        assert layout.num_questions == len(layout.verdict_rows)
        for start, row, length in zip(
            layout.question_starts, layout.verdict_rows, layout.question_lens, strict=True
        ):
            assert layout.num_draft_rows <= start <= row == start + length - 1 < layout.num_rows


@settings(max_examples=40)
@given(BATCHES)
def test_pseudo_sequences_match_the_mask(batch):
    seen, rows = [], []
    for sequence in batch.pseudo_sequences():
        first = batch.qo_indptr[sequence.request] + sequence.start
        kv_len = batch.requests[sequence.request].kv_len
        for i in range(sequence.num_rows):
            own = range(sequence.start_column, sequence.start_column + i + 1)
            columns = {*range(sequence.context_len), *own}
            seen += [column in columns for column in range(kv_len)]
            rows.append(first + i)
        assert sequence.kv_len == len(columns)
    assert rows == list(range(batch.num_rows))
    assert seen == flat_mask(batch).tolist()


@settings(max_examples=40)
@given(BATCHES, st.booleans(), st.sampled_from([None, 0, 5]))
def test_paged_rows_of_pseudo_sequences(batch, with_own, unknown):
    """The inputs of paged kernels.

    ``unknown``: only the device knows the context lengths; the host's bound is this much larger.
    """
    width = max(request.kv_len for request in batch.requests) + 2
    slots = torch.arange(len(batch.requests) * width).view(-1, width) * 7
    sequences = batch.pseudo_sequences()
    expected = [
        [
            *slots[s.request, : s.context_len].tolist(),
            *slots[s.request, s.start_column : s.start_column + s.num_rows * with_own].tolist(),
        ]
        for s in sequences
    ]
    host_view, starts = sequences, None
    if unknown is not None:
        prefixes = [request.prefix_len for request in batch.requests]
        starts = torch.tensor(prefixes)
        longest = batch.at([prefix + unknown for prefix in prefixes])
        assert longest.at(prefixes) == batch
        host_view = longest.pseudo_sequences()
    rows = paged_rows(host_view, slots, with_own=with_own, starts=starts)
    num_slots = int(rows.kv_indptr[-1])
    assert rows.kv_slots[:num_slots].tolist() == [slot for one in expected for slot in one]
    assert unknown is not None or num_slots == len(rows.kv_slots)
    assert torch.diff(rows.kv_indptr).tolist() == [len(one) for one in expected]
    assert torch.diff(rows.qo_indptr).tolist() == [s.num_rows for s in sequences]
    assert rows.longest == max(s.num_rows for s in sequences)
    if with_own:
        table = page_table(host_view, slots, starts)
        kv_lens = [s.kv_len for s in host_view]
        offsets = kv_offsets(kv_lens, host_view, slots.device, starts)
        assert torch.diff(offsets).tolist() == [s.kv_len for s in sequences]
        assert [
            row[: s.kv_len].tolist() for row, s in zip(table, sequences, strict=True)
        ] == expected


@settings(max_examples=40)
@given(request_layouts(), st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(0, 4))
def test_the_flat_mask_of_context_lengths_only_the_device_knows(request, starts, unknown):
    batch = VerifyLayout.of([request.at(start) for start in starts])
    longest = batch.at([start + unknown for start in starts])
    flat = flat_mask_at(longest, torch.tensor(starts), qlen_only_mask(request))
    assert flat[: batch.mask_size].equal(flat_mask(batch))
    assert len(flat) == longest.mask_size


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_flat_mask_of_the_wrong_size_is_refused(extra):
    batch = VerifyLayout.of([GOLDEN_LAYOUT])
    with pytest.raises(ValueError, match=f"mask has {88 + extra} entries, the layout needs 88"):
        split_flat_mask(torch.ones(88 + extra, dtype=torch.bool), batch)


def test_the_context_is_written_once():
    """At 32k tokens it is most of the mask: one tensor of that size is allocated, never copied."""
    from torch.utils._python_dispatch import TorchDispatchMode

    written: list[str] = []

    class Large(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ARG002
            result = func(*args, **(kwargs or {}))
            is_view = func.is_view or not isinstance(result, torch.Tensor)
            if not is_view and result.numel() > 1217 * 32768:
                written.append(str(func))
            return result

    cuts = tuple(range(16, 257, 16))
    layout = VerifyLayout.of([RequestLayout(32768, 257, cuts, (60,) * 16)])
    with Large():
        flat = flat_mask(layout, "meta")
    assert flat.nbytes == layout.mask_size == 1217 * (32768 + 1217)
    assert written == ["aten.ones.default"]


def test_an_empty_batch():
    empty = VerifyLayout.of([])
    assert flat_mask(empty).shape == (0,)
    assert split_flat_mask(flat_mask(empty), empty) == []
    assert empty.qo_indptr == [0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"visible_lens": (2,)}, "1 visible_lens for 2 questions"),
        ({"prefix_len": -1}, "prefix_len -1"),
        ({"num_draft_rows": 0}, "num_draft_rows 0"),
        ({"visible_lens": (2, 5)}, r"visible_lens \(2, 5\) outside 0..4"),
        ({"visible_lens": (-1, 4)}, r"visible_lens \(-1, 4\) outside 0..4"),
        ({"question_lens": (2, 0)}, r"empty question in \(2, 0\)"),
    ],
)
def test_invalid_layouts_are_refused(change, message):
    golden = {"prefix_len": 3, "num_draft_rows": 4, "visible_lens": (2, 4), "question_lens": (2, 2)}
    with pytest.raises(ValueError, match=message):
        RequestLayout(**(golden | change))
