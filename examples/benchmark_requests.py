"""Speed of requests that ask for more than text, on the demo pair: medians, each over the plain
server in the same run.

    python examples/benchmark_requests.py [--runs 3] [--problems 16] [--at 1 4 16]

Greedy answers to its held-out problems; before each run of PARSE the same requests run on the plain
server. The last columns are the median run's times, in ms per output token. Exit code 1 if an
answer differs from the plain server's in token mode.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmark_texts import Bench

SERVERS = {"token": "token in process", "semantic": "in process"}
REQUESTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "logprobs": {"logprobs": True},
    "top_logprobs 5": {"logprobs": True, "top_logprobs": 5},
    "repetition_penalty 1.1": {"repetition_penalty": 1.1},
    "frequency and presence_penalty 0.2": {"frequency_penalty": 0.2, "presence_penalty": 0.2},
    "logit_bias": {"logit_bias": {"17": -1.0}},
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed of requests that ask for more than text")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--problems", type=int, default=16)
    parser.add_argument("--at", type=int, nargs="+", default=[1, 4, 16], help="requests at a time")
    parser.add_argument("--only", default="", help="rows whose names contain this text")
    parser.add_argument("--output", type=Path, default=Path("build/requests/results.json"))
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    rows = {
        f"{mode}, {asked}, {many} at a time": (server, [body] * arguments.problems, many)
        for many in arguments.at
        for mode, server in SERVERS.items()
        for asked, body in REQUESTS.items()
    }
    results = {}
    with ExitStack() as stack:
        bench = Bench(stack, arguments.problems)
        for name in filter(lambda name: arguments.only in name, rows):
            server, bodies, many = rows[name]
            results[name] = found = bench.compare(server, bodies, arguments.runs, many=many)
            print(f"{name:60}", *(f"{key} {value}" for key, value in found.items()), flush=True)
    arguments.output.write_text(json.dumps(results, indent=1))
    print("all answers in token mode equal the plain server's" if bench.is_exact else "NOT EXACT")
    return 0 if bench.is_exact else 1


if __name__ == "__main__":
    sys.exit(main())
