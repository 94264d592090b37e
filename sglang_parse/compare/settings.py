"""Settings of ``sglang-parse compare`` and of its presets ``demo`` and ``load``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from sglang_parse.client.demo_pair import judge_of, layer_of, short_path
from sglang_parse.client.flags import at_least, fraction, numbers, split_names
from sglang_parse.client.records import (
    DRAFT,
    ON_GPU,
    OTHER_JUDGES,
    PARSE_ONE,
    PARSE_TOKEN,
    PLAIN,
    TITLES,
    WITH_LAYER,
    BenchError,
    Variant,
    has_parse,
    kind_of,
)
from sglang_parse.client.servers import NAMED_URLS, Remote
from sglang_parse.tasks.settings import TaskSettings, load, model, task

DEMO_SERVER_BYTES = 2.6 * 2**30
"""Resident memory of a demo pair's server on a CPU, most of it SGLang and PyTorch."""

PRESETS: dict[str, dict[str, Any]] = {
    "demo": {
        "servers": ("plain", "standalone", "eagle3", "parse-token", "parse", "parse-eagle3"),
        "concurrencies": (1, 4, 16),
        "thresholds": (),
        "requests": 4,
        "waves": 2,
        "problems": 0,
        "noise": False,
        "output": Path("build/demo"),
    },
    "load": {
        "servers": ("plain", "standalone", "eagle3", "parse", "parse-eagle3"),
        "concurrencies": (1, 4, 8, 16),
        "thresholds": (),
        "off_fractions": (0.0, 0.5, 1.0),
        "requests": 16,
        "traced": 0,
        "problems": 0,
        "output": Path("build/load"),
    },
}
"""Command -> its defaults."""


