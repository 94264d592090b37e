"""Fallback to plain decoding for requests that PARSE cannot serve faithfully."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_parse.core.config import ParseConfig, RequestOptions

# (reason, whether a request has it)
_PLAIN_REASONS: tuple[tuple[str, Callable[[Any], object]], ...] = (
    ("log probabilities", lambda req: req.return_logprob),
    ("sampling mask", lambda req: req.return_sampling_mask),
    ("hidden states", lambda req: req.return_hidden_states),
    (
        "grammar",
        lambda req: (
            req.grammar is not None
            or req.sampling_params.json_schema is not None
            or req.sampling_params.regex is not None
            or req.sampling_params.ebnf is not None
            or req.sampling_params.structural_tag is not None
        ),
    ),
    (
        "penalties",
        lambda req: (
            req.sampling_params.frequency_penalty
            or req.sampling_params.presence_penalty
            or req.sampling_params.repetition_penalty != 1.0
        ),
    ),
    ("min_new_tokens", lambda req: req.sampling_params.min_new_tokens),
    ("logit_bias", lambda req: req.sampling_params.logit_bias),
    ("custom logit processor", lambda req: req.custom_logit_processor),
    ("multimodal input", lambda req: req.multimodal_inputs),
    ("input embeddings", lambda req: req.input_embeds is not None),
    ("LoRA", lambda req: req.lora_id),
)


def unsupported_feature(req: Any) -> str:
    """Returns the feature for which a request needs plain decode steps; "" for none."""
    return next((reason for reason, asks in _PLAIN_REASONS if asks(req)), "")


def plain_reason(feature: str, options: RequestOptions) -> str:
    """Returns why a request with this feature is served by plain decoding; "" if it is not."""
    return feature if options.enabled else "switched off"


def decode_accelerator(feature: str, config: ParseConfig, *, uses_eagle: bool) -> str:
    """Returns ``RequestPolicy.decode_accelerator``."""
    if not config.uses_eagle3:
        return ""
    return "eagle3" if uses_eagle and not feature else "none"
