"""Grades answers to the demo pair's problems, plain or in JSON: a --grader of `sglang-parse`.

Reads {"reference": what the user wrote, "answer": ..., "finished": ...}, writes {"score": 0 or 1,
"right_chars": how many leading characters are right, null where nothing is wrong so far}.
"""

from __future__ import annotations

import json
import sys

from json_answers import grade


def main() -> None:
    """Until there are no more lines."""
    for line in sys.stdin:
        row = json.loads(line)
        is_right, right_chars = grade(row["reference"], row["answer"], finished=row["finished"])
        print(json.dumps({"score": int(is_right), "right_chars": right_chars}), flush=True)


if __name__ == "__main__":
    main()
