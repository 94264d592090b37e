"""Labeled drafts of a file, ``--data``: a task whose grader looks its labels up."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sglang_parse.client.prompts import read_lines
from sglang_parse.client.records import Assignment, BenchError, Item

WANTED = (
    'fix: one object per line, {"messages": [{"role": "user", "content": "..."}], "draft": "...", '
    '"score": 0 or 1, "right_chars": null or a number}'
)


class LabeledText(BaseModel):
    """One line.

    Attributes:
        score: 1 if it is right, else 0.
        right_chars: number of characters before the first error; None without one, or where
            it was not located.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    messages: list[dict[str, Any]] = Field(min_length=1)
    draft: str = Field(min_length=1)
    score: Literal[0, 1]
    right_chars: int | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _check(self) -> LabeledText:
        for message in self.messages:
            if not isinstance(message.get("role"), str) or "content" not in message:
                raise ValueError(f"messages has {message!r}, without a role or content")
        if self.messages[-1]["role"] == "assistant":
            raise ValueError("messages ends with the assistant's; the answer belongs in draft")
        if self.right_chars is not None and (self.score or self.right_chars > len(self.draft)):
            raise ValueError(
                f"right_chars is {self.right_chars}, but score is {self.score} and draft has "
                f"{len(self.draft)} characters; null means no error"
            )
        return self


def read_data(path: Path) -> list[LabeledText]:
    """Reads the file; errors name line and field."""
    found = []
    for number, line in read_lines(path, WANTED):
        try:
            found.append(LabeledText.model_validate(line))
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            place = "".join(f"{part}: " for part in problem["loc"])
            text = f"{path}:{number}: {place}{problem['msg']}; {WANTED}"
            raise BenchError(text) from error
    return found


def data_assignment(path: Path, title: str) -> Assignment:
    """The file as a task. Errors are located if all of its wrong drafts have ``right_chars``."""
    texts = read_data(path)
    items = [
        Item(f"line {number}", text.messages[-1]["content"], text, messages=tuple(text.messages))
        for number, text in enumerate(texts, 1)
    ]
    is_located = all(text.score or text.right_chars is not None for text in texts)
    return Assignment(
        title,
        items,
        grade=lambda item, _: float(item.reference.score),
        max_tokens=0,
        locate=(lambda item, _text, _finished: item.reference.right_chars) if is_located else None,
    )
