"""Grades functions by their tests: a --grader of `sglang-parse`.

    python examples/grade_code.py --prompts HumanEval.jsonl.gz > humaneval.jsonl
    sglang-parse calibrate --task-file humaneval.jsonl --grader 'python examples/grade_code.py' \
        --loss answer ...

The first command makes prompts from HumanEval.jsonl.gz (openai/human-eval). An answer's code runs
in a process of its own with limits of time and memory, not in a sandbox: grade models that you
would let write files here, or run this in a container.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import resource
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

INSTRUCTION = "Complete this function. Answer with the whole function in one block of code.\n\n"
FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
SECONDS, MEMORY = 10, 1 << 30
"""Of processor time, and bytes of address space."""


def make_prompt(row: dict[str, str]) -> dict[str, object]:
    """The reference has what the tests need: the function's head and name, and the tests."""
    reference = {name: row[name] for name in ("prompt", "test", "entry_point")}
    text = INSTRUCTION + f"```python\n{row['prompt']}```"
    return {"key": row["task_id"], "prompt": text, "reference": reference}


def program_of(reference: dict[str, str], answer: str, last: str) -> str:
    """The tests behind the answer's code; the head in front, whose imports it may need. It prints
    ``last`` at its end, because code that exits before has passed no test."""
    blocks = FENCED.findall(answer)
    code = "\n".join(blocks) if blocks else answer
    check = f"check({reference['entry_point']})\nprint({last!r})"
    head = f"{reference['prompt']}    pass\n"
    return "\n\n".join([head, code, reference["test"], check])


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def score(reference: dict[str, str], answer: str) -> int:
    """1 if the tests pass, else 0."""
    last = secrets.token_hex()
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", program_of(reference, answer, last)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                cwd=folder,
                env={},
                timeout=4 * SECONDS,
                preexec_fn=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 0
    return int(done.returncode == 0 and done.stdout.decode(errors="replace").endswith(f"{last}\n"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Grades one JSON line per line of stdin.")
    parser.add_argument("--prompts", type=Path, help="print the prompts of this file instead")
    path = parser.parse_args().prompts
    lines = gzip.decompress(path.read_bytes()).decode().splitlines() if path else sys.stdin
    for line in lines:
        row = json.loads(line)
        made = make_prompt(row) if path else {"score": score(row["reference"], row["answer"])}
        print(json.dumps(made), flush=True)


if __name__ == "__main__":
    main()
