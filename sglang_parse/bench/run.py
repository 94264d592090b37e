"""``sglang-parse bench``: a comparison of models without weights, one server after another.

As many servers as fit into the device's memory start together. Then each is measured while the
others are suspended: one that starts would disturb it. Requests are random tokens, answers of a
fixed length.
"""

from __future__ import annotations

import argparse
import contextlib
import random

import psutil
import torch
from rich.console import Console

from sglang_parse.bench.settings import BenchSettings
from sglang_parse.client.pool import Pool
from sglang_parse.client.program import ProgressLog, write_json
from sglang_parse.client.records import Assignment, BenchError, Item
from sglang_parse.client.servers import ServerSpec
from sglang_parse.client.tables import publish
from sglang_parse.compare.figures import Measured, make_comparison
from sglang_parse.compare.report import conditions, results, sections
from sglang_parse.compare.run import Runner
from sglang_parse.core.simulation import ENV_VAR as SIMULATE

TITLE = "Speed without trained weights, simulated acceptance"
NOTES = (
    "no trained weights: they are random and tiny, which a GPU multiplies at a higher clock than "
    "trained ones",
    "acceptance is simulated: verdicts are computed and ignored",
)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Measures and writes results.json after each server: a machine may be lent for a short while,
    and a server that fails leaves the others. Returns 1 if one failed.
    """
    settings, log = BenchSettings.read(arguments), ProgressLog(console)
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise BenchError(
            "--device is cuda and torch finds no GPU; use a machine with one, or try it with "
            "--device cpu --target tiny_target --draft tiny_draft"
        )
    gpus = [torch.cuda.mem_get_info(gpu)[1] for gpu in range(torch.cuda.device_count())]
    is_cpu = settings.device == "cpu"
    at_once = settings.servers_at_once(psutil.virtual_memory().total if is_cpu else sum(gpus))
    file, specs, compared = settings.output / "results.json", settings.specs(), settings.compared
    measured, failed, task = Measured(), dict[str, str](), random_task(settings)
    for start in range(0, len(specs), at_once):
        some = specs[start : start + at_once]
        log(f"start {', '.join(spec.name for spec in some)}")
        with Pool(some, settings.output / "logs") as pool:
            with contextlib.suppress(BenchError):  # of the one that failed, when its turn comes
                pool.start_all()
            runner = Runner(compared, task, pool, log, measured)
            for spec in some:
                try:
                    for number in range(compared.runs):
                        runner.turn(spec.name, number)
                    check(measured, spec, settings)
                except BenchError as error:
                    failed[spec.name] = str(error)
                    measured.drop(spec.name)
                    log(f"{spec.name} failed: {error}")
                figures = make_comparison(measured, compared.servers, compared.baseline)
                facts = conditions(compared, specs, task.title, runner.command, log.seconds)
                facts |= {**settings.facts, "failed": failed, "notes": NOTES}
                facts["environment"] = {spec.name: spec.environment for spec in specs}
                write_json(file, content := results(figures, measured, facts))
    publish(console, file, content, TITLE, sections(figures, facts))
    return 1 if failed else 0


def check(measured: Measured, spec: ServerSpec, settings: BenchSettings) -> None:
    """Refuses figures of answers of another length, or without simulated acceptance."""
    for run in (run for run in measured.serving if run.variant.server == spec.name):
        if run.output_tokens != run.requests * settings.max_new_tokens:
            raise BenchError(f"{run.requests} answers have {run.output_tokens} tokens")
    is_simulated = SIMULATE in spec.environment
    for traced in (run for run in measured.traced if run.variant.server == spec.name):
        for answer in traced.answers:
            if is_simulated and "simulated" not in answer.parse:
                raise BenchError(f"acceptance is not simulated: {answer.parse!r}")


def random_task(settings: BenchSettings) -> Assignment:
    """Prompts that differ from request to request; nothing grades what comes back."""
    numbers, words = random.Random(0), range(3, settings.target.vocab_size)
    count = max(settings.compared.num_timed, settings.compared.warmup)
    prompts = [numbers.choices(words, k=settings.input_len) for _ in range(count)]
    requests = [{"input_ids": prompt, "ignore_eos": True} for prompt in prompts]
    items = [Item(str(n), "random", None, request=request) for n, request in enumerate(requests)]
    title = f"{settings.input_len} random tokens, answers of {settings.max_new_tokens}"
    return Assignment(title, items, lambda *_: 0.0, settings.max_new_tokens)
