"""``sglang-parse try``: checks the models, asks its servers in turn, and says what to set."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from rich.console import Console

from sglang_parse.client.ask import ANY_MODEL, LONG_LIMIT_S, Asking, ask, decode_there
from sglang_parse.client.conditions import of_now
from sglang_parse.client.pool import Pool
from sglang_parse.client.program import ProgressLog
from sglang_parse.client.prompts import prompts_for
from sglang_parse.client.records import PARSE, PLAIN, Answer, BenchError, BenchRun, Item, Variant
from sglang_parse.client.servers import Endpoint, Remote, ServerSpec, free_ports
from sglang_parse.client.tables import publish
from sglang_parse.client.targets import command_of
from sglang_parse.core.phases import MODEL
from sglang_parse.doctor.finding import FAILS, WARNING
from sglang_parse.tasks.collect import ACCEPT_ALL
from sglang_parse.trial.answered import Answered
from sglang_parse.trial.forecast import Trial
from sglang_parse.trial.report import content, sections
from sglang_parse.trial.settings import TrialSettings

WARM_UP_TOKENS, FEWEST_ANSWERS = 16, 4
SHARES = {"drafts": 0.45, "parse": 0.25, "plain": 0.3}
"""Of the budget."""
NO_DRAFTS = "no draft model: what other judges would give is not predicted"
TRACED = {"trace": True, "drafting": "always"}


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Prints tables and advice; writes results.json and report.html."""
    settings, log = TrialSettings.read(arguments), ProgressLog(console)
    specs = settings.specs()
    warnings = [line for spec in specs if spec.name == PARSE for line in check_start(spec, log)]
    logs, remotes = settings.output / "logs", settings.remotes
    with Pool(specs, logs, log=log, remotes=remotes, max_alive=1) as pool:
        found = measure(settings, pool, log)
    facts = of_now() | {"servers": {spec.name: command_of(spec) for spec in specs}}
    facts |= {"prompts": str(settings.prompts or "built in"), "seconds": round(log.seconds)}
    file = settings.output / "results.json"
    shown = sections(found, settings.models, warnings, facts)
    publish(console, file, content(found, facts), "PARSE for these models", shown)
    return 0


def check_start(spec: ServerSpec, log: ProgressLog) -> list[str]:
    """Runs the doctor on the server with PARSE; returns its warnings. In a process of its own: it
    resolves settings in its environment, which servers inherit.

    Raises:
        BenchError: the models do not fit; with the doctor's findings.
    """
    log("sglang-parse doctor: do these models fit?")
    (port,) = free_ports(1)
    flags = [*spec.common, *spec.flags, "--port", str(port)]
    command = [sys.executable, "-m", "sglang_parse.cli", "doctor", "--json", *flags]
    environment = {**os.environ, **spec.environment}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines: dict[str, list[str]] = defaultdict(list)
    try:
        for one in json.loads(done.stdout)["findings"]:
            lines[one["status"]].append(f"{one['check']}: {one['found']}. Fix: {one['fix']}")
    except (ValueError, LookupError) as error:
        raise BenchError(f"the doctor ended with {done.returncode}: {done.stderr}") from error
    if lines[FAILS]:
        raise BenchError("\n".join(["these models cannot be served:", *lines[FAILS]]))
    for line in lines[WARNING]:
        log(line)
    return lines[WARNING]


def items_for(settings: TrialSettings, model_path: str) -> list[Item]:
    """The prompts; a file that begins with neither { nor " holds lines of plain text."""
    path, count = settings.prompts, settings.requests
    if path is not None and path.is_file():
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if lines and lines[0].lstrip()[0] not in '{"':
            return [Item(str(number), text, None) for number, text in enumerate(lines[:count])]
    is_alone = settings.target and not (settings.draft or settings.eagle3 or settings.mtp)
    return prompts_for(path, model_path, count, with_text=bool(is_alone))


def measure(settings: TrialSettings, pool: Pool, log: ProgressLog) -> Answered:
    """Asks both servers for about the budget."""
    seconds = {name: share * settings.budget for name, share in SHARES.items()}
    drafts = None
    with pool.awake(PARSE) as (endpoint,):
        items = items_for(settings, settings.target or Remote(PARSE, endpoint.url).model_path())
        alone = Remote(PLAIN, endpoint.url)  # under PARSE's name the client would require drafts
        step = answers(alone, items[:1], {"enabled": False}, WARM_UP_TOKENS)
        affordable = int(seconds["parse"] / FEWEST_ANSWERS * step.tokens_per_s)
        most = min(settings.max_tokens, max(WARM_UP_TOKENS, affordable))
        if settings.predicts:
            log(f"drafts, accepted whole: {len(items)} prompts, answers of up to {most} tokens")
            whole = {**ACCEPT_ALL, **TRACED}
            drafts = answers(endpoint, items, whole, most, seconds["drafts"])
            if not any(MODEL in answer.parse["sources"] for answer in drafts.answers):
                log(NO_DRAFTS)
                drafts = None
        log(f"PARSE as it is served: {len(items)} prompts")
        options, together = TRACED if drafts else {}, settings.concurrency
        parse = answers(endpoint, items, options, most, seconds["parse"], together)
        texts = _texts(endpoint, drafts.answers) if drafts else {}
    log(f"{len(parse.answers)} answers; the plain target")
    with pool.awake(PLAIN) as (endpoint,):
        plain = answers(endpoint, items, {}, most, seconds["plain"], together)
    if drafts is None:
        return Answered(parse, plain, together)
    return Trial(parse, plain, together, drafts, step.per_token("decode_ms"), texts)


def answers(
    server: Endpoint,
    items: Sequence[Item],
    options: Mapping[str, Any],
    max_tokens: int,
    seconds: float = 0.0,
    concurrency: int = 1,
) -> BenchRun:
    """As many as are expected to end in time, at least one, and before them short ones, which may
    compile kernels. No prompt is cached."""

    def ask_some(indices: Sequence[int], most: int) -> list[Answer]:
        asking = Asking(ANY_MODEL, most, parse=options, limit_s=LONG_LIMIT_S, wants_tokens=True)
        return [*ask(server, items, indices, concurrency=concurrency, asking=asking).answers]

    starts = range(0, len(items), concurrency)
    together = [range(len(items))[start : start + concurrency] for start in starts]
    ask_some(together[0], WARM_UP_TOKENS)
    httpx.post(f"{server.url}/flush_cache", timeout=60)
    found: list[Answer] = []
    started, longest = time.monotonic(), 0.0
    for some in together:
        begun = time.monotonic()
        if found and begun + longest > started + seconds:
            break
        found += ask_some(some, max_tokens)
        longest = max(longest, time.monotonic() - begun)
    seconds = sum(answer.wall_ms for answer in found) / 1e3
    return BenchRun(Variant(server.name), 0, concurrency, seconds, tuple(found))


def _texts(endpoint: Endpoint, drafts: Sequence[Answer]) -> dict[int, str]:
    """Token id -> text, of all tokens in the answers and their traces."""
    records = [record for answer in drafts for record in answer.parse["trace"]]
    rows: list[Sequence[int]] = [answer.token_ids for answer in drafts]
    rows += [record[key] for record in records for key in ("draft_token_ids", "target_token_ids")]
    ids = sorted({token for row in rows for token in row})
    return dict(zip(ids, decode_there(endpoint.url, [[token] for token in ids]), strict=True))
