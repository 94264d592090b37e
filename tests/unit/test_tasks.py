"""Graded problems: the demo pair's, and a file of prompts with a grader command."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import grade_code
import grade_math  # examples is on pytest's pythonpath
import pytest

from sglang_parse.calibrate.run import with_loss
from sglang_parse.client.records import Assignment, BenchError
from sglang_parse.tasks.assignment import FILE_MAX_TOKENS, make_assignment

PROMPT = {"prompt": "One and one?", "reference": "2", "key": "sum"}
GRADER = """
import json, sys
for line in sys.stdin:
    row = json.loads(line)
    answer, right = row["answer"], row["reference"]
    wrong = not right.startswith(answer) or (row["finished"] and answer != right)
    print(json.dumps({"score": int(answer == right), "right_chars": 0 if wrong else None}),
          flush=True)
"""
ALWAYS_RIGHT = "print('{\"score\": 1}', flush=True); input()"


def task_of(folder: Path, program: str) -> Assignment:
    """One prompt, graded by a Python program."""
    path = folder / "prompts.jsonl"
    path.write_text(json.dumps(PROMPT) + "\n")
    return make_assignment(path, shlex.join([sys.executable, "-c", program]), 1, None)


def demo_task(count: int) -> Assignment:
    return make_assignment(None, "", count, None)


def test_a_command_grades_and_locates(tmp_path: Path):
    """One process serves both, a line for a line."""
    task = task_of(tmp_path, GRADER)
    (item,) = task.items
    assert (item.key, item.text, item.reference) == ("sum", "One and one?", "2")
    assert (task.title, task.max_tokens) == ("prompts.jsonl", FILE_MAX_TOKENS)
    assert [task.grade(item, answer) for answer in ("2", "3", "2")] == [1.0, 0.0, 1.0]
    assert task.locate is not None
    assert [task.locate(item, text, False) for text in ("", "2", "3")] == [None, None, 0]
    assert task.locate(item, "", True) == 0


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise SystemExit(3)", "wrote no JSON line for sum"),
        ("print('right', flush=True)", "wrote no JSON line for sum"),
        ("print(1, flush=True); input()", "expected a JSON object"),
        ("print('{\"score\": 7}', flush=True); input()", "the score 7; expected 0 to 1"),
    ],
)
def test_a_command_that_does_not_grade(program: str, message: str, tmp_path: Path):
    task = task_of(tmp_path, program)
    with pytest.raises(BenchError, match=message):
        task.grade(task.items[0], "2")


@pytest.mark.parametrize(
    ("line", "message"), [("", "--grader is not set"), ("/nowhere/grader", "does not start")]
)
def test_a_command_that_does_not_start(line: str, message: str, tmp_path: Path):
    task_of(tmp_path, GRADER)
    with pytest.raises(BenchError, match=message):
        make_assignment(tmp_path / "prompts.jsonl", line, 1, None)


def test_a_command_that_does_not_locate(tmp_path: Path):
    task = task_of(tmp_path, ALWAYS_RIGHT)
    assert task.locate is not None
    with pytest.raises(BenchError, match="no right_chars for sum.*--loss answer"):
        task.locate(task.items[0], "2", False)


def test_a_file_that_is_missing():
    with pytest.raises(BenchError, match=r"'none\.jsonl' cannot be read"):
        make_assignment(Path("none.jsonl"), "cat", 1, None)


def test_errors_are_located_only_for_the_token_loss():
    able = demo_task(1)
    assert with_loss(able, None) == ("token", able)
    loss, asked = with_loss(able, "answer")
    assert (loss, asked.locate) == ("answer", None)
    unable = replace(able, locate=None)
    assert with_loss(unable, None) == ("answer", unable)
    with pytest.raises(BenchError, match="--loss is 'token'.*cannot say where"):
        with_loss(unable, "token")


def test_demo_problems():
    task = demo_task(3)
    assert len({item.text for item in task.items}) == 3
    answer = task.items[0].reference.solution
    assert task.grade(task.items[0], answer) == 1.0
    assert task.grade(task.items[0], answer[:-1]) == 0.0


# -- examples/grade_math.py ------------------------------------------------------------

GSM8K = {"question": "How much is 1,000 + 234?", "answer": "Add.\n#### 1,234"}
MATH = {"problem": "Half of one?", "answer": "\\frac{1}{2}", "unique_id": "a/1"}


@pytest.mark.parametrize(
    ("row", "answer", "score"),
    [
        (GSM8K, "1000 and 234 are \\boxed{1234}", 1),
        (GSM8K, "That makes $1,234.00. So the answer is \\boxed{1,234}.", 1),
        (GSM8K, "It is 1234, no: \\boxed{1235}", 0),
        (GSM8K, "I do not know.", 0),
        (MATH, "Half of it is \\boxed{0.5}.", 1),
        (MATH, "So \\boxed{\\frac{2}{4}}", 1),
        (MATH, "So \\boxed{2}", 0),
    ],
)
def test_grades_of_final_answers(row: dict[str, str], answer: str, score: int):
    assert grade_math.score(grade_math.make_prompt(row)["reference"], answer) == score


def test_gsm8k_from_its_own_file(tmp_path: Path):
    """As the example's docstring has it."""
    (tmp_path / "test.jsonl").write_text(json.dumps(GSM8K) + "\n")
    command = [sys.executable, grade_math.__file__]
    made = subprocess.run(
        [*command, "--prompts", str(tmp_path / "test.jsonl")], check=True, capture_output=True
    )
    (tmp_path / "gsm8k.jsonl").write_bytes(made.stdout)
    task = make_assignment(tmp_path / "gsm8k.jsonl", shlex.join(command), 1, 512)
    (item,) = task.items
    assert item.text.startswith(GSM8K["question"])
    assert [task.grade(item, f"\\boxed{{{n}}}") for n in (1234, 1235)] == [1, 0]


# -- examples/grade_code.py ------------------------------------------------------------

DOUBLE = {
    "task_id": "Code/0",
    "prompt": 'def double(x: int) -> int:\n    """Twice x."""\n',
    "entry_point": "double",
    "test": "def check(candidate):\n    assert candidate(2) == 4",
}
RIGHT = "Here:\n```python\ndef double(x):\n    return 2 * x\n```\n"


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (RIGHT, 1),
        (RIGHT.removesuffix("```\n"), 1),
        ("def double(x):\n    return x + x", 1),
        (RIGHT.replace("2 *", "3 *"), 0),
        (RIGHT.replace("return 2 * x", "return 2 *"), 0),
        ("```python\nraise SystemExit(0)\n```", 0),
        ("```python\ndef double(x):\n    while True: pass\n```", 0),
        ("```python\ndef double(x):\n    return [0] * 10**10 and 4\n```", 0),
        ("I do not know.", 0),
    ],
)
def test_functions_pass_their_tests(answer: str, score: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grade_code, "SECONDS", 1)
    row = grade_code.make_prompt(DOUBLE)
    assert DOUBLE["prompt"] in row["prompt"]
    assert grade_code.score(row["reference"], answer) == score
