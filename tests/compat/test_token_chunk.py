"""Token-by-token draft chunks on a CPU: the host looks at every token before the next step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_parse.core.block import block_kinds
from sglang_parse.core.doubt import LEVELS, Doubt, level_of
from sglang_parse.core.phases import DraftPlan, Phase, RequestPolicy
from sglang_parse.core.request import RequestState
from sglang_parse.core.simulation import CYCLE, SimulatedAcceptance, place_of

pytestmark = pytest.mark.compat

WIDTH, VOCAB, STOP = 128, 50, 0


def next_token(token: int, pool: int) -> int:
    return (3 * token + pool) % VOCAB


class Runner:
    """A draft model whose next token follows from the last one and the request."""

    device = "cpu"
    spec_algorithm = None
    kv_index_translator = SimpleNamespace(bind_own_plan=lambda _: None)

    def __init__(self, nan_at: int | None = None) -> None:
        self.batches: list[list[int]] = []
        self._nan_at = nan_at

    def forward(self, batch: Any) -> Any:
        pools, ids = batch.req_pool_indices.tolist(), batch.input_ids.tolist()
        assert batch.positions.tolist() == [length - 1 for length in batch.seq_lens.tolist()]
        assert batch.out_cache_loc.tolist() == [
            pool * WIDTH + at for pool, at in zip(pools, batch.positions.tolist(), strict=True)
        ]
        self.batches.append(pools)
        logits = torch.zeros(len(ids), VOCAB)
        logits[range(len(ids)), [*map(next_token, ids, pools)]] = 1.0
        if len(self.batches) == self._nan_at:
            logits[-1] = float("nan")
        output = SimpleNamespace(next_token_logits=logits)
        return SimpleNamespace(can_run_graph=False, logits_output=output)


def expected_draft(pool: int, last: int, most: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < most and last != STOP:
        last = next_token(last, pool)
        tokens.append(last)
    return tokens


def request(pool: int, last: int, budget: int) -> SimpleNamespace:
    policy = RequestPolicy(threshold=0.5, stop_ids=frozenset({STOP}))
    state = RequestState(
        policy,
        plan=DraftPlan(budget, 1, 8),
        output_ids=[1, last],
        committed=21,
        prefilled_len=20,
        draft_kv_len=21,
        draft_kv_found=True,
    )
    return SimpleNamespace(
        parse_state=state,
        kv=SimpleNamespace(req_pool_idx=pool, kv_allocated_len=WIDTH),
        origin_input_ids=[1] * 20,
        sampling_params=SimpleNamespace(max_new_tokens=100, top_k=1),
        finished=lambda: False,
        is_retracted=False,
    )


def draft(
    reqs: list[SimpleNamespace],
    num_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
    nan_at: int | None = None,
    runs_ahead: bool = False,
    waits: bool = True,
    simulated: SimulatedAcceptance | None = None,
) -> tuple[Any, Runner]:
    from sglang_parse.engine.drafting import token_by_token
    from sglang_parse.engine.drafting.draft_model import DraftModel
    from sglang_parse.engine.drafting.kv_marks import DraftKvMarks
    from sglang_parse.engine.drafting.token_by_token import TokenChunk

    monkeypatch.setattr(token_by_token, "broadcast", lambda values: values)
    model, runner = DraftModel.__new__(DraftModel), Runner(nan_at)
    table = torch.arange(len(reqs) * WIDTH, dtype=torch.int32).view(-1, WIDTH)
    model.draft_runner, model.device, model.req_to_token = runner, "cpu", table
    model.runs_ahead, model.graph_reqs = runs_ahead, 0
    model.kv = DraftKvMarks(table, table.numel())
    batch = SimpleNamespace(reqs=reqs, device="cpu")
    (layout,) = block_kinds(1, allow_one_token=False)
    among = range(len(reqs))
    model.simulated = simulated
    chunk = TokenChunk(model, layout, batch, among, draft_tokens=64, runs_ahead=runs_ahead)
    chunk.launch(num_tokens)
    if waits:
        chunk.wait()
    return chunk, runner


def test_drafts_end_at_stop_tokens_and_budgets_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
):
    starts = [(7, 64), (44, 64), (9, 3), (8, 64), (32, 64)]  # the last token, the budget
    reqs = [request(pool, *start) for pool, start in enumerate(starts)]
    drafts = [
        expected_draft(pool, last, min(budget, 8)) for pool, (last, budget) in enumerate(starts)
    ]
    chunk, runner = draft(reqs, 8, monkeypatch)
    assert [req.parse_state.draft.token_ids for req in reqs] == drafts
    ended = [row for row, ids in enumerate(drafts) if ids[-1] == STOP or len(ids) == starts[row][1]]
    assert sorted(chunk.finished) == ended
    assert ended == [1, 2, 4]
    phases = [req.parse_state.phase for req in reqs]
    assert [phase is Phase.VERIFYING for phase in phases] == [row in ended for row in range(5)]
    # No request is in a forward after its draft's end.
    assert [sum(row in rows for rows in runner.batches) for row in range(5)] == [*map(len, drafts)]
    assert chunk.num_forwards == len(runner.batches) == 8
    assert [req.parse_state.notes.telemetry.stats.draft_forwards for req in reqs] == [
        *map(len, drafts)
    ]
    assert not any(req.parse_state.num_draft_inflight for req in reqs)


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_draft_behind_a_rejected_token_that_the_target_chose(
    lacking: int, monkeypatch: pytest.MonkeyPatch
):
    """Its KV is there already; it is computed again for its logits, beside one that lacks more."""
    reqs = [request(0, 7, 64), request(1, 8, 64)]
    for req in reqs:
        req.parse_state.draft_kv_len = 22
    reqs[1].parse_state.draft_kv_len -= lacking
    draft(reqs, 8, monkeypatch)
    expected = [expected_draft(0, 7, 8), expected_draft(1, 8, 8)]
    assert [req.parse_state.draft.token_ids for req in reqs] == expected


def test_a_nan_ends_its_request_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch):
    reqs = [request(pool, 7, 64) for pool in range(3)]
    _, runner = draft(reqs, 6, monkeypatch, nan_at=3)
    assert [bool(req.parse_state.fault) for req in reqs] == [False, False, True]
    for pool, req in enumerate(reqs[:2]):
        assert req.parse_state.draft.token_ids == expected_draft(pool, 7, 6)
    assert [len(rows) for rows in runner.batches[:4]] == [3, 3, 3, 2]


def doubtful(pool: int, least: float) -> SimpleNamespace:
    """Its draft model is unsure of every token: all of n are accepted in one of 2 to the n."""
    req = request(pool, 7, 64)
    doubt = Doubt([0.5] * LEVELS, least)
    req.parse_state.plan = replace(req.parse_state.plan, doubt=doubt)
    return req


def test_simulated_doubt_ends_a_draft_at_a_token_that_is_refused(monkeypatch: pytest.MonkeyPatch):
    """Whatever the draft model's own probabilities are; the same place as a verify pass finds."""
    simulated = SimulatedAcceptance.refusals(1 << 14, seed=1, in_doubt=True)
    req = request(0, 7, 64)
    place = place_of(req.origin_input_ids, len(req.parse_state.output_ids))
    simulated.unsure = frozenset({(place + 3) % CYCLE})
    chances = [0.1, *[0.9] * (LEVELS - 1)]
    req.parse_state.plan = replace(req.parse_state.plan, doubt=Doubt(chances, least=0.2))
    draft([req], 8, monkeypatch, simulated=simulated)
    assert req.parse_state.draft.levels == [*[LEVELS - 1] * 3, 0]
    assert req.parse_state.draft.in_doubt


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_draft_in_doubt_ends(runs_ahead: bool, monkeypatch: pytest.MonkeyPatch):
    """Where the host runs ahead, one forward is in flight while it looks at the one before it."""
    reqs = [doubtful(0, 0.2)]
    chunk, runner = draft(reqs, 8, monkeypatch, runs_ahead=runs_ahead)
    state, num_drafted = reqs[0].parse_state, 3 + runs_ahead
    assert state.draft.token_ids == expected_draft(0, 7, num_drafted)
    assert state.draft.levels == [0] * num_drafted
    assert (state.phase, state.draft.in_doubt) == (Phase.VERIFYING, True)
    assert (len(runner.batches), chunk.num_forwards, chunk.finished) == (*[num_drafted] * 2, [0])
    assert state.num_draft_inflight == 0
    assert state.notes.telemetry.stats.doubted_drafts == 1
    assert not chunk.can_follow(reqs)


