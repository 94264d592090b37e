"""Segment ends. Pieces are the decoded texts of single tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_parse.core.segment import (
    Segmenter,
    SegmentRule,
    evenly_spaced,
    prefix_ends,
    segment_ends,
)

pytestmark = pytest.mark.unit

LINE = SegmentRule("line")
SENTENCE = SegmentRule("sentence")


def segments(pieces: list[str], rule: SegmentRule) -> list[str]:
    """Returns the segments' texts, the unfinished rest last."""
    bounds = [0, *segment_ends(pieces, rule), len(pieces)]
    texts = ["".join(pieces[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    return [text for text in texts if text]


@pytest.mark.parametrize("text", ["line", "sentence", "tokens:1", "tokens:32"])
def test_rule_reads_and_prints_the_same_text(text):
    assert str(SegmentRule.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "lines", "tokens", "tokens:", "tokens:0", "tokens:-1", "tokens:08", "tokens:4 "]
)
def test_rule_refuses_other_texts(text):
    with pytest.raises(ValueError, match="expected 'line', 'sentence' or 'tokens:N'") as error:
        SegmentRule.parse(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([], []),
        (["no", " end"], ["no end"]),
        (["a", "\n", "b", "\n", "c"], ["a\n", "b\n", "c"]),
        (["a", ":\n", "b", ".\n"], ["a:\n", "b.\n"]),
        (["a", "\r\n", "b"], ["a\r\n", "b"]),
        (["a", "\n \t", "b"], ["a\n \t", "b"]),
        # A paragraph break is one end, however its blank lines are tokenized.
        (["a", "\n\n", "b"], ["a\n\n", "b"]),
        (["a", "\n", "\n", "\n", "b"], ["a\n\n\n", "b"]),
        (["a\n", "\n", "b"], ["a\n\n", "b"]),
        (["a", "\n", " ", "\n", "b"], ["a\n \n", "b"]),
        (["a", "\n", "b", "\n", "\n"], ["a\n", "b\n\n"]),
        # Indentation belongs to the line it indents.
        (["a", "\n", "    ", "b"], ["a\n", "    b"]),
        # Leading blank lines are not a segment.
        (["\n", "\n", "a", "\n"], ["\n\na\n"]),
        (["\n"], ["\n"]),
        # No end inside a token.
        (["a", "\nb", "\n"], ["a\nb\n"]),
    ],
)
def test_lines(pieces, expected):
    assert segments(pieces, LINE) == expected


def test_blank_text_has_no_end():
    assert segment_ends(["\n", " ", "\n\n"], LINE) == []
    assert segment_ends(["\n", " ", "\n\n"], SENTENCE) == []


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["Hi", ".", " You", "!", " Why", "?", " So"], ["Hi.", " You!", " Why?", " So"]),
        (["It", " is", " 3", ".", "14", " now"], ["It is 3.14 now"]),
        (["It", " is", " 3.", "14", ".", " Yes"], ["It is 3.14.", " Yes"]),
        (["see", " a", ".py", " there"], ["see a.py there"]),
        (["Well", "...", " Then"], ["Well...", " Then"]),
        (["Well", ".", ".", ".", " Then"], ["Well...", " Then"]),
        (["Hi", ". ", "You"], ["Hi. ", "You"]),
        (["Hi", ".", "\u00a0You"], ["Hi.", "\u00a0You"]),
        # A title without a mark ends with its line.
        (["Title", "\n", "Text", ".", " More"], ["Title\n", "Text.", " More"]),
        # The line break after a mark belongs to the sentence; a paragraph break is one end.
        (["Hi", ".", "\n", "You"], ["Hi.\n", "You"]),
        (["Hi", ".\n", "\n", "You"], ["Hi.\n\n", "You"]),
        (["Hi", ". ", "\n", "You"], ["Hi. \n", "You"]),
        (["Hi", ".", " ", "\n", "You"], ["Hi. \n", "You"]),
        (["Hi", ".", "\nYou"], ["Hi.", "\nYou"]),
        # Closing quotes and brackets, in the same token or in one of their own.
        (["say", ' "', "no", '."', " Then"], ['say "no."', " Then"]),
        (["say", ' "', "no", ".", '"', " Then"], ['say "no."', " Then"]),
        (["say \u201cno", ".", "\u201d", " Then"], ["say \u201cno.\u201d", " Then"]),
        (["(so", ".)", " [or", "?]", " Then"], ["(so.)", " [or?]", " Then"]),
        # No space follows a wide mark.
        (
            ["\u4f60\u597d", "\u3002", "\u4e16\u754c", "\uff01", "\u597d"],
            ["\u4f60\u597d\u3002", "\u4e16\u754c\uff01", "\u597d"],
        ),
        (
            ["\u597d", "\uff1f", "\uff01", "\u300d", "\u4f60"],
            ["\u597d\uff1f\uff01\u300d", "\u4f60"],
        ),
        (["\u597d", "\u3002", "\n", "\u4f60"], ["\u597d\u3002\n", "\u4f60"]),
    ],
)
def test_sentences(pieces, expected):
    assert segments(pieces, SENTENCE) == expected


