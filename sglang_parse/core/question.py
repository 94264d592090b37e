"""Renders the question that asks the target whether the text so far is correct.

The model's chat template renders the question: it ends the answer's turn, adds a user turn with
the question and opens an assistant turn. These tokens are appended to a prefix, which is never
tokenized again. The logits at the question's last token give the verdict.

Thinking models: the reply starts after an empty think block, so that the verdict comes at once. If
a prefix ends inside a think block, the block is closed before its turn ends. Templates that drop
the reasoning of earlier turns do not matter, because the prefix itself is not rendered.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from sglang_parse.core.setting import read_json_file

BUILT_IN = Path(__file__).parent / "questions"
DEFAULT_QUESTION_FILE = BUILT_IN / "default.json"
FAMILY_MARKS = {
    "qwen3_thinking": "<think>",
    "chatml": "<|im_start|>",
    "llama3": "<|start_header_id|>",
    "mistral": "[INST]",
    "gemma": "<start_of_turn>",
}
"""Built-in question -> marker in the chat templates of its model family."""
LOW_VERDICT_MASS = 0.5
"""Mean p(accept) + p(reject) below which the question is reported as not understood."""
SHORT = "_short"
"""Suffix of built-in questions with fewer tokens, which are used only if configured."""
_ANSWER_MARK = "PARSE-ANSWER-MARK"
_THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Template variables that disable thinking in the reply."""


class QuestionError(ValueError):
    """A question cannot be used; the message names the reason and the fix."""


def built_in_questions() -> list[str]:
    return sorted(path.stem for path in BUILT_IN.glob("*.json"))


def built_in_for(template: str) -> list[str]:
    """Returns the built-in questions, best match for the chat template first, short ones last."""
    marked = [name for name, mark in FAMILY_MARKS.items() if mark in template]
    others = sorted(built_in_questions(), key=lambda name: name.endswith(SHORT))
    return list(dict.fromkeys([*marked, DEFAULT_QUESTION_FILE.stem, *others]))


def question_file(question: str) -> Path:
    """Returns the path of a question, given its path or the name of a built-in one."""
    return BUILT_IN / f"{question}.json" if question in built_in_questions() else Path(question)


_RequiredText = Annotated[str, Field(min_length=1)]


@pydantic_dataclass(
    frozen=True,
    slots=True,
    config=ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True),
)
class QuestionWording:
    partial: _RequiredText
    """User turn about an unfinished answer."""
    complete: _RequiredText
    """User turn about the finished answer."""
    accept: _RequiredText
    """Text of the verdict token that accepts."""
    reject: _RequiredText
    """Text of the verdict token that rejects."""
    opening: str = ""
    """Text after the opened assistant turn; "" closes a think block if the template opens one."""
    suffix: str = ""
    """The complete rendered suffix with ``{question}``, for templates that drop or rewrite earlier
    turns; "" renders with the chat template."""
    thinking: str = ""
    """User turn about unfinished reasoning in a think block; "" uses ``partial``."""
    think_start: str = ""
    """Token that opens a think block; "" is ``<think>`` if the tokenizer has it as a token."""
    think_end: str = ""
    """Token that closes a think block; "" is ``</think>`` if the tokenizer has it as a token."""

    @property
    def think_marks(self) -> tuple[str, str]:
        return self.think_start or "<think>", self.think_end or "</think>"

    @classmethod
    def read(cls, path: str | Path) -> QuestionWording:
        """Reads a question file.

        Raises:
            QuestionError: it cannot be read, or a key is missing, unknown or invalid.
        """
        try:
            return read_json_file(cls, Path(path), f"question file {str(path)!r}", QuestionError)
        except QuestionError as error:
            keys = ", ".join(field.name for field in fields(cls))
            raise QuestionError(
                f"{error}; give --parse-question a JSON file with texts for its keys ({keys}), or "
                f"one of {built_in_questions()}"
            ) from error


@dataclass(frozen=True, slots=True)
class Thinking:
    """Question for prefixes that end inside a think block.

    Attributes:
        start_id, end_id: tokens around a think block.
        turn_end_id: token that ends a turn and any open block; None if unknown.
        suffix_ids: closes the block and the turn, then asks.
        line_end_ids: inserted before ``suffix_ids`` if the reasoning does not end with a newline.
    """

    start_id: int
    end_id: int
    turn_end_id: int | None
    suffix_ids: tuple[int, ...]
    line_end_ids: tuple[int, ...]

    def is_open_after(self, token_ids: Sequence[int], was_open: bool = False) -> bool:
        """Returns whether a think block is open after ``token_ids``, if one ``was_open`` before."""
        for token in reversed(token_ids):
            if token == self.start_id:
                return True
            if token in (self.end_id, self.turn_end_id):
                return False
        return was_open


@dataclass(frozen=True, slots=True)
class Question:
    """A rendered question.

    Attributes:
        partial_ids: suffix of a prefix of an unfinished answer.
        complete_ids: suffix of a finished answer.
        accept_id, reject_id: verdict tokens.
        thinking: suffix inside a think block; None if the model has no think tokens.
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
        """Returns the suffix of one prefix.

        A finished draft usually ends with the token that ends the turn, which is then left out of
        the suffix. After another stop token, the suffix ends the turn.

        Args:
            prefix: draft tokens of the prefix.
            complete: ``prefix`` completes the answer.
            was_thinking: a think block is open before the draft.
            ends_line: the prefix ends with a newline.
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
    """Renders a question with the model's tokenizer and chat template.

    Args:
        tokenizer: a Hugging Face tokenizer.
        template: Jinja chat template that replaces the tokenizer's.

    Raises:
        QuestionError: there is no chat template, it omits the answer or the question, or opens the
            reply inside a think block; the verdict texts are not two different single tokens; or
            the wording needs think tokens that the tokenizer does not have.
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
    """Returns the think tokens; None if the tokenizer has none and the wording needs none."""
    added = tokenizer.get_added_vocab()
    start, end = wording.think_marks
    if start in added and end in added:
        return added[start], added[end]
    if wording.thinking or wording.think_start or wording.think_end:
        raise QuestionError(
            f"the question file asks about thinking, but {start!r} and {end!r} are not both added "
            "tokens of this model's tokenizer; set think_start and think_end to its tokens, or "
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
    """Returns the text after ``reply``, the opened assistant turn.

    It must not leave a think block open: the model would continue to think instead of answering.
    """
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
            "the text that ends the answer, asks {question} and opens the reply"
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
        **{name: False for name in _THINKING_SWITCHES if re.search(rf"\b{name}\b", str(template))},
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
