"""Checks that an answer's last number is the sum: a --grader of calibrate and train-judge."""

import json
import re
import sys

for line in sys.stdin:
    row = json.loads(line)
    numbers = [*re.finditer(r"\d[\d,]*", row["answer"])]
    is_right = bool(numbers) and numbers[-1][0].replace(",", "") == row["reference"]
    wrong_at = numbers[-1].start() if numbers else 0
    print(
        json.dumps({"score": int(is_right), "right_chars": None if is_right else wrong_at}),
        flush=True,
    )
