"""Faults: what ends a request, and what ends the server.

- NaN logits end the request whose row they are in.
- An exception in the draft model's forward ends the requests in it. The server can live on: that
  forward wrote draft KV only, behind what is committed, changed no slot count, and the target's
  tokens never depend on draft KV. What is incomplete stays out of the radix cache.
- An exception in the target's forward ends the server, as it does without PARSE: every later
  token depends on state that nobody can vouch for. So do a broken device, a draft model that
  fails again and again, and any exception where other ranks would wait for this one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT

logger = logging.getLogger(__name__)

NAN_IN_TARGET = "NaN in the target model's logits"
"""Why a request ends whose row the target cannot compute."""
MAX_DRAFT_FAILURES = 3
"""Failures in a row of the draft model after which the server ends: it would answer nothing."""


class DraftFailure(RuntimeError):
    """The draft model's forward raised, and the server cannot live on."""


class DraftGuard:
    """Contains exceptions of the draft model's forwards where that is provably safe.

    Args:
        model: whose forwards, in words.
        num_ranks: processes that run this model together. With more than one, the others wait
            for this one's part of the forward: nothing is contained.
    """

    def __init__(self, num_ranks: int, model: str = "the draft model") -> None:
        self.num_ranks = num_ranks
        self.model = model
        self.failures_in_a_row = 0

    @contextmanager
    def contain(self, reqs: Iterable[Any], *, is_burst: bool = False) -> Iterator[None]:
        """Run a forward of the draft model; if it raises, that ends ``reqs``.

        Args:
            reqs: the requests whose draft KV it writes; iterated only after an exception.
            is_burst: success ends a row of failures; that of a prefill says little.

        Raises:
            DraftFailure: the server cannot live on; the text says why.
        """
        try:
            yield
        except Exception as error:
            logger.exception("PARSE: %s's forward failed", self.model)
            self.failures_in_a_row += 1
            if reason := self._why_fatal(error):
                raise DraftFailure(f"PARSE: {self.model} failed ({error!r}); {reason}") from error
            for req in reqs:
                _give_up_draft_kv(req, f"{self.model} failed: {error!r}")
        else:
            if is_burst:
                self.failures_in_a_row = 0

    def _why_fatal(self, error: Exception) -> str:
        if isinstance(error, torch.AcceleratorError):
            return "the device is unusable from here on"
        if self.num_ranks > 1:
            return f"the other {self.num_ranks - 1} ranks wait for this one"
        if self.failures_in_a_row >= MAX_DRAFT_FAILURES:
            return f"{self.failures_in_a_row} times in a row"
        return ""


def _give_up_draft_kv(req: Any, reason: str) -> None:
    """End a request whose draft KV is incomplete, unless it no longer needs a draft.

    Its tokens stay out of the radix cache, or later turns would draft from garbage.
    """
    req.skip_radix_cache_insert = True
    if not req.finished() and not req.parse_state.policy.is_plain:
        req.parse_state.fail(reason)


def nan_rows(logits: torch.Tensor) -> torch.Tensor:
    """Which rows of logits [n, vocab] hold a NaN: bool [n] on their device.

    Those rows become 0, so that sampling the other rows of the same tensor cannot fail. Without a
    wait for the device; on a CPU, where looking is free, only what must be written is written.
    """
    # The largest logit of a row is NaN if any is: one reduction, no [n, vocab] temporary.
    bad = torch.isnan(logits.amax(dim=-1))
    if logits.device.type != "cpu" or bad.any():
        logits.masked_fill_(bad[:, None], 0)
    return bad


def end_request(req: Any, reason: str) -> None:
    """End a request with an error; SGLang acts on it when it processes the result."""
    logger.error("PARSE: request %s ends: %s", req.rid, reason)
    req.skip_radix_cache_insert = True  # its KV may hold NaN, or lack the draft's part
    req.to_finish = FINISH_ABORT(
        f"PARSE: {reason}", HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"
    )
