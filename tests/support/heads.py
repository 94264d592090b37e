"""Verdict heads with random weights, and their verdicts by plain transformers and NumPy."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from sglang_parse.core.judge import FILE, WEIGHTS
from sglang_parse.startup.certificates import model_digest
from support.calibration import FINGERPRINT
from support.client import parse_info

TOLERANCE = 1e-4
"""Of verdicts of random heads."""


@dataclass(frozen=True)
class HeadShape:
    """What a random head reads; ``bias`` shifts its scores, so that some are below 0."""

    pooling: str
    layers: tuple[int, ...]
    hidden_size: int
    bias: float = 1.0
    scalars: tuple[float, float] = (0.3, 0.2)


def write_head(folder: Path, pair: tuple[Path, Path], shape: HeadShape, scale: float) -> Path:
    """Writes a head for a target and draft.

    Args:
        scale: standard deviation of a hidden state's entries; scores get one of 2 or 3.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows, width = 3 if shape.pooling == "running-mean" else 2, len(shape.layers) * shape.hidden_size
    random = np.random.default_rng(5)
    weights = 2 * random.normal(size=(rows, width)) / (scale * np.sqrt(max(1, width)))
    tensors = {"weights": weights, "scalars": shape.scalars, "bias": [shape.bias]}
    arrays = {name: np.asarray(value, dtype=np.float32) for name, value in tensors.items()}
    save_file(arrays, folder / WEIGHTS)
    digests = {"target": model_digest(str(pair[0])), "draft": model_digest(str(pair[1]))}
    fingerprint = FINGERPRINT.model_copy(update=digests)
    content = {
        "version": 1,
        "pooling": shape.pooling,
        "layers": shape.layers,
        "hidden_size": shape.hidden_size,
        "fingerprint": fingerprint.model_dump(),
        "first_verdicts": [k / 100 for k in range(101)],
    }
    (folder / FILE).write_text(json.dumps(content))
    return folder


@dataclass(frozen=True)
class Rows:
    """The target's output for an anchor and n draft tokens, by plain transformers.

    Attributes:
        hidden: [1 + n, width] of the layers; ``scale``: their standard deviation.
        logprobs, entropies: [n] of the draft tokens.
    """

    hidden: np.ndarray
    logprobs: np.ndarray
    entropies: np.ndarray

    @property
    def scale(self) -> float:
        return float(self.hidden.std())


@torch.no_grad()
def rows_of(
    model: Any, context: Sequence[int], draft: Sequence[int], layers: Sequence[int]
) -> Rows:
    """Args: model: from transformers; context: everything before the draft, the anchor last."""
    ids = torch.tensor([[*context, *draft]])
    output = model(input_ids=ids, output_hidden_states=True)
    start = len(context) - 1
    # Entry 0 is the embedding's output.
    hidden = [output.hidden_states[layer + 1][0, start:] for layer in layers]
    logprobs = output.logits[0, start:-1].double().log_softmax(-1)
    return Rows(
        hidden=torch.cat(hidden, -1).numpy() if hidden else np.zeros((1 + len(draft), 0)),
        logprobs=logprobs.gather(1, torch.tensor(draft)[:, None])[:, 0].numpy(),
        entropies=-(logprobs.exp() * logprobs).sum(-1).numpy(),
    )


def head_verdicts(folder: Path, rows: Rows, ends: Sequence[int]) -> list[float]:
    """The definition in ``core.judge``, written again."""
    pooling = json.loads((folder / FILE).read_text())["pooling"]
    tensors = load_file(folder / WEIGHTS)
    weights, (on_logprob, on_entropy) = tensors["weights"], tensors["scalars"]
    scores = rows.hidden[:-1] @ weights[0] + rows.hidden[1:] @ weights[1] + tensors["bias"]
    scores = scores + on_logprob * rows.logprobs + on_entropy * rows.entropies
    pooled = []
    for end in ends:
        if pooling == "worst-token":
            pooled.append(scores[:end].min())
        else:
            pooled.append(scores[:end].mean() + rows.hidden[end] @ weights[2])
    return [float(1 / (1 + np.exp(-score))) for score in pooled]


def decode_hidden_states(found: dict[str, Any]) -> np.ndarray:
    """A trace's hidden states, [rows, width]."""
    raw = base64.b64decode(found["data"])
    return np.frombuffer(raw, dtype=found["dtype"]).reshape(found["shape"])


def check_verdicts(
    model: Any, folder: Path, layers: tuple[int, ...], prompt: list[int], answer: dict
) -> list[float]:
    """Asserts that every verdict of a head is NumPy's; returns them."""
    found: list[float] = []
    for record in parse_info(answer)["trace"]:
        context = [*prompt, *answer["output_ids"][: record["output_start"]]]
        ends, draft = record["prefix_ends"], record["draft_token_ids"]
        rows = rows_of(model, context, draft[: ends[-1]], layers)
        ours = head_verdicts(folder, rows, ends)
        asked = [bool(ids) for ids in record["question_token_ids"]]
        for verdict, expected, is_asked, mass in zip(
            record["verdicts"], ours, asked, record["verdict_mass"], strict=True
        ):
            assert (mass is not None) == is_asked
            if not is_asked:
                assert verdict == pytest.approx(expected, abs=TOLERANCE)
                found.append(verdict)
    return found
