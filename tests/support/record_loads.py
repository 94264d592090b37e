"""Records tests/unit/loads.json: stage times and verified drafts of real servers.

    PYTHONPATH=tests:examples/demo_pair python tests/support/record_loads.py

Three servers always draft 128 tokens and verify them at every segment's end: the demo pair with
blocks and token by token, and the demo target with an untrained draft of the same shape. Each
answers held-out problems at several loads. Servers with other fixed settings then do the same three
times, for the test that ``replay`` predicts them. Takes ten minutes on an idle machine.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from untrained import save_untrained  # examples/demo_pair

from sglang_parse.client.records import PARSE
from sglang_parse.client.servers import Server, free_ports
from sglang_parse.client.targets import parse_settings, server_specs
from sglang_parse.client.traced import num_matched
from sglang_parse.core.phases import TraceRecord
from sglang_parse.core.selection import matching_tokens
from sglang_parse.core.stage import Stage
from support.client import Client, parse_info
from support.demo_pair import DEMO, held_out
from support.loads import best_fixed, loads, recorded
from support.pair_models import pair_models
from support.servers import plugin

ROOT = Path(__file__).resolve().parents[2]
TO = ROOT / "tests" / "unit" / "loads.json"
LENGTH = {"max_new_tokens": 256}
NUM_PROBLEMS = 96
"""Held-out problems; the same number before them served to choose the controller's constants."""
EVERYWHERE = parse_settings(draft_tokens=128, max_prefixes=64, draft_chunk=16, drafting="always")
"""Verifies at every segment's end."""
HIGH, MIDDLE, NONE = 0.5, 0.9985, 1.0
"""Thresholds that accept most, some and nothing of the demo pair's drafts."""
PREDICTED = (
    {"requests": 1, "draft_tokens": 32, "max_prefixes": 4, "draft_chunk": 32},
    {"requests": 4, "draft_tokens": 64, "max_prefixes": 1, "draft_chunk": 16},
    {"requests": 8, "draft_tokens": 16, "max_prefixes": 16, "draft_chunk": 4},
    {"requests": 4, "drafting": "never"},
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        untrained = save_untrained(Path(folder) / "untrained", like=DEMO / "draft")
        pairs = {
            "blocks": _serve(EVERYWHERE, {HIGH: (1, 4, 16), MIDDLE: (4,)}),
            "one": _serve((*EVERYWHERE, "--parse-draft-parallel-tokens", "1"), {HIGH: (1, 4, 16)}),
            "disagreeing": _serve(
                (*EVERYWHERE, "--speculative-draft-model-path", str(untrained)), {HIGH: (1, 4)}
            ),
            "plain": _serve(parse_settings(drafting="never"), {HIGH: (1, 4, 16)}),
        }
    real = []
    for settings in PREDICTED:
        chosen = {key: value for key, value in settings.items() if key != "requests"}
        flags = parse_settings(**{"drafting": "always", **chosen})
        runs = _serve(flags, {HIGH: 3 * (settings["requests"],)})["runs"]
        real.append(
            {**settings, "tokens_per_s": statistics.median(r["tokens_per_s"] for r in runs)}
        )
    conditions = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    content = {"conditions": conditions, "pairs": pairs, "real": real}
    _write(content)
    # Searching the grid takes a minute; the test replays only the best.
    _write({**content, "best": {load.name: best_fixed(load) for load in loads()}})
    print(f"{TO.relative_to(ROOT)}: {TO.stat().st_size / 1e3:.0f} kB")


def _write(content: dict[str, Any]) -> None:
    TO.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    recorded.cache_clear()


def _serve(flags: Sequence[str], loads: dict[float, Sequence[int]]) -> dict[str, Any]:
    """Returns one server's stage times by size, and per load its scripts."""
    (port,) = free_ports(1)
    (parse,) = server_specs(pair_models(DEMO), (PARSE,))
    spec = replace(parse, flags=(*parse.flags, *flags))
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines"
        with plugin("stage_times", STAGE_TIMES=str(lines)):
            server = Server(spec, port, Path(folder) / "log")
        try:
            server.wait_ready()
            client = Client(server.url)
            runs = [
                _run(client, lines, threshold, count)
                for threshold, counts in loads.items()
                for count in counts
            ]
        finally:
            server.stop()
    stages: dict[str, list[list[float]]] = defaultdict(list)
    for run in runs:
        for kind, *line in run.pop("seen"):
            if kind != "round":
                stages[kind].append(line)
    return {"costs": {kind: _by_size(kind, seen) for kind, seen in stages.items()}, "runs": runs}


def _run(client: Client, lines: Path, threshold: float, concurrency: int) -> dict[str, Any]:
    problems = [problem.prompt for problem in held_out(2 * NUM_PROBLEMS)[NUM_PROBLEMS:]]
    asked = {"parse": {"threshold": threshold, "trace": True}}
    client.generate_all(problems[-8:], concurrency, **asked, max_new_tokens=64)
    lines.write_text("")
    started = time.perf_counter()
    answers = client.generate_all(
        problems[: max(24, 4 * concurrency)], concurrency, **asked, **LENGTH
    )
    seconds = time.perf_counter() - started
    seen = [json.loads(line) for line in lines.read_text().splitlines()]
    infos = [parse_info(answer) for answer in answers]
    tokens = sum(len(answer["output_ids"]) for answer in answers)
    counted = sum(ms for kind, *_, ms in seen if kind != "round")
    prefills = sum(info["prefill_ms"] for info in infos)
    iterations = sum(kind != "round" for kind, *_ in seen)
    run = {
        "threshold": threshold,
        "requests": concurrency,
        "tokens_per_s": round(tokens / seconds, 2),
        "prefill_ms": round(prefills / len(answers), 3),
        "overhead_ms": round((1e3 * seconds - counted - prefills) / iterations, 3),
        "scripts": [script_of(answer) for answer in answers if parse_info(answer)["trace"]],
    }
    print(f"{concurrency} requests, threshold {threshold}: {run['tokens_per_s']} tokens/s")
    return {**run, "seen": seen}


def _by_size(kind: str, seen: Sequence[Sequence[float]]) -> list[list[float]]:
    """Returns [[size, median ms]]; per token for drafts. The first of a size warms up."""
    found: dict[float, list[float]] = defaultdict(list)
    for size, num_tokens, ms in seen:
        found[size].append(ms / max(1, num_tokens) if kind == Stage.DRAFT.value else ms)
    medians = ((size, statistics.median(times[1:])) for size, times in found.items() if times[1:])
    return [[size, round(ms, 3)] for size, ms in sorted(medians)]


def script_of(answer: dict[str, Any]) -> list[list[int]]:
    """Returns per segment [tokens, 1 if the draft's version is rejected, its leading tokens that
    match the target's choices], as ``replay.Segment``."""
    script: list[list[int]] = []
    rounds = parse_info(answer)["trace"]
    length = len(answer["output_ids"])
    starts = [record["output_start"] for record in rounds] + [length]
    if starts[0] > 0:
        script.append([starts[0], 0, starts[0]])
    for record, next_start in zip(rounds, starts[1:], strict=True):
        script += _segments(record, next_start - record["output_start"])
    return [segment for segment in script if segment[0] > 0]


def _segments(record: TraceRecord, num_tokens: int) -> Iterator[list[int]]:
    """Yields the segments between one draft's start and the next one's."""
    draft, target = record["draft_token_ids"], record["target_token_ids"]
    ends, accepted_len, start = record["prefix_ends"], record["accepted_len"], 0
    output = accepted_len + num_matched(record)
    for end, verdict in zip(ends, record["verdicts"], strict=True):
        if end > output:
            break
        is_bad = end > accepted_len and verdict < record["threshold"]
        yield [end - start, int(is_bad), matching_tokens(draft[start:end], target[start:end])]
        start = end
    is_bad = output < ends[-1]
    rest = num_tokens - start
    yield [rest, int(is_bad), output - start if is_bad else rest]


if __name__ == "__main__":
    main()
