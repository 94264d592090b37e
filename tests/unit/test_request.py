"""KV slots a request asks for, phase by phase."""

import pytest

from sglang_parse.core.kv_demand import lookahead_slots
from sglang_parse.core.layout import RequestLayout
from sglang_parse.core.phases import Draft, DraftPlan, Phase, RequestPolicy
from sglang_parse.core.request import RequestState
from support.rounds import round_of

pytestmark = pytest.mark.unit


def state(phase: Phase, draft: Draft | None = None) -> RequestState:
    return RequestState(RequestPolicy(threshold=0.5), phase=phase, draft=draft or Draft())


@pytest.mark.parametrize(
    ("drafted", "chunk", "budget", "expected"),
    [(0, 16, 128, 16), (16, 16, 128, 32), (120, 16, 128, 128), (0, 16, 5, 5), (0, 1, 1, 1)],
)
def test_drafting_asks_for_the_draft_so_far_and_one_chunk(drafted, chunk, budget, expected):
    drafting = state(Phase.DRAFTING, Draft(token_ids=[7] * drafted))
    assert lookahead_slots(drafting, chunk, budget) == expected


def test_verifying_asks_for_exactly_the_rows_of_its_layout():
    draft = Draft(
        token_ids=[7] * 9, prefix_ends=[4, 9], question_ids=[(1, 2, 3), (1, 2, 3, 4)], finished=True
    )
    layout = RequestLayout(
        prefix_len=20, num_draft_rows=10, visible_lens=(5, 10), question_lens=(3, 4)
    )
    assert lookahead_slots(state(Phase.VERIFYING, draft), 16, 128) == layout.num_rows == 17


def test_verifying_without_questions_asks_for_the_anchor_and_the_draft():
    assert lookahead_slots(state(Phase.VERIFYING, Draft(token_ids=[7] * 9)), 16, 4) == 10


@pytest.mark.parametrize("phase", [Phase.DECODING, Phase.PLAIN])
def test_plain_decoding_asks_for_one(phase):
    assert lookahead_slots(state(phase, Draft(token_ids=[7, 7])), 16, 128) == 1


@pytest.mark.parametrize("phase", [Phase.DECODING, Phase.PLAIN])
def test_accelerated_decoding_asks_for_its_rows(phase):
    assert lookahead_slots(state(phase), 16, 128, 4) == 4


@pytest.mark.parametrize("phase", list(Phase))
def test_asking_twice_answers_the_same_and_changes_nothing(phase):
    """SGLang asks for the capacity check and again to allocate."""
    asked = state(phase, Draft(token_ids=[7, 7], prefix_ends=[2], question_ids=[(1, 2)]))
    before = repr(asked)
    assert lookahead_slots(asked, 16, 128) == lookahead_slots(asked, 16, 128)
    assert repr(asked) == before


def test_requests_share_no_state():
    one, other = state(Phase.DRAFTING), state(Phase.DRAFTING)
    one.draft.token_ids.append(7)
    one.notes.telemetry.stats.rounds += 1
    one.notes.telemetry.trace.append({})
    assert other == RequestState(RequestPolicy(threshold=0.5), phase=Phase.DRAFTING)


def test_a_reason_makes_a_request_plain():
    assert not state(Phase.PLAIN).policy.is_plain
    assert RequestPolicy(threshold=0.5, plain_reason="grammar").is_plain


def busy(plain_reason: str = "") -> RequestState:
    return RequestState(
        RequestPolicy(threshold=0.5, plain_reason=plain_reason),
        phase=Phase.VERIFYING,
        draft=Draft(token_ids=[7, 7], finished=True, prefix_ends=[2]),
        draft_kv_len=30,
    )


@pytest.mark.parametrize(("reason", "phase"), [("", Phase.DECODING), ("grammar", Phase.PLAIN)])
def test_decoding_after_a_round_drops_the_draft_and_retains_its_kv(reason, phase):
    """Of a plain request, too, whose draft a head has proposed."""
    changed = busy(plain_reason=reason)
    changed.start_decode()
    assert (changed.phase, changed.draft) == (phase, Draft())
    assert changed.draft_kv_len == 30


def test_a_skipped_draft_is_counted_until_one_starts():
    changed = busy()
    changed.skip_draft("too slow")
    assert changed.phase is Phase.DECODING
    assert (changed.notes.telemetry.stats.skipped_drafts, changed.no_draft_reason) == (
        1,
        "too slow",
    )
    changed.start_draft(DraftPlan(8, 1, 8))
    assert changed.phase is Phase.DRAFTING


