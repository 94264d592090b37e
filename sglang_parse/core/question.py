"""The question: token suffixes that ask the target whether the text so far is right.

A question is rendered by the model's own chat template (the answer's turn is closed, a user turn
asks, an assistant turn is opened) and appended to a prefix as token ids; the prefix itself is
never tokenised again. The verdict is read at the question's last token.

Thinking models: the reply is opened behind an empty think block, so that the verdict comes at
once. A prefix that ends inside a think block has the block closed before its turn is. Nothing
earlier is lost by that: a template would drop the reasoning of a closed block when it renders the
conversation again, but the prefix is never rendered again.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

BUILT_IN = Path(__file__).parent / "questions"
DEFAULT_QUESTION_FILE = BUILT_IN / "default.json"
FAMILY_MARKS = {
    "qwen3_thinking": "<think>",
    "chatml": "<|im_start|>",
    "llama3": "<|start_header_id|>",
    "mistral": "[INST]",
    "gemma": "<start_of_turn>",
}
"""Built-in question -> what the chat templates of its family have in them."""
LOW_VERDICT_MASS = 0.5
"""Mean p(accept) + p(reject) below which a question is reported as not understood."""
SHORT = "_short"
"""Ends the names of the built-in questions that take fewer tokens; asked only where named."""
_ANSWER_MARK = "PARSE-ANSWER-MARK"


class QuestionError(ValueError):
    """A question file or its tokens cannot be used; the text says which, why and the fix."""


def built_in_questions() -> list[str]:
    """Names of the question files that come with PARSE."""
    return sorted(path.stem for path in BUILT_IN.glob("*.json"))


def built_in_for(template: str) -> list[str]:
    """The built-in questions, the likeliest first: the family's of this chat template, then the
    one for all others. The short ones come last: a server that finds its question asks a long one,
    whose verdict words are the same."""
    marked = [name for name, mark in FAMILY_MARKS.items() if mark in template]
    others = sorted(built_in_questions(), key=lambda name: name.endswith(SHORT))
    return list(dict.fromkeys([*marked, DEFAULT_QUESTION_FILE.stem, *others]))


def question_file(question: str) -> Path:
    """Where a question is read from: the name of a built-in one, or else a path."""
    return BUILT_IN / f"{question}.json" if question in built_in_questions() else Path(question)


_NeededText = Annotated[str, Field(min_length=1)]


@pydantic_dataclass(
    frozen=True,
    slots=True,
    config=ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True),
)
class QuestionWording:
    """What a question file holds; all are texts."""

    partial: _NeededText
    """User turn that asks about an unfinished answer."""
    complete: _NeededText
    """User turn that asks about the finished answer."""
    accept: _NeededText
    """Text of the verdict token that accepts."""
    reject: _NeededText
    """Text of the verdict token that rejects."""
    opening: str = ""
    """Text put after the opened assistant turn; "" closes a think block that the template opens
    there, and adds nothing for all other models."""
    suffix: str = ""
    """The whole rendered suffix with ``{question}`` in it, for templates that drop or rewrite
    earlier turns; "" renders with the chat template."""
    thinking: str = ""
    """User turn that asks about reasoning cut inside a think block; "" asks ``partial``."""
    think_start: str = ""
    """Token that opens a think block; "" is ``<think>`` where the tokenizer has it as a single
    token."""
    think_end: str = ""
    """Token that closes a think block; "" is ``</think>``, likewise."""

    @property
    def think_marks(self) -> tuple[str, str]:
        return self.think_start or "<think>", self.think_end or "</think>"

    @classmethod
    def read(cls, path: str | Path) -> QuestionWording:
        """Read a question file.

        Raises:
            QuestionError: missing, empty, not UTF-8, not JSON, or a key is missing, unknown or not
                text.
        """
        file = f"question file {str(path)!r}"
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise QuestionError(
                f"{file} cannot be read ({error.strerror}); give --parse-question an existing JSON "
                f"file or one of {built_in_questions()}"
            ) from error
        except UnicodeDecodeError as error:
            raise QuestionError(
                f"{file} is not UTF-8 text ({error.reason}); save it as UTF-8"
            ) from error
        if not text.strip():
            raise QuestionError(f"{file} is empty; it needs the keys {_NEEDED}")
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise QuestionError(f"{file} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise QuestionError(f"{file} must hold one JSON object")
        try:
            return cls(**content)
        except ValidationError as error:
            raise QuestionError(f"{file}: {_wrong_keys(error)}") from None


_KEYS = sorted(field.name for field in fields(QuestionWording))
_NEEDED = [field.name for field in fields(QuestionWording) if field.default is MISSING]


def _wrong_keys(error: ValidationError) -> str:
    """All that is wrong with a question file's keys."""
    problems: dict[str, list[str]] = defaultdict(list)
    for problem in error.errors(include_url=False):
        problems[problem["type"]].append(str(problem["loc"][0]))
    empty = [key for key in _NEEDED if key in problems["missing"] + problems["string_too_short"]]
    unknown = sorted(problems["unexpected_keyword_argument"])
    return (
        f"missing or empty {empty}, unknown {unknown}, not text {sorted(problems['string_type'])}; "
        f"its keys are {_KEYS}, all texts"
    )


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a prefix that ends inside a think block is asked about.

    Attributes:
        start_id, end_id: the tokens around a think block.
        turn_end_id: ends a turn, and with it any block that was left open; None if unknown.
        suffix_ids: closes the block, then the turn, and asks.
        line_end_ids: goes before ``suffix_ids`` where the reasoning does not end its line.
    """

    start_id: int
    end_id: int
    turn_end_id: int | None
    suffix_ids: tuple[int, ...]
    line_end_ids: tuple[int, ...]

    def is_open_after(self, token_ids: Sequence[int], was_open: bool = False) -> bool:
        """Whether a think block is open behind ``token_ids``.

        Args:
            token_ids: what was written; read from its end to the first token that decides.
            was_open: the same before them.
        """
        for token in reversed(token_ids):
            if token == self.start_id:
                return True
            if token in (self.end_id, self.turn_end_id):
                return False
        return was_open


@dataclass(frozen=True, slots=True)
class Question:
    """A rendered question: token ids only.

    Attributes:
        partial_ids: suffix for a prefix of an unfinished answer.
        complete_ids: suffix for a finished answer.
        accept_id, reject_id: the two verdict tokens.
        thinking: for prefixes inside a think block; None where the model has no such tokens.
    """

    partial_ids: tuple[int, ...]
    complete_ids: tuple[int, ...]
    accept_id: int
    reject_id: int
    thinking: Thinking | None = None

    @property
    def max_len(self) -> int:
        lens = [len(self.partial_ids), len(self.complete_ids)]
        if self.thinking is not None:
            lens.append(len(self.thinking.line_end_ids) + len(self.thinking.suffix_ids))
        return max(lens)

    def ids_for(
        self,
        prefix: Sequence[int],
        *,
        complete: bool,
        was_thinking: bool = False,
        ends_line: bool = False,
    ) -> tuple[int, ...]:
        """The suffix for one prefix.

        A finished draft already ends with the token that closes the answer's turn; the suffix
        then starts behind it, so that the turn is not closed twice. Another stop token (such as
        the end of the text) is kept, and the turn closed behind it.

        Args:
            prefix: the draft's tokens up to the cut.
            complete: the draft is the finished answer and ``prefix`` all of it.
            was_thinking: a think block is open before the draft.
            ends_line: the prefix ends with a line end.
        """
        if complete:
            ids = self.complete_ids
            return ids[1:] if prefix and prefix[-1] == ids[0] else ids
        thinking = self.thinking
        if thinking is None or not thinking.is_open_after(prefix, was_thinking):
            return self.partial_ids
        return thinking.suffix_ids if ends_line else thinking.line_end_ids + thinking.suffix_ids


def render_question(
    tokenizer: Any, wording: QuestionWording, template: str | None = None
) -> Question:
    """Turn the wording into token ids with the model's tokenizer and chat template.

    Args:
        tokenizer: a Hugging Face tokenizer.
        wording: see ``QuestionWording``.
        template: the Jinja chat template to use instead of the tokenizer's own.

    Raises:
        QuestionError: no chat template, the template hides the answer or the question, the reply
            is opened inside a think block, a verdict text is not one token, both are the same
            token, or thinking is asked about and the tokenizer has no tokens for it.
    """
    accept_id = _verdict_id(tokenizer, "accept", wording.accept)
    reject_id = _verdict_id(tokenizer, "reject", wording.reject)
    if accept_id == reject_id:
        raise QuestionError(
            f"accept {wording.accept!r} and reject {wording.reject!r} are the same token "
            f"{accept_id}; choose two texts with different tokens"
        )

    def suffix_ids(question: str, before: str = "") -> tuple[int, ...]:
        return _encode(tokenizer, before + _suffix(tokenizer, wording, question, template))

    marks = _think_ids(tokenizer, wording)
    return Question(
        partial_ids=suffix_ids(wording.partial),
        complete_ids=suffix_ids(wording.complete),
        accept_id=accept_id,
        reject_id=reject_id,
        thinking=marks
        and Thinking(
            *marks,
            turn_end_id=tokenizer.eos_token_id,
            suffix_ids=suffix_ids(
                wording.thinking or wording.partial, f"{wording.think_marks[1]}\n\n"
            ),
            line_end_ids=_encode(tokenizer, "\n"),
        ),
    )


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _verdict_id(tokenizer: Any, name: str, text: str) -> int:
    ids = _encode(tokenizer, text)
    if len(ids) != 1:
        raise QuestionError(
            f"{name} {text!r} is {len(ids)} tokens {list(ids)} for this model; a verdict must be a "
            "single token, choose another text in the question file"
        )
    return int(ids[0])


def _think_ids(tokenizer: Any, wording: QuestionWording) -> tuple[int, int] | None:
    """The tokens around a think block; None where the tokenizer has none and none were named."""
    added = tokenizer.get_added_vocab()
    start, end = wording.think_marks
    if start in added and end in added:
        return added[start], added[end]
    if wording.thinking or wording.think_start or wording.think_end:
        raise QuestionError(
            f"the question file asks about thinking, but {start!r} and {end!r} are not both added "
            "tokens of this model's tokenizer; name its tokens in think_start and think_end, or "
            "leave thinking, think_start and think_end out"
        )
    return None


def _suffix(tokenizer: Any, wording: QuestionWording, question: str, template: str | None) -> str:
    if wording.suffix:
        if "{question}" not in wording.suffix:
            raise QuestionError("suffix in the question file has no {question} in it")
        asked = wording.suffix.replace("{question}", question)
    else:
        asked = _render_suffix(tokenizer, question, template)
    return asked + _opening(asked.rpartition(question.strip())[2], wording)


def _opening(reply: str, wording: QuestionWording) -> str:
    """What follows ``reply``, the opened assistant turn: the verdict must not fall inside a think
    block, because the model would think on and give no verdict."""
    start, end = wording.think_marks
    opened = reply + wording.opening
    if opened.rfind(start) <= opened.rfind(end):
        return wording.opening
    if wording.opening:
        raise QuestionError(
            f"the reply to the question is opened inside a think block ({opened!r}); end 'opening' "
            f"in the question file with {end!r}, or leave it out"
        )
    return ("" if reply.endswith("\n") else "\n") + f"\n{end}\n\n"


def _render_suffix(tokenizer: Any, question: str, template: str | None) -> str:
    template = template or getattr(tokenizer, "chat_template", None)
    if not template:
        raise QuestionError(
            "the target's tokenizer has no chat template; set 'suffix' in the question file to "
            "the text that closes the answer, asks {question} and opens the reply"
        )
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _ANSWER_MARK},
        {"role": "user", "content": question},
    ]
    rendered = tokenizer.apply_chat_template(
        messages,
        chat_template=template if isinstance(template, str) else None,
        tokenize=False,
        add_generation_prompt=True,
        **_thinking_off(template),
    )
    head, mark, suffix = rendered.partition(_ANSWER_MARK)
    if not mark or not head or not suffix:
        raise QuestionError(
            "the chat template does not show an earlier answer; set 'suffix' in the question file"
        )
    if question.strip() not in suffix:
        raise QuestionError(
            f"the chat template does not show the question {question!r}; reword it, or set "
            "'suffix' in the question file"
        )
    return suffix


def _thinking_off(template: Any) -> dict[str, bool]:
    """Switches by which templates open a reply without thinking, where this template has them."""
    names = ("enable_thinking", "thinking")
    return {name: False for name in names if re.search(rf"\b{name}\b", str(template))}
