"""The question of a server, rendered by its chat template."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import jinja2

from sglang_parse.core.config import ParseConfig, flag
from sglang_parse.core.question import (
    FAMILY_MARKS,
    Question,
    QuestionError,
    QuestionWording,
    built_in_for,
    question_file,
    render_question,
)
from sglang_parse.startup.models import AdmissionError, refuse

logger = logging.getLogger(__name__)
SETTING = flag("question")
MAX_LEN = 512
"""Longest question, in tokens."""


def question_for(args: Any, tokenizer: Any, config: ParseConfig) -> Question | None:
    """Returns the question that is set, or a built-in one; None in token mode.

    Raises:
        AdmissionError, QuestionError: it does not fit the model; with setting, value and fix.
    """
    if not config.is_semantic:
        return None
    if config.question:
        question = _given(args, tokenizer, config.question)
    else:
        question = _found(args, tokenizer)
    if question.max_len > MAX_LEN:
        refuse(SETTING, f"{question.max_len} tokens long", "use a shorter wording")
    return question


def _given(args: Any, tokenizer: Any, name: str) -> Question:
    """Returns the question of that name; the error of an unfit one names fitting built-in ones."""
    wording = QuestionWording.read(question_file(name))
    try:
        return _rendered(args, tokenizer, wording)
    except QuestionError as error:
        fitting = ", ".join(_fitting(args, tokenizer)) or "none"
        raise QuestionError(
            f"{SETTING} is {name!r}: {error}. Built-in questions that fit this model: {fitting}"
        ) from error


def _found(args: Any, tokenizer: Any) -> Question:
    """Returns the built-in question that fits best, and logs the choice."""
    template = _template(args, tokenizer)
    problems = []
    for name in built_in_for(template):
        wording = QuestionWording.read(question_file(name))
        try:
            question = _rendered(args, tokenizer, wording)
        except QuestionError as error:
            problems.append(f"{name}: {error}")
            continue
        mark = FAMILY_MARKS.get(name)
        has_mark = mark is not None and mark in template
        logger.info(
            "PARSE: built-in question '%s': %s, and %r and %r are single tokens of this model. "
            "Set another with %s.",
            name,
            f"the chat template has {mark!r}" if has_mark else "no family's question fits better",
            *(wording.accept, wording.reject, SETTING),
        )
        return question
    raise QuestionError(
        f"{SETTING} is not set, and no built-in question fits this model ({problems[0]}); give it "
        "a question file"
    )


def _fitting(args: Any, tokenizer: Any) -> list[str]:
    """Returns the names of built-in questions that fit, the best first."""
    names: list[str] = []
    with contextlib.suppress(AdmissionError):  # the template cannot render any question
        for name in built_in_for(_template(args, tokenizer)):
            with contextlib.suppress(QuestionError):
                _rendered(args, tokenizer, QuestionWording.read(question_file(name)))
                names.append(name)
    return names


def _rendered(args: Any, tokenizer: Any, wording: QuestionWording) -> Question:
    template = None if wording.suffix else _served_template(args.chat_template)
    try:
        return render_question(tokenizer, wording, template)
    except jinja2.TemplateError as error:
        raise AdmissionError(
            f"PARSE: the chat template refuses the question's conversation of user, assistant and "
            f"user turn ({error}). Fix: set 'suffix' in the file given to {SETTING} to "
            "the text that closes the answer, asks {question} and opens the reply"
        ) from error


def _template(args: Any, tokenizer: Any) -> str:
    """Returns the served template's text; of all templates if the tokenizer has several."""
    return _served_template(args.chat_template) or str(getattr(tokenizer, "chat_template", None))


def _served_template(setting: str | None) -> str | None:
    """Reads ``--chat-template`` as SGLang does (``TemplateManager._load_jinja_template``).

    Returns:
        The template's text; None if the tokenizer's template is used.
    """
    if not setting:
        return None
    if not setting.endswith(".jinja") or not os.path.isfile(setting):
        refuse(
            "--chat-template",
            setting,
            f"give a .jinja file, or set 'suffix' in the file given to {flag('question')}",
        )
    with open(setting, encoding="utf-8") as file:
        return file.read().strip("\n").replace("\\n", "\n")
