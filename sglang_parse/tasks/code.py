"""HumanEval+ and MBPP+: programs, run against the tests by EvalPlus."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sglang_parse.tasks.base import Grader, Item, Options, Task, TaskError, need

INSTRUCTION = (
    "Write a self-contained Python program that solves this problem, in one Markdown code block:"
)


def code_item(row: Mapping[str, Any], number: int) -> Item:
    """The reference is the row: EvalPlus needs its tests and its own solution."""
    del number
    for key in ("entry_point", "canonical_solution", "base_input", "plus_input", "atol"):
        row[key]
    text = f"{INSTRUCTION}\n\n```python\n{row['prompt'].strip()}\n```"
    return Item(str(row["task_id"]), text, dict(row))


def make_grader(options: Options, *, dataset: str) -> Grader:
    """Whether the program passes the base tests and the added ones.

    Raises:
        TaskError: nobody allowed to run what a model wrote.
    """
    if not options.allow_code:
        raise TaskError(
            "this task runs programs a model wrote, on this machine; EvalPlus limits time and "
            "memory, which is no sandbox. Fix: run it in a container and add --allow-code"
        )
    need("evalplus", "running programs")
    from evalplus.eval import PASS, untrusted_check
    from evalplus.eval._special_oracle import MBPP_OUTPUT_NOT_NONE_TASKS
    from evalplus.gen.util import trusted_exec
    from evalplus.sanitize import sanitize

    read_inputs = _reader(dataset)

    def grade(item: Item, texts: Sequence[str]) -> float:
        row = item.reference
        entry_point = row["entry_point"]
        program = sanitize(texts[0], entry_point)
        for key in ("base_input", "plus_input"):
            inputs = read_inputs(row["task_id"], row[key])
            expected, seconds = trusted_exec(
                row["prompt"] + row["canonical_solution"],
                inputs,
                entry_point,
                record_time=True,
                output_not_none=entry_point in MBPP_OUTPUT_NOT_NONE_TASKS,
            )
            outcome, _ = untrusted_check(
                dataset, program, inputs, entry_point, expected, row["atol"], seconds, True
            )
            if outcome != PASS:
                return 0.0
        return 1.0

    return grade


def _reader(dataset: str) -> Callable[[str, list], list]:
    """MBPP's inputs are tuples, sets and complex numbers that JSON cannot hold."""
    if dataset == "humaneval":
        return lambda task_id, inputs: inputs  # noqa: ARG005
    from evalplus.data.mbpp import mbpp_deserialize_inputs

    return mbpp_deserialize_inputs


def _task(name: str, title: str, dataset: str, file: str) -> Task:
    return Task(
        name,
        title,
        f"{file} of EvalPlus's releases (task_id, prompt, entry_point, canonical_solution, "
        "base_input, plus_input, atol)",
        code_item,
        partial(make_grader, dataset=dataset),
        note="base and added tests both passed",
    )


TASKS = (
    _task("humaneval-plus", "HumanEval+", "humaneval", "HumanEvalPlus.jsonl.gz"),
    _task("mbpp-plus", "MBPP+", "mbpp", "MbppPlus.jsonl.gz"),
)
