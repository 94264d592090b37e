"""Records of log probabilities: of any rows, in pieces, equal to a softmax of whole rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.compat

VOCAB = 11


def asking(top: int, ids: list[int] | None, temperature: float = 1.0, top_k: int = 1) -> Any:
    return SimpleNamespace(
        return_logprob=True,
        logprob=SimpleNamespace(top_logprobs_num=top, token_ids_logprob=ids),
        sampling_params=SimpleNamespace(temperature=temperature, top_k=top_k),
    )


SILENT = SimpleNamespace(return_logprob=False)
REQS = [asking(2, [7]), SILENT, asking(0, None, 0.5, top_k=9), asking(1, [1, 2, 3])]


@pytest.mark.parametrize("piece_rows", [1, 2, 100])
@pytest.mark.parametrize("is_kept", [False, True])
def test_records(monkeypatch: pytest.MonkeyPatch, piece_rows: int, is_kept: bool):
    from sglang_parse.engine.logits import logprobs
    from sglang_parse.engine.logits.rows import LogitsRows

    monkeypatch.setattr("sglang_parse.engine.logits.rows.PIECE_BYTES", 4 * VOCAB * piece_rows)
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1))
    choices = logits.argmax(-1)
    parts = [
        LogitsRows(REQS[0], 0, 3, after=[4, 5]),
        LogitsRows(REQS[2], 4),
        LogitsRows(REQS[3], 6, 2, after=[0]),
    ]
    asked = logprobs.LogprobRows(parts, REQS, logits.device)
    read_from = logits.clone()
    if is_kept:
        asked.keep(read_from)
        read_from.zero_()
    found = asked.records(read_from, choices.double()).tolist()
    expected = logits.log_softmax(-1)
    expected[4] = (logits[4] / 0.5).log_softmax(-1)
    rows, drafted = [0, 1, 2, 4, 6, 7], [4, 5, None, None, 0, None]
    requested = [[7]] * 3 + [[]] + [[1, 2, 3]] * 2
    for record, row, token, ids in zip(found, rows, drafted, requested, strict=True):
        values = expected[row]
        assert record[0] == pytest.approx(values.max().item())
        if token is not None:
            assert record[1] == pytest.approx(values[token].item())
        top = values.topk(2)
        assert record[2:4] == pytest.approx(top.values.tolist())
        assert record[4:6] == top.indices.tolist()
        assert record[6 : 6 + len(ids)] == pytest.approx(values[ids].tolist())


def test_what_sglang_slices():
    """Places of requests that output less, or do not ask, are empty."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    from sglang_parse.engine.logits.logprobs import write_logprobs

    output = LogitsProcessorOutput(next_token_logits=None)
    tokens = [
        (-0.5, (-0.5, -9.0, -0.5, -1.5, 3, 4, -7.0, 0.0, 0.0)),
        (-2.0, (-0.1, -2.0, -0.1, -2.0, 5, 6, -8.0, 0.0, 0.0)),
    ]
    write_logprobs(output, REQS, {0: tokens}, 2)
    assert output.next_token_logprobs.tolist()[:2] == [[-0.5, -2.0], [0.0, 0.0]]
    for name, first in {
        "next_token_top_logprobs_val": [[-0.5, -1.5], [-0.1, -2.0]],
        "next_token_top_logprobs_idx": [[3, 4], [5, 6]],
        "next_token_token_ids_logprobs_val": [[-7.0], [-8.0]],
    }.items():
        written = [entry.tolist() for entry in getattr(output, name)]
        assert len(written) == 2 * len(REQS)
        assert written[0] == pytest.approx(first[0])
        assert written[1] == pytest.approx(first[1])
        assert not any(written[2:])
    assert output.next_token_token_ids_logprobs_idx == [[7], [7], *[[]] * 6]
