"""An EAGLE-3 head's forwards: as parts of a graph they compute what they compute by themselves."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.compat

VOCAB, CONTEXT, HIDDEN, SIZE = 13, 60, 6, 4


class HeadRunner:
    """Logits and hidden states depend on all that a row is given."""

    model_config = SimpleNamespace(context_len=CONTEXT)
    spec_algorithm = None

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        sizes = (VOCAB, CONTEXT, 5 * CONTEXT)
        self._parts = [torch.randn(n, HIDDEN, generator=generator) for n in sizes]
        self._lm_head = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.model = SimpleNamespace(forward=self._compute)
        nothing = SimpleNamespace(bind_own_plan=id, bind_runner_slots=id)
        self.kv_index_translator = nothing
        self.seen: list[Any] = []

    def _compute(self, ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> Any:
        self.seen.append(batch)
        assert batch.capture_hidden_mode.is_full()
        rows = zip(self._parts, (ids, positions, batch.out_cache_loc), strict=True)
        hidden = sum(part[index] for part, index in rows) + batch.spec_info.hidden_states
        return SimpleNamespace(next_token_logits=hidden @ self._lm_head.T, hidden_states=hidden)

    def forward(self, batch: Any) -> Any:
        output = self._compute(batch.input_ids, batch.positions, batch)
        return SimpleNamespace(logits_output=output)


class Backend:
    """Plans a forward inside a graph, and remembers of which lengths."""

    def __init__(self, _: Any, rows: Any) -> None:
        self.width, self.planned = rows.num_rows, list[tuple[str, list[int]]]()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        assert max_num_tokens == max_bs * self.width

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool) -> None:
        assert in_capture
        self.planned.append(("out", batch.seq_lens.tolist()))

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        self.planned.append(("in", batch.seq_lens.tolist()))


@pytest.mark.parametrize("own", [None, torch.arange(VOCAB).flip(0)], ids=["all tokens", "own"])
def test_in_a_graph_and_by_itself(monkeypatch: pytest.MonkeyPatch, own: torch.Tensor | None):
    """``own``: a head's vocabulary may be another one."""
    from sglang.srt.model_executor import forward_context
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    from sglang_parse.engine.drafting import draft_head

    monkeypatch.setattr(draft_head, "WideTritonBackend", Backend)
    monkeypatch.setattr(draft_head.DraftHead, "forward_contexts", lambda _: nullcontext())
    head, runner = object.__new__(draft_head.DraftHead), HeadRunner()
    table = torch.arange(5)[:, None] * CONTEXT + torch.arange(CONTEXT)
    head.worker = SimpleNamespace(
        draft_runner=runner,
        hot_token_id=own,
        req_to_token_pool=SimpleNamespace(req_to_token=table.to(torch.int32)),
    )
    pools, starts = torch.tensor([3, 1]), torch.tensor([7, CONTEXT - 5])
    graphed = draft_head.HeadInGraph(head, SIZE, 2)
    block = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=2,
        input_ids=torch.zeros(2 * SIZE),
        req_pool_indices=pools,
        seq_lens=torch.zeros(2),
        seq_lens_sum=0,
        out_cache_loc=torch.zeros(2 * SIZE),
    )
    for width in (SIZE, 1):
        ids, hidden = torch.randint(VOCAB, (2, width)), torch.randn(2, width, HIDDEN)
        alone = head.forward(pools, [20, CONTEXT - 1], ids, starts, hidden)
        inside = graphed.forward(block, ids, starts, hidden)
        assert all(torch.equal(*pair) for pair in zip(alone, inside, strict=True))
        assert alone[0].shape == (2, width)
        assert graphed._backends[width].planned == [(w, starts.tolist()) for w in ("out", "in")]
        slots = runner.seen[-1].out_cache_loc.view(2, width)
        assert slots.tolist() == [table[p, s : s + width].tolist() for p, s in ((3, 7), (1, 55))]
        by_itself = runner.seen[-2].spec_info
        assert torch.equal(by_itself.starts, starts)
        assert by_itself.layout.requests[0].prefix_len == 20
    assert not forward_context.has_forward_context()
