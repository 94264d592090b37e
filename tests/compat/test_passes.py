"""One pass or several: never more rows, or logits, than there is memory for, and no difference in
the end."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.core.layout import RequestLayout
from sglang_parse.core.phases import RequestPolicy
from sglang_parse.engine import forward
from sglang_parse.engine.rows import VerifyRows

pytestmark = pytest.mark.compat


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch):
    """The module, with a target that answers row r of request i with the number 100 i + r, and
    measurements that keep what they are given."""
    from sglang_parse.engine import verify

    def run_pass(_runner, _batch, parts, *, is_masked: bool, capture: bool):
        assert is_masked
        logits, starts, hidden = [], [0], []
        for part in parts:
            logits += [100 * part.row + row for row in part.logits_rows]
            hidden += [100 * part.row + row for row in range(part.layout.num_rows)]
            starts.append(len(logits))
        states = torch.tensor(hidden)[:, None] if capture else None
        return forward.PassOutput(torch.tensor(logits)[:, None], starts, states, replays=False)

    class Measured:
        def __init__(self, parts, logits, _sampler, question):
            self.told = (list(parts), logits.flatten().tolist(), question)

    monkeypatch.setattr(verify, "run_pass", run_pass)
    monkeypatch.setattr(verify, "Measured", Measured)
    monkeypatch.setattr(verify, "choose_steps", lambda *told: told[2:])
    for name in ("verifying_rows", "proposed_rows", "continuing_rows"):
        monkeypatch.setattr(verify, name, lambda _row, req, *_, **__: req.rows)
    return verify


SIZES = (3, 4, 9, 1, 1, 5)
PARTS = [
    VerifyRows(i, RequestLayout(7, n), list(range(n)), tuple(range(0, n, 2)), 1)
    for i, n in enumerate(SIZES)
]
JUDGED, PROPOSALS, STEPPING = [0, 1], {2: [5], 3: []}, [4, 5]


def launch(verify, monkeypatch: pytest.MonkeyPatch, *, capture: bool = True, **limits: int):
    """A pass that judges two drafts, checks two heads' proposals and lets two continue."""
    target = SimpleNamespace(runner=SimpleNamespace(model_config=SimpleNamespace(vocab_size=1)))
    monkeypatch.setattr(forward, "max_forward_rows", lambda: limits.get("max_rows", 23))
    logits_bytes = 4 * limits.get("max_logits_rows", 23)
    monkeypatch.setattr(forward, "MAX_LOGITS_BYTES", logits_bytes)
    verifier = verify.Verifier(target, "question", is_masked=True)
    state = SimpleNamespace(policy=RequestPolicy(threshold=0.5, uses_eagle=capture))
    reqs = [SimpleNamespace(rows=part, lora_id=None, parse_state=state) for part in PARTS]
    batch = SimpleNamespace(reqs=reqs)
    return verifier.launch(batch, JUDGED, PROPOSALS, STEPPING)


def told(launched) -> list:
    """Whom the measurements of each kind were made for, and by which numbers."""
    kinds = []
    for kind in ("judged", "checked"):
        made = [getattr(part, kind).told for part in launched.passes]
        rows = [part.row for parts, _, _ in made for part in parts]
        kinds.append((rows, [number for _, numbers, _ in made for number in numbers]))
        assert {question for _, _, question in made} == {"question" if kind == "judged" else None}
    rows, logits = launched.steps
    return [*kinds, (list(rows), logits.flatten().tolist())]


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
def test_as_few_passes_as_the_limits_allow(verify, monkeypatch, limits: dict, num_rows: list):
    whole = launch(verify, monkeypatch)
    assert whole.num_passes == 1
    several = launch(verify, monkeypatch, **limits)
    assert [len(part.hidden) for part in several.passes] == num_rows
    assert told(several) == told(whole)
    assert told(whole)[0] == ([0, 1], [0, 2, 100, 102])
    bounds = pairwise([0, 3, 7, 16, 17, 18, 23])
    assert several.places == whole.places == [(i, slice(*span)) for i, span in enumerate(bounds)]
    assert several.num_rows == 23
    assert torch.equal(several.hidden, whole.hidden)
    assert launch(verify, monkeypatch, capture=False, **limits).hidden is None


@pytest.mark.parametrize(("chunk", "rows"), [(512, 512), (-1, 16384), (None, 16384)])
def test_a_pass_is_no_larger_than_a_chunk_of_prefill(monkeypatch, chunk, rows):
    from sglang_parse.engine import batch

    schedule = SimpleNamespace(chunked_prefill_size=chunk, max_prefill_tokens=16384)
    monkeypatch.setattr(batch, "get_schedule", lambda: schedule)
    assert batch.max_forward_rows() == rows
