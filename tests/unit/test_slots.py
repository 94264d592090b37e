"""KV slots when there are not enough for all: who moves, who waits, and that nobody starves."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_parse.core.phases import Move, Phase
from sglang_parse.core.slots import PATIENCE, Grant, Holding, cost, pages_up, share_out

pytestmark = pytest.mark.unit

BURST, QUESTION, BUDGET = 4, 3, 12


def moves(grants: list[Grant]) -> list[Move]:
    return [grant.move for grant in grants]


def drafter(num_drafted: int = 0, committed: int = 20, allocated: int = 20) -> Holding:
    tail = num_drafted + BURST
    return Holding(
        Phase.DRAFTING, committed, allocated, tail, 1 + tail + QUESTION * tail, num_drafted
    )


def judged(num_drafted: int = 6, waited: int = 0, committed: int = 20) -> Holding:
    tail = 1 + num_drafted + 2 * QUESTION
    return Holding(
        Phase.VERIFYING, committed, committed + num_drafted, tail, 0, num_drafted, waited
    )


def stepper(committed: int = 20) -> Holding:
    return Holding(Phase.CONTINUING, committed, committed, 1)


def test_with_room_for_all_everyone_makes_its_phases_move():
    grants = share_out([drafter(), judged(), stepper()], 1000)
    assert moves(grants) == [Move.BURST, Move.PASS, Move.STEP]
    assert [grant.tail for grant in grants] == [4, 13, 1]


def ended(phase: Phase = Phase.DRAFTING) -> Holding:
    return Holding(phase, 20, 30, tail=0, has_ended=True)


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("available", [0, 1000])
def test_an_ended_request_waits_and_gives_nothing_up(phase, available):
    assert share_out([ended(phase)], available) == [Grant(Move.WAIT, None)]
    grants = share_out([ended(phase), stepper()], available)
    assert moves(grants) == [Move.WAIT, Move.STEP]


def test_short_of_slots_others_wait_for_those_of_an_ended_request():
    assert moves(share_out([judged()], 0)) == [Move.GIVE_UP]
    assert moves(share_out([judged(), ended()], 0)) == [Move.WAIT, Move.WAIT]


def test_a_burst_leaves_room_to_judge_it():
    need = 4 + 1 + 3 * 4
    assert moves(share_out([drafter()], need)) == [Move.BURST]
    assert moves(share_out([drafter()], need - 1)) == [Move.GIVE_UP]


def test_short_of_slots_a_draft_is_judged_as_it_is():
    assert moves(share_out([drafter(num_drafted=5, allocated=25), stepper()], 3)) == [
        Move.END_DRAFT,
        Move.STEP,
    ]


def test_a_pass_waits_for_slots_another_pass_gives_back():
    grants = share_out([judged(), judged(waited=2)], 8)
    assert moves(grants) == [Move.WAIT, Move.PASS]


def test_a_pass_that_waited_long_enough_gives_its_draft_up():
    holdings = [judged(waited=PATIENCE), stepper()]
    assert moves(share_out(holdings, 1)) == [Move.GIVE_UP, Move.STEP]


def test_when_nobody_can_move_the_shortest_draft_goes():
    assert moves(share_out([judged(9), judged(5)], 0)) == [Move.WAIT, Move.GIVE_UP]


def test_drafts_go_before_a_request_is_retracted():
    holdings = [judged(6), stepper(), stepper()]
    grants = share_out(holdings, 0)
    assert moves(grants) == [Move.GIVE_UP, Move.STEP, Move.STEP]
    assert cost(holdings, grants) <= 0


def test_steps_that_do_not_fit_are_reported_so_that_sglang_retracts():
    holdings = [stepper(), stepper()]
    assert cost(holdings, share_out(holdings, 1)) == 2


def ahead(committed: int = 20, left_over: int = 0) -> Holding:
    """A request whose target is accelerated by an EAGLE-3 head, three tokens ahead."""
    allocated = committed + left_over
    return Holding(Phase.CONTINUING, committed, allocated, 4, is_accelerated=True)


def test_the_head_stands_still_before_a_draft_gives_way():
    need = 4 + 1 + 3 * 4
    assert moves(share_out([drafter(), ahead()], need + 4)) == [Move.BURST, Move.EAGLE]
    grants = share_out([drafter(), ahead()], need + 3)
    assert moves(grants) == [Move.BURST, Move.STEP]
    assert [grant.tail for grant in grants] == [4, 1]


def test_a_plain_step_gives_back_what_an_accelerated_one_left_over():
    holdings = [ahead(left_over=3), stepper(), stepper()]
    grants = share_out(holdings, 0)
    assert moves(grants) == [Move.STEP] * 3
    assert cost(holdings, grants) == 0


def test_whole_pages_are_counted():
    holdings = [stepper(committed=31), stepper(committed=32)]
    grants = share_out(holdings, 1000, page_size=16)
    # 31 + 1 still fits the second page that is held; 32 + 1 opens a third.
    assert cost(holdings, grants, page_size=16) == 16


holdings_lists = st.lists(
    st.one_of(
        st.builds(drafter, st.integers(0, 8), allocated=st.integers(28, 32)),
        st.builds(judged, st.integers(1, 9), st.integers(0, PATIENCE)),
        st.builds(stepper, st.integers(1, 40)),
        st.builds(ahead, st.integers(1, 40), st.integers(0, 3)),
    ),
    min_size=1,
    max_size=8,
)


@given(holdings_lists, st.integers(0, 120), st.sampled_from([1, 4, 16]))
def test_never_more_than_there_is_unless_plain_steps_alone_do_not_fit(holdings, available, page):
    grants = share_out(holdings, available, page)
    total = cost(holdings, grants, page)
    if total > available:  # an EAGLE move is no plain step
        assert all(move in (Move.STEP, Move.GIVE_UP) for move in moves(grants))
    assert any(move not in (Move.WAIT, Move.END_DRAFT) for move in moves(grants))


@given(holdings_lists, st.integers(0, 120), st.sampled_from([1, 4, 16]))
def test_asking_twice_answers_the_same(holdings, available, page):
    assert share_out(holdings, available, page) == share_out(holdings, available, page)


@dataclass
class Simulated:
    """A request of the simulation below; ``output`` tokens are still to be written."""

    committed: int
    allocated: int
    output: int
    phase: Phase = Phase.DRAFTING
    drafted: int = 0
    waited: int = 0
    idle: int = 0

    def holding(self) -> Holding:
        drafting = self.phase is Phase.DRAFTING
        tail = min(self.drafted + BURST, BUDGET) if drafting else 1
        if self.phase is Phase.VERIFYING:
            tail = 1 + self.drafted + QUESTION * 2
        return Holding(
            self.phase,
            self.committed,
            self.allocated,
            tail,
            1 + tail + QUESTION * tail,
            self.drafted,
            self.waited,
        )

    def apply(self, grant: Grant, page: int, rng: random.Random) -> None:
        """What the worker does, without models."""
        if grant.tail is not None and grant.move is not Move.GIVE_UP:
            wanted = pages_up(self.committed + grant.tail, page)
            self.allocated = max(self.allocated, wanted)
        self.waited = self.waited + 1 if grant.move is Move.WAIT else 0
        if grant.move is Move.BURST:
            self.drafted = min(self.drafted + BURST, BUDGET)
            self.phase = Phase.VERIFYING if self.drafted == BUDGET else Phase.DRAFTING
        elif grant.move is Move.END_DRAFT:
            self.phase = Phase.VERIFYING
        elif grant.move is not Move.WAIT:
            self._write(grant, page, rng)

    def _write(self, grant: Grant, page: int, rng: random.Random) -> None:
        written = 1 + (rng.randint(0, self.drafted) if grant.move is Move.PASS else 0)
        self.committed += written
        self.output -= written
        self.drafted = 0
        self.phase = rng.choice([Phase.DRAFTING, Phase.CONTINUING])
        self.allocated = pages_up(self.committed, page)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.sampled_from([1, 16]))
def test_every_request_ends_in_a_pool_that_holds_the_plain_load(seed, num_requests, page):
    """The pool is as large as the finished sequences: drafts live on what is left over."""
    rng = random.Random(seed)
    requests = [
        Simulated(n, pages_up(n, page), rng.randint(1, 60))
        for n in (rng.randint(1, 40) for _ in range(num_requests))
    ]
    # The anchor of a finished request has no slot; one token may be written past the end.
    pool = sum(pages_up(r.committed + r.output + BUDGET + 1, page) for r in requests)
    for _ in range(60 * (PATIENCE + 8) * num_requests):
        running = [r for r in requests if r.output > 0]
        if not running:
            return
        holdings = [r.holding() for r in running]
        available = pool - sum(r.allocated for r in running)
        grants = share_out(holdings, available, page)
        assert cost(holdings, grants, page) <= available
        for request, grant in zip(running, grants, strict=True):
            before = (request.output, request.drafted, request.phase)
            request.apply(grant, page, rng)
            request.idle = (
                0
                if before != (request.output, request.drafted, request.phase)
                else (request.idle + 1)
            )
            assert request.idle <= PATIENCE + 1, "a request starves"
        assert sum(r.allocated for r in running) <= pool
    pytest.fail("requests still run: livelock")
