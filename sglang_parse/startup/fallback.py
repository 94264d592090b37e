"""Fallback to plain decoding for requests that PARSE cannot serve faithfully."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sglang.srt.sampling.sampling_params import SamplingParams

# (reason, whether a request has it)
_PLAIN_REASONS: tuple[tuple[str, Callable[[Any], object]], ...] = (
    ("log probabilities", lambda req: req.return_logprob),
    ("sampling mask", lambda req: req.return_sampling_mask),
    ("hidden states", lambda req: req.return_hidden_states),
    (
        "grammar",
        lambda req: (
            any(
                getattr(req.sampling_params, name) is not None
                for name in ("json_schema", "regex", "ebnf", "structural_tag")
            )
            or req.grammar is not None
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


@dataclass
class _Ordinary:
    """A request with these sampling parameters and nothing else."""

    sampling_params: SamplingParams

    def __getattr__(self, _name: str) -> None:
        """Everything else is unset."""


def plain_defaults(args: Any, target: Any) -> Iterator[tuple[str, str]]:
    """Finds the server's defaults that make ordinary requests fall back to plain decoding.

    Args:
        args: SGLang's settings.
        target: the target's ``ModelConfig``, which has its generation_config.json.

    Yields:
        (what was found, the fix).
    """
    in_file, flag = target.get_default_sampling_params(), "--preferred-sampling-params"
    others = ", ".join(f"{k} {v}" for k, v in in_file.items() if not _feature_of(k, v))
    drops = f", which also drops the file's {others}" if others else ""
    openai = f"start with --sampling-defaults openai{drops}, or set it in the requests"
    sources = (
        ("the target's generation_config.json", in_file, "chat", openai),
        (flag, args.preferred_sampling_params or {}, "/generate", f"leave it out of {flag}"),
    )
    for where, defaults, requests, fix in sources:
        for name, value in defaults.items():
            if feature := _feature_of(name, value):
                found = f"{name} is {value!r} in {where}: {requests} requests that do not set it"
                yield f"{found} are served by plain decoding ({feature})", fix


def _feature_of(name: str, value: Any) -> str:
    return unsupported_feature(_Ordinary(SamplingParams(**{name: value})))
