"""What transformers say of an answer: its tokens, and the verdicts of its trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sglang_parse.core.judge import LIKELIHOOD_BIAS, LIKELIHOOD_SCALARS, sigmoid
from support.client import parse_info
from support.heads import rows_of
from support.reference import Case, separate_verdicts


def reference_verdicts(
    model: Any, context: Sequence[int], output: Sequence[int], record: dict[str, Any]
) -> Any:
    """Computes the verdicts of one trace record with plain transformers, one prompt per prefix.

    Args:
        model: the target, from transformers.
        context: the prompt's tokens.
        output: the answer's tokens.
        record: one round of ``meta_info["parse"]["trace"]``.
    """
    return separate_verdicts(
        model,
        Case(
            context_ids=(*context, *output[: record["output_start"]]),
            draft_ids=tuple(record["draft_token_ids"]),
            prefix_ends=tuple(record["prefix_ends"]),
            question_ids=tuple(map(tuple, record["question_token_ids"])),
            accept_id=record["accept_token_id"],
            reject_id=record["reject_token_id"],
        ),
    )


def likelihoods(
    model: Any, context: Sequence[int], output: Sequence[int], record: dict[str, Any]
) -> list[float]:
    """The same of the default likelihood, in one forward."""
    before = [*context, *output[: record["output_start"]]]
    ends = record["prefix_ends"]
    rows = rows_of(model, before, record["draft_token_ids"][: ends[-1]], ())
    on_logprob, on_entropy = LIKELIHOOD_SCALARS
    scores = on_logprob * rows.logprobs + on_entropy * rows.entropies + LIKELIHOOD_BIAS
    return [sigmoid(scores[:end].min()) for end in ends]


def assert_likelihoods(model: Any, prompt: Sequence[int], answer: dict[str, Any]) -> int:
    """Compares all verdicts of a traced answer; returns how many there are."""
    trace = parse_info(answer)["trace"]
    for record in trace:
        expected = likelihoods(model, prompt, answer["output_ids"], record)
        assert record["verdicts"] == pytest.approx(expected, abs=1e-4)
    return sum(len(record["prefix_ends"]) for record in trace)


def assert_chosen(model: Any, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Every token of a greedy answer is the one that transformers choose."""
    with torch.no_grad():
        chosen = model(torch.tensor([[*prompt, *output]])).logits[0].argmax(-1)
    assert chosen[len(prompt) - 1 : -1].tolist() == [*output]