@pytest.mark.parametrize(("reason", "phase"), [("", Phase.DRAFTING), ("grammar", Phase.PLAIN)])
def test_a_prefill_restarts_in_the_phase_decided_before(reason, phase):
    """The first prefill, or the one after a retraction: no draft, the KV as long as told; how far
    the draft's goes nobody knows."""
    restarted = busy(plain_reason=reason)
    restarted.record_draft_kv(20, is_sure=True)
    restarted.restart(12, [])
    assert (restarted.phase, restarted.draft) == (phase, Draft())
    assert (restarted.draft_kv_len, restarted.draft_kv_found) == (0, False)
    assert (restarted.committed, restarted.prefilled_len, restarted.output_ids) == (12, 12, [])


def test_the_drafts_kv_is_looked_up_in_the_prompt():
    state = busy()
    state.restart(12, [])
    state.record_draft_kv(12, is_sure=False)
    state.write([6, 7])
    state.set_draft_kv_len(14)
    state.record_draft_kv(12, is_sure=True)
    assert (state.draft_kv_len, state.draft_kv_found) == (14, True)
    state.record_draft_kv(5, is_sure=True)  # others' slots have taken the prompt's place
    assert state.draft_kv_len == 5


def test_what_is_written_is_output_and_committed():
    state = busy()
    state.restart(12, [])
    state.output_ids.append(5)  # the prefill's token: it has no KV yet
    state.write([6, 7])
    assert (state.output_ids, state.committed) == ([5, 6, 7], 14)


@pytest.mark.parametrize(
    ("cut_off", "accepted", "matched"),
    [(0, 0, 0), (1, 0, 0), (2, 0, 1), (3, 0, 2), (5, 2, 2)],
)
def test_a_run_ends_with_the_targets_own_and_before_that_with_what_matched(
    cut_off: int, accepted: int, matched: int
):
    state = busy()
    state.count_round(round_of(4, 4, 2, num_matched=2))
    assert (
        state.notes.telemetry.stats.accepted_tokens,
        state.notes.telemetry.stats.matched_tokens,
    ) == (2, 2)
    assert state.notes.telemetry.last_of_output(cut_off) == (accepted, matched)
    state.count_decode(1)
    assert state.notes.telemetry.last_of_output(1) == (0, 0)


def test_a_retraction_takes_back_a_run_that_was_never_sent():
    """Under overlap: SGLang had not processed it. It was three draft tokens and the target's."""
    state = busy()
    state.restart(12, [])
    state.output_ids.append(5)
    state.notes.telemetry.stats.accepted_tokens = 2
    state.notes.telemetry.trace = [{"output_start": 1}, {"output_start": 4}]
    state.write([6, 6, 7])
    state.notes.telemetry.stats.accepted_tokens += 3
    state.write([8, 8, 8, 9])
    state.notes.telemetry.num_target_run = 1
    state.restart(16, [5, 6, 6, 7])
    assert (state.output_ids, state.committed) == ([5, 6, 6, 7], 16)
    assert state.notes.telemetry.stats.accepted_tokens == 2
    assert state.notes.telemetry.trace == [{"output_start": 1}]


@pytest.mark.parametrize(
    ("tokens", "candidates", "left"),
    [
        ([5, 6], [7, 8, 9], (7, 8, 9)),
        ([5, 6, 7], [8, 9, 10], (7, 8, 9)),  # what it has no room for comes first; K - 1 at most
        ([5, 6, 7], [], (7,)),
        ([5, 0], [8, 9, 10], ()),
        ([5, 6], None, ()),
    ],
    ids=["at its end", "past it", "without proposals", "a stop token", "no block"],
)
def test_a_complete_draft_has_candidates_behind_it(tokens: list, candidates: list, left: tuple):
    one = RequestState(RequestPolicy(threshold=0.5, stop_ids=frozenset({0})))
    one.add_draft(tokens, 2, num_launched=4, levels=[0] * len(tokens), candidates=candidates)
    assert one.phase is Phase.VERIFYING
    assert (one.draft.token_ids, one.draft.candidates) == (tokens[:2], left)
    # A later block of the same draft is dropped.
    one.add_draft([1], 2, num_launched=4, levels=[0], candidates=[2, 3, 4])
    assert one.draft.candidates == left
