"""KV slots when there are not enough for all: who moves, who waits, and that nobody starves."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_parse.core.kv_demand import (
    PATIENCE,
    KvDemand,
    KvGrant,
    allocate_kv_slots,
    cost,
    pages_up,
)
from sglang_parse.core.phases import Action, Phase

pytestmark = pytest.mark.unit

CHUNK, QUESTION, BUDGET = 4, 3, 12


DROP_DRAFT, END_DRAFT = (Action.DECODE, "cuts its draft"), (Action.WAIT, "cuts its draft")


def moves(grants: list[KvGrant]) -> list:
    return [(one.action, "cuts its draft") if one.cuts_draft else one.action for one in grants]


def drafter(num_drafted: int = 0, committed: int = 20, allocated: int = 20) -> KvDemand:
    tail = num_drafted + CHUNK
    return KvDemand(
        Phase.DRAFTING, committed, allocated, tail, 1 + tail + QUESTION * tail, num_drafted
    )


def judged(num_drafted: int = 6, waited: int = 0, committed: int = 20) -> KvDemand:
    tail = 1 + num_drafted + 2 * QUESTION
    return KvDemand(
        Phase.VERIFYING, committed, committed + num_drafted, tail, 0, num_drafted, waited
    )


def stepper(committed: int = 20) -> KvDemand:
    return KvDemand(Phase.DECODING, committed, committed, 1)


def test_with_room_for_all_everyone_makes_its_phases_move():
    grants = allocate_kv_slots([drafter(), judged(), stepper()], 1000)
    assert moves(grants) == [Action.DRAFT, Action.VERIFY, Action.DECODE]
    assert [grant.lookahead_slots for grant in grants] == [4, 13, 1]


def ended(phase: Phase = Phase.DRAFTING) -> KvDemand:
    return KvDemand(phase, 20, 30, lookahead_slots=0, has_ended=True)


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("available", [0, 1000])
def test_an_ended_request_waits_and_gives_nothing_up(phase, available):
    assert allocate_kv_slots([ended(phase)], available) == [KvGrant(Action.WAIT, None)]
    grants = allocate_kv_slots([ended(phase), stepper()], available)
    assert moves(grants) == [Action.WAIT, Action.DECODE]


def test_short_of_slots_others_wait_for_those_of_an_ended_request():
    assert moves(allocate_kv_slots([judged()], 0)) == [DROP_DRAFT]
    assert moves(allocate_kv_slots([judged(), ended()], 0)) == [Action.WAIT, Action.WAIT]


def test_a_chunk_leaves_room_to_verify_it():
    need = 4 + 1 + 3 * 4
    assert moves(allocate_kv_slots([drafter()], need)) == [Action.DRAFT]
    assert moves(allocate_kv_slots([drafter()], need - 1)) == [DROP_DRAFT]


def test_short_of_slots_a_draft_is_verified_as_it_is():
    assert moves(allocate_kv_slots([drafter(num_drafted=5, allocated=25), stepper()], 3)) == [
        END_DRAFT,
        Action.DECODE,
    ]


def test_a_pass_waits_for_slots_another_pass_gives_back():
    grants = allocate_kv_slots([judged(), judged(waited=2)], 8)
    assert moves(grants) == [Action.WAIT, Action.VERIFY]


def test_a_pass_that_waited_long_enough_gives_its_draft_up():
    holdings = [judged(waited=PATIENCE), stepper()]
    assert moves(allocate_kv_slots(holdings, 1)) == [DROP_DRAFT, Action.DECODE]


def test_when_nobody_can_move_the_shortest_draft_goes():
    assert moves(allocate_kv_slots([judged(9), judged(5)], 0)) == [Action.WAIT, DROP_DRAFT]


def test_drafts_go_before_a_request_is_retracted():
    holdings = [judged(6), stepper(), stepper()]
    grants = allocate_kv_slots(holdings, 0)
    assert moves(grants) == [DROP_DRAFT, Action.DECODE, Action.DECODE]
    assert cost(holdings, grants) <= 0


def test_steps_that_do_not_fit_are_reported_so_that_sglang_retracts():
    holdings = [stepper(), stepper()]
    assert cost(holdings, allocate_kv_slots(holdings, 1)) == 2


def ahead(committed: int = 20, left_over: int = 0) -> KvDemand:
    """A request whose target is accelerated by an EAGLE-3 head, three tokens ahead."""
    allocated = committed + left_over
    return KvDemand(Phase.DECODING, committed, allocated, 4, proposes=True)


def test_the_head_stands_still_before_a_draft_gives_way():
    need = 4 + 1 + 3 * 4
    assert moves(allocate_kv_slots([drafter(), ahead()], need + 4)) == [
        Action.DRAFT,
        Action.PROPOSE,
    ]
    grants = allocate_kv_slots([drafter(), ahead()], need + 3)
    assert moves(grants) == [Action.DRAFT, Action.DECODE]
    assert [grant.lookahead_slots for grant in grants] == [4, 1]


def test_a_plain_step_gives_back_what_an_accelerated_one_left_over():
    holdings = [ahead(left_over=3), stepper(), stepper()]
    grants = allocate_kv_slots(holdings, 0)
    assert moves(grants) == [Action.DECODE] * 3
    assert cost(holdings, grants) == 0


def test_whole_pages_are_counted():
    holdings = [stepper(committed=31), stepper(committed=32)]
    grants = allocate_kv_slots(holdings, 1000, page_size=16)
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
    grants = allocate_kv_slots(holdings, available, page)
    total = cost(holdings, grants, page)
    if total > available:  # an EAGLE move is no plain step
        assert all(move in (Action.DECODE, DROP_DRAFT) for move in moves(grants))
    assert any(move not in (Action.WAIT, END_DRAFT) for move in moves(grants))


@given(holdings_lists, st.integers(0, 120), st.sampled_from([1, 4, 16]))
def test_asking_twice_answers_the_same(holdings, available, page):
    assert allocate_kv_slots(holdings, available, page) == allocate_kv_slots(
        holdings, available, page
    )


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

    def holding(self) -> KvDemand:
        drafting = self.phase is Phase.DRAFTING
        tail = min(self.drafted + CHUNK, BUDGET) if drafting else 1
        if self.phase is Phase.VERIFYING:
            tail = 1 + self.drafted + QUESTION * 2
        return KvDemand(
            self.phase,
            self.committed,
            self.allocated,
            tail,
            1 + tail + QUESTION * tail,
            self.drafted,
            self.waited,
        )

    def apply(self, grant: KvGrant, page: int, rng: random.Random) -> None:
        """Acts as the worker, without models."""
        if grant.lookahead_slots is not None and not grant.cuts_draft:
            wanted = pages_up(self.committed + grant.lookahead_slots, page)
            self.allocated = max(self.allocated, wanted)
        waits = grant.action is Action.WAIT and not grant.cuts_draft
        self.waited = self.waited + 1 if waits else 0
        if grant.action is Action.DRAFT:
            self.drafted = min(self.drafted + CHUNK, BUDGET)
            self.phase = Phase.VERIFYING if self.drafted == BUDGET else Phase.DRAFTING
        elif grant.action is Action.WAIT and grant.cuts_draft:
            self.phase = Phase.VERIFYING
        elif grant.action is not Action.WAIT:
            self._write(grant, page, rng)

    def _write(self, grant: KvGrant, page: int, rng: random.Random) -> None:
        written = 1 + (rng.randint(0, self.drafted) if grant.action is Action.VERIFY else 0)
        self.committed += written
        self.output -= written
        self.drafted = 0
        self.phase = rng.choice([Phase.DRAFTING, Phase.DECODING])
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
        grants = allocate_kv_slots(holdings, available, page)
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
