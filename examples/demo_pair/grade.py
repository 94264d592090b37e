"""Grades answers to the demo pair's problems, a line for a line: a --grader of `sglang-parse`.

Reads {"reference": the problem's text, "answer": ..., "finished": ...}, writes {"score": 0 or 1,
"right_chars": how many leading characters are right, null where nothing is wrong so far}.
"""

from __future__ import annotations

import json
import sys

from problems import is_answer_right, num_right_before_error, read_problem


def main() -> None:
    """Until there are no more lines."""
    for line in sys.stdin:
        row = json.loads(line)
        problem, answer = read_problem(row["reference"]), row["answer"]
        reply = {
            "score": int(is_answer_right(problem, answer)),
            "right_chars": num_right_before_error(problem, answer, finished=row["finished"]),
        }
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
