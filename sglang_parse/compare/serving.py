"""SGLang's own ``bench_serving`` against one server.

It is run as people run it, ``python -m sglang.bench_serving ...`` in a process of its own: its
arguments, its output and its exit code are not ours. Importing it takes half a minute on a small
machine and it is run a hundred times, so that the standard library's fork server imports it once
and every run is a fork of that.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_parse.client.ask import Asking
from sglang_parse.client.records import (
    LATENCIES,
    PERCENTILES,
    BenchError,
    Item,
    ServingRun,
    Variant,
)
from sglang_parse.client.servers import Endpoint

PROGRAM = "sglang.bench_serving"
PRELOADED = ("sglang_parse.compare.preload",)
_PROCESSES = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True)
class Load:
    """What one run sends.

    Attributes:
        problems: one request each, sent in this order.
        concurrency: requests under way at a time.
        tokenizer: path or name; used to count prompt tokens.
    """

    problems: Sequence[Item]
    concurrency: int
    tokenizer: str
    asking: Asking
    seed: int


def write_requests(path: Path, load: Load) -> None:
    """The load in ``bench_serving``'s dataset format ``openai``, one JSON line a request.

    Only the first turn is sent: what the user says next may depend on the answer.
    """
    extra = load.asking.extra_body()
    del extra["return_meta_info"]  # bench_serving does not read it
    lines = [
        json.dumps(
            {
                "messages": [{"role": "user", "content": problem.text}],
                "max_tokens": load.asking.max_tokens,
                "temperature": load.asking.temperature,
                "ignore_eos": False,
                "stream_options": {"include_usage": True},  # tokens as the server counts them
                **extra,
            }
        )
        for problem in load.problems
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def flags(url: str, load: Load, requests: Path, output: Path) -> list[str]:
    """``bench_serving``'s command line."""
    return [
        *("--backend", "sglang-oai-chat", "--base-url", url),
        *("--model", load.tokenizer, "--served-model-name", load.asking.model),
        *("--tokenizer", load.tokenizer),
        *("--dataset-name", "openai", "--dataset-path", str(requests)),
        *("--num-prompts", str(len(load.problems)), "--max-concurrency", str(load.concurrency)),
        *("--warmup-requests", "1", "--flush-cache", "--disable-tqdm", "--seed", str(load.seed)),
        *("--output-details", "--output-file", str(output)),
    ]


def command_of(load: Load) -> str:
    """The command line as a person would type it."""
    words = flags("URL", load, Path("requests.jsonl"), Path("result.jsonl"))
    return f"python -m {PROGRAM} {shlex.join(words)}"


def bench(endpoint: Endpoint, way: Variant, run: int, load: Load, folder: Path) -> ServingRun:
    """One run of ``bench_serving``; its files and what it printed stay in ``folder``.

    Raises:
        BenchError: it failed, or a request did.
    """
    threshold = "" if way.threshold is None else f"-at{way.threshold:g}"
    stem = f"{way.server}{threshold}-run{run}-c{load.concurrency}"
    folder.mkdir(parents=True, exist_ok=True)
    requests, output = folder / f"{stem}.requests.jsonl", folder / f"{stem}.result.jsonl"
    log = folder / f"{stem}.log"
    write_requests(requests, load)
    output.unlink(missing_ok=True)
    _run(flags(endpoint.url, load, requests, output), endpoint, log)
    result = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    failed = [error for error in result["errors"] if error]
    if failed or result["completed"] != len(load.problems):
        endpoint.check_alive()
        raise BenchError(
            f"{len(failed)} of {len(load.problems)} requests to {endpoint.name} failed "
            f"(all: {output}); the first: {failed[:1]}"
        )
    return read_result(way, run, load.concurrency, result)


def _run(words: Sequence[str], endpoint: Endpoint, log: Path) -> None:
    _PROCESSES.set_forkserver_preload(list(PRELOADED))
    process = _PROCESSES.Process(target=_become, args=(PROGRAM, words, log), daemon=True)
    process.start()
    try:
        process.join()
    finally:
        process.kill()  # where we are told to end, it ends too
    if process.exitcode:
        endpoint.check_alive()
        raise BenchError(
            f"bench_serving against {endpoint.name} failed: exit code {process.exitcode} "
            f"(log: {log})"
        )


def _become(program: str, words: Sequence[str], log: Path) -> None:
    """``python -m program words > log``, in a process made for it."""
    with log.open("wb") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    sys.argv = [program, *words]
    runpy.run_module(program, run_name="__main__", alter_sys=True)


def read_result(way: Variant, run: int, concurrency: int, result: Mapping[str, Any]) -> ServingRun:
    """From the object ``bench_serving`` writes."""
    # It has no p50 of its own, but the median under its name.
    names = {"p50": "median", "p90": "p90", "p99": "p99"}
    latency = {
        kind: {
            percentile: result[f"{names[percentile]}_{'e2e_latency' if kind == 'e2e' else kind}_ms"]
            for percentile in PERCENTILES
        }
        for kind in LATENCIES
    }
    return ServingRun(
        variant=way,
        run=run,
        concurrency=concurrency,
        requests=result["completed"],
        output_tokens=result["total_output_tokens"],
        seconds=result["duration"],
        tokens_per_s=result["output_throughput"],
        requests_per_s=result["request_throughput"],
        latency_ms=latency,
        accept_length=result["accept_length"],
    )
