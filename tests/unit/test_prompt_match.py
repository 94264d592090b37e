"""Where an answer copies from its prompt and from itself, against a search by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_parse.core import prompt_match
from sglang_parse.core.prompt_match import KNOWN, MAX_MATCH, NEAR, PromptMatch

pytestmark = pytest.mark.unit

TEXT = [*range(100, 140)]


class ByHand:
    """The rule of ``PromptMatch``, place by place."""

    def __init__(self, prompt: list[int]) -> None:
        self.tokens, self.num_seen = [*prompt], 0
        self.place: int | None = None
        self.length, self.is_near = 0, False
        self.known: tuple[int, int] | None = None

    def match(self, place: int) -> int:
        """Newest tokens that are before the place, too."""
        length, end = 0, len(self.tokens)
        while length < min(MAX_MATCH, place):
            if self.tokens[place - 1 - length] != self.tokens[end - 1 - length]:
                break
            length += 1
        return length

    def enter(self, place: int, length: int, *, is_near: bool) -> None:
        self.place, self.length, self.is_near = place, length, is_near
        if length >= KNOWN or (is_near and length > 2):
            self.known = place, self.num_seen

    def follow(self, token: int) -> None:
        expected = None if self.place is None else [*self.tokens, token][self.place]
        self.tokens.append(token)
        self.num_seen += 1
        if self.place is not None and expected == token:
            self.enter(self.place + 1, self.length + 1, is_near=self.is_near)
        else:
            self.place, self.length = None, 0

    def find(self) -> None:
        lengths = {place: self.match(place) for place in range(1, len(self.tokens))}
        longest = max(lengths.values(), default=0)
        if self.place is not None or not longest or not self.num_seen:
            return
        if self.known is not None:
            behind, since = self.known
            near = range(behind + 1, behind + self.num_seen - since + NEAR + 1)
            found = [place for place in near if lengths.get(place)][: prompt_match.FEW]
            best = max((lengths[place] for place in found), default=0)
            if best and best + 1 >= longest:
                place = next(place for place in found if lengths[place] == best)
                return self.enter(place, best + 1, is_near=True)
        latest = max(place for place, length in lengths.items() if length == longest)
        return self.enter(latest, longest, is_near=False)


@pytest.fixture(params=[3, 64])
def few(request: pytest.FixtureRequest) -> Iterator[None]:
    """Places that are measured together: some texts below have more of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_match, "FEW", request.param)
        yield


def tokens(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 3), max_size=size)


@given(
    prompt=tokens(60),
    parts=st.lists(
        st.one_of(tokens(6), st.tuples(st.integers(0, 99), st.integers(1, 80))), max_size=20
    ),
)
@settings(max_examples=150, deadline=None)
@pytest.mark.usefixtures("few")
def test_the_place_is_that_of_a_search_by_hand(prompt: list, parts: list):
    """The answer has tokens of its own, and copies of what is before them."""
    ours, theirs = PromptMatch(prompt), ByHand(prompt)
    for part in parts:
        if isinstance(part, tuple):
            start = part[0] * len(theirs.tokens) // 100
            part = theirs.tokens[start : start + part[1]]
        ours.follow(part)
        for token in part:
            theirs.follow(token)
        rest = ours.rest(1000)
        theirs.find()
        assert ours.num_seen == theirs.num_seen
        assert ours.match_len == theirs.length
        assert ours.follows == (theirs.place is not None)
        assert [*rest] == ([] if theirs.place is None else theirs.tokens[theirs.place :])


@given(prompt=tokens(40), answer=tokens(40), step=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_a_retraction_leaves_the_prompt(prompt: list, answer: list, step: int):
    once, again = PromptMatch(prompt), PromptMatch(prompt)
    again.follow(answer[::-1])
    again.rest(9)
    again.reset()
    for start in range(0, len(answer), step):
        for match in (once, again):
            match.follow(answer[start : start + step])
        assert [*once.rest(99)] == [*again.rest(99)]
    assert len(once) == len(again) == len(prompt) + len(answer)


def test_appended_output_does_not_match_itself():
    match = PromptMatch([1, 2, 3])
    match.follow([9])
    assert match.rest(5) == ()
    match.follow([9])
    assert (match.rest(5), match.match_len) == ([9], 1)


def test_the_latest_place_of_the_longest_match():
    match = PromptMatch([1, 2, 3, 4, 50, 7, 3, 4, 51, 3, 52])
    match.follow([2, 3, 4])
    assert (match.rest(1), match.match_len) == ([50], 3)
    match.follow([8, 3, 4])
    assert (match.rest(2), match.match_len) == ([8, 3], 2)  # its own output: later than the prompt


def test_a_changed_token_is_passed_by():
    """One newest token near the last well-known place, where a later one is elsewhere, too."""
    match = PromptMatch([*TEXT, 1, TEXT[8], 2])
    match.follow(TEXT[:6])
    assert match.rest(1) == TEXT[6:7]
    match.follow([7, 7, TEXT[8]])
    assert (match.rest(2), match.match_len) == (TEXT[9:11], 2)


def test_more_tokens_than_there_was_room_for():
    match = PromptMatch(TEXT)
    for token in range(10_000):
        match.follow([token % 1000 + 1000])
    assert match.rest(3) == [1000, 1001, 1002]
    assert match.match_len == MAX_MATCH
    assert len(match) == len(TEXT) + 10_000


def test_a_copy_is_followed_without_a_search():
    match = PromptMatch(range(100_000))
    match.follow([50_000])
    match.rest(1)
    searched = match.num_searched
    match.follow(range(50_001, 50_100))
    assert match.rest(2) == [50_100, 50_101]
    assert match.num_searched == searched == 100_001


def test_what_is_no_token_is_never_drafted_and_matches_nothing():
    """The ids in the place of an image are hashes: of any size, and not the target's."""
    image = [2**40, 2**31, 900, -1]
    text = PromptMatch([1, 2, *image, 7, 8, 1, 2, *image, 7], vocab_size=900)
    text.follow([8])
    assert (text.rest(9), text.match_len) == ([1, 2], 2)
    text.follow([1, 2])
    assert (text.rest(9), text.match_len) == ([], 4)