@dataclass(frozen=True)
class CompareSettings(TaskSettings):
    """Settings of a comparison.

    Attributes:
        servers: names, in the order of the page; ``remotes`` are those of them that run already.
        has_text: False of models without weights, whose answers are not streamed.
        waves: requests per place at higher concurrencies, at least: the beginning and the end of a
            closed loop are the smaller part. The demo has less, to take no more than ten minutes.
    """

    eagle3: str = model(partial(short_path, "eagle3"), "'' for none")
    mtp: str = model(
        None,
        "'own' where the target's checkpoint has an MTP layer, or the path of one that has it; for "
        "servers nextn and parse-mtp (default: the demo pair's for its target, else 'own')",
    )
    dflash: str = model("", "DFLASH draft of the target, a folder; for a server dflash")
    judge: str = model(
        None,
        "verdict head of the servers with PARSE, a folder (default: the demo pair's for its "
        "target, else ''); '' asks --question",
    )
    standalone_steps: int = model(4, "draft tokens of stock STANDALONE", type=at_least(1))
    eagle3_steps: int = model(3, "draft tokens of stock EAGLE3 and NEXTN", type=at_least(1))
    servers: tuple[str, ...] = model(
        tuple(name for name in TITLES if name not in (*OTHER_JUDGES, *WITH_LAYER, *ON_GPU)),
        f"of {','.join(TITLES)}; default: the command's, or those of --url. With @VALUE acceptance "
        "is simulated: an accept length of stock servers, a fraction of every draft, every:N, a "
        "refusal every N tokens, or doubt:N, the same where the draft model is unsure, with PARSE; "
        "on all servers answers then end where right ones do",
        read=lambda names: split_names(names) if isinstance(names, str) else names,
    )
    remotes: dict[str, Remote] = model(
        [], "a running server instead of one started here; repeatable", **NAMED_URLS
    )
    max_alive: int = model(
        lambda: max(1, int(psutil.virtual_memory().available / DEMO_SERVER_BYTES)),
        "servers in memory at a time; 1 where one fills a GPU; as many of the demo pair's fit",
        type=at_least(1),
    )
    fresh: bool = model(False, "start the servers anew for every run", action="store_true")
    concurrencies: tuple[int, ...] = load(
        (1, 4, 16),
        "requests at a time; with other thresholds 1 is always in",
        name="--concurrency",
        type=numbers(at_least(1)),
    )
    thresholds: tuple[float, ...] = load(
        (0.0, 0.1, 0.9, 0.99, 1.5),
        "of requests to servers with PARSE, one at a time; the server's is always in; '' for none",
        type=numbers(float),
    )
    off_fractions: tuple[float, ...] = load(
        (0.0,),
        "fractions of the requests that switch PARSE off, where there is PARSE",
        name="--off",
        type=numbers(fraction),
    )
    runs: int = load(3, "medians are reported", type=at_least(1))
    requests: int = load(8, "per run, one at a time", type=at_least(1))
    waves: int = load(3, "requests per run for each of several at a time", type=at_least(1))
    warmup: int = load(8, "requests before the first run of a server", type=at_least(1))
    traced: int = load(4, "requests per run for stage times", type=at_least(0))
    output: Path = load(Path("build/compare"), "folder", type=Path)
    problems: int = task(200, "graded per server; 0 grades the timed answers", type=at_least(0))
    sweep_problems: int = task(50, "per threshold", type=at_least(1))
    has_text: bool = True
    noise: bool = task(True, "grade the plain target twice", action=argparse.BooleanOptionalAction)

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> CompareSettings:
        found = super().read(arguments)
        # With URLs only those servers, unless others were asked for too.
        is_default = not isinstance(arguments.servers, str)
        named = () if found.remotes and is_default else found.servers
        servers = (*named, *(name for name in found.remotes if name not in named))
        if len(set(servers)) != len(servers):
            raise BenchError(f"--servers names a server twice: {arguments.servers}")
        first = {1} if found.thresholds else set()
        settings = replace(
            found,
            servers=servers,
            tokenizer=found.tokenizer or found.target,
            judge=judge_of(found.target) if found.judge is None else found.judge,
            mtp=found.mtp or layer_of(found.target),
            concurrencies=tuple(sorted({*found.concurrencies, *first})),
            sweep_problems=min(found.sweep_problems, found.problems),
        )
        if settings.own_servers:
            settings.check_local()
        return settings

    @property
    def own_servers(self) -> tuple[str, ...]:
        return tuple(name for name in self.servers if name not in self.remotes)

    @property
    def baseline(self) -> str:
        return PLAIN if PLAIN in self.servers else self.servers[0]

    @property
    def stock_servers(self) -> tuple[str, ...]:
        """Servers without PARSE that answer as the target does."""
        return tuple(name for name in self.servers if not has_parse(name) and name != DRAFT)

    def graded_variants(self, server: str) -> tuple[Variant, ...]:
        # Token by token the draft's text is the same, and token mode has no threshold.
        has_others = has_parse(server) and kind_of(server) not in (PARSE_ONE, PARSE_TOKEN)
        others = self.thresholds if has_others else ()
        return (Variant(server), *(Variant(server, threshold) for threshold in others))

    def loads(self, server: str) -> list[tuple[Variant, int]]:
        """Variants and concurrencies that ``bench_serving`` measures, in this order."""
        offs = (has_parse(server) and self.off_fractions) or (0.0,)
        own = [Variant(server, off_fraction=off) for off in offs]
        found = [(variant, concurrency) for concurrency in self.concurrencies for variant in own]
        return [*found, *((variant, 1) for variant in self.graded_variants(server)[1:])]

    def num_requests(self, concurrency: int) -> int:
        return max(self.requests, self.waves * concurrency if concurrency > 1 else 1)

    @property
    def num_timed(self) -> int:
        return self.runs * sum(map(self.num_requests, self.concurrencies))

    def indices(self, run: int, concurrency: int, total: int) -> list[int]:
        """Problems of a run at a concurrency, distinct as far as the ``total`` go."""
        counts = {c: self.num_requests(c) for c in self.concurrencies}
        before = sum(count for c, count in counts.items() if c < concurrency)
        start = run * sum(counts.values()) + before
        return [index % total for index in range(start, start + self.num_requests(concurrency))]

    def order(self, run: int) -> tuple[str, ...]:
        """Servers by their turns: there and back again, so that none is always the first."""
        return self.servers if run % 2 == 0 else self.servers[::-1]


add_arguments = CompareSettings.add_arguments
