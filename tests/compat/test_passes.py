"""One pass or several: never more rows, or logits, than there is memory for, and no difference in
the end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_parse.core.layout import RequestLayout
from sglang_parse.core.phases import Action, RequestPolicy
from sglang_parse.core.request import RequestState
from sglang_parse.engine import forward
from sglang_parse.engine.forward import RequestRows

pytestmark = pytest.mark.compat


SIZES = (3, 4, 9, 1, 1, 5)
ACTIONS = [Action.VERIFY] * 2 + [Action.PROPOSE] * 2 + [Action.DECODE] * 2
PARTS = [
    RequestRows(i, RequestLayout(7, n), list(range(n)), tuple(range(0, n, 2)), 1, action)
    for i, (n, action) in enumerate(zip(SIZES, ACTIONS, strict=True))
]
DRAFTED, DECODING = [0, 1, 2, 3], [4, 5]


def test_rows_repeat_what_a_state_lacks():
    state = RequestState(RequestPolicy(threshold=0.5), output_ids=[4, 5, 6, 7], committed=6)
    state.draft.token_ids, state.state_lag = [8, 9], 2
    req = SimpleNamespace(origin_input_ids=[1, 2, 3], parse_state=state)
    replay, decode = (forward.decode_rows(0, req, num_anchors) for num_anchors in (0, 1))
    verify = forward.verify_rows(0, req)
    assert [part.layout.prefix_len for part in (replay, decode, verify)] == [4, 4, 4]
    assert (replay.token_ids, replay.logits_rows) == ([5, 6], (1,))
    assert (decode.token_ids, decode.logits_rows) == ([5, 6, 7], (2,))
    assert (verify.token_ids, verify.logits_rows) == ([5, 6, 7, 8, 9], (2, 3, 4))
    assert (decode.drafted_ids, verify.drafted_ids) == ([], [8, 9])


class Launched:
    """A verify pass of a target that gives row r of request i the logit 100 i + r."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, capture: bool = True, **limits: int):
        from sglang_parse.engine import verify
        from sglang_parse.engine.row_results import RowReader

        self.num_rows: list[int] = []
        self.measured: list[tuple[list[int], list[float]]] = []
        monkeypatch.setattr(verify, "run_forward", self._run_forward)
        monkeypatch.setattr(verify, "broadcast", lambda values: values)
        for name in ("verify_rows", "decode_rows"):
            monkeypatch.setattr(verify, name, lambda _row, req, *_, **__: req.rows)
        monkeypatch.setattr(RowReader, "results", self._results)
        monkeypatch.setattr(forward, "max_forward_rows", lambda: limits.get("max_rows", 23))
        logits_bytes = 4 * limits.get("max_logits_rows", 23)
        monkeypatch.setattr(forward, "MAX_LOGITS_BYTES", logits_bytes)
        model = SimpleNamespace(vocab_size=1)
        target = SimpleNamespace(runner=SimpleNamespace(model_config=model))
        state = RequestState(RequestPolicy(threshold=0.5, uses_eagle=capture))
        common = {"lora_id": None, "parse_state": state, "return_logprob": False}
        reqs = [SimpleNamespace(rows=part, **common) for part in PARTS]
        verifier = verify.Verifier(
            target, SimpleNamespace(scorer=None, captured=None), is_masked=True
        )
        batch = SimpleNamespace(reqs=reqs)
        self.forward = verifier.verify(batch, DRAFTED, DECODING)

    def _run_forward(self, _target, _batch, parts, *, is_masked, capture: bool, ids: None):
        assert is_masked
        assert ids is None
        logits = [100 * part.index + row for part in parts for row in part.logits_rows]
        hidden = [100 * part.index + row for part in parts for row in range(part.layout.num_rows)]
        self.num_rows.append(len(hidden))
        states = torch.tensor(hidden)[:, None] if capture else None
        return forward.ForwardOutput(torch.tensor(logits)[:, None], states, graph=0)

    def _results(self, _batch, parts, logits, *hidden):
        if hidden:
            return self._verified(parts, logits), None
        return self._decoded(parts, logits), None

    def _verified(self, parts, logits):
        from sglang_parse.engine.row_results import RowResults

        self.measured.append(([part.index for part in parts], logits.flatten().tolist()))
        firsts = [
            sum(len(part.logits_rows) for part in parts[:place]) for place in range(len(parts))
        ]
        others = [place for place in range(len(logits)) if place not in firsts]
        tokens, answers = logits[firsts, 0], logits[others]
        return RowResults(tokens, tokens[:, None] + 0.5, answers.expand(-1, 2))

    def _decoded(self, parts, logits):
        from sglang_parse.engine.row_results import RowResults

        self.sampled = ([part.index for part in parts], logits.flatten().tolist())
        return RowResults(logits[: len(parts), 0])

    @property
    def hidden(self) -> list:
        return [one.hidden for one in self.forward.wait()]

    @property
    def results(self) -> list:
        """Each request's choices, scores and answers."""
        found = self.forward.wait()
        return [(one.target_tokens, one.scores, one.answers) for one in found]

    @property
    def values(self) -> list:
        rows = [row for rows, _ in self.measured for row in rows]
        return [rows, [value for _, values in self.measured for value in values], self.sampled]


@pytest.mark.parametrize(
    ("limits", "num_rows"),
    [
        ({"max_rows": 8}, [7, 9, 7]),
        ({"max_rows": 1}, list(SIZES)),
        ({"max_logits_rows": 5}, [7, 9, 7]),
        ({"max_logits_rows": 4}, [7, 9, 2, 5]),
        ({"max_rows": 16, "max_logits_rows": 9}, [16, 7]),
    ],
)
def test_as_few_passes_as_the_limits_allow(monkeypatch, limits: dict, num_rows: list):
    whole = Launched(monkeypatch)
    assert whole.forward.num_passes == 1
    several = Launched(monkeypatch, **limits)
    assert several.num_rows == num_rows
    assert several.values == whole.values
    assert whole.values[0] == [0, 1, 2, 3]
    assert whole.values[1][:4] == [0, 2, 100, 102]
    assert whole.sampled[0] == DECODING
    assert several.forward.num_rows == 23
    for one, other in zip(several.hidden, whole.hidden, strict=True):
        assert torch.equal(one, other)
    assert several.results == whole.results
    assert whole.results[:2] == [
        ([0], [[0.5]], [[2.0, 2.0]]),
        ([100], [[100.5]], [[102.0, 102.0]]),
    ]
    assert whole.results[-1] == ([500], [], [])
    assert set(Launched(monkeypatch, capture=False, **limits).hidden) == {None}


@pytest.mark.parametrize(("chunk", "rows"), [(512, 512), (-1, 16384), (None, 16384)])
def test_a_pass_is_no_larger_than_a_chunk_of_prefill(monkeypatch, chunk, rows):
    from sglang_parse.engine import batch

    schedule = SimpleNamespace(chunked_prefill_size=chunk, max_prefill_tokens=16384)
    monkeypatch.setattr(batch, "get_schedule", lambda: schedule)
    assert batch.max_forward_rows() == rows
