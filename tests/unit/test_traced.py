"""Traced answers by rounds and segments, and accepted lengths at other thresholds."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sglang_parse.client.records import BenchError
from sglang_parse.client.traced import (
    ACCEPTED,
    DROPPED,
    REJECTED,
    UNVERIFIED,
    Run,
    Traced,
    explain_answer,
)
from sglang_parse.client.traced_table import answer_table
from sglang_parse.core.selection import SELECTIONS, select
from support.traces import QUESTION, decode, encode, record, three_answers, traced

pytestmark = pytest.mark.unit


def pieces(one) -> list[tuple]:
    return [(s.text, s.status, s.verdict) for s in one.segments]


def test_reading_order():
    """Hi | a, bad, worse -> a | good | end"""
    first = record(3, ["a\n", "bad\n", "worse\n"], [0.9, 0.1, 0.8], 1)
    second = record(10, ["end"], [0.7], 1, finished=True)
    made = explain_answer(traced("?", "Hi\na\ngood\nend", first, second), decode)
    assert (made.text, made.before) == ("Hi\na\ngood\nend", "Hi\n")
    one, two = made.rounds
    assert pieces(one) == [
        ("a\n", ACCEPTED, 0.9),
        ("bad\n", REJECTED, 0.1),
        ("worse\n", DROPPED, 0.8),
    ]
    assert one.target_text == "good\n"
    assert (pieces(two), two.target_text) == ([("end", ACCEPTED, 0.7)], "")
    assert [s.decided for s in one.segments] == [False, True, False]
    assert [s.mass for s in one.segments] == [0.99, 0.98, 0.97]
    assert {s.question for s in one.segments} == {QUESTION}
    assert one.verdict_tokens == ("y", "n")


def test_a_token_that_is_not_the_targets_own():
    refused = {"strict": {"place": 3, "name": "numbers"}}
    ours = {**record(0, ["a\n", "b7\n", "c\n"], [0.9, 0.8, 0.7], 1), **refused}
    (one,) = explain_answer(traced("?", "a\nX\n", ours), decode).rounds
    assert [segment.refused for segment in one.segments] == ["", "a number", ""]
    assert {accepted_len for _, accepted_len in one.accepted_at} == {0, 2}


def test_matched_tokens():
    round_ = record(0, ["x\n", "abc\n"], [0.9, 0.1], 1, bonus="abX")
    (one,) = explain_answer(traced("?", "x\nabXd\n", round_), decode).rounds
    assert (one.target_text, one.num_matched) == ("abXd\n", 2)


def test_rejected_prefixes_that_the_target_would_have_written():
    """The target's choices are the draft up to its last segment."""
    ours = record(0, ["a\n", "b\n", "c\n"], [0.9, 0.4, 0.1], 1)
    choices = [*b"a\nb\nX\n", 0]
    for threshold, target_ids, expected in (
        (0.5, choices, [False, True, False]),
        (1.0, choices, [True, True, False]),
        (1.5, choices, [False] * 3),  # rejects everything, whatever the verdicts
        (0.5, [0] * 7, [False] * 3),
    ):
        changed = {**ours, "threshold": threshold, "target_token_ids": target_ids}
        (one,) = explain_answer(traced("?", "a\nX\n", changed), decode).rounds
        assert [segment.contradicted for segment in one.segments] == expected


def test_words_that_the_target_would_have_chosen_otherwise():
    """The draft says "so 5", the target would say "is 5": a run is as long as tokens differ."""
    reworded = {**record(0, ["so 5\n"], [0.9], 1), "target_token_ids": [*b"is 5\n", 0]}
    (one,) = explain_answer(traced("?", "so 5\n", reworded), decode).rounds
    (segment,) = one.segments
    assert segment.runs == (Run("so", "i"), Run(" 5\n"))
    assert one.num_reworded == 2
    del reworded["target_token_ids"]  # of an older server
    (unknown,) = explain_answer(traced("?", "so 5\n", reworded), decode).rounds
    assert (unknown.segments[0].runs, unknown.num_reworded) == ((Run("so 5\n"),), 0)


