"""Forwards before the first request, on a GPU without numbers."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import pytest

from sglang_parse.core.phases import Action, Phase
from sglang_parse.core.policy.constants import DEFAULTS
from sglang_parse.core.stage import Stage
from support.fake_engine import arrived, batch_of, engine_for, request

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("gpu")]


@pytest.mark.parametrize("graph_reqs", [0, 4])
@pytest.mark.parametrize("block_size", [1, 4])
def test_every_kind_of_forward_runs(
    block_size: int, graph_reqs: int, monkeypatch: pytest.MonkeyPatch
):
    """Passes of each bucket that fits; forwards of each layout at each size of the graphs. All are
    timed until none is cold."""
    from sglang_parse.device import HostCopy
    from sglang_parse.engine import prewarm as prewarming

    monkeypatch.setattr(HostCopy, "tolist", arrived)
    monkeypatch.setattr(prewarming, "broadcast_object", lambda times: times)

    batch = batch_of(request(0, Phase.DECODING, Action.DECODE))
    engine = engine_for(batch, block_size=block_size)
    target, draft = engine.verifier.target.runner, engine.drafter.model.draft_runner
    info = batch.sampling_info
    monkeypatch.setattr(type(info), "from_schedule_batch", lambda *_: info)
    monkeypatch.setattr(prewarming, "max_forward_rows", lambda: 1024)
    for runner in (target, draft):
        runner.req_to_token_pool = batch.req_to_token_pool
        runner.prefill_cuda_graph_runner = SimpleNamespace(capture_num_tokens=[16, 32, 64])
    engine.drafter.model.has_graph = lambda _, size: size <= graph_reqs
    prewarming.prewarm(engine)
    rows = [len(forward.input_ids) for forward in target.forwards]
    num_runs = 1 + DEFAULTS.cold_forwards
    assert rows == [1, *[16, 32] * num_runs]
    costs = engine.controller._costs[Stage.VERIFY]
    assert [size for size in (4, 16, 32, 128) if costs.knows(size)] == [16, 32]
    rows = [len(forward.input_ids) for forward in draft.forwards]
    assert rows[:2] == [16, 32]
    costs = engine.controller.blocks.costs
    assert len(costs) == (1 if block_size == 1 else 2)
    sizes = (1, 2, 4) if graph_reqs else ()
    chunks = [*((layout, 1) for layout in costs), *product(costs, sizes)]
    chunks += [*product(costs, sizes)] * (num_runs - 1)
    assert rows[2:] == [size * layout.rows(0).num_rows for layout, size in chunks for _ in range(4)]
    # What forwards bring is measured by the first drafts.
    for cost in costs.values():
        assert [size for size in (1, 2, 4) if cost.per_forward.knows(size)] == [*sizes]
        assert cost.per_token(1) == math.inf
        # What the first requests' chunks take is no mean: their kernels may be cold.
        known = cost.per_forward.at(1)
        for _ in range(DEFAULTS.cold_forwards):
            cost.per_forward.add(1, 1e3)
        assert cost.per_forward.at(1) == known
        assert engine.controller.blocks.choose(1) is [*costs][0]
