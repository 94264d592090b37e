"""Faults of one request: it ends with an error that says what happened; the server lives on."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT

logger = logging.getLogger(__name__)


def nan_rows(logits: torch.Tensor) -> list[bool]:
    """Which rows of logits [n, vocab] hold a NaN. Their NaNs become 0, so that sampling the
    other rows of the same tensor cannot fail."""
    # A NaN anywhere makes the row's sum NaN: one reduction, no [n, vocab] temporary.
    bad = torch.isnan(logits.sum(dim=-1))
    flags = bad.tolist()
    if any(flags):
        # Inf - Inf is NaN too, and legal where tokens are masked out: look again at those rows.
        bad = torch.isnan(logits[bad]).any(dim=-1)
        rows = [i for i, flag in enumerate(flags) if flag]
        flags = [False] * len(flags)
        for row, is_nan in zip(rows, bad.tolist(), strict=True):
            flags[row] = is_nan
        torch.nan_to_num_(logits, nan=0.0, posinf=float("inf"), neginf=float("-inf"))
    return flags


def end_request(req: Any, reason: str) -> None:
    """End a request with an error; SGLang acts on it when it processes the result."""
    logger.error("PARSE: request %s ends: %s", req.rid, reason)
    req.to_finish = FINISH_ABORT(
        f"PARSE: {reason}", HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"
    )
