"""What drafts need of a request of the OpenAI API: its predicted output, and its messages."""

from __future__ import annotations

from collections.abc import Mapping

MESSAGES = "__parse_messages"
"""Key of ``custom_params`` with a chat's messages as JSON, for another server that drafts: it
renders them with its own chat template. ``patches.parse.predictions`` adds it."""
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


def _part(part: object, place: int) -> str:
    is_text = isinstance(part, Mapping) and part.get("type") == "text"
    text = part.get("text") if is_text and isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise ValueError(f"prediction.content[{place}] is no text part; {_SHAPE}")
    return text
