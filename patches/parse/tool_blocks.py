"""Tool calls of a stream are parsed in pieces of a token's size (ledger: tool_blocks)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from sglang.srt.function_call.core_types import StreamingParseResult
from sglang.srt.runtime_context import get_spec

from sglang_parse.algorithm import names_parse
from sglang_parse.patches.base import Patch, after, around

_CALLS = "sglang.srt.function_call"
_WORDS = r"\w+|\W"


def _note_markers(_result: None, self: Any, *_: Any, tokenizer: Any = None, **__: Any) -> None:
    added = sorted(getattr(tokenizer, "get_added_vocab", dict)(), key=len, reverse=True)
    self.parse_pieces = "|".join([*map(re.escape, added), _WORDS])


def _chunk(original: Callable, self: Any, chunk_text: str) -> tuple[str, list]:
    parts = [original(self, piece) for piece in _pieces(self.parse_pieces, chunk_text)]
    texts, calls = zip(*parts, strict=True)
    return "".join(texts), [call for part in calls for call in part]


def _increment(original: Callable, self: Any, new_text: str, tools: list) -> StreamingParseResult:
    parts = [original(self, piece, tools) for piece in _pieces(_WORDS, new_text)]
    calls = [call for part in parts for call in part.calls]
    return StreamingParseResult(normal_text="".join(p.normal_text for p in parts), calls=calls)


def _pieces(pattern: str, text: str) -> list[str]:
    """The added tokens, words and other characters of ``text``; one piece on other servers."""
    is_parse = names_parse(get_spec())
    return (is_parse and re.findall(pattern, text)) or [text]


PATCH = Patch(
    "tool_blocks",
    {
        f"{_CALLS}.function_call_parser.FunctionCallParser.__init__": after(_note_markers),
        f"{_CALLS}.function_call_parser.FunctionCallParser.parse_stream_chunk": around(_chunk),
        f"{_CALLS}.json_array_parser.JsonArrayParser.parse_streaming_increment": around(_increment),
    },
    why="SGLang's parsers of streamed tool calls expect text token by token: of a chunk with more "
    "they take one step, the name of a call or its arguments, and drop what comes before a call. "
    "PARSE accepts a whole call at once: text, arguments and further calls were lost.",
    how="on PARSE servers, a parser is given a chunk in pieces: the tokenizer's added tokens, "
    "words and other characters. Other servers call the original.",
    upstream="docs/upstream.md",
    removed_when="the parsers' results do not depend on how a text is divided.",
)
