"""Texts as drafts: where an answer is in a text, and how long its drafts are."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_parse.core.loss import Budget
from sglang_parse.core.phases import MODEL, PREDICTION, Phase, RequestPolicy
from sglang_parse.core.policy.constants import DEFAULTS
from sglang_parse.core.policy.texts import TextLength, TextSourceStats
from sglang_parse.core.request import RequestState
from sglang_parse.core.request_text import RequestText
from sglang_parse.core.round import Round
from sglang_parse.core.segment import whole_segments
from sglang_parse.core.text_match import CLOSING, MAX_MATCH, MAX_PLACES, TextMatch
from support.rounds import round_of

pytestmark = pytest.mark.unit

TEXT = [*range(100, 140)]


def followed(text: list[int], answer: list[int]) -> TextMatch:
    match = TextMatch(text)
    match.follow(answer)
    return match


# -- where the answer is --------------------------------------------------------------------


def test_an_answer_that_follows_the_text():
    match = followed(TEXT, TEXT[:5])
    assert match.rest(3) == TEXT[5:8]
    assert (match.num_covered, match.match_len) == (5, 0)
    match.follow(TEXT[5:])
    assert match.rest(8) == []
    assert match.num_covered == len(TEXT)


def test_a_changed_token_is_passed_by():
    match = followed(TEXT, [*TEXT[:5], 7, TEXT[6]])
    assert match.rest(2) == TEXT[7:9]
    assert (match.num_covered, match.match_len) == (6, 1)


def test_a_place_is_known_better_the_longer_the_answer_follows():
    """Else a text that was entered by one token, where such places were wrong lately, would not be
    tried for the rest of the answer."""
    match = followed(TEXT, [*TEXT[:5], 7, TEXT[6]])
    assert match.rest(1) == [TEXT[7]]
    for length, token in enumerate(TEXT[7:20], 2):
        match.follow([token])
        assert match.match_len == min(length, MAX_MATCH)
    match.follow_draft()
    match.follow(TEXT[20:22])
    assert match.match_len == 0


def test_an_insertion_and_a_deletion():
    assert followed(TEXT, [*TEXT[:5], 7, 8, 9, TEXT[5]]).rest(1) == [TEXT[6]]
    assert followed(TEXT, [*TEXT[:5], TEXT[12]]).rest(1) == [TEXT[13]]


def test_one_token_far_off_is_chance():
    answer = [*TEXT[:2], TEXT[30]]
    assert not followed(TEXT, answer).rest(1)
    assert followed(TEXT, [*answer, TEXT[31]]).rest(1) == [TEXT[32]]


def test_moved_text_is_found_before_the_last_place():
    match = followed(TEXT, [*TEXT[20:24]])
    assert match.rest(1) == [TEXT[24]]
    match.follow([*TEXT[24:], *TEXT[3:6]])
    assert match.rest(2) == TEXT[6:8]
    assert match.match_len == 3


def test_the_nearest_place_behind_the_last_one_comes_first():
    text = [1, 2, 3, 9, 5, 6, 9, 7, 8, 9, 4]
    match = followed(text, [1, 2, 3, 0, 9])
    assert match.rest(2) == [5, 6]
    match.follow([0, 9])
    assert match.rest(2) == [7, 8]


def test_a_longer_match_far_off_wins():
    text = [1, 2, 3, 9, 5, *[0] * 40, 6, 7, 9, 8]
    assert followed(text, [1, 2, 6, 7, 9]).rest(1) == [8]


def test_the_answer_is_at_the_texts_end_for_a_few_tokens():
    """A code block is closed behind it."""
    match = followed(TEXT, TEXT[:-1])
    assert not match.is_at_end
    for token in (TEXT[-1], *[7] * CLOSING):
        match.follow([token])
        assert match.is_at_end
        match.rest(8)  # looks for the place
    match.follow([7])
    assert not match.is_at_end
    assert not TextMatch([]).is_at_end


def test_text_that_arrives_later():
    match = followed([], TEXT[:4])
    assert match.rest(4) == ()
    match.extend(TEXT)
    assert match.rest(2) == TEXT[4:6]


@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.integers(0, 3), max_size=60),
    st.integers(1, 7),
)
@settings(max_examples=300, deadline=None)
def test_what_is_found_ends_with_the_newest_tokens(text: list, answer: list, step: int):
    """Against a search by hand; however the answer arrives."""
    match = TextMatch(text)
    for start in range(0, len(answer), step):
        part = answer[start : start + step]
        match.follow(part)
        rest, seen = [*match.rest(100)], answer[: start + len(part)]
        assert match.num_seen == len(seen)
        if not rest:
            continue
        place = len(text) - len(rest)
        assert rest == text[place:]
        length = match.match_len
        assert length <= MAX_MATCH
        if length and part:
            assert place == 0 or text[place - 1] == seen[-1]


def test_a_text_that_is_not_found_is_searched_ever_more_rarely():
    """100,000 tokens of noise, and an answer of 1,000 others that then goes on as the text does."""
    noise, match = [*range(1000, 101_000)], TextMatch(range(1000, 101_000))
    for token in range(1000):
        match.follow([token])
        assert not match.rest(9)
    assert match.num_searched <= 60 * len(noise)
    place = 500
    while not (found := match.rest(3)):
        match.follow([noise[place]])
        place += 1
    assert place - 500 <= 1000 / 8 + 1
    assert found == noise[place : place + 3]


def test_few_places_of_a_frequent_token_are_looked_at():
    text = [5] * 50_000
    text[20_000] = text[30_000] = 6
    match = TextMatch.entered(text, 25_000, 0)
    match.follow([9, 5, 6])
    assert match.rest(1) == [5]
    assert match.match_len == 2
    match.follow([9, 5])
    assert max(map(len, match._matches())) <= 2 * MAX_PLACES


# -- how long its drafts are ----------------------------------------------------------------


def new_length(
    shared: TextSourceStats | None = None, max_loss: float = DEFAULTS.text_loss
) -> TextLength:
    budget = Budget(max_loss, DEFAULTS.text_loss_rate, DEFAULTS.text_gain)
    return TextLength(shared or TextSourceStats(DEFAULTS), budget)


def accepted(num_drafted: int, num_accepted: int) -> Round:
    return round_of(num_drafted, num_drafted, num_accepted)


def others_had(shared: TextSourceStats, match_len: int, outcome: Round) -> None:
    new_length(shared).observe(match_len, outcome, 0.0)


def drafted(answer: list[int], text: list[int], cost_per_row: float) -> tuple[float, int]:
    """(cost of an answer in decode steps, verify passes)."""
    request, seen, cost, passes = RequestText(TextMatch(text), new_length()), 1, 0.0, 0
    match, length = request.match, request.length
    request.follow(answer[:1])
    while seen < len(answer):
        rest = match.rest(min(128, len(answer) - seen))
        count = length.choose(match.match_len, len(rest), seen, lambda n: cost_per_row * (n + 1))
        right = 0
        while right < count and rest[right] == answer[seen + right]:
            right += 1
        if count:
            extra = cost_per_row * (count + 1)
            length.observe(match.match_len, accepted(count, right), extra)
            cost, passes, request.is_verified = cost + extra, passes + 1, True
            if right == count:
                match.follow_draft()
        seen, cost = seen + right + 1, cost + 1
        request.follow(answer[:seen])
    return cost, passes


def test_right_drafts_grow_fourfold():
    answer = [*range(1000, 1300)]
    assert drafted(answer, answer, 0.03)[1] == 4


def test_a_text_that_was_given_up_is_tried_again_once_the_answer_follows_it():
    """As a function is copied behind a docstring that the text does not have."""
    copied = [*range(1000, 1100)]
    assert drafted([1, *range(40, 90), *copied], [1, *copied], 0.1)[0] <= 85


def test_a_given_up_text_is_not_tried_again_for_chance():
    """What follows is too short to pay for what is lost by trying."""
    text = RequestText(TextMatch(TEXT), new_length())
    text.length.lose(1.0)
    for end in (1, 4, 5):
        text.follow(TEXT[:end])
    assert text.length.choose(0, 9, 5, lambda _: 0.1) == 0
    text.match.match_len = 3
    text.follow(TEXT[:6])
    assert text.length.choose(4, 9, 6, lambda _: 0.1) == 0
    text.follow(TEXT[:7])
    assert text.length.choose(4, 9, 7, lambda _: 0.1) > 0


def test_what_a_source_learns_from_decoded_tokens_is_what_drafts_tell():
    """No more than the drafts: their tokens are not counted again."""
    shared, other = TextSourceStats(DEFAULTS), TextSourceStats(DEFAULTS)
    text = RequestText(TextMatch.entered(TEXT, 4, 4), new_length(shared))
    text.follow([*TEXT[:4], TEXT[4]])
    others_had(other, MAX_MATCH, accepted(1, 1))
    assert shared.hit(MAX_MATCH) == other.hit(MAX_MATCH) > 0.5
    text.is_verified = True
    text.follow([*TEXT[:5], 7])
    assert shared.hit(MAX_MATCH) == other.hit(MAX_MATCH)
    text.match = TextMatch.entered(TEXT, 5, 6)
    text.follow([*TEXT[:5], 7, 8])
    assert shared.hit(MAX_MATCH) < other.hit(MAX_MATCH)


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.2, 0.5, 1.0])
def test_changed_lines_cost_little_more_than_themselves(fraction: float):
    """Two of a line's 12 tokens are others in some lines of the text. The answer takes four steps
    for each, and twice the rows of right drafts."""
    rng, answer = random.Random(5), []
    for line in range(100):
        answer += [1, line, *rng.choices(range(200, 210), k=2), *range(2, 8), 210 + line, 9]
    text, changed = [*answer], rng.sample(range(100), round(100 * fraction))
    for line in changed:
        text[12 * line + 2 : 12 * line + 4] = rng.choices(range(220, 230), k=2)
    cost, passes = drafted(answer, text, 0.01)
    assert passes <= 12 + 3 * len(changed)
    assert cost <= 12 + 4 * len(changed) + 0.01 * 2 * len(answer)


@pytest.mark.parametrize("cost_per_row", [0.005, 0.03, 0.2, 1.0])
@pytest.mark.parametrize("size", [8, 64, 2000])
def test_a_hopeless_text_costs_three_percent(cost_per_row: float, size: int):
    """Also one that looks promising again and again: few different tokens."""
    rng = random.Random(size)
    answer, text = ([rng.randrange(size) for _ in range(400)] for _ in range(2))
    cost, _ = drafted(answer, [answer[0], *text], cost_per_row)
    assert cost <= 1.03 * (len(answer) - 1)


def test_losses_are_bounded_whatever_others_gained():
    shared = TextSourceStats(DEFAULTS)
    for _ in range(100):
        others_had(shared, 3, accepted(16, 16))
    length, lost = new_length(shared), 0.0
    for written in range(400):
        if count := length.choose(3, 16, written, lambda n: 0.1 * n):
            length.observe(3, accepted(count, 0), 0.1 * count)
            lost += 0.1 * count
    assert 0 < lost <= DEFAULTS.text_loss + DEFAULTS.text_loss_rate * 400
    assert length.longest == DEFAULTS.probe_tokens


def test_own_misses_count_more_than_the_hits_of_others():
    """A place known by one token: right for everybody else, wrong in this request."""
    shared = TextSourceStats(DEFAULTS)
    for _ in range(100):
        others_had(shared, 1, accepted(16, 16))
    length, drafts = new_length(shared, 1e3), []
    for _ in range(8):
        drafts.append(length.choose(1, 16, 1, lambda n: 0.2 * n))
        if drafts[-1]:
            length.observe(1, accepted(drafts[-1], 0), 0.2 * drafts[-1])
    assert drafts[0] == 16
    assert drafts[-1] == 0
    length.observe(1, accepted(4, 4), 0.8)
    assert length.choose(1, 16, 1, lambda n: 0.2 * n) == 16


@pytest.mark.parametrize("match_len", [0, 4])
def test_texts_that_never_fit_do_not_end_others(match_len: int):
    shared = TextSourceStats(DEFAULTS)
    for _ in range(1000):
        others_had(shared, match_len, accepted(16, 0))

    def choose(length: TextLength) -> int:
        return length.choose(match_len, 100, 1, lambda n: 0.01 * n)

    wrong, right = new_length(shared), new_length(shared)
    wrong.observe(match_len, accepted(choose(wrong), 0), 0.1)
    assert choose(wrong) == 0
    first = choose(right)
    right.observe(match_len, accepted(first, first), 0.1)
    assert choose(right) > first > 0


def test_an_estimate_cannot_end_what_it_is_learned_from():
    length = new_length()
    assert length.choose(0, 100, 1, lambda _: 50.0) == 2
    length.observe(0, accepted(2, 2), 50.0)
    assert length.choose(0, 100, 6, lambda _: 50.0) == 0
    assert new_length().choose(2, 100, 1, lambda _: 50.0) == 0


@pytest.mark.parametrize("line", [1, 5, 10, 12, 20, 50, 200])
def test_drafts_are_whole_segments_and_grow(line: int):
    """A right text of equal lines: part of a line is drafted only where the line is too long."""
    length, place, total, drafts = new_length(), 0, 10 * max(40, line), []
    while place < total:
        ends = [end - place for end in range(line, total + 1, line) if end > place]
        ends = [end for end in ends if end <= 2 * length.longest]
        count = length.choose(0, total - place, place, lambda _: 0.1, ends)
        assert (place + count) % line == 0 or line > count
        length.observe(0, accepted(count, count), 0.1)
        place += count
        drafts.append(count)
    assert place == total
    assert len(drafts) <= 10
    assert max(drafts) >= total / 4


def test_a_segment_too_long_is_no_reason_for_none():
    assert whole_segments(16, []) == 16
    assert whole_segments(16, [9]) == 9
    assert whole_segments(16, [9, 32]) == 32
    assert whole_segments(16, [9, 33]) == 9
    assert whole_segments(16, [33]) == whole_segments(16, [16]) == 16


def test_no_draft_without_tokens():
    assert new_length().choose(0, 0, 10, lambda _: 0.0) == 0


# -- the request ----------------------------------------------------------------------------


def test_a_given_draft_is_no_draft_models():
    state = RequestState(RequestPolicy(threshold=0.5, stop_ids=frozenset({9})))
    state.restart(10, ())
    state.begin(5)
    state.set_draft_kv_len(4)
    state.give_draft([6, 7, 9, 8], 4, PREDICTION)
    assert (state.phase, state.draft.finished) == (Phase.VERIFYING, True)
    assert state.draft.token_ids == [6, 7, 9]
    assert state.draft_kv_len == 4
    assert state.notes.telemetry.stats.draft_forwards == 0
    state.count_round(round_of(3, 3, 2, source=PREDICTION))
    assert state.num_failed == 0
    state.notes.telemetry.charge("verify", 3.0)
    found = state.notes.telemetry.sources[PREDICTION]
    assert (found.rounds, found.drafted_tokens, found.accepted_tokens) == (1, 3, 2)
    assert found.verify_ms == 3.0
    assert MODEL not in state.notes.telemetry.sources


def test_a_retraction_starts_the_text_over():
    state = RequestState(RequestPolicy(threshold=0.5))
    text = RequestText(TextMatch(), new_length(), is_complete=False)
    state.notes.texts[PREDICTION] = text
    text.extend(TEXT, num_unused=3)
    text.match.follow(TEXT[:4])
    state.restart(10, TEXT[:2])
    assert text.match.num_seen == 0
    assert text.is_complete
    assert text.count_covered(TEXT[:2]) == (2, len(TEXT) - 2)


def test_the_answer_may_get_ahead_of_a_text_that_grows():
    """The target's next tokens come before the other server's; then they are compared."""
    match = TextMatch.entered((), 0, 5, grows=True)
    match.follow([1, 2, 3])
    assert match.follows
    assert match.rest(9) == []
    match.extend([1, 2], grows=True)
    assert match.follows
    match.extend([3, 4, 5], grows=True)
    assert match.rest(9) == [4, 5]
    assert (match.num_seen, match.num_covered) == (8, 3)


def test_an_answer_ahead_that_a_growing_text_contradicts():
    match = TextMatch.entered((), 0, 0, grows=True)
    match.follow([1, 9])
    match.extend([1, 2], grows=True)
    assert not match.follows


def test_a_text_that_ends_before_the_answer_is_left():
    match = TextMatch.entered((), 0, 0, grows=True)
    match.follow([1, 2, 3])
    match.extend([1, 2])
    assert not match.follows
