"""Faults: what ends a request, and what ends the server.

- NaN logits end the request of their row. The target's own are checked, before a request's
  parameters adjust them.
- An exception in what is done for one request on the host (its grammar, its questions, its sources,
  its commit) ends that request. Each rank does the same, so that all ranks end it.
- An exception in a draft model's forward ends the requests in it. The server lives on: the forward
  wrote only draft KV after the committed tokens, changed no allocation, and the target's tokens do
  not depend on draft KV. Incomplete draft KV stays out of the radix cache.
- An exception in a target forward ends the server, as without PARSE: later tokens depend on the
  state it leaves. So do a broken device, repeated failures of the draft model, and exceptions on
  one of several ranks, for which the others would wait.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from http import HTTPStatus

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_parse.core.block import NO_TOKEN
from sglang_parse.core.request import NAN_CAUSE, NAN_FIX, NAN_IN_TARGET, RequestState
from sglang_parse.engine.broadcast import is_first_rank
from sglang_parse.engine.sglang_types import Req

logger = logging.getLogger(__name__)

NO_LOGIT = -2
"""In place of a token, where adjusted logits hold nothing finite."""
NO_LOGITS = "its sampling parameters or its grammar leave no finite logit"
DRAFT_MODEL = "the draft model"
EAGLE_HEAD, MTP_LAYER = "the EAGLE-3 head", "the MTP layer"
MAX_DRAFT_FAILURES = 3
"""Consecutive failures of a draft model after which the server ends."""


class DraftFailure(RuntimeError):
    """The draft model's forward raised, and the server cannot go on."""


class DraftGuard:
    """Contains exceptions of a server's draft models where that is safe.

    Args:
        num_ranks: tensor-parallel ranks; with more than one nothing is contained.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._failures_in_a_row: Counter[str] = Counter()

    @contextmanager
    def contain(
        self, reqs: Iterable[Req], *, model: str = DRAFT_MODEL, ends_failures: bool = False
    ) -> Iterator[None]:
        """Runs a forward of a draft model; an exception ends ``reqs``.

        Args:
            reqs: the requests whose draft KV it writes; iterated only after an exception.
            model: its name in logs.
            ends_failures: success resets the model's count of consecutive failures.

        Raises:
            DraftFailure: the server cannot go on; the text gives the reason.
        """
        try:
            yield
        except Exception as error:
            logger.exception("PARSE: %s's forward failed", model)
            self._failures_in_a_row[model] += 1
            if reason := self._why_fatal(error, self._failures_in_a_row[model]):
                raise DraftFailure(f"PARSE: {model} failed ({error!r}); {reason}") from error
            for req in reqs:
                # Its draft KV is incomplete: later turns would draft from garbage.
                req.skip_radix_cache_insert = True
                if not req.finished() and not req.parse_state.policy.is_plain:
                    req.parse_state.fail(f"{model} failed: {error!r}")
        else:
            if ends_failures:
                self._failures_in_a_row[model] = 0

    def _why_fatal(self, error: Exception, failures_in_a_row: int) -> str:
        if isinstance(error, torch.AcceleratorError):
            return "the device is unusable from here on"
        if self.num_ranks > 1:
            return f"the other {self.num_ranks - 1} ranks wait for this one"
        if failures_in_a_row >= MAX_DRAFT_FAILURES:
            return f"{failures_in_a_row} times in a row"
        return ""


@contextmanager
def contain_request(state: RequestState | None, what: str) -> Iterator[None]:
    """An exception in what is done for one request ends that request; None if it has ended.

    Its text may quote what the client wrote, so only its kind and place are logged.
    """
    try:
        yield
    except torch.AcceleratorError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, others are served on
        places = "".join(traceback.format_tb(error.__traceback__))
        logger.error("PARSE: %s failed: %s at\n%s", what, type(error).__name__, places)
        if state is not None:
            state.fail(f"{what} failed: {type(error).__name__}")


def nan_rows(logits: torch.Tensor) -> torch.Tensor:
    """Finds rows of logits [n, vocab] with a NaN, and resets them: bool [n]."""
    # The largest logit of a row is NaN if any is: one reduction, no [n, vocab] temporary.
    return reset_rows(logits, torch.isnan(logits.amax(dim=-1)))


def mark_faults(
    tokens: torch.Tensor, is_bad: torch.Tensor, is_empty: torch.Tensor | None = None
) -> torch.Tensor:
    """int64 [n] the rows' ``tokens``; ``NO_TOKEN`` where logits held a NaN, and ``NO_LOGIT`` where
    adjusted ones held nothing finite."""
    tokens = tokens.to(torch.int64)
    if is_empty is not None:
        tokens = tokens.masked_fill(is_empty, NO_LOGIT)
    return tokens.masked_fill(is_bad, NO_TOKEN)


def fault_of(tokens: Collection[int | None]) -> str:
    """Why marked ``tokens`` mean nothing; empty if they do."""
    return NAN_IN_TARGET if NO_TOKEN in tokens else NO_LOGITS if NO_LOGIT in tokens else ""


def reset_rows(logits: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
    """Sets rows of logits [n, vocab] to 0, without a device sync, so that sampling the other rows
    cannot fail; returns ``bad``, bool [n]."""
    if logits.device.type != "cpu" or bad.any():
        logits.masked_fill_(bad[:, None], 0)
    return bad


@cache
def _explain_nan() -> None:
    """Says it once per server; SGLang's warm-up is the first request."""
    logger.error(
        "PARSE: the target answers NaN, where stock SGLang would write its first token ('!!!!'). "
        "If most requests end so, %s. Fix: %s",
        NAN_CAUSE,
        NAN_FIX,
    )


def end_request(req: Req, reason: str) -> None:
    """Ends a request with an error when SGLang processes the result."""
    logger.error("PARSE: request %s ends: %s", req.rid, reason)
    if reason == NAN_IN_TARGET and is_first_rank():
        _explain_nan()
    req.skip_radix_cache_insert = True  # its KV may hold NaN, or lack the draft's part
    req.to_finish = FINISH_ABORT(
        f"PARSE: {reason}", HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"
    )