def test_nothing_accepted():
    made = explain_answer(traced("?", "ab", record(1, ["x\n"], [0.1], 0)), decode)
    (one,) = made.rounds
    assert (made.before, pieces(one), one.target_text) == ("a", [("x\n", REJECTED, 0.1)], "b")


def test_an_unverified_end():
    made = explain_answer(
        traced("?", "x\nyz", record(0, ["x\n"], [0.9], 1, unverified="yy")), decode
    )
    assert pieces(made.rounds[0]) == [("x\n", ACCEPTED, 0.9), ("yy", UNVERIFIED, None)]
    assert made.rounds[0].target_text == "yz"


def test_tokens_that_are_verified_one_by_one_are_shown_by_line():
    asked = record(0, [*"a\nbc"], [0.9, 0.8, 0.7, 0.1], 3)
    ours = {**asked, "question_token_ids": [[]] * 4, "verdict_mass": [None] * 4}
    (one,) = explain_answer(traced("?", "a\nbX", ours), decode).rounds
    assert pieces(one) == [("a\n", ACCEPTED, 0.8), ("b", ACCEPTED, 0.7), ("c", REJECTED, 0.1)]
    assert [s.end for s in one.segments] == [2, 3, 4]
    assert [run.text for s in one.segments for run in s.runs] == ["a\n", "b", "c"]
    (with_question,) = explain_answer(traced("?", "a\nbX", asked), decode).rounds
    assert len(with_question.segments) == 4


def test_token_mode():
    plain = record(0, [], [], 0, unverified="abcX", rule=None)
    accepted = plain | {"accepted_len": 3, "accept_token_id": None, "reject_token_id": None}
    (one,) = explain_answer(traced("?", "abcd", accepted), decode).rounds
    assert pieces(one) == [("abc", ACCEPTED, None), ("X", REJECTED, None)]
    assert (one.verdict_tokens, one.accepted_at, one.target_text) == ((), (), "d")


def test_characters_of_several_tokens():
    """A segment may end inside one: it belongs to the segment that ends it."""
    text = "aé\nb→c"
    ends = [2, 4, 7]
    whole = record(0, [text], [0.9], 1) | {"prefix_ends": ends, "accepted_len": 7}
    whole |= {"verdicts": [0.9] * 3, "verdict_mass": [1.0] * 3, "decided_by": 2}
    whole["question_token_ids"] = [encode(QUESTION)] * 3
    made = explain_answer(traced("?", text, whole), decode)
    assert [s.text for s in made.rounds[0].segments] == ["a", "é\n", "b", "→c"]
    assert made.text == text


def test_an_answer_that_a_stop_string_ended():
    made = explain_answer(traced("?", "ab", record(0, ["abc\n"], [0.9], 1)), decode)
    assert (made.text, made.rounds[0].target_text) == ("ab", "")


def test_another_answers_trace_is_refused():
    with pytest.raises(BenchError, match="give output_ids and trace of one answer"):
        explain_answer(traced("?", "other", record(0, ["abc\n"], [0.9], 1)), decode)


def test_an_answer_without_a_trace_is_refused():
    with pytest.raises(BenchError, match='"trace": true'):
        explain_answer(Traced("?", [1], {"mode": "parse"}), decode)


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=6),
    st.sampled_from(sorted(SELECTIONS)),
    st.booleans(),
    st.floats(0, 2),
)
def test_accepted_length_at_other_thresholds(verdicts, rule, finished, threshold):
    """Equal to the selection rule itself."""
    segments = ["x\n"] * len(verdicts)
    one = record(0, segments, verdicts, 0, rule=rule, finished=finished)
    (made,) = explain_answer(traced("?", "", one), decode).rounds
    found = next(length for up_to, length in made.accepted_at if threshold <= up_to)
    wanted = select(verdicts, one["prefix_ends"], threshold, rule, is_finished=finished)
    assert found == wanted[0]


def test_terminal_table():
    console = Console(width=120, record=True, file=io.StringIO())
    for made in three_answers():
        console.print(answer_table(made, "Answer"))
    printed = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "draft : 40 + 58 = 98 0.9993 0.99 accepted" in printed
    assert "draft b: 98 - 72 = 25 0.0300 0.98 rejected" in printed
    assert "target b: 98 - 72 = 26" in printed
    assert "draft d: 1 not verified" in printed
