"""Fallback to plain decoding for requests that PARSE cannot serve faithfully."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

# (reason in ``meta_info``, whether a request has it, why it is served by plain decoding)
_PLAIN_REASONS: tuple[tuple[str, Callable[[Any], object], str], ...] = (
    (
        "sampling mask",
        lambda req: req.return_sampling_mask,
        "it lists the tokens that SGLang's sampler drew from; accepted draft tokens are not drawn",
    ),
    (
        "hidden states",
        lambda req: req.return_hidden_states,
        "SGLang returns those of every row of a forward, and verify passes have rejected rows",
    ),
    (
        "grammar",
        lambda req: req.grammar is not None and not can_fork_grammars(),
        "of the grammar backends, only xgrammar and llguidance can go ahead along a draft",
    ),
    (
        "custom logit processor",
        lambda req: req.custom_logit_processor and not is_pure(req.custom_logit_processor),
        "a draft asks for several rows at once; its class does not say `is_pure = True`",
    ),
    ("multimodal input", lambda req: req.multimodal_inputs, "the draft model does not see it"),
    (
        "input embeddings",
        lambda req: req.input_embeds is not None,
        "the draft model has other embeddings",
    ),
)


def can_fork_grammars() -> bool:
    """Whether the server's grammar backend can go ahead of a request, along its draft."""
    return get_exec().kernel.grammar_backend in ("xgrammar", "llguidance")


def unsupported_feature(req: Any) -> str:
    """Returns the feature for which a request needs plain decode steps; "" for none."""
    return next((reason for reason, asks, _ in _PLAIN_REASONS if asks(req)), "")


def is_pure(processor: str) -> bool:
    """Whether a serialized custom logit processor depends on logits, parameters and the request's
    tokens only: SGLang's own do, and those whose class says ``is_pure = True``."""
    kind = type(CustomLogitProcessor.from_str(processor))
    return kind.__module__ == CustomLogitProcessor.__module__ or getattr(kind, "is_pure", False)
