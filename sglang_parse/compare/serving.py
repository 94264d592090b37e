"""SGLang's own ``bench_serving`` against one server.

It runs as ``python -m sglang.bench_serving ...`` does, in a separate process. Importing it takes
half a minute on a small machine, so the standard library's fork server imports it once and every
run is a fork of that.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import runpy
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from sglang_parse.client.ask import Asking
from sglang_parse.client.records import (
    ALL,
    DRAFTING,
    LATENCIES,
    PERCENTILES,
    SWITCHED_OFF,
    Answer,
    BenchError,
    Item,
    ServingRun,
    Variant,
)
from sglang_parse.client.servers import Endpoint
from sglang_parse.telemetry.metrics import METRICS, PREFIX

PROGRAM = "sglang.bench_serving"
PRELOADED = ("sglang_parse.compare.preload",)
_PROCESSES = multiprocessing.get_context("forkserver")
STAGE_SECONDS, PASSES, ROWS = "stage_seconds_total", "verify_passes_total", "verify_rows_total"
_LABELS = {metric.name: metric.label for metric in METRICS}


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of one run, one per problem, in this order; ``max_tokens`` is of each."""

    variant: Variant
    run: int
    concurrency: int
    problems: Sequence[Item]
    max_tokens: Sequence[int]
    tokenizer: str
    asking: Asking
    streams: bool = True

    @property
    def stem(self) -> str:
        at = "" if self.variant.threshold is None else f"-at{self.variant.threshold:g}"
        off = f"-off{self.variant.off_fraction:g}" if self.variant.off_fraction else ""
        return f"{self.variant.server}{at}{off}-run{self.run}-c{self.concurrency}"

    def is_off(self, index: int) -> bool:
        """Whether a request switches PARSE off: spread evenly, of a half every second one."""
        fraction = self.variant.off_fraction
        return math.floor((index + 1) * fraction) > math.floor(index * fraction)

    def groups(self) -> dict[Variant, list[int]]:
        """Variant -> its requests: all of them, or those that draft and the others."""
        indices = range(len(self.problems))
        if not 0 < self.variant.off_fraction < 1:
            return {self.variant: list(indices)}
        found: dict[str, list[int]] = {DRAFTING: [], SWITCHED_OFF: []}
        for index in indices:
            found[SWITCHED_OFF if self.is_off(index) else DRAFTING].append(index)
        return {replace(self.variant, group=group): some for group, some in found.items()}


