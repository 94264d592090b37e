"""Counts of a pair's drafts on a real server, by mode: rounds, drafted, accepted and doubted.

    PYTHONPATH=tests:examples/demo_pair python tests/support/draft_counts.py [PROBLEMS [SERVER]]

The demo pair answers held-out problems one after another, in token mode and with the likelihood. To
compare two builds, run it in both trees: counts tell as much on a busy machine as on an idle one,
but for what a draft token takes beside a decode step.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from problems import held_out_problems  # examples/demo_pair

from sglang_parse.client.demo_pair import DEMO_PAIR
from sglang_parse.client.records import PARSE_LIKELIHOOD, PARSE_TOKEN
from sglang_parse.client.servers import Server, ServerSpec, free_ports
from sglang_parse.client.targets import Models, server_specs
from sglang_parse.core.phases import MODEL
from support.client import Client, parse_info
from support.demo_pair import rendered

SERVERS = (PARSE_TOKEN, PARSE_LIKELIHOOD)
LENGTH = {"max_new_tokens": 256}
WARM_UP = 8
"""Problems before those that count: costs and chances are learned from them."""


def main(count: str = "24", *servers: str) -> None:
    prompts = rendered(DEMO_PAIR / "target", held_out_problems(WARM_UP + int(count), seed=8))
    models = Models(str(DEMO_PAIR / "target"), str(DEMO_PAIR / "draft"))
    for spec in server_specs(models, servers or SERVERS):
        print(json.dumps({"server": spec.name, **counts(spec, prompts)}), flush=True)


def counts(spec: ServerSpec, prompts: Sequence[str]) -> dict[str, float]:
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(spec, port, Path(folder) / "log")
        try:
            server.wait_ready()
            answers = Client(server.url).generate_all(prompts, 1, **LENGTH)[WARM_UP:]
        finally:
            server.stop()
    infos = [parse_info(answer) for answer in answers]
    drafts = [info["sources"].get(MODEL, {}) for info in infos]
    names = ("rounds", "drafted_tokens", "accepted_tokens", "matched_tokens")
    found = {name: sum(one.get(name, 0) for one in drafts) for name in names}
    found["rounds_of_all_sources"] = sum(info["rounds"] for info in infos)
    for name in ("draft_forwards", "skipped_drafts", "doubted_drafts"):
        found[name] = sum(info.get(name, 0) for info in infos)
    output = sum(len(answer["output_ids"]) for answer in answers)
    kept = (found["accepted_tokens"] + found["matched_tokens"]) / max(1, found["drafted_tokens"])
    return {**found, "output_tokens": output, "kept": round(kept, 3)}


if __name__ == "__main__":
    main(*sys.argv[1:])
