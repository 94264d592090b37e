"""No character of a stream is sent twice (ledger: streamed_text)."""

from __future__ import annotations

from typing import Any

from sglang_parse.patches.base import Patch, Value


def _sent_offset(status: Any) -> int:
    return status.__dict__.get("sent_offset", 0)


def _advance(status: Any, offset: int) -> None:
    status.__dict__["sent_offset"] = max(_sent_offset(status), offset)


PATCH = Patch(
    "streamed_text",
    {
        "sglang.srt.managers.detokenizer_manager.DecodeStatus.sent_offset": Value(
            property(_sent_offset, _advance)
        )
    },
    why="while a text ends inside a character, `DetokenizerManager._decode_batch_token_id_output` "
    "sends what `find_printable_text` returns: up to a last Chinese character, else up to the last "
    "space. More tokens can make that shorter than what is sent, the offset goes back, and the "
    "characters between are sent again. One token at a time ends a text after every character, so "
    "it takes steps of several tokens: any speculative algorithm.",
    how="the offset never goes back. Where a step brings one token, the same is sent as before.",
    upstream="docs/upstream.md",
    removed_when="SGLang's offset never goes back.",
)
