"""Writes a task file of the demo pair's problems, to be answered in plain lines or constrained: in
JSON of a schema, or in lines that match a regex.

    python examples/demo_pair/task_file.py --json 1 > build/json.jsonl
    sglang-parse compare --task-file build/json.jsonl \
        --grader 'python examples/demo_pair/grade.py' --max-tokens 320
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable

from json_answers import SCHEMA, WISH
from problems import LABELS, MAX_STEPS, MIN_STEPS, WORDINGS, held_out_problems, training_problems

FACTS = {
    "left": "[0-9]{2}",
    "right": "[0-9]{2}",
    "ones": "[0-9]",
    "parity": "(even|odd)",
    "direction": "(up|down)",
}


def any_of(texts: Iterable[str]) -> str:
    """A regex of wordings."""
    escaped = (text.replace("+", r"\+").replace(".", r"\.") for text in texts)
    return f"({'|'.join(text.format_map(FACTS) for text in escaped)})"


def answer_format() -> str:
    """A regex of whole answers; it knows no arithmetic, and any label may stand anywhere."""
    part = {name: any_of(texts) for name, texts in WORDINGS.items()}
    step = any_of([*WORDINGS["+"], *WORDINGS["-"]])
    line = f"[{''.join(LABELS)}]: {part['opener']}{step}{part['remark']}{part['equals']}[0-9]{{2}}"
    line = f"({line}{part['tail']}\n){{{2 * MIN_STEPS},{2 * MAX_STEPS}}}"
    return f"{line}{part['answer']}[0-9]{{2}}{part['joint']}[0-9]{{2}}{part['stop']}"


def main() -> None:
    """Prints a line for each problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="problems (default 1000)")
    parser.add_argument("--training", action="store_true", help="instead of held-out problems")
    parser.add_argument("--json", type=float, default=0.0, help="share of JSON (default 0)")
    parser.add_argument("--regex", action="store_true", help="for answers that are not JSON")
    arguments = parser.parse_args()
    problems = (training_problems if arguments.training else held_out_problems)(arguments.count)
    rng = random.Random("task file")
    lines = {"regex": answer_format()} if arguments.regex else {}
    for problem in problems:
        in_json = rng.random() < arguments.json
        text = problem.text + (WISH if in_json else "")
        request = {"json_schema": json.dumps(SCHEMA)} if in_json else lines
        print(json.dumps({"prompt": text, "reference": text, "request": request}))


if __name__ == "__main__":
    main()
