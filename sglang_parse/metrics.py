"""What PARSE tells about one request in ``meta_info["parse"]``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any


def response_info(req: Any) -> dict[str, Any]:
    """The JSON object of one finished request; its keys are documented in the README.

    Requests that never reached the worker (aborted while waiting) have zero counters and the
    reason "not started".
    """
    state = getattr(req, "parse_state", None)
    if state is None:
        return {"mode": "plain", "reason": "not started"}
    info: dict[str, Any] = {"mode": "plain" if state.is_plain else "parse"}
    if state.is_plain:
        info["reason"] = state.plain_reason
    info.update(
        {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(state.stats).items()}
    )
    num_visible = len(req.output_ids_through_stop)
    info["accepted_tokens"] -= _accepted_behind_the_stop(req, num_visible)
    info["target_tokens"] = num_visible - info["accepted_tokens"]
    if state.keep_trace:
        info["trace"] = state.trace
    return info


def _accepted_behind_the_stop(req: Any, num_visible: int) -> int:
    """Accepted draft tokens that a stop inside the last run cut off; nobody sees them."""
    num_cut_off = len(req.output_ids) - num_visible
    return max(0, num_cut_off - req.parse_state.target_wrote_last)
