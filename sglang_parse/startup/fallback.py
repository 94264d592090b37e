"""Fallback to plain decoding for requests that PARSE cannot serve faithfully."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sglang.srt.sampling.sampling_params import SamplingParams

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
        lambda req: (
            any(
                getattr(req.sampling_params, name) is not None
                for name in ("json_schema", "regex", "ebnf", "structural_tag")
            )
            or req.grammar is not None
        ),
        "drafts do not follow it",
    ),
    (
        "penalties",
        lambda req: (
            req.sampling_params.frequency_penalty
            or req.sampling_params.presence_penalty
            or req.sampling_params.repetition_penalty != 1.0
        ),
        "drafts do not follow them",
    ),
    (
        "min_new_tokens",
        lambda req: req.sampling_params.min_new_tokens,
        "drafts do not follow it",
    ),
    ("logit_bias", lambda req: req.sampling_params.logit_bias, "drafts do not follow it"),
    (
        "custom logit processor",
        lambda req: req.custom_logit_processor,
        "drafts do not follow it",
    ),
    (
        "multimodal input",
        lambda req: req.multimodal_inputs,
        "the draft model does not see it",
    ),
    (
        "input embeddings",
        lambda req: req.input_embeds is not None,
        "the draft model has other embeddings",
    ),
    (
        "LoRA",
        lambda req: req.lora_id,
        "SGLang's LoRA kernels do not support the rows of a verify pass",
    ),
)


def unsupported_feature(req: Any) -> str:
    """Returns the feature for which a request needs plain decode steps; "" for none."""
    return next((reason for reason, asks, _ in _PLAIN_REASONS if asks(req)), "")


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
