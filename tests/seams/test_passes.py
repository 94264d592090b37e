"""One pass or several: never more rows than there is memory for, and no difference in the end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_parse.core.layout import RequestLayout
from sglang_parse.engine.rows import VerifyRows

pytestmark = pytest.mark.seams


@pytest.fixture
def verify(monkeypatch: pytest.MonkeyPatch):
    """The module, with a target that answers row r of request i with the number 100 i + r."""
    from sglang_parse.engine import verify

    def run_pass(_runner, _batch, parts, *, is_masked: bool, capture: bool):
        assert is_masked
        logits, starts, hidden, row_starts = [], [0], [], [0]
        for part in parts:
            logits += [100 * part.row + row for row in part.logits_rows]
            hidden += [100 * part.row + row for row in range(part.layout.num_rows)]
            starts.append(len(logits))
            row_starts.append(len(hidden))
        states = torch.tensor(hidden)[:, None] if capture else None
        return verify.PassOutput(torch.tensor(logits)[:, None], starts, states, row_starts)

    monkeypatch.setattr(verify, "run_pass", run_pass)
    return verify


def test_as_few_passes_as_the_rows_allow(verify):
    sizes = (3, 4, 9, 1, 1, 5)
    parts = [
        VerifyRows(i, RequestLayout(7, n), list(range(n)), tuple(range(0, n, 2)), 1)
        for i, n in enumerate(sizes)
    ]

    def run(max_rows: int, capture: bool = True):
        options = {"is_masked": True, "capture": capture, "max_rows": max_rows}
        return verify.run_passes(None, None, parts, **options)

    (whole,) = run(max_rows=23)
    several = run(max_rows=8)
    assert [output.row_starts for output in several] == [[0, 3, 7], [0, 9], [0, 1, 2, 7]]
    again = verify.joined(several)
    assert again.starts == whole.starts
    assert again.row_starts == whole.row_starts == [0, 3, 7, 16, 17, 18, 23]
    assert torch.equal(again.logits, whole.logits)
    assert torch.equal(again.hidden, whole.hidden)
    assert verify.joined(run(max_rows=8, capture=False)).hidden is None
    assert len(run(max_rows=1)) == len(parts)


@pytest.mark.parametrize(("chunk", "rows"), [(512, 512), (-1, 16384), (None, 16384)])
def test_a_pass_is_no_larger_than_a_chunk_of_prefill(verify, monkeypatch, chunk, rows):
    schedule = SimpleNamespace(chunked_prefill_size=chunk, max_prefill_tokens=16384)
    monkeypatch.setattr(verify, "get_schedule", lambda: schedule)
    assert verify.max_pass_rows() == rows
