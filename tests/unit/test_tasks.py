"""Every task adapter on a few rows of our own, in the shape of the real file: right and wrong."""

from __future__ import annotations

import csv
import gzip
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pandas
import pytest

from sglang_parse.calibrate.run import with_loss
from sglang_parse.client.records import BenchError
from sglang_parse.tasks import Options, TaskError, find_task, task_names
from sglang_parse.tasks.base import Grader, Item
from sglang_parse.tasks.demo import demo_assignment

HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": 'def twice(x):\n    """Twice x."""\n',
    "entry_point": "twice",
    "canonical_solution": "    return 2 * x\n",
    "base_input": [[1], [2]],
    "plus_input": [[0], [-3]],
    "atol": 0,
}
MBPP = {
    "task_id": "Mbpp/2",  # its inputs are tuples, which JSON makes lists
    "prompt": '"""Write a function to find the shared elements of two tuples."""\n',
    "entry_point": "shared",
    "canonical_solution": "def shared(a, b):\n    return tuple(sorted(set(a) & set(b)))\n",
    "base_input": [[[1, 2, 3], [2, 3, 4]]],
    "plus_input": [[[1], [2]]],
    "atol": 0,
}
GPQA = {
    "Record ID": "rec1",
    "Question": "Which is a metal?",
    "Correct Answer": "iron",
    **{f"Incorrect Answer {n}": f"gas {n}" for n in (1, 2, 3)},
}
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
DIALOGUE = {"question_id": 81, "category": "math", "turns": ["1 + 1?", "Twice that?"]}
ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": "How much is 1,000 + 234?", "answer": "Add.\n#### 1,234"}],
    "math-500": [{"problem": "Half of one?", "answer": "\\frac{1}{2}", "unique_id": "a/1"}],
    "mmlu": [{"question": "Two?", "choices": ["one", "two", "three", "four"], "answer": 1}],
    "mmlu-pro": [{"question": "J?", "options": list("abcdefghij"), "answer": "J"}],
    "gpqa": [GPQA],
    "humaneval-plus": [HUMANEVAL],
    "mbpp-plus": [MBPP],
    "mt-bench": [DIALOGUE],
    "prompts": [PROMPT],
}
FILES = {"gpqa": "csv", "mmlu": "parquet", "mmlu-pro": "parquet", "humaneval-plus": "jsonl.gz"}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".parquet":
        pandas.DataFrame(rows).to_parquet(path)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def load(name: str, folder: Path, options: Options = Options()) -> tuple[Item, Grader]:  # noqa: B008
    """The one item of our sample, and the grader."""
    task = find_task(name)
    path = write(folder / f"{name}.{FILES.get(name, 'jsonl')}", ROWS[name])
    (item,) = task.read(path)
    return item, task.make_grader(options)


def test_every_task_has_a_sample():
    assert set(ROWS) == set(task_names())


def grader(program: str) -> Options:
    return Options(grader=shlex.join([sys.executable, "-c", program]))


def test_own_prompts_are_graded_by_a_command(tmp_path: Path):
    """One process, a line for a line, for grades and for where a text goes wrong."""
    item, grade = load("prompts", tmp_path, grader(GRADER))
    assert (item.key, item.text, item.reference) == ("sum", "One and one?", "2")
    assert [grade(item, [answer]) for answer in ("2", "3", "2")] == [1.0, 0.0, 1.0]
    locate = find_task("prompts").make_locator(grader(GRADER))
    assert [locate(item, text, False) for text in ("", "2", "3")] == [None, None, 0]
    assert locate(item, "", True) == 0


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("", "--grader is not set"),
        ("raise SystemExit(3)", "wrote no JSON line for sum"),
        ("print('right', flush=True)", "wrote no JSON line for sum"),
        ("print(1, flush=True); input()", "expected a JSON object"),
        ("print('{\"score\": 7}', flush=True); input()", "the score 7; expected 0 to 1"),
    ],
)
def test_a_command_that_does_not_grade(program: str, message: str, tmp_path: Path):
    options = grader(program) if program else Options()

    def graded() -> float:
        item, grade = load("prompts", tmp_path, options)
        return grade(item, ["2"])

    with pytest.raises(TaskError, match=message):
        graded()


def test_a_command_that_cannot_say_where(tmp_path: Path):
    options = grader("print('{\"score\": 1}', flush=True); input()")
    item, _ = load("prompts", tmp_path, options)
    locate = find_task("prompts").make_locator(options)
    with pytest.raises(TaskError, match="no right_chars for sum.*--loss answer"):
        locate(item, "2", False)


def test_where_a_text_goes_wrong_is_asked_for_only_where_that_counts():
    able = demo_assignment(1)
    assert with_loss(able, None) == ("token", able)
    loss, asked = with_loss(able, "answer")
    assert (loss, asked.locate) == ("answer", None)
    unable = replace(able, locate=None)
    assert with_loss(unable, None) == ("answer", unable)
    with pytest.raises(BenchError, match="--loss is 'token'.*cannot say where"):
        with_loss(unable, "token")


def test_a_command_that_is_not_there(tmp_path: Path):
    with pytest.raises(TaskError, match="does not start"):
        load("prompts", tmp_path, Options(grader="/nowhere/grader"))


CASES = [
    ("gsm8k", "1000 and 234 are \\boxed{1234}", 1.0),
    ("gsm8k", "That makes $1,234.00. So the answer is \\boxed{1,234}.", 1.0),
    ("gsm8k", "It is 1234, no: \\boxed{1235}", 0.0),
    ("gsm8k", "I do not know.", 0.0),
    ("math-500", "Half of it is \\boxed{0.5}.", 1.0),
    ("math-500", "So \\boxed{\\frac{2}{4}}", 1.0),
    ("math-500", "So \\boxed{2}", 0.0),
    ("mmlu", "One is less, so it is two.\nAnswer: B", 1.0),
    ("mmlu", "A looks good at first.\nAnswer: **B**", 1.0),
    ("mmlu", "B might do, but no.\nAnswer: A", 0.0),
    ("mmlu-pro", "The last one.\nAnswer: J", 1.0),
    ("mmlu-pro", "The last one.\nAnswer: I", 0.0),
]


@pytest.mark.parametrize(("name", "answer", "score"), CASES)
def test_answers(name: str, answer: str, score: float, tmp_path: Path):
    item, grade = load(name, tmp_path)
    assert grade(item, [answer]) == score


def test_gpqa_draws_the_place_of_the_right_choice(tmp_path: Path):
    item, grade = load("gpqa", tmp_path)
    letter = next(line[0] for line in item.text.splitlines() if line.endswith(") iron"))
    assert [grade(item, [f"Answer: {given}"]) for given in "ABCD"].count(1.0) == 1
    assert grade(item, [f"Answer: {letter}"]) == 1.0
    assert load("gpqa", tmp_path)[0] == item


PROGRAMS = [
    ("humaneval-plus", "def twice(x):\n    return x + x\n", 1.0),
    # Passes the base tests, but not the added ones.
    ("humaneval-plus", "def twice(x):\n    return abs(x) * 2\n", 0.0),
    ("humaneval-plus", "def twice(x):\n    return undefined\n", 0.0),
    ("mbpp-plus", "def shared(a, b):\n    return tuple(x for x in a if x in b)\n", 1.0),
    ("mbpp-plus", "def shared(a, b):\n    return [x for x in a if x in b]\n", 0.0),
]


@pytest.mark.parametrize(("name", "program", "score"), PROGRAMS)
def test_programs(name: str, program: str, score: float, tmp_path: Path):
    item, grade = load(name, tmp_path, Options(allow_code=True))
    assert grade(item, [f"Here it is:\n\n```python\n{program}```\nIt works."]) == score


def test_programs_are_not_run_unasked(tmp_path: Path):
    with pytest.raises(TaskError, match="--allow-code"):
        load("humaneval-plus", tmp_path)


class Judge(BaseHTTPRequestHandler):
    """Rates the first turn 8 and the second 4; notes what it was asked."""

    asked: Sequence[dict] = []

    def do_POST(self) -> None:  # noqa: N802 - the library's name
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Judge.asked = [*Judge.asked, request]
        text = f"Fine. Rating: [[{8 if len(Judge.asked) == 1 else 4}]]"
        choice = {"index": 0, "finish_reason": "stop"}
        choice["message"] = {"role": "assistant", "content": text}
        body = json.dumps({"id": "1", "object": "chat.completion", "choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Not into the test's output."""


