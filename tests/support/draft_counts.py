"""Counts of a pair's drafts on a real server, by mode: rounds, drafted, accepted and doubted.

    PYTHONPATH=tests:examples/demo_pair python tests/support/draft_counts.py [PROBLEMS]

The demo pair answers held-out problems one after another, in token mode and by default. To compare
two builds, run it in both trees: counts tell as much on a busy machine as on an idle one, but for
what a draft token takes beside a decode step.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from problems import held_out_problems  # examples/demo_pair

from sglang_parse.client.demo_pair import DEMO_PAIR
from sglang_parse.client.records import PARSE
from sglang_parse.client.servers import Server, free_ports
from sglang_parse.client.targets import Models, parse_settings, server_specs
from support.client import Client, parse_info
from support.demo_pair import rendered

MODES = {"token": parse_settings(verification="token"), "default": ()}
COUNTS = ("rounds", "drafted_tokens", "draft_forwards", "accepted_tokens", "skipped_drafts")
LENGTH = {"max_new_tokens": 256}
WARM_UP = 8
"""Problems before those that count: costs and chances are learned from them."""


def main(count: int = 24) -> None:
    prompts = rendered(DEMO_PAIR / "target", held_out_problems(WARM_UP + count, seed=8))
    for mode, flags in MODES.items():
        print(json.dumps({"mode": mode, **counts(flags, prompts)}), flush=True)


def counts(flags: Sequence[str], prompts: Sequence[str]) -> dict[str, float]:
    (port,), pair = free_ports(1), (str(DEMO_PAIR / "target"), str(DEMO_PAIR / "draft"))
    (spec,) = server_specs(Models(*pair, parse_flags=tuple(flags)), (PARSE,))
    with tempfile.TemporaryDirectory() as folder:
        server = Server(spec, port, Path(folder) / "log")
        try:
            server.wait_ready()
            answers = Client(server.url).generate_all(prompts, 1, **LENGTH)[WARM_UP:]
        finally:
            server.stop()
    infos = [parse_info(answer) for answer in answers]
    totals = {name: sum(info[name] for info in infos) for name in COUNTS}
    totals["doubted_drafts"] = sum(info.get("doubted_drafts", 0) for info in infos)
    output = sum(len(answer["output_ids"]) for answer in answers)
    kept = totals["accepted_tokens"] / max(1, totals["drafted_tokens"])
    return {**totals, "output_tokens": output, "kept": round(kept, 3)}


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
