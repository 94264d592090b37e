"""When a draft starts beside a decode step in flight."""

import pytest

from sglang_parse.core.arming import STAYS, Arming

pytestmark = pytest.mark.unit


def test_a_draft_is_held_back_until_no_step_is_in_flight():
    arming = Arming()
    assert not arming.waits
    assert not arming.may_start(num_inflight=1)
    assert arming.waits
    arming.observe(0, 1)
    assert not arming.waits
    assert arming.may_start(num_inflight=0)
    assert not arming.waits


def test_a_request_stays_synchronous_while_drafts_pay():
    arming = Arming()
    arming.observe(8, 9)
    assert arming.waits
    num_decoded = 0
    while arming.waits:
        arming.observe(0, 1)
        num_decoded += 1
    assert 8 < num_decoded < 16
    assert arming.share <= STAYS
    arming.observe(0, 1)
    arming.observe(1, 2)
    assert arming.waits


def test_the_share_is_that_of_the_tokens_one_by_one():
    once, each = Arming(), Arming()
    once.observe(5, 7)
    for drafted in (1, 1, 1, 1, 1, 0, 0):
        each.observe(drafted, 1)
    assert once.share == pytest.approx(each.share)