@pytest.fixture
def judge_url() -> Iterator[str]:
    Judge.asked = []
    with HTTPServer(("127.0.0.1", 0), Judge) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_mt_bench_asks_the_judge_about_both_turns(tmp_path: Path, judge_url: str):
    single = {"system_prompt": "Be fair.", "prompt_template": "{question}|{answer}"}
    multi = single | {"prompt_template": "{question_1}|{answer_1}|{question_2}|{answer_2}"}
    prompts = [{"name": "single-v1", **single}, {"name": "single-v1-multi-turn", **multi}]
    path = write(tmp_path / "judge_prompts.jsonl", prompts)
    options = Options(judge_url=judge_url, judge_prompts=path)
    item, grade = load("mt-bench", tmp_path, options)
    assert item.follow_ups == ("Twice that?",)
    assert grade(item, ["2", "4"]) == pytest.approx(0.6)
    asked = [request["messages"][1]["content"] for request in Judge.asked]
    assert asked == ["1 + 1?|2", "1 + 1?|2|Twice that?|4"]


def test_mt_bench_without_a_judge_is_not_graded(tmp_path: Path):
    item, grade = load("mt-bench", tmp_path)
    assert grade(item, ["2", "4"]) is None
    with pytest.raises(TaskError, match=r"judge_prompts\.jsonl"):
        load("mt-bench", tmp_path, Options(judge_url="http://127.0.0.1:1"))


