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
from sglang_parse.startup.models import AdmissionError, require

logger = logging.getLogger(__name__)
SETTING = flag("question")
MAX_LEN = 512
"""Longest question, in tokens."""


def question_for(args: Any, tokenizer: Any, config: ParseConfig) -> Question | None:
    """Returns the question that is set, or a built-in one; None where none is asked.

    Raises:
        AdmissionError, QuestionError: it does not fit the model; with setting, value and fix.
    """
    if not config.max_questions:
        return None
    name = config.question
    question = _given(args, tokenizer, name) if name else _found(args, tokenizer)
    fix, why = "use a shorter wording", f"{question.max_len} tokens long, above {MAX_LEN}"
    require(question.max_len <= MAX_LEN, SETTING, name or "not set", fix, why=why)
    return question


def _given(args: Any, tokenizer: Any, name: str) -> Question:
    """Returns the question of that name; the error of an unfit one names fitting built-in ones."""
    try:
        return _rendered(args, tokenizer, name)
    except QuestionError as error:
        fitting = ""
        with contextlib.suppress(AdmissionError):  # the template cannot render any question
            fitting = ", ".join(_built_in(args, tokenizer)[0])
        raise QuestionError(
            f"{SETTING} is {name!r}: {error}. Built-in questions that fit this model: "
            f"{fitting or 'none'}"
        ) from error


def _found(args: Any, tokenizer: Any) -> Question:
    """Returns the built-in question that fits best, and logs the choice."""
    fitting, problems = _built_in(args, tokenizer)
    if not fitting:
        raise QuestionError(
            f"{SETTING} is not set, and no built-in question fits this model ({problems[0]}); "
            "give it a question file"
        )
    name, question = next(iter(fitting.items()))
    wording, mark = QuestionWording.read(question_file(name)), FAMILY_MARKS.get(name)
    has_mark = mark is not None and mark in _template(args, tokenizer)
    logger.info(
        "PARSE: built-in question '%s': %s, and %r and %r are single tokens of this model. "
        "Set another with %s.",
        name,
        f"the chat template has {mark!r}" if has_mark else "no family's question fits better",
        wording.accept,
        wording.reject,
        SETTING,
    )
    return question


def _built_in(args: Any, tokenizer: Any) -> tuple[dict[str, Question], list[str]]:
    """Returns the built-in questions that fit, the best first, and the problems of the others."""
    fitting, problems = {}, []
    for name in built_in_for(_template(args, tokenizer)):
        try:
            fitting[name] = _rendered(args, tokenizer, name)
        except QuestionError as error:
            problems.append(f"{name}: {error}")
    return fitting, problems


def _rendered(args: Any, tokenizer: Any, name: str) -> Question:
    wording = QuestionWording.read(question_file(name))
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
    is_template = setting.endswith(".jinja") and os.path.isfile(setting)
    fix = f"give a .jinja file, or set 'suffix' in the file given to {SETTING}"
    require(is_template, "--chat-template", setting, fix)
    with open(setting, encoding="utf-8") as file:
        return file.read().strip("\n").replace("\\n", "\n")
