"""The question: token suffixes that ask the target whether the text so far is right.

A question is rendered by the model's own chat template (the answer's turn is closed, a user turn
asks, an assistant turn is opened) and appended to a prefix as token ids; the prefix itself is
never tokenised again. The verdict is read at the question's last token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

DEFAULT_QUESTION_FILE = Path(__file__).parent / "questions" / "default.json"
_ANSWER_MARK = "PARSE-ANSWER-MARK"


class QuestionError(ValueError):
    """A question file or its tokens cannot be used; the text says which, why and the fix."""


@dataclass(frozen=True, slots=True)
class QuestionWording:
    """What a question file holds.

    Attributes:
        partial: user turn that asks about an unfinished answer.
        complete: user turn that asks about the finished answer.
        accept, reject: texts of the verdict tokens.
        opening: text put after the opened assistant turn, "" for most models.
        suffix: the whole rendered suffix with ``{question}`` in it, for templates that drop or
            rewrite earlier turns; "" renders with the chat template.
    """

    partial: str
    complete: str
    accept: str
    reject: str
    opening: str = ""
    suffix: str = ""

    @classmethod
    def read(cls, path: str | Path) -> QuestionWording:
        """Read a question file.

        Raises:
            QuestionError: missing, empty, not UTF-8, not JSON, or a key is missing, unknown or not
                text.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise QuestionError(
                f"question file {str(path)!r} cannot be read ({error.strerror}); "
                "give --parse-question an existing JSON file"
            ) from error
        except UnicodeDecodeError as error:
            raise QuestionError(
                f"question file {str(path)!r} is not UTF-8 text ({error.reason}); save it as UTF-8"
            ) from error
        if not text.strip():
            raise QuestionError(
                f"question file {str(path)!r} is empty; it needs the keys {cls._required()}"
            )
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise QuestionError(f"question file {str(path)!r} is not JSON: {error}") from error
        return cls._from_content(content, str(path))

    @classmethod
    def _required(cls) -> list[str]:
        return ["partial", "complete", "accept", "reject"]

    @classmethod
    def _from_content(cls, content: Any, path: str) -> QuestionWording:
        if not isinstance(content, dict):
            raise QuestionError(f"question file {path!r} must hold one JSON object")
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(content) - known)
        missing = [key for key in cls._required() if not content.get(key)]
        not_text = sorted(key for key, value in content.items() if not isinstance(value, str))
        if unknown or missing or not_text:
            raise QuestionError(
                f"question file {path!r}: missing or empty {missing}, unknown {unknown}, "
                f"not text {not_text}; its keys are {sorted(known)}, all texts"
            )
        return cls(**content)


@dataclass(frozen=True, slots=True)
class Question:
    """A rendered question: token ids only.

    Attributes:
        partial_ids: suffix for a prefix of an unfinished answer.
        complete_ids: suffix for a finished answer.
        accept_id, reject_id: the two verdict tokens.
    """

    partial_ids: tuple[int, ...]
    complete_ids: tuple[int, ...]
    accept_id: int
    reject_id: int

    @property
    def max_len(self) -> int:
        return max(len(self.partial_ids), len(self.complete_ids))

    def ids_for(self, prefix: Sequence[int], *, complete: bool) -> tuple[int, ...]:
        """The suffix for one prefix.

        A finished draft already ends with the token that closes the answer's turn; the suffix
        then starts behind it, so that the turn is not closed twice.
        """
        ids = self.complete_ids if complete else self.partial_ids
        return ids[1:] if complete and prefix and prefix[-1] == ids[0] else ids


def render_question(tokenizer: Any, wording: QuestionWording) -> Question:
    """Turn the wording into token ids with the model's tokenizer and chat template.

    Args:
        tokenizer: a Hugging Face tokenizer.
        wording: see ``QuestionWording``.

    Raises:
        QuestionError: no chat template, the template hides the answer, or a verdict text is not
            one token, or both verdict texts are the same token.
    """
    accept_id = _verdict_id(tokenizer, "accept", wording.accept)
    reject_id = _verdict_id(tokenizer, "reject", wording.reject)
    if accept_id == reject_id:
        raise QuestionError(
            f"accept {wording.accept!r} and reject {wording.reject!r} are the same token "
            f"{accept_id}; choose two texts with different tokens"
        )
    return Question(
        partial_ids=_suffix_ids(tokenizer, wording, wording.partial),
        complete_ids=_suffix_ids(tokenizer, wording, wording.complete),
        accept_id=accept_id,
        reject_id=reject_id,
    )


def _verdict_id(tokenizer: Any, name: str, text: str) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise QuestionError(
            f"{name} {text!r} is {len(ids)} tokens {ids} for this model; a verdict must be a "
            "single token, choose another text in the question file"
        )
    return int(ids[0])


def _suffix_ids(tokenizer: Any, wording: QuestionWording, question: str) -> tuple[int, ...]:
    if wording.suffix:
        if "{question}" not in wording.suffix:
            raise QuestionError("suffix in the question file has no {question} in it")
        text = wording.suffix.replace("{question}", question) + wording.opening
    else:
        text = _render_suffix(tokenizer, question) + wording.opening
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _render_suffix(tokenizer: Any, question: str) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise QuestionError(
            "the target's tokenizer has no chat template; set 'suffix' in the question file to "
            "the text that closes the answer, asks {question} and opens the reply"
        )
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _ANSWER_MARK},
        {"role": "user", "content": question},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    head, mark, suffix = rendered.partition(_ANSWER_MARK)
    if not mark or not head or not suffix:
        raise QuestionError(
            "the chat template does not show an earlier answer; set 'suffix' in the question file"
        )
    return suffix
