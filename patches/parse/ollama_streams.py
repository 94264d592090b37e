"""The last block of text in Ollama's streams (ledger: ollama_streams)."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from sglang.srt.runtime_context import get_spec

from sglang_parse.algorithm import names_parse
from sglang_parse.patches.base import Patch, around

_SERVING = "sglang.srt.entrypoints.ollama.serving.OllamaServing"


class _TextBeforeEnd:
    """A tokenizer manager whose streams bring text and end in different chunks."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    async def generate_request(self, *args: Any) -> AsyncIterator[dict[str, Any]]:
        sent = 0
        async with aclosing(self._manager.generate_request(*args)) as chunks:
            async for chunk in chunks:
                meta_info, length = chunk["meta_info"], len(chunk["text"])
                if meta_info["finish_reason"] and length > sent:
                    yield {**chunk, "meta_info": {**meta_info, "finish_reason": None}}
                sent = length
                yield chunk


def _stream(original: Callable, self: Any, *args: Any) -> Any:
    if names_parse(get_spec()):
        self = copy.copy(self)
        self.tokenizer_manager = _TextBeforeEnd(self.tokenizer_manager)
    return original(self, *args)


PATCH = Patch(
    "ollama_streams",
    {
        f"{_SERVING}._stream_chat_response": around(_stream),
        f"{_SERVING}._stream_generate_response": around(_stream),
    },
    why="the event that ends a stream of Ollama's API has no text: what the last step brought is "
    "lost. With one token per step that is the last token of an answer that its length ends; PARSE "
    "lost up to a whole accepted draft.",
    how="on PARSE servers, both streams send that text in an event before the last one. Other "
    "servers call the original.",
    upstream="docs/upstream.md",
    removed_when="SGLang's last event of these streams has text.",
)
