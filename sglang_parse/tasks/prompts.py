"""One's own prompts, and a command that grades: a process that answers a line with a line.

It reads one JSON object per line and writes one, at once, for each:

    {"prompt": ..., "reference": ..., "answer": ..., "finished": true}  ->  {"score": 1}

``score`` is 0 to 1. Where it can tell where a text goes wrong it says that too, of unfinished
answers as well: ``"right_chars"``, how many leading characters are right, or null where nothing is
wrong so far.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from sglang_parse.tasks.base import Grader, Item, Locator, Options, Task, TaskError

SETTING = "--grader"


class Command:
    """The process. Raises: TaskError, where it cannot be started."""

    def __init__(self, line: str) -> None:
        if not line:
            raise TaskError(f"{SETTING} is not set; give the command that grades one's own prompts")
        self._line = line
        try:
            self._process = subprocess.Popen(
                shlex.split(line), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise TaskError(f"{SETTING} is {line!r}, which does not start: {error}") from error

    def ask(self, item: Item, answer: str, finished: bool) -> Mapping[str, Any]:
        """Its reply to one line. Raises: TaskError, where that is no JSON object."""
        prompt, reference = item.text, item.reference
        question = {"prompt": prompt, "reference": reference, "answer": answer}
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(question | {"finished": finished}) + "\n")
            stdin.flush()
            reply = json.loads(line := stdout.readline())
        except (OSError, json.JSONDecodeError) as error:
            code = self._process.poll()
            raise TaskError(
                f"{SETTING} {self._line!r} wrote no JSON line for {item.key} ({error}; exit code "
                f"{code}); fix: write and flush one per line read"
            ) from error
        if not isinstance(reply, dict):
            raise TaskError(f"{SETTING} {self._line!r} wrote {line!r}; expected a JSON object")
        return reply


@lru_cache(maxsize=1)
def command(line: str) -> Command:
    """One process for grader and locator."""
    return Command(line)


def prompt_item(row: Mapping[str, Any], number: int) -> Item:
    """``prompt``, and what the command needs: ``reference``, ``key``."""
    return Item(str(row.get("key", number)), row["prompt"], row.get("reference"))


def make_grader(options: Options) -> Grader:
    process = command(options.grader)

    def grade(item: Item, texts: Sequence[str]) -> float:
        score = process.ask(item, texts[0], True).get("score")
        if not isinstance(score, (int, float)) or not 0 <= score <= 1:
            raise TaskError(f"{SETTING} gave {item.key} the score {score!r}; expected 0 to 1")
        return float(score)

    return grade


def make_locator(options: Options) -> Locator:
    process = command(options.grader)

    def locate(item: Item, text: str, finished: bool) -> int | None:
        reply = process.ask(item, text, finished)
        if "right_chars" not in reply:
            raise TaskError(
                f"{SETTING} does not say where a text goes wrong (no right_chars for {item.key}); "
                "fix: let it, or use --loss answer"
            )
        return reply["right_chars"]

    return locate


TASKS = (
    Task(
        "prompts",
        "own prompts",
        "a JSONL file of objects with prompt, and what your --grader command needs: reference, key",
        prompt_item,
        make_grader,
        make_locator=make_locator,
    ),
)
