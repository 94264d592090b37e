"""Checks that an answer contains the number: a --grader of `sglang-parse calibrate`."""

import json
import re
import sys

for line in sys.stdin:
    row = json.loads(line)
    numbers = re.findall(r"\d+", row["answer"].replace(",", ""))
    print(json.dumps({"score": int(numbers[-1:] == [row["reference"]])}), flush=True)
