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
    if state.keep_trace:
        info["trace"] = state.trace
    return info
