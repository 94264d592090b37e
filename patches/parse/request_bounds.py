"""Values that would crash the server are a 400 (ledger: request_bounds)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, get_type_hints

import torch
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.runtime_context import get_spec
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_parse.algorithm import names_parse
from sglang_parse.core.setting import shown
from sglang_parse.patches.base import Patch, after, around

_MANAGERS = "sglang.srt.managers"
_ANY_VOCAB_SIZE = 1 << 31
"""For SGLang's requests for embeddings, which do not know their model's."""
_TYPES = get_type_hints(SamplingParams)
_FLOATS = [name for name, kind in _TYPES.items() if kind is float]
_INTEGERS = [name for name, kind in _TYPES.items() if kind in (int, int | None)]
_FP32, _MAX_INT32 = torch.finfo(torch.float32), torch.iinfo(torch.int32).max
_ANY_SIZE = ("max_new_tokens", "sampling_seed")
"""Integers that SGLang limits itself; others go into int32 tensors."""
# Logits beyond fp32 are infinite, and probabilities NaN, also after a division by SGLang's smallest
# temperature, 1e-6. Logits of models stay below 1e6.
MAX_LOGIT_BIAS, MIN_REPETITION_PENALTY = 1e30, 1e-20


def prompt_problem(token_ids: Sequence[int], vocab_size: int) -> str:
    """Describes why a prompt's tokens cannot be served, with the fix; "" if they can."""
    if not token_ids:
        return "the prompt has no tokens; send at least one"
    for found in (min(token_ids), max(token_ids)):
        if not 0 <= found < vocab_size:
            place = list(token_ids).index(found)
            return f"input_ids has {found} at place {place}; {_ids(vocab_size)}"
    return ""


def _ids(vocab_size: int) -> str:
    return f"this model's token ids are 0..{vocab_size - 1}"


# A ValueError raised in the next two becomes a 400 in every API of SGLang.


def _check_prompt(_result: None, self: Any, obj: Any, input_ids: Any) -> None:
    if not names_parse(get_spec()):
        return
    vocab_size = self.model_config.vocab_size
    overrides = getattr(obj, "positional_embed_overrides", None)
    if overrides is not None and not isinstance(overrides, PositionalEmbeds):
        raise ValueError("PARSE: positional_embed_overrides cannot be sent as JSON; leave it out")
    if (getattr(obj, "top_logprobs_num", None) or 0) > vocab_size:
        raise ValueError(
            f"PARSE: top_logprobs_num is {obj.top_logprobs_num}; use {vocab_size} at most, one "
            "for each of this model's tokens"
        )
    start = getattr(obj, "logprob_start_len", None)
    if getattr(obj, "return_logprob", False) and start is not None and start < -1:
        raise ValueError(
            f"PARSE: logprob_start_len is {start}; use -1 (the output's tokens only) or more"
        )
    _check_processor(getattr(obj, "custom_logit_processor", None))
    if input_ids is None or obj.contains_mm_input():
        return
    if not input_ids and getattr(obj, "session_params", None):
        return  # the session's earlier tokens are in the scheduler
    if found := prompt_problem(input_ids, vocab_size):
        raise ValueError(f"PARSE: {found}")


def _check_processor(processor: str | None) -> None:
    if not processor:
        return
    try:
        CustomLogitProcessor.from_str(processor)
    except Exception as error:
        raise ValueError(
            f"PARSE: custom_logit_processor cannot be read ({error!r}); send what "
            "CustomLogitProcessor.to_str() returns"
        ) from error


def _check_sampling(_result: None, self: Any, vocab_size: int) -> None:
    if not names_parse(get_spec()):
        return
    for name in (*_INTEGERS, *_FLOATS):
        if found := number_problem(name, getattr(self, name)):
            raise ValueError(f"PARSE: {name} is {shown(getattr(self, name))}; {found}")
    _check_logit_bias(self.logit_bias)
    outside = sorted(id_ for id_ in self.stop_token_ids or () if not 0 <= id_ < vocab_size)
    if self.min_new_tokens > 0 and outside:
        raise ValueError(
            f"PARSE: stop_token_ids has {outside[0]} beside min_new_tokens; {_ids(vocab_size)}"
        )


def number_problem(name: str, value: Any) -> str:
    """Returns the fix for a number that the sampler's tensors cannot hold; "" if they can."""
    if name in _INTEGERS:
        if value is not None and not isinstance(value, Integral):
            return "use a whole number"
        is_held = value is None or name in _ANY_SIZE or value <= _MAX_INT32
        return "" if is_held else f"use {_MAX_INT32} at most"
    if not _is_number(value):
        return "use a number"
    smallest = MIN_REPETITION_PENALTY if name == "repetition_penalty" else _FP32.tiny
    if value == 0 or smallest <= abs(value) <= _FP32.max:  # False for NaN
        return ""
    return f"use {smallest:.3g} to {_FP32.max:.3g}: the sampler computes in fp32"


def _is_number(value: object) -> bool:
    return isinstance(value, Real)


def _check_logit_bias(bias: Any) -> None:
    if not isinstance(bias, Mapping | None):
        raise ValueError(f"PARSE: logit_bias is {shown(bias)}; use an object")
    for token, value in (bias or {}).items():
        if not (_is_number(value) and abs(value) <= MAX_LOGIT_BIAS):
            raise ValueError(
                f"PARSE: logit_bias has {shown(value)} for token {token}; use a number from "
                f"{-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}: the sampler computes in fp32"
            )


def _check_request(original: Callable, req: Any, *args: Any, **kwargs: Any) -> str | None:
    found = ""
    if names_parse(get_spec()) and req.multimodal_inputs is None:
        found = prompt_problem(req.origin_input_ids, req.vocab_size or _ANY_VOCAB_SIZE)
    return f"PARSE: {found}" if found else original(req, *args, **kwargs)


PATCH = Patch(
    "request_bounds",
    {
        f"{_MANAGERS}.tokenizer_manager.TokenizerManager._validate_one_request": after(
            _check_prompt
        ),
        f"{_MANAGERS}.scheduler.validate_input_length": around(_check_request),
        "sglang.srt.sampling.sampling_params.SamplingParams.verify": after(_check_sampling),
    },
    why='a prompt without tokens (`"text": ""` if the tokenizer adds no BOS token), a token id '
    "outside the vocabulary in a prompt, or in `stop_token_ids` with `min_new_tokens`, a "
    "`top_logprobs_num` above the vocabulary size, a `logprob_start_len` below -1, sampling "
    "parameters that no int32 or fp32 tensor can hold (`top_k` 2**40, `logit_bias` 1e39, "
    "`repetition_penalty` 1e-320) or of another type (`max_new_tokens` 4.5), a "
    "`custom_logit_processor` that is none, and `positional_embed_overrides` in JSON pass all of "
    "SGLang's checks, and each ends the whole server with an error in the scheduler; on a GPU with "
    "an assertion.",
    how="further checks next to SGLang's own, on PARSE servers only: they raise a `ValueError`, a "
    "400 in every API (in a stream of `/generate` an event with that code, in SGLang's Ollama API "
    "a 500, as for every bad value there). A batch with such a request is rejected as a whole, as "
    "SGLang does with every bad value in a batch; other HTTP requests are not affected. The "
    "scheduler checks prompts again, for requests that bypass SGLang's tokenizer manager: that one "
    "request ends with a 400. Image placeholders are not checked.",
    upstream="https://github.com/sgl-project/sglang/pull/8383 (ids outside the vocabulary); "
    "the others are not reported. Each ends a stock server, too, speculating or not",
    removed_when="SGLang rejects them itself.",
)
