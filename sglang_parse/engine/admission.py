"""Arrival: how a request is served is decided once, before the radix cache is asked for its prompt.

Beside an EAGLE-3 head there are two kinds of KV: with the head's own in the same slots, and
without. A request that the head reads must not be handed a prefix that it has not read. So those
that it does not read have a part of the radix cache of their own, by SGLang's ``extra_key``.
"""

from __future__ import annotations

from typing import Any

from sglang_parse.core.config import RequestOptions
from sglang_parse.core.phases import RequestPolicy
from sglang_parse.core.request import RequestState
from sglang_parse.engine.batch import stop_ids_of
from sglang_parse.engine.iteration import Engine
from sglang_parse.startup import fallback

UNREAD = "parse:unread-by-the-head"
"""Begins the ``extra_key`` of requests that the head does not read."""


def receive(engine: Engine, req: Any) -> None:
    """A request is about to wait for its prefill, its first or one after a retraction.

    Args:
        engine: the server's.
        req: SGLang's ``Req``; gets ``parse_policy``.
    """
    if getattr(req, "parse_policy", None) is not None:
        return
    terms = req.parse_policy = policy_for(engine, req)
    # An adapter's requests have a part of the cache of their own anyway.
    if engine.head.is_there and not terms.uses_eagle and not req.lora_id:
        req.extra_key = "|".join(filter(None, (UNREAD, req.extra_key)))
        engine.counters.count("eagle_bypassed_requests_total")


def learn(engine: Engine, req: Any) -> None:
    """A request is over: how much of its answer steps wrote."""
    state: RequestState = req.parse_state
    if engine.head.is_there and not state.policy.is_plain:
        num_prompt = len(req.origin_input_ids) - req.cached_tokens
        engine.controller.eagle_gate.observe_answer(
            state.policy.threshold, num_prompt + len(state.output_ids), state.num_stepped
        )


def policy_for(engine: Engine, req: Any) -> RequestPolicy:
    """How a request is served."""
    config, certified = engine.config, engine.certified
    options = RequestOptions.read(req.sampling_params.custom_params, config)
    wish = fallback.special_wish(req)
    plain_reason = fallback.plain_reason(wish, options)
    uses_eagle = _uses_eagle(engine, req, options, is_plain=bool(plain_reason))
    return RequestPolicy(
        threshold=options.threshold,
        keep_trace=options.trace,
        plain_reason=plain_reason,
        decode_accelerator=fallback.decode_accelerator(wish, config, uses_eagle=uses_eagle),
        uses_eagle=uses_eagle,
        allow_async_decode=not wish,
        stop_ids=stop_ids_of(req),
        certified=certified.covers(
            options.threshold, greedy=req.sampling_params.top_k <= 1, plain=bool(plain_reason)
        ),
        fingerprint=certified.fingerprint.model_dump() if options.trace else None,
    )


def _uses_eagle(engine: Engine, req: Any, options: RequestOptions, *, is_plain: bool) -> bool:
    """Whether the server's head, if it has one, reads along: for what it saves this request, or for
    others that may find its KV in the radix cache or in their session."""
    if not engine.head.is_there or req.lora_id:
        return False
    if is_plain or req.session is not None:
        return True
    return engine.controller.uses_eagle(options.threshold)
