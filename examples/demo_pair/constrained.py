"""Writes a task file of constrained requests: the demo pair's problems, with a JSON schema of their
answers, or with a regex that every right answer in plain lines matches.

    python examples/demo_pair/constrained.py > build/constrained.jsonl
    sglang-parse compare --task-file build/constrained.jsonl \
        --grader 'python examples/demo_pair/grade.py' --max-tokens 256
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable

from json_answers import SCHEMA, WISH
from problems import LABELS, MAX_STEPS, MIN_STEPS, WORDINGS, held_out_problems

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
    parser.add_argument(
        "--format", choices=("json", "regex"), default="json", help="of the answers (default json)"
    )
    arguments = parser.parse_args()
    wish, request = "", {"regex": answer_format()}
    if arguments.format == "json":
        wish, request = WISH, {"json_schema": json.dumps(SCHEMA)}
    for problem in held_out_problems(arguments.count):
        text = problem.text + wish
        print(json.dumps({"prompt": text, "reference": text, "request": request}))


if __name__ == "__main__":
    main()
