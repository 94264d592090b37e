"""Forwards before the first request, on a GPU without numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_parse.core.phases import Action, Phase
from support.fake_engine import arrived, batch_of, engine_for, request

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("gpu")]


@pytest.mark.parametrize("block_size", [1, 4])
def test_every_kind_of_forward_runs(block_size: int, monkeypatch: pytest.MonkeyPatch):
    """Passes of each bucket that fits."""
    from sglang_parse.device import HostCopy
    from sglang_parse.engine import prewarm as prewarming

    monkeypatch.setattr(HostCopy, "tolist", arrived)

    batch = batch_of(request(0, Phase.DECODING, Action.DECODE))
    engine = engine_for(batch, block_size=block_size)
    target, draft = engine.verifier.target.runner, engine.drafter.model.draft_runner
    info = batch.sampling_info
    monkeypatch.setattr(type(info), "from_schedule_batch", lambda *_: info)
    monkeypatch.setattr(prewarming, "max_forward_rows", lambda: 1024)
    for runner in (target, draft):
        runner.req_to_token_pool = batch.req_to_token_pool
        runner.prefill_cuda_graph_runner = SimpleNamespace(capture_num_tokens=[16, 32, 64])
    prewarming.prewarm(engine)
    rows = [len(forward.input_ids) for forward in target.forwards]
    assert rows == [1, 16, 32]
    rows = [len(forward.input_ids) for forward in draft.forwards]
    assert rows[:2] == [16, 32]
    num_layouts = len(engine.controller.layouts.costs)
    assert len(rows) == 2 + 2 * num_layouts
    assert num_layouts == (1 if block_size == 1 else 2)
