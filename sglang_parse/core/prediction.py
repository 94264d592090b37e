"""What drafts need of a request of the OpenAI API: its predicted output, and its messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_SHAPE = 'use {"type": "content", "content": TEXT}, or a list of {"type": "text", "text": TEXT}'


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


def chat_texts(messages: Iterable[Any]) -> list[tuple[str, str]]:
    """Returns (role, text) of each of a chat's messages, for another server that drafts: it renders
    them with its own chat template. Text parts are joined as SGLang joins them; images, tools and
    all other fields are left out."""
    return [(one.role, _text(one.content)) for one in messages]


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return " ".join(part.text for part in content if part.type == "text")


def _part(part: object, place: int) -> str:
    is_text = isinstance(part, Mapping) and part.get("type") == "text"
    text = part.get("text") if is_text and isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise ValueError(f"prediction.content[{place}] is no text part; {_SHAPE}")
    return text
