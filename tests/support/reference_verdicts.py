"""A trace's verdicts by the reference implementation: one prompt per prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.reference import Case, separate_verdicts


def reference_verdicts(
    model: Any, context: Sequence[int], output: Sequence[int], record: dict[str, Any]
) -> Any:
    """Computes the verdicts of one trace record with plain transformers.

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