@pytest.mark.parametrize("name", task_names())
def test_a_missing_file_says_where_to_get_it(name: str, tmp_path: Path):
    task = find_task(name)
    for path in (None, tmp_path / "none.jsonl"):
        with pytest.raises(TaskError, match="get it: ") as error:
            task.read(path)
        assert task.source in str(error.value)


@pytest.mark.parametrize("name", task_names())
def test_a_file_of_something_else_is_an_error(name: str, tmp_path: Path):
    path = write(tmp_path / "other.jsonl", [{"text": "hello"}])
    with pytest.raises(TaskError, match=r"row 0 .* does not fit .*'text'"):
        find_task(name).read(path)


def test_unknown_names_and_kinds_of_files(tmp_path: Path):
    with pytest.raises(TaskError, match="'gsm9k'; known: gsm8k"):
        find_task("gsm9k")
    path = tmp_path / "rows.txt"
    path.write_text("1")
    with pytest.raises(TaskError, match=r"ends in \.jsonl"):
        find_task("gsm8k").read(path)
    path = tmp_path / "rows.jsonl"
    path.write_text("{")
    with pytest.raises(TaskError, match="cannot be read"):
        find_task("gsm8k").read(path)


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(TaskError, match=r"sglang-parse\[compare\]"):
        load("gsm8k", tmp_path)


def test_the_demos_own_problems():
    task = demo_assignment(3)
    items, grade = task.items, task.grade
    assert len({item.text for item in items}) == 3
    answer = items[0].reference.solution
    assert grade(items[0], [answer]) == 1.0
    assert grade(items[0], [answer[:-1]]) == 0.0
