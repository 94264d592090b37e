"""A chat's messages reach the scheduler, for a server that drafts (ledger: chat_messages)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang.srt.managers import io_struct

from sglang_parse.core.config import ParseConfig
from sglang_parse.patches.base import Patch, Registration, Value, after

_MANAGERS = "sglang.srt.managers"
_TOKENIZER = f"{_MANAGERS}.tokenizer_manager.TokenizerManager"


class ParseTokenizedGenerateReqInput(  # type: ignore[call-arg]
    io_struct.TokenizedGenerateReqInput, kw_only=True
):
    """SGLang's, with a chat's (role, text) pairs. No API has this field."""

    parse_messages: list[tuple[str, str]] = []


class ParseBatchTokenizedGenerateReqInput(  # type: ignore[call-arg]
    io_struct.BatchTokenizedGenerateReqInput, kw_only=True
):
    """SGLang's, of ``ParseTokenizedGenerateReqInput``."""

    batch: list[ParseTokenizedGenerateReqInput]


_TYPES = ParseTokenizedGenerateReqInput, ParseBatchTokenizedGenerateReqInput


def chat_texts(messages: Iterable[Any]) -> list[tuple[str, str]]:
    """Returns (role, text) of each of a chat's messages, for another server that drafts: it renders
    them with its own chat template. Text parts are joined as SGLang joins them; images, tools and
    all other fields are left out."""
    return [(one.role, _text(one.content)) for one in messages]


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return " ".join(part.text for part in content if part.type == "text")


def _read(converted: tuple[Any, Any], _self: Any, request: Any, *_: Any, **__: Any) -> None:
    if ParseConfig.from_env().draft_url:
        converted[0].parse_messages = chat_texts(request.messages)


def _copy_messages(copied: Any, given: Any) -> None:
    copied.parse_messages = getattr(given, "parse_messages", [])


def _of_batch(one: Any, self: Any, _index: int) -> None:
    _copy_messages(one, self)


def _tokenized(tokenized: Any, _self: Any, obj: Any, *_: Any, **__: Any) -> None:
    if isinstance(tokenized, ParseTokenizedGenerateReqInput):  # not of an embedding
        _copy_messages(tokenized, obj)


def _received(req: Any, _self: Any, recv_req: Any, *_: Any, **__: Any) -> None:
    _copy_messages(req, recv_req)


PATCH = Patch(
    "chat_messages",
    {
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat"
        "._convert_to_internal_request": after(_read),
        f"{_MANAGERS}.io_struct.GenerateReqInput.__getitem__": after(_of_batch),
        f"{_TOKENIZER}._create_tokenized_object": after(_tokenized),
        f"{_TOKENIZER}.tokenized_generate_req_type": Value(_TYPES[0]),
        f"{_TOKENIZER}.batch_tokenized_generate_req_type": Value(_TYPES[1]),
        f"{_MANAGERS}.io_struct.hook_custom_types": Registration(
            lambda: io_struct.hook_custom_types(*_TYPES),
            lambda: set(_TYPES) <= {*io_struct._all_types},
        ),
        f"{_MANAGERS}.scheduler.Scheduler._create_generation_req": after(_received),
    },
    why="a server that drafts (`--parse-draft-url`) renders a chat with its own template. The "
    "scheduler, which asks it, gets the target's rendering only, and what it gets beside that "
    "(`custom_params`) any client can write.",
    how="with `--parse-draft-url`, roles and texts of a chat's messages travel in a field of "
    "their own of the tokenized request, and of the scheduler's `Req`. No API has this field.",
    removed_when="a tokenized request has a place for an algorithm's data.",
)
