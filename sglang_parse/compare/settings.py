"""What the command line of ``sglang-parse compare`` can ask for."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sglang_parse.client.demo_pair import check_there, is_of_demo_pair, short_path
from sglang_parse.client.flags import Flags, at_least, option, split_names, split_words
from sglang_parse.client.records import (
    DRAFT,
    EAGLE3,
    PARSE,
    PARSE_EAGLE3,
    PARSE_ONE,
    PLAIN,
    STANDALONE,
    TITLES,
    WITH_PARSE,
    BenchError,
    Variant,
)
from sglang_parse.client.servers import COMMON_FLAGS, MODEL_NAME, Remote
from sglang_parse.client.targets import Models
from sglang_parse.core.config import ParseConfig
from sglang_parse.tasks import DEMO_TASK, Options, task_names

SERVERS = (PLAIN, STANDALONE, EAGLE3, PARSE_ONE, PARSE, PARSE_EAGLE3, DRAFT)
OF_THE_PAIR = ("target", "draft", "eagle3", "question")
OWN_THRESHOLD = ParseConfig().accept_threshold
"""At which a server with PARSE is measured like the others, at every concurrency."""


_models = partial(option, group="models and servers")
_load = partial(option, group="load")
_task = partial(option, group="task")


def _remotes(texts: Sequence[str]) -> dict[str, Remote]:
    remotes = {}
    for text in texts:
        name, _, url = text.partition("=")
        if name not in TITLES or not url.startswith(("http://", "https://")):
            raise BenchError(
                f"--url is {text!r}; use NAME=http://host:port with a name of {', '.join(TITLES)}"
            )
        remotes[name] = Remote(name, url.rstrip("/").removesuffix("/v1"))
    return remotes


def _concurrencies(text: str) -> tuple[int, ...]:
    return tuple(sorted({1, *_numbers(text, int)}))


def _other_thresholds(text: str) -> tuple[float, ...]:
    return tuple(sorted({*_numbers(text, float)} - {OWN_THRESHOLD}))


def _numbers(text: str, kind: Callable[[str], Any]) -> list:
    try:
        numbers = [kind(word) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise BenchError(f"{text!r} is no list of numbers such as 1,4,16") from error
    if any(number < 0 for number in numbers):
        raise BenchError(f"{text!r} has a negative number")
    return numbers


@dataclass(frozen=True)
class CompareSettings(Flags):
    """What was asked for.

    Attributes:
        servers: names, in the order of the page; ``remotes`` are those of them that run already.
        thresholds: for the servers with PARSE, at one request at a time; without the own one.
        requests: per run at one request at a time; three waves at higher concurrencies.
        looks: answers per run and way that are looked at for stage times.
        problems: graded per server; ``sweep_problems`` at each other threshold.
        output: folder for results.json, report.html and all logs.
    """

    target: str = _models(partial(short_path, "target"), "path or name")
    draft: str = _models(partial(short_path, "draft"), "path or name")
    eagle3: str = _models(partial(short_path, "eagle3"), "'' for none")
    question: str = _models(partial(short_path, "question.json"), "'' for the built-in")
    tokenizer: str = _models(None, "to count prompt tokens with (default: the target's)")
    model_name: str = _models(MODEL_NAME, "as it is served (default %(default)s)")
    flags: tuple[str, ...] = _models(
        shlex.join(COMMON_FLAGS), "of SGLang, for every server", read=split_words
    )
    parse_flags: tuple[str, ...] = _models("", "more, for servers with PARSE", read=split_words)
    standalone_steps: int = _models(4, "draft tokens", type=at_least(1))
    eagle3_steps: int = _models(3, "draft tokens", type=at_least(1))
    servers: tuple[str, ...] = _models("", f"default: {','.join(SERVERS)}", read=split_names)
    remotes: dict[str, Remote] = _models(
        [],
        "a running server instead of one started here; repeatable",
        name="--url",
        action="append",
        metavar="NAME=URL",
        read=_remotes,
    )
    max_alive: int = _models(
        4,
        "servers in memory at a time; 1 where one fills a GPU (default %(default)s)",
        type=at_least(1),
    )
    concurrencies: tuple[int, ...] = _load(
        "1,4,16",
        "requests at a time; 1 is always in",
        name="--concurrency",
        metavar="CONCURRENCY",
        read=_concurrencies,
    )
    thresholds: tuple[float, ...] = _load(
        "0,0.5,0.998,0.999,0.9995,1.5",
        "of servers with PARSE, per request; models differ in their verdicts (default %(default)s)",
        read=_other_thresholds,
    )
    runs: int = _load(3, "medians are reported", type=at_least(1))
    requests: int = _load(8, "per run, one at a time", type=at_least(1))
    looks: int = _load(4, "per run, for stage times", type=at_least(1))
    seed: int = _load(1, "of bench_serving", type=int)
    output: Path = _load(Path("build/compare"), "folder", type=Path)
    task: str = _task(DEMO_TASK, ", ".join((DEMO_TASK, *task_names())))
    task_file: Path | None = _task(None, "the task's problems; nothing is downloaded", type=Path)
    problems: int = _task(200, "graded per server", type=at_least(1))
    sweep_problems: int = _task(50, "per threshold", type=at_least(1))
    max_tokens: int | None = _task(None, "per answer (default: the task's)", type=at_least(1))
    allow_code: bool = _task(
        False, "run programs a model wrote, on this machine", action="store_true"
    )
    judge_url: str | None = _task(None, "an OpenAI-compatible server, for open answers")
    judge_model: str = _task("default")
    judge_prompts: Path | None = _task(None, "FastChat's judge_prompts.jsonl", type=Path)
    grader: str = _task("", "command that grades, for --task prompts; see the documents")

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> CompareSettings:
        """Raises: BenchError, when settings do not fit together."""
        found = super().read(arguments)
        # Started ones from --servers; with URLs only those, unless both were asked for.
        named = found.servers or tuple(found.remotes) or SERVERS
        servers = (*named, *(name for name in found.remotes if name not in named))
        if len(set(servers)) != len(servers):
            raise BenchError(f"--servers names a server twice: {arguments.servers}")
        settings = replace(
            found,
            servers=servers,
            tokenizer=found.tokenizer or found.target,
            sweep_problems=min(found.sweep_problems, found.problems),
        )
        if settings.own_servers:
            check_there({f"--{name}": getattr(settings, name) for name in OF_THE_PAIR})
            settings.models.check_local()
        return settings

    @property
    def models(self) -> Models:
        """What is served here."""
        return Models(
            target=self.target,
            draft=self.draft,
            eagle3=self.eagle3 or None,
            question=self.question or None,
            common=self.flags,
            parse_flags=self.parse_flags,
            standalone_steps=self.standalone_steps,
            eagle3_steps=self.eagle3_steps,
        )

    @property
    def options(self) -> Options:
        """What graders may need."""
        return Options(
            allow_code=self.allow_code,
            judge_url=self.judge_url,
            judge_model=self.judge_model,
            judge_prompts=self.judge_prompts,
            grader=self.grader,
        )

    @property
    def own_servers(self) -> tuple[str, ...]:
        """Those that are started here."""
        return tuple(name for name in self.servers if name not in self.remotes)

    def is_demo_pair(self) -> bool:
        """Whether every server here has the demo pair's models; running ones are asked."""
        started = (self.models.target, self.models.draft) if self.own_servers else ()
        return is_of_demo_pair(
            [*started, *(remote.model_path() for remote in self.remotes.values())]
        )

    def ways(self, server: str) -> tuple[Variant, ...]:
        """A server's ways, its own threshold first."""
        if server not in WITH_PARSE:
            return (Variant(server),)
        if server == PARSE_ONE:  # its text is PARSE's: other thresholds would say nothing new
            return (Variant(server, OWN_THRESHOLD),)
        return tuple(Variant(server, value) for value in (OWN_THRESHOLD, *self.thresholds))

    def all_ways(self) -> tuple[Variant, ...]:
        """Every way: servers in their order, thresholds rising."""
        return tuple(way for server in self.servers for way in sorted(self.ways(server)))

    def num_requests(self, concurrency: int) -> int:
        """How many requests one run of ``bench_serving`` sends."""
        return self.requests if concurrency == 1 else max(self.requests, 3 * concurrency)

    def indices(self, run: int, concurrency: int, total: int) -> list[int]:
        """Other problems for every run and concurrency, as far as the ``total`` go."""
        counts = {c: self.num_requests(c) for c in self.concurrencies}
        before = sum(count for c, count in counts.items() if c < concurrency)
        start = run * sum(counts.values()) + before
        return [index % total for index in range(start, start + counts[concurrency])]

    def order(self, run: int) -> tuple[str, ...]:
        """Who plays when: there and back again, so that no server is always the first."""
        return self.servers if run % 2 == 0 else self.servers[::-1]


add_arguments = CompareSettings.add_arguments
