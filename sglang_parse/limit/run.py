"""``sglang-parse bench``: real shapes without weights, simulated acceptance, beside stock SGLang.

As many servers as fit into the device's memory start together. Then each is measured while the
others are suspended: one that starts would disturb it. Requests are random tokens, answers of a
fixed length: without trained weights there is no text, whose chunks ``bench_serving`` could time.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial

import httpx
import psutil
import torch
from rich.console import Console

from sglang_parse.client.ask import LONG_LIMIT_S, timed
from sglang_parse.client.pool import Pool
from sglang_parse.client.program import ProgressLog, write_json
from sglang_parse.client.records import Answer, BenchError, BenchRun, Variant, has_parse
from sglang_parse.client.servers import Endpoint, ServerSpec
from sglang_parse.core.policy.constants import DEFAULTS
from sglang_parse.core.simulation import ENV_VAR as SIMULATE
from sglang_parse.limit.figures import content, speeds, table
from sglang_parse.limit.settings import LimitSettings

WARM_UP = -1
"""The run that is not timed: a server's first requests are its slowest."""
MIN_REQUESTS = 2
ADAPTIVE_WARM_UP = 1 + DEFAULTS.window
"""Requests: the adaptive policy decides after a window of drafts."""


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measures and writes results.json after each server: a machine may be lent for a short while,
    and a server that fails leaves the others. Prints a table. Returns 1 if one failed.
    """
    settings, log = LimitSettings.read(arguments), ProgressLog(console)
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise BenchError(
            "--device is cuda and torch finds no GPU; use a machine with one, or try it with "
            "--device cpu --target tiny_target --draft tiny_draft"
        )
    gpus = [torch.cuda.mem_get_info(gpu)[1] for gpu in range(torch.cuda.device_count())]
    is_cpu = settings.device == "cpu"
    at_once = settings.servers_at_once(psutil.virtual_memory().total if is_cpu else sum(gpus))
    results = settings.output / "results.json"
    specs, runs, failed = settings.specs(), list[BenchRun](), dict[str, str]()
    for start in range(0, len(specs), at_once):
        for name, outcome in _measure(specs[start : start + at_once], settings, log):
            if isinstance(outcome, BenchError):
                failed[name] = str(outcome)
                log(f"{name} failed: {outcome}")
            else:
                runs += outcome
            found = content(settings, specs, speeds(runs), failed, log.seconds)
            write_json(results, found)
    console.print(table(speeds(runs)), str(results), sep="\n", highlight=False)
    return 1 if failed else 0


def _measure(
    specs: Sequence[ServerSpec], settings: LimitSettings, log: ProgressLog
) -> Iterator[tuple[str, list[BenchRun] | BenchError]]:
    """Starts servers together; yields each one's name with its runs, or why there are none."""
    log(f"start {', '.join(spec.name for spec in specs)}")
    with Pool(specs, settings.output / "logs") as pool:
        with contextlib.suppress(BenchError):  # of the one that failed, when its turn comes
            pool.start_all()
        for spec in specs:
            try:
                with pool.awake(spec.name) as (server,):
                    yield spec.name, _send(Sender(server, spec, settings), settings, log)
            except BenchError as error:
                yield spec.name, error


def _send(sender: Sender, settings: LimitSettings, log: ProgressLog) -> list[BenchRun]:
    found: list[BenchRun] = []
    for concurrency in settings.concurrencies:
        sender.send(WARM_UP, concurrency)
        timed = [sender.send(run, concurrency) for run in range(settings.runs)]
        rates = ", ".join(f"{run.tokens_per_s:.1f}" for run in timed)
        log(f"  {sender.endpoint.name}, {concurrency} at a time: {rates} tokens/s")
        found += timed
    return found


class Sender:
    """Sends loads to one server; the prompts differ from request to request."""

    def __init__(self, endpoint: Endpoint, spec: ServerSpec, settings: LimitSettings) -> None:
        self.endpoint, self.settings = endpoint, settings
        self._is_simulated = SIMULATE in dict(spec.environment)
        self._rng = random.Random(0)

    def send(self, run: int, concurrency: int) -> BenchRun:
        """Sends so many requests at once; at a warm-up more, one after another."""
        settings, words = self.settings, range(3, self.settings.target.vocab_size)
        least = MIN_REQUESTS
        if run == WARM_UP:
            is_adaptive = settings.drafting == "auto" and has_parse(self.endpoint.name)
            least = ADAPTIVE_WARM_UP if is_adaptive else 1
        prompts = [
            self._rng.choices(words, k=settings.input_len) for _ in range(max(least, concurrency))
        ]
        limits = httpx.Limits(max_connections=None)
        with httpx.Client(timeout=LONG_LIMIT_S, limits=limits) as client:
            calls = [partial(self._ask, client, i, prompt) for i, prompt in enumerate(prompts)]
            return timed(calls, Variant(self.endpoint.name), run, concurrency)

    def _ask(self, client: httpx.Client, index: int, prompt: Sequence[int]) -> Answer:
        name, wanted = self.endpoint.name, self.settings.max_new_tokens
        params = {"temperature": 0, "max_new_tokens": wanted, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params}
        started = time.perf_counter()
        try:
            response = client.post(f"{self.endpoint.url}/generate", json=body).raise_for_status()
        except httpx.HTTPError as error:
            self.endpoint.check_alive()  # a dead server raises with its log
            raise BenchError(f"a request to {name} failed: {error!r}") from error
        wall_ms = 1e3 * (time.perf_counter() - started)
        meta = response.json()["meta_info"]
        if meta["completion_tokens"] != wanted:
            raise BenchError(f"{name} generated {meta['completion_tokens']} tokens")
        answer = Answer(index, "", wanted, wall_ms, meta)
        if self._is_simulated and not (
            answer.parse["mode"] == "parse" and "simulated" in answer.parse
        ):
            raise BenchError(
                f"{name} should serve with PARSE and simulate acceptance, its meta_info['parse'] "
                f"is {answer.parse!r}"
            )
        return answer
