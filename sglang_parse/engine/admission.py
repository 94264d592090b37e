"""Admission: decides how a request is served, before SGLang looks up its prompt in the radix cache.

With an EAGLE-3 head or MTP layer there are two kinds of KV, with and without the head's in the same
slots. A request that the head runs for must not hit a prefix without it. So the other requests use
a separate part of the radix cache, by SGLang's ``extra_key``.
"""

from __future__ import annotations

from sglang.srt.runtime_context import get_disagg, get_serving

from sglang_parse.core.judge import LIKELIHOOD
from sglang_parse.core.options import RequestOptions
from sglang_parse.core.phases import RequestPolicy
from sglang_parse.core.setting import ConfigError
from sglang_parse.engine.logits.adjust import Adjustment
from sglang_parse.engine.parts import Engine
from sglang_parse.engine.requests import stop_ids_of
from sglang_parse.engine.sglang_types import Req
from sglang_parse.startup import fallback

BYPASS_KEY = "parse:without-head"
"""Prefix of the ``extra_key`` of requests that the head does not run for."""

REFUSED = RequestPolicy(threshold=2.0, plain_reason="refused")
"""Of a request that SGLang ends after one token."""


def admit(engine: Engine, req: Req) -> None:
    """Sets ``parse_policy`` of a request that joins the waiting queue, also after a retraction."""
    if getattr(req, "parse_policy", None) is not None:
        if getattr(req, "parse_state", None) is not None:
            engine.sources.retract(req)
        return
    options = _options_of(engine, req)
    policy = req.parse_policy = policy_for(engine, req, options)  # before it gets a key
    engine.sources.receive(req, options)
    # Requests with an adapter use a separate part of the radix cache anyway.
    if engine.eagle is not None and not policy.uses_eagle and not req.lora_id:
        req.extra_key = "|".join(filter(None, (BYPASS_KEY, req.extra_key)))
        engine.counters.count("eagle_bypassed_requests_total")


def _options_of(engine: Engine, req: Req) -> RequestOptions:
    """Reads a request's options; a bad one, of a request that bypassed SGLang's tokenizer manager,
    ends it with a 400."""
    config = engine.config
    try:
        return RequestOptions.of_request(
            req.sampling_params.custom_params,
            config,
            host=get_serving().host,
            vocab_size=req.vocab_size,
            returns_logprobs=req.return_logprob,
            prefills=get_disagg().disaggregation_mode == "null",
        )
    except ConfigError as error:
        req.set_finish_with_abort(f"PARSE: {error}")
        return RequestOptions(enabled=False, threshold=config.accept_threshold)


def finish(engine: Engine, req: Req) -> None:
    """Keeps a finished answer, and observes how much of it needed decode steps."""
    state = req.parse_state
    engine.sources.finish(req)
    if engine.eagle is not None and not state.policy.is_plain and not req.lora_id:
        num_prompt = len(req.origin_input_ids) - req.cached_tokens
        engine.controller.observe_answer(
            state.draft_key, num_prompt + len(state.output_ids), state.num_decoded
        )


def policy_for(engine: Engine, req: Req, options: RequestOptions) -> RequestPolicy:
    config, certified = engine.config, engine.certified
    feature = fallback.unsupported_feature(req)
    plain_reason = feature if options.enabled else "switched off"
    is_adjusted = Adjustment.adjusts(req)
    uses_eagle = _uses_eagle(engine, req, options, is_plain=bool(plain_reason))
    proposer = config.proposer if uses_eagle and not feature else "none"
    # What a head was trained on and a question was chosen with are the base weights.
    sets_threshold = "threshold" in options.model_fields_set
    may_judge = not req.lora_id or config.judge_name == LIKELIHOOD or sets_threshold
    return RequestPolicy(
        threshold=options.threshold,
        # Given drafts are verified as they are.
        strict=() if plain_reason or options.draft_token_ids else options.strict,
        judge=config.judge_name if may_judge and not plain_reason else None,
        adapter=req.lora_id or "",
        keep_trace=options.trace,
        keep_hidden_states=options.hidden_states,
        draft_token_ids=() if plain_reason else tuple(options.draft_token_ids),
        always_drafts=options.drafting == "always",
        plain_reason=plain_reason,
        proposer=proposer if config.proposer else "",
        uses_eagle=uses_eagle,
        allow_async_decode=not feature and not is_adjusted,
        is_adjusted=is_adjusted,
        stop_ids=stop_ids_of(req),
        certified=certified.covers(
            options.threshold,
            greedy=req.sampling_params.top_k <= 1,
            # It is about the base weights, and about drafts and choices that nothing adjusts.
            plain=bool(plain_reason or req.lora_id or is_adjusted),
        ),
        fingerprint=certified.fingerprint.model_dump() if options.trace else None,
    )


def _uses_eagle(engine: Engine, req: Req, options: RequestOptions, *, is_plain: bool) -> bool:
    """Whether the head runs for the request: for what it saves this request, or for others that may
    find its KV in the radix cache or in their session. It does not see images."""
    if engine.eagle is None or req.lora_id or req.multimodal_inputs:
        return False
    if is_plain or req.session is not None:
        return True
    return engine.controller.uses_eagle((options.threshold, ""))