def test_mark_at_the_end_is_undecided():
    """The next chunk may start with 14 or a closing quote."""
    assert segment_ends(["It", " is", " 3", "."], SENTENCE) == []
    assert segment_ends(["\u597d", "\u3002"], SENTENCE) == []
    assert segment_ends(["Hi", ". "], SENTENCE) == [2]


def test_abbreviations_and_list_numbers_end_sentences_too():
    """Known limitation: a period before a space ends a sentence. It only adds a question."""
    assert segments(["use", " e", ".g", ".", " this"], SENTENCE) == ["use e.g.", " this"]
    assert segments(["1", ".", " First"], SENTENCE) == ["1.", " First"]


def test_every_n_tokens():
    assert segment_ends(list("abcdefg"), SegmentRule("tokens", 3)) == [3, 6]
    assert segment_ends(list("abcdef"), SegmentRule("tokens", 3)) == [3, 6]
    assert segment_ends(list("ab"), SegmentRule("tokens", 3)) == []


@pytest.mark.parametrize(
    ("pieces", "finished", "expected"),
    [
        ([], True, []),
        (["a", "\n", "b"], False, [2]),  # half a line is left out
        (["a", "\n", "b"], True, [2, 3]),  # the end of a finished draft is not
        (["a", "\n"], True, [2]),
        (["a", "\n"], False, [2]),
        (["a", "b"], False, [2]),  # unless it is the only segment
        (["a", "\n", ""], True, [2, 3]),  # an end-of-turn token decodes to nothing
    ],
)
def test_prefix_ends(pieces, finished, expected):
    assert prefix_ends(pieces, LINE, finished=finished, max_prefixes=16) == expected


def test_prefix_ends_merges_segments_up_to_the_end_of_a_finished_draft():
    pieces = ["a", "\n"] * 10 + ["b"]
    ends = prefix_ends(pieces, LINE, finished=True, max_prefixes=3)
    assert len(ends) == 3
    assert ends[-1] == len(pieces)


def test_evenly_spaced_merges_even_groups():
    assert evenly_spaced([2, 4, 6, 8], 4) == [2, 4, 6, 8]
    assert evenly_spaced([2, 4, 6, 8], 2) == [4, 8]
    assert evenly_spaced(range(1, 11), 3) == [3, 6, 10]
    assert evenly_spaced([2, 4, 6], 1) == [6]
    assert evenly_spaced([], 1) == []


PIECES = st.lists(st.sampled_from(["a", " b", ".", ". ", "\n", " ", "", "\n\n", '"', "\u3002"]))
RULES = st.sampled_from([LINE, SENTENCE, SegmentRule("tokens", 3)])


@given(PIECES, RULES, st.booleans(), st.integers(1, 8))
def test_prefix_ends_of_any_text_are_valid(pieces, rule, finished, max_prefixes):
    ends = prefix_ends(pieces, rule, finished=finished, max_prefixes=max_prefixes)
    assert ends == sorted(set(ends))
    assert all(1 <= end <= len(pieces) for end in ends)
    assert len(ends) <= max_prefixes
    assert bool(ends) == bool(pieces)
    if finished and pieces:
        assert ends[-1] == len(pieces)


@given(PIECES, st.sampled_from([LINE, SENTENCE]))
def test_every_segment_has_text_and_includes_following_blank_lines(pieces, rule):
    ends = segment_ends(pieces, rule)
    for start, end in zip([0, *ends], ends, strict=False):
        assert "".join(pieces[start:end]).strip()
    for end in ends:
        following = "".join(pieces[end : end + 1])
        assert following.strip() or "\n" not in following


@pytest.mark.parametrize(
    ("before", "new", "ends"),
    [
        ([], ["a", " b"], False),
        (["a"], [" b", "\n"], True),
        (["x", "\n"], ["a"], False),
        (["x", "\n"], ["\n"], True),  # a blank line belongs to the line before
        (["x", "\n"], ["a\n", "b"], True),
        (["a", " b", " c"], ["\n"], True),
    ],
)
def test_a_segment_that_ends_in_the_last_tokens(before: list[str], new: list[str], ends: bool):
    """Ends before them do not count."""
    words = [*before, *new]
    segments = Segmenter(Words(words), SegmentRule.parse("line"))
    ids = [*range(len(words))]
    assert segments.ends_in(ids, len(before)) is ends


class Words:
    """A tokenizer of these words, by their places."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def decode(self, ids: list[int]) -> str:
        return "".join(self.words[place] for place in ids)
