"""The demo pair's problems, or prompts of a file, graded by an external command.

The command is one process. For each JSON line it reads, it writes one JSON line and flushes it:

    {"prompt": ..., "reference": ..., "answer": ..., "finished": true}  ->  {"score": 1}

``score`` is from 0 to 1. A command that can locate errors adds ``"right_chars"``, also for
unfinished answers: the number of leading characters before the first error, or null without one.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_parse.client.ask import MAX_TOKENS
from sglang_parse.client.demo_pair import load_problems
from sglang_parse.client.prompts import read_prompts
from sglang_parse.client.records import Assignment, BenchError, Item

FILE_MAX_TOKENS = 1024
"""Default answer length for prompts of a file, in tokens."""


def make_assignment(
    file: Path | None, grader: str, count: int, max_tokens: int | None, *, is_training: bool = False
) -> Assignment:
    """Loads the file's prompts and their grader, or so many of the demo pair's problems:
    ``is_training`` ones, which no other program grades, or held-out ones."""
    if file is not None:
        items, command, limit = read_prompts(file), GraderCommand(grader), FILE_MAX_TOKENS
        return Assignment(file.name, items, command.grade, max_tokens or limit, command.locate)
    module = load_problems()
    draw = module.training_problems if is_training else module.held_out_problems
    items = [Item(str(number), problem.text, problem) for number, problem in enumerate(draw(count))]
    title = f"{'training' if is_training else 'held-out'} problems of the demo pair"

    def grade(item: Item, text: str) -> float:
        return float(module.is_answer_right(item.reference, text))

    def locate(item: Item, text: str, finished: bool) -> int | None:
        return module.num_right_before_error(item.reference, text, finished=finished)

    return Assignment(title, items, grade, max_tokens or MAX_TOKENS, locate)


def data_set(task: Assignment, count: int | None = None) -> str:
    """Names a task, or its first problems, with a digest of their texts."""
    texts = [item.text for item in task.items[:count]]
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    return f"{task.title} ({len(texts)} problems, {digest})"


class GraderCommand:
    """The grader's process."""

    def __init__(self, line: str) -> None:
        if not line:
            raise BenchError("--grader is not set; fix: give the command that grades --task-file")
        self._line = line
        try:
            self._process = subprocess.Popen(
                shlex.split(line), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except (OSError, ValueError) as error:
            raise BenchError(f"--grader is {line!r}, which does not start: {error}") from error

    def grade(self, item: Item, text: str) -> float:
        score = self._ask(item, text, True).get("score")
        if not isinstance(score, (int, float)) or not 0 <= score <= 1:
            raise BenchError(f"--grader gave {item.key} the score {score!r}; expected 0 to 1")
        return float(score)

    def locate(self, item: Item, text: str, finished: bool) -> int | None:
        """Number of characters before the first error, None without one."""
        reply = self._ask(item, text, finished)
        if "right_chars" not in reply:
            raise BenchError(
                f"--grader wrote no right_chars for {item.key}, so errors cannot be located; "
                "fix: write it, or grade complete answers only: --loss answer (calibrate), "
                "--labels answers (train-judge)"
            )
        return reply["right_chars"]

    def _ask(self, item: Item, answer: str, finished: bool) -> Mapping[str, Any]:
        question = {"prompt": item.text, "reference": item.reference, "answer": answer}
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(question | {"finished": finished}) + "\n")
            stdin.flush()
            reply = json.loads(line := stdout.readline())
        except (OSError, json.JSONDecodeError) as error:
            code = self._process.poll()
            raise BenchError(
                f"--grader {self._line!r} wrote no JSON line for {item.key} ({error}; exit code "
                f"{code}); fix: write and flush one per line read"
            ) from error
        if not isinstance(reply, dict):
            raise BenchError(f"--grader {self._line!r} wrote {line!r}; expected a JSON object")
        return reply
