"""A prompt without tokens, or with ids no model has, is a 400 (ledger: token_ids)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_spec

from sglang_parse.algorithm import NAME
from sglang_parse.patches.base import Hook, hook_patch

_MANAGERS = "sglang.srt.managers"


def problem(token_ids: Sequence[int], vocab_size: int) -> str:
    """What a prompt's tokens cannot be served for, with the fix; "" where they can."""
    if not token_ids:
        return "the prompt has no tokens; send at least one"
    for found in (min(token_ids), max(token_ids)):
        if not 0 <= found < vocab_size:
            return (
                f"input_ids has token id {found} at place {list(token_ids).index(found)}; "
                f"this model's ids are 0..{vocab_size - 1}"
            )
    return ""


def _check_prompt(_result: None, manager: Any, obj: Any, input_ids: Any) -> None:
    # ValueErrors raised here become a 400 in every API of SGLang's.
    if get_spec().speculative_algorithm != NAME or input_ids is None or obj.contains_mm_input():
        return
    if not input_ids and getattr(obj, "session_params", None):
        return  # goes on from its session's tokens; the scheduler has them
    if found := problem(input_ids, manager.model_config.vocab_size):
        raise ValueError(f"PARSE: {found}")


def _check_request(original: Callable, req: Any, *args: Any, **kwargs: Any) -> str | None:
    found = ""
    if get_spec().speculative_algorithm == NAME and req.multimodal_inputs is None:
        found = problem(req.origin_input_ids, req.vocab_size)
    return f"PARSE: {found}" if found else original(req, *args, **kwargs)


PATCH = hook_patch(
    "token_ids",
    {
        f"{_MANAGERS}.tokenizer_manager.TokenizerManager._validate_one_request": Hook(
            _check_prompt, HookType.AFTER, ("self", "obj", "input_ids")
        ),
        f"{_MANAGERS}.scheduler.validate_input_length": Hook(
            _check_request, HookType.AROUND, ("req",)
        ),
    },
    why='a prompt without tokens (`"text": ""` where the tokenizer adds no first token) and a '
    "token id outside the vocabulary pass all of SGLang's checks, and end the whole server: "
    "an IndexError in the logits processor, one in the embedding; on a GPU an assertion.",
    how="beside SGLang's own checks of a prompt's length, on PARSE servers only: what is wrong is "
    "raised as a `ValueError`, a 400 in every API. A batch with such a prompt is refused as a "
    "whole, as SGLang does with every bad value in a batch; other HTTP requests do not notice. "
    "The scheduler looks again, for the roads that do not lead through SGLang's tokenizer "
    "manager: there the one request ends with a 400. Placeholders of images are left alone.",
    upstream="https://github.com/sgl-project/sglang/pull/8383 (ids outside the vocabulary); "
    "the prompt without tokens is not reported. Stock servers end by both, speculating or not",
    removed_when="SGLang refuses such prompts itself.",
)