def write_requests(path: Path, load: Load) -> None:
    """The load in ``bench_serving``'s dataset format ``openai``, one JSON line a request."""
    lines = []
    for index, problem in enumerate(load.problems):
        parse = {"enabled": False} if load.is_off(index) else load.variant.parse
        request = {
            "ignore_eos": False,
            **problem.request,
            "messages": [{"role": "user", "content": problem.text}],
            "max_tokens": load.max_tokens[index],
            "temperature": load.asking.temperature,
            # Tokens as the server counts them.
            **({"stream_options": {"include_usage": True}} if load.streams else {}),
            **({"custom_params": {"parse": parse}} if parse else {}),
        }
        lines.append(json.dumps(request) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def flags(url: str, load: Load, requests: Path, output: Path) -> list[str]:
    return [
        *("--backend", "sglang-oai-chat", "--base-url", url),
        *("--model", load.tokenizer, "--served-model-name", load.asking.model),
        *("--tokenizer", load.tokenizer),
        *("--dataset-name", "openai", "--dataset-path", str(requests)),
        *("--num-prompts", str(len(load.problems)), "--max-concurrency", str(load.concurrency)),
        *("--warmup-requests", "0", "--flush-cache", "--disable-tqdm"),
        *(() if load.streams else ("--disable-stream",)),
        *("--output-details", "--output-file", str(output)),
    ]


def command_of(load: Load) -> str:
    words = flags("URL", load, Path("requests.jsonl"), Path("result.jsonl"))
    return f"python -m {PROGRAM} {shlex.join(words)}"


def bench(endpoint: Endpoint, load: Load, folder: Path) -> tuple[list[ServingRun], list[Answer]]:
    """Runs ``bench_serving`` once: a run per group of requests, and the answers to all of them.
    Its files and its log stay in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    requests, output = folder / f"{load.stem}.requests.jsonl", folder / f"{load.stem}.result.jsonl"
    write_requests(requests, load)
    output.unlink(missing_ok=True)
    before = server_totals(endpoint)
    _run(flags(endpoint.url, load, requests, output), endpoint, folder / f"{load.stem}.log")
    after = server_totals(endpoint)
    result = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    failed = [error for error in result["errors"] if error]
    if failed or result["completed"] != len(load.problems):
        endpoint.check_alive()
        raise BenchError(
            f"{len(failed)} of {len(load.problems)} requests to {endpoint.name} failed "
            f"(all: {output}); the first: {failed[:1]}"
        )
    # A server publishes a counter from its first use on.
    growth = {key: after[key] - before.get(key, 0.0) for key in after}
    return read_result(load, result, growth), read_answers(result)


def server_totals(endpoint: Endpoint) -> dict[tuple[str, str], float]:
    """(Counter, label value) -> its total since the server's start, of stage times, verify passes
    and their rows; empty where it publishes none."""
    try:
        response = httpx.get(f"{endpoint.url}/metrics", timeout=60)
    except httpx.HTTPError as error:
        endpoint.check_alive()
        raise BenchError(f"{endpoint.name} does not show its metrics: {error!r}") from error
    if response.status_code != httpx.codes.OK:
        return {}
    return {
        (name, sample.labels.get(_LABELS[name], "")): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if (name := sample.name.removeprefix(PREFIX)) in (STAGE_SECONDS, PASSES, ROWS)
    }


def _run(words: Sequence[str], endpoint: Endpoint, log: Path) -> None:
    _PROCESSES.set_forkserver_preload(list(PRELOADED))
    process = _PROCESSES.Process(target=_become, args=(PROGRAM, words, log), daemon=True)
    process.start()
    try:
        process.join()
    finally:
        process.kill()  # also where this process is ending
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


def read_result(
    load: Load, result: Mapping[str, Any], growth: Mapping[tuple[str, str], float]
) -> list[ServingRun]:
    """Figures of each group of requests, from ``--output-details`` and the server's counters."""
    seconds, passes = result["duration"], growth.get((PASSES, ""))
    spent = {stage: value for (name, stage), value in growth.items() if name == STAGE_SECONDS}
    found = []
    for variant, indices in load.groups().items():
        output_tokens = sum(result["output_lens"][index] for index in indices)
        found.append(
            ServingRun(
                variant=variant,
                run=load.run,
                concurrency=load.concurrency,
                requests=len(indices),
                output_tokens=output_tokens,
                seconds=seconds,
                tokens_per_s=output_tokens / seconds,
                latency_ms=_latency_ms(result, indices, LATENCIES if load.streams else ("e2e",)),
                accept_length=result["accept_length"] if variant.group == ALL else None,
                stages={stage: value / seconds for stage, value in spent.items()},
                rows_per_pass=growth[ROWS, ""] / passes if passes else None,
                ms_per_pass=1e3 * spent["verify"] / passes if passes else None,
            )
        )
    return found


def read_answers(result: Mapping[str, Any]) -> list[Answer]:
    """The answers of a load, in its order; ``bench_serving`` records no ``meta_info``."""
    found = zip(result["generated_texts"], result["output_lens"], _e2e_s(result), strict=True)
    return [Answer(index, text, n, 1e3 * s, {}) for index, (text, n, s) in enumerate(found)]


def _e2e_s(result: Mapping[str, Any]) -> list[float]:
    return [ttft + sum(itls) for ttft, itls in zip(result["ttfts"], result["itls"], strict=True)]


def _latency_ms(
    result: Mapping[str, Any], indices: Sequence[int], kinds: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Percentiles over the requests; ``bench_serving``'s own divide the time between two chunks by
    the tokens of the second, which hides that nothing came for a while."""
    ttfts, itls, lens = result["ttfts"], result["itls"], result["output_lens"]
    e2e_s = _e2e_s(result)
    values = {
        "ttft": [ttfts[i] for i in indices],
        "tpot": [sum(itls[i]) / (lens[i] - 1) for i in indices if lens[i] > 1],
        "itl": [itl for i in indices for itl in itls[i]],
        "max_itl": [max(itls[i], default=0.0) for i in indices],
        "e2e": [e2e_s[i] for i in indices],
    }
    return {
        kind: {
            p: 1e3 * float(np.percentile(values[kind] or [0.0], int(p[1:]))) for p in PERCENTILES
        }
        for kind in kinds
    }
