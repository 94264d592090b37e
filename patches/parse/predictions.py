"""OpenAI's predicted outputs (ledger: predictions)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

from pydantic.fields import FieldInfo
from sglang.srt.entrypoints.openai import protocol
from sglang.srt.runtime_context import get_spec

from sglang_parse.algorithm import names_parse
from sglang_parse.patches.base import Patch, Registration, after, around

_OPENAI = "sglang.srt.entrypoints.openai"
_PREDICTED = (protocol.ChatCompletionRequest, protocol.CompletionRequest)
_SMALLEST = {"model": "m", "messages": [], "prompt": "", "prediction": "x"}
"""A request that each of them accepts."""
_DETAILS = "accepted_prediction_tokens", "rejected_prediction_tokens"
_RESPONSES = (
    *(protocol.CompletionTokensDetails, protocol.UsageInfo),
    *(protocol.ChatCompletionResponse, protocol.ChatCompletionStreamResponse),
    *(protocol.CompletionResponse, protocol.CompletionStreamResponse),
)
"""The model that gets new fields, and those that contain it, from the inside out."""
_SHAPE = 'use {"type": "content", "content": TEXT}, or a list of {"type": "text", "text": TEXT}'
Counts = dict[str, Mapping[str, int]]
"""Request -> ``meta_info["parse"]["prediction"]``; empty where it is served plainly. None without a
prediction."""
_counts: ContextVar[Counts | None] = ContextVar("parse_prediction_counts", default=None)


async def _read_prediction(original: Callable, self: Any, request: Any, raw_request: Any) -> Any:
    """Makes the ``prediction`` of a request its draft."""
    if names_parse(get_spec()) and isinstance(request, _PREDICTED):
        try:
            text = prediction_text(await _prediction(request, raw_request))
            _counts.set(None if text is None else {})
            if text is not None:
                request.custom_params = with_draft(request.custom_params, text)
        except ValueError as error:
            return self.create_error_response(str(error), param="prediction")
    return await original(self, request, raw_request)


async def _prediction(request: Any, raw_request: Any) -> Any:
    """The body's, which FastAPI has parsed: it keeps models without our field where SGLang's HTTP
    server was imported before this patch. A request over gRPC has no body."""
    if not hasattr(raw_request, "json"):
        return request.prediction
    return (await raw_request.json()).get("prediction")


def prediction_text(prediction: object) -> str | None:
    """Returns the text of a request's ``prediction``; None for none.

    Raises:
        ValueError: it has another shape than OpenAI's.
    """
    if prediction is None:
        return None
    if not isinstance(prediction, Mapping) or prediction.get("type") != "content":
        raise ValueError(f"prediction is no object of type content; {_SHAPE} as content")
    content = prediction.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"prediction.content is no text; {_SHAPE}")
    return "".join(_part(part, place) for place, part in enumerate(content))


def _part(part: object, place: int) -> str:
    is_text = isinstance(part, Mapping) and part.get("type") == "text"
    text = part.get("text") if is_text and isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise ValueError(f"prediction.content[{place}] is no text part; {_SHAPE}")
    return text


def with_draft(custom_params: Any, text: str) -> Any:
    """Adds a draft to a request's ``custom_params``; raises ValueError if there is one."""
    params = custom_params or {}
    options = params.get("parse") or {}
    if not isinstance(options, Mapping):
        return custom_params  # rejected with all other options
    if options.get("draft"):
        raise ValueError("prediction is given beside custom_params.parse.draft; leave one out")
    return {**params, "parse": {**options, "draft": text}}


async def _note_counts(
    original: Callable, self: Any, obj: Any, *args: Any, **kwargs: Any
) -> AsyncIterator[Any]:
    """Notes how much of the predictions is in the answers, for the usage that the same task
    computes from them."""
    counts: Counts = {}
    async with aclosing(original(self, obj, *args, **kwargs)) as contents:
        async for content in contents:
            for one in content if isinstance(content, list) else (content,):
                meta_info = one.get("meta_info", {})
                for info in meta_info.get("parse") or ():
                    if "prediction" in info:
                        counts[meta_info["id"]] = info["prediction"]
            if counts:
                _counts.set(counts)
            yield content


def _add_details(usage: Any, *_: Any, **__: Any) -> Any:
    counts = _counts.get()
    if counts is not None:
        details = usage.completion_tokens_details or protocol.CompletionTokensDetails()
        for name in _DETAILS:
            key = name.replace("_prediction", "")
            setattr(details, name, sum(one[key] for one in counts.values()))
        usage.completion_tokens_details = details
    return usage


def _add_fields() -> None:
    for name in _DETAILS:
        protocol.CompletionTokensDetails.__pydantic_fields__[name] = FieldInfo(
            annotation=int, default=0
        )
    for model in _PREDICTED:
        model.__pydantic_fields__["prediction"] = FieldInfo(annotation=Any, default=None)
    for model in (*_PREDICTED, *_RESPONSES):
        model.model_rebuild(force=True)


def _has_fields() -> bool:
    if not all(model(**_SMALLEST).prediction for model in _PREDICTED):
        return False
    details = protocol.CompletionTokensDetails(**dict.fromkeys(_DETAILS, 1))
    usage = protocol.UsageInfo(completion_tokens_details=details)
    shown = usage.model_dump()["completion_tokens_details"]
    return all(shown.get(name) == 1 for name in _DETAILS)


PATCH = Patch(
    "predictions",
    {
        f"{_OPENAI}.serving_base.OpenAIServingBase.handle_request": around(_read_prediction),
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request": around(
            _note_counts
        ),
        f"{_OPENAI}.usage_processor.UsageProcessor.calculate_token_usage": after(_add_details),
        f"{_OPENAI}.protocol.CompletionTokensDetails": Registration(_add_fields, _has_fields),
    },
    why="`prediction` of `/v1/chat/completions` and `/v1/completions` is no field of SGLang's "
    "request models, so it is left out without a word, and the usage of a response has no place "
    "for the two figures that OpenAI returns for it.",
    how="SGLang's request models get the field `prediction`; on PARSE servers, its text becomes "
    "`custom_params.parse.draft`, and a wrong shape is a 400. SGLang's usage model gets the fields "
    "`accepted_prediction_tokens` and `rejected_prediction_tokens`, filled from "
    '`meta_info["parse"]` of the answers to that request. Other servers ignore `prediction`, as '
    "before.",
    removed_when="SGLang has the field, and an algorithm can read it and report its figures.",
)
