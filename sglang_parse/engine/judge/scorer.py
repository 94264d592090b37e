"""Verdict heads on the target's device; ``core.judge`` has the formulas."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput

from sglang_parse.core.judge import (
    LIKELIHOOD_BIAS,
    LIKELIHOOD_SCALARS,
    WEIGHTS,
    JudgeFile,
    Pooling,
    pooled_scores,
    sigmoid,
)
from sglang_parse.engine.judge import likelihood_kernel
from sglang_parse.engine.logits.rows import pieces

MIN_LOGPROB = -1e4
"""Keeps a product with a weight of 0 finite."""


@dataclass(frozen=True, slots=True)
class CapturedLayers:
    """Hidden states of several layers in one tensor, [rows, len(layers) * hidden_size]; behind them
    the last ones, if they are kept for an MTP layer.

    Attributes:
        layers: ascending.
    """

    layers: tuple[int, ...]
    hidden_size: int

    @property
    def width(self) -> int:
        """Columns of the layers."""
        return len(self.layers) * self.hidden_size

    @classmethod
    def configure(cls, runner: Any, layers: Iterable[int]) -> CapturedLayers:
        """Makes the target capture the outputs of these layers; before its attention backends.

        Args:
            runner: the target's model runner.
        """
        captured = cls(tuple(sorted({*layers})), runner.model_config.hidden_size)
        config = runner.spec_aux_config
        is_told = hasattr(runner.model, "set_eagle3_layers_to_capture")
        has_other = hasattr(runner.model, "set_dflash_layers_to_capture")
        config.eagle_use_aux_hidden_state = is_told or not has_other
        config.eagle_aux_hidden_state_layer_ids = list(captured.layers)
        # DeepSeek's classes take what they are told for EAGLE-3 as the layers before, unless it
        # starts with 1. This is told after it, and taken as it is. Nemotron and LFM2 have only it.
        if has_other and (runner.use_mla_backend or not is_told):
            config.dflash_use_aux_hidden_state = True
            config.dflash_target_layer_ids = list(captured.layers)
        return captured

    def keep_last(self, model: torch.nn.Module) -> torch.Tensor:
        """Makes the target return its last hidden states, too: int64 [hidden_size] their columns.
        SGLang keeps them on servers that return layers to clients."""
        for module in model.modules():
            if isinstance(module, LogitsProcessor):
                module.keep_last_hidden_states = True
        return torch.arange(self.width, self.width + self.hidden_size)

    def columns(self, layers: Sequence[int]) -> torch.Tensor:
        """int64 [len(layers) * hidden_size] columns of these layers."""
        starts = [self.layers.index(layer) * self.hidden_size for layer in layers]
        return torch.cat([torch.arange(start, start + self.hidden_size) for start in starts])


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores draft tokens: the likelihood, or a trained verdict head.

    Attributes:
        weights: fp32 [3, width] of h before a token, at it, and at a prefix's end.
        scalars: fp32 [2] of log-probability and entropy; ``bias``: added to a token's score.
        columns: int64 [width] what it reads of the captured hidden states; None for nothing.
    """

    pooling: Pooling
    weights: torch.Tensor
    scalars: torch.Tensor
    bias: float
    columns: torch.Tensor | None

    @classmethod
    def likelihood(cls, device: str) -> Scorer:
        """The one that needs no training."""
        scalars = torch.tensor(LIKELIHOOD_SCALARS, device=device)
        return cls("worst-token", torch.zeros(3, 0), scalars, LIKELIHOOD_BIAS, None)

    @classmethod
    def load(
        cls, folder: str, file: JudgeFile, captured: CapturedLayers | None, device: str
    ) -> Scorer:
        """Loads a trained head, which reads layers only if some are captured."""
        tensors = load_file(f"{folder}/{WEIGHTS}")
        weights = torch.zeros(3, tensors["weights"].shape[1])
        weights[: file.num_weights] = tensors["weights"]
        return cls(
            pooling=file.pooling,
            weights=weights.to(device),
            scalars=tensors["scalars"].float().to(device),
            bias=float(tensors["bias"]),
            columns=captured.columns(file.layers).to(device) if captured and file.layers else None,
        )

    def scores(self, hidden: torch.Tensor | None, likelihoods: torch.Tensor) -> torch.Tensor:
        """Scores rows.

        Args:
            hidden: [rows, captured width]; None if nothing is captured.
            likelihoods: fp32 [rows, 2] as ``next_likelihoods`` returns them.

        Returns:
            fp32 [rows, 2] each row's score, meaningless in a request's first row, and its
            ``weights[2] . h``.
        """
        before = likelihoods @ self.scalars
        at = end = torch.zeros_like(before)
        if self.columns is not None and hidden is not None:
            dots = hidden[:, self.columns].float() @ self.weights.T
            before, at, end = before + dots[:, 0], dots[:, 1], dots[:, 2]
        return torch.stack([before.roll(1) + at + self.bias, end], dim=-1)

    def verdicts(self, scores: Sequence[Sequence[float]], ends: Sequence[int]) -> list[float]:
        """[len(ends)] verdicts on prefixes, from the ``scores`` of a request's rows."""
        tokens, at_ends = zip(*(row[:2] for row in scores[1:]), strict=True)
        return [*map(sigmoid, pooled_scores(self.pooling, tokens, at_ends, ends))]


def next_likelihoods(
    logits: torch.Tensor, rows: torch.Tensor | None, next_ids: torch.Tensor
) -> torch.Tensor:
    """fp32 [len(next_ids), 2] log-probability of the token that follows, and entropy in nats.

    Args:
        logits: [n, vocab], not changed.
        rows: int64 indices into ``logits``; None for all of them.
        next_ids: int64 the tokens that follow.
    """
    num_rows = len(next_ids)
    found = torch.empty(num_rows, 2, dtype=torch.float32, device=logits.device)
    if likelihood_kernel.serves(logits):
        likelihood_kernel.write_likelihoods(found, logits, rows, next_ids, MIN_LOGPROB)
        return found
    for piece in pieces(num_rows, logits.shape[1]):
        some = logits[piece] if rows is None else logits[rows[piece]]
        logprobs = some.float().log_softmax(dim=-1)
        found[piece, 0] = logprobs.gather(1, next_ids[piece, None])[:, 0]
        found[piece, 1] = torch.special.entr(logprobs.exp()).sum(dim=-1)
    # NaN where a request's parameters leave one infinite logit, or none that is finite.
    return found.nan_to_num_(nan=MIN_LOGPROB).clamp_(min=MIN_LOGPROB)


def hidden_states_of(output: LogitsProcessorOutput, *, copied: bool = False) -> torch.Tensor | None:
    """[rows, width] what a target forward captured, if it did; ``copied``: in memory of its own."""
    hidden, last = output.hidden_states, output.last_hidden_states
    if hidden is None or last is None:
        return hidden.clone() if copied and hidden is not None else hidden
    return torch.cat([hidden, last], dim=-1)


def encode_hidden_states(hidden: torch.Tensor, captured: CapturedLayers) -> dict[str, Any]:
    """Returns layers' hidden states [rows, >= their width] as plain data: raw little-endian bytes
    in base64."""
    hidden = hidden[:, : captured.width]
    raw = hidden.contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return {
        "layers": list(captured.layers),
        "dtype": str(hidden.dtype).removeprefix("torch."),
        "shape": list(hidden.shape),
        "data": base64.b64encode(raw).decode("ascii"),
    }
