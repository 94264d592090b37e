"""Grades final answers with Math-Verify (`pip install math-verify`): a --grader of `sglang-parse`.

    python examples/grade_math.py --prompts test.jsonl > gsm8k.jsonl
    sglang-parse calibrate --task-file gsm8k.jsonl --grader 'python examples/grade_math.py' \
        --loss answer ...

The first command makes prompts from test.jsonl of GSM8K (openai/grade-school-math: question,
answer) or of MATH-500 (HuggingFaceH4/MATH-500: problem, answer).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

INSTRUCTION = "\n\nReason step by step, and put the final answer into \\boxed{}."
KINDS = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def make_prompt(row: dict[str, str]) -> dict[str, str]:
    """A GSM8K answer ends in ``#### <number>``; a MATH answer is LaTeX."""
    reference = row["answer"]
    if "question" in row:
        reference = reference.rpartition("####")[2].strip().replace(",", "")
    return {"prompt": row.get("question", row.get("problem")) + INSTRUCTION, "reference": reference}


def score(reference: str, answer: str) -> int:
    """1 if the final answer equals the reference as mathematics, else 0."""
    return int(verify(parse(f"${reference}$", KINDS), parse(answer, KINDS)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Grades one JSON line per line of stdin.")
    parser.add_argument("--prompts", type=Path, help="print the prompts of this file instead")
    path = parser.parse_args().prompts
    for line in path.open(encoding="utf-8") if path else sys.stdin:
        row = json.loads(line)
        made = make_prompt(row) if path else {"score": score(row["reference"], row["answer"])}
        print(json.dumps(made), flush=True)


if __name__ == "__main__":
    main()
