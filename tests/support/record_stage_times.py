"""Makes tests/unit/stage_times.json: stage times and rounds of real PARSE servers (minutes).

    PYTHONPATH=tests:examples/demo_pair python tests/support/record_stage_times.py

The demo pair answers held-out problems, at 1, 2, 4 and 8 requests at a time: drafting always, at
thresholds that keep most, some and none of the drafts; and never.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_parse.bench.harness.demo_pair import DEMO_PAIR, demo_models
from sglang_parse.bench.harness.lineup import lineup
from sglang_parse.bench.harness.records import PARSE
from sglang_parse.bench.harness.servers import Server, free_ports
from support.client import Client
from support.demo_pair import held_out
from support.servers import plugin

ROOT = Path(__file__).resolve().parents[2]
TO = ROOT / "tests" / "unit" / "stage_times.json"
CONCURRENCIES = (1, 2, 4, 8)
THRESHOLDS = (0.5, 0.999, 1.0)
WARM_UP = 8
LENGTH = {"max_new_tokens": 256}


def main() -> None:
    runs = [*_serve("never", (0.5,)), *_serve("always", THRESHOLDS)]
    conditions = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    TO.write_text(json.dumps({"conditions": conditions, "runs": runs}, separators=(",", ":")))
    print(f"{TO.relative_to(ROOT)}: {TO.stat().st_size / 1e3:.0f} kB")


def _serve(drafting: str, thresholds: Sequence[float]) -> list[dict[str, Any]]:
    """What one server saw, load by load."""
    (port,) = free_ports(1)
    (parse,) = lineup(demo_models(DEMO_PAIR), (PARSE,))
    spec = replace(parse, flags=(*parse.flags, "--parse-drafting", drafting))
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines"
        with plugin("stage_times", STAGE_TIMES=str(lines)):
            server = Server(spec, port, Path(folder) / "log")
        try:
            server.wait_ready()
            return [
                _run(Client(server.url), lines, drafting, count, threshold)
                for count in CONCURRENCIES
                for threshold in thresholds
            ]
        finally:
            server.stop()


def _run(
    client: Client, lines: Path, drafting: str, concurrency: int, threshold: float
) -> dict[str, Any]:
    problems = [problem.prompt for problem in held_out(64)]
    asked = {"parse": {"threshold": threshold}}
    client.generate_all(problems[-WARM_UP:], concurrency, **asked, max_new_tokens=64)
    lines.write_text("")
    client.generate_all(problems[: max(12, 4 * concurrency)], concurrency, **asked, **LENGTH)
    seen = [json.loads(line) for line in lines.read_text().splitlines()]
    print(f"{drafting}, {concurrency} requests, threshold {threshold}: {len(seen)} lines")
    return {"drafting": drafting, "requests": concurrency, "threshold": threshold, "seen": seen}


if __name__ == "__main__":
    main()