def test_drafts_that_share_forwards_doubt_together(monkeypatch: pytest.MonkeyPatch):
    """Nobody ends early beside one that must not; that one's length is its plan's."""
    reqs = [doubtful(0, 0.2), doubtful(1, 0.05)]
    draft(reqs, 8, monkeypatch)
    assert [req.parse_state.num_drafted for req in reqs] == [4, 4]  # 1/16 is below 1/8
    reqs = [doubtful(0, 0.2), request(1, 7, 6)]
    draft(reqs, 8, monkeypatch)
    assert [req.parse_state.num_drafted for req in reqs] == [6, 6]
    assert [req.parse_state.draft.in_doubt for req in reqs] == [True, False]


def test_a_chunk_that_follows_takes_the_tokens_before_it_first(monkeypatch: pytest.MonkeyPatch):
    from sglang_parse.engine.drafting.token_by_token import TokenChunk

    reqs = [doubtful(0, 1 / 1000)]
    first, runner = draft(reqs, 3, monkeypatch, runs_ahead=True, waits=False)
    assert first.can_follow(reqs)
    assert reqs[0].parse_state.num_drafted == 2
    second = TokenChunk(
        *(first.model, first.kind, first.batch, first.indices), draft_tokens=64, runs_ahead=True
    )
    second.launch(20, first)
    first.wait()
    second.wait()
    # 2 to the -10 is the first chance below; one more forward was in flight.
    assert reqs[0].parse_state.draft.token_ids == expected_draft(0, 7, 11)
    assert len(runner.batches) == 11
    assert reqs[0].parse_state.draft.in_doubt


def test_levels_are_octaves_of_odds():
    """Of the token that was chosen, likely or not."""
    from sglang_parse.engine.logits.sampling import surprisals_of

    def levels_of(logits: torch.Tensor, tokens: torch.Tensor) -> list[int]:
        return [*map(level_of, surprisals_of(logits, tokens).tolist())]

    chances = [0.001, 0.3, 0.4, 0.6, 0.7, 0.995, 0.9995, 1.0]
    logits = torch.tensor([[p, 1 - p] for p in chances]).log()
    chosen = torch.zeros(len(chances), dtype=torch.int64)
    assert levels_of(logits, chosen) == [0, 0, 1, 2, 3, 9, 12, 12]
    for dtype in (torch.float16, torch.bfloat16):
        found = levels_of((5 * logits.clamp(min=-9)).to(dtype), 1 - chosen)
        assert (min(found), max(found)) == (0, LEVELS - 1)
    none = levels_of(torch.tensor([[0.0, 9.0], [0.0, 0.0]]), torch.tensor([-1, 0]))
    assert none[1] == 2
