"""What the command line of ``sglang-parse compare`` can ask for."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sglang_parse.bench.harness.demo_pair import DEMO_PAIR, is_of_demo_pair
from sglang_parse.bench.harness.lineup import Models
from sglang_parse.bench.harness.pool import Remote
from sglang_parse.bench.harness.program import at_least
from sglang_parse.bench.harness.records import (
    DRAFT,
    EAGLE3,
    PARSE,
    PARSE_EAGLE3,
    PLAIN,
    STANDALONE,
    TITLES,
    WITH_PARSE,
    BenchError,
    Way,
)
from sglang_parse.bench.harness.servers import COMMON_FLAGS, MODEL_NAME
from sglang_parse.bench.tasks import Options, task_names
from sglang_parse.core.config import ParseConfig

DEMO_TASK = "demo"
SERVERS = (PLAIN, STANDALONE, EAGLE3, PARSE, PARSE_EAGLE3, DRAFT)
OWN_THRESHOLD = ParseConfig().threshold
"""At which a server with PARSE is measured like the others, at every concurrency."""


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """What was asked for.

    Attributes:
        servers: names, in the order of the page.
        remotes: those of them that run already.
        thresholds: for the servers with PARSE, at one request at a time; without the own one.
        requests: per run at one request at a time; three waves at higher concurrencies.
        looks: answers per run and way that are looked at for stage times.
        problems: graded per server; ``sweep_problems`` at each other threshold.
        max_alive: servers kept in memory at a time.
        output: folder for results.json, report.html and all logs.
    """

    models: Models
    model_name: str
    tokenizer: str
    servers: tuple[str, ...]
    remotes: dict[str, Remote]
    concurrencies: tuple[int, ...]
    thresholds: tuple[float, ...]
    runs: int
    requests: int
    looks: int
    problems: int
    sweep_problems: int
    max_alive: int
    task: str
    task_file: Path | None
    max_tokens: int | None
    options: Options
    seed: int
    output: Path

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> CompareSettings:
        """From a parsed command line.

        Raises:
            BenchError: settings that do not fit together.
        """
        remotes = dict(map(_remote, arguments.url))
        servers = _servers(arguments.servers, tuple(remotes))
        settings = cls(
            models=_models(arguments),
            model_name=arguments.model_name,
            tokenizer=arguments.tokenizer or arguments.target,
            servers=servers,
            remotes=remotes,
            concurrencies=tuple(sorted({1, *_numbers(arguments.concurrency, int)})),
            thresholds=tuple(
                value
                for value in sorted(set(_numbers(arguments.thresholds, float)))
                if value != OWN_THRESHOLD
            ),
            runs=arguments.runs,
            requests=arguments.requests,
            looks=arguments.looks,
            problems=arguments.problems,
            sweep_problems=min(arguments.sweep_problems, arguments.problems),
            max_alive=arguments.max_alive,
            task=arguments.task,
            task_file=arguments.task_file,
            max_tokens=arguments.max_tokens,
            options=Options(
                arguments.allow_code,
                arguments.judge_url,
                arguments.judge_model,
                arguments.judge_prompts,
            ),
            seed=arguments.seed,
            output=arguments.output,
        )
        if settings.own_servers:
            settings.models.check_local()
        return settings

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

    def ways(self, server: str) -> tuple[Way, ...]:
        """A server's ways, its own threshold first."""
        if server not in WITH_PARSE:
            return (Way(server),)
        return tuple(Way(server, value) for value in (OWN_THRESHOLD, *self.thresholds))

    def all_ways(self) -> tuple[Way, ...]:
        """Every way: servers in their order, thresholds rising."""
        return tuple(way for server in self.servers for way in sorted(self.ways(server)))

    def num_requests(self, concurrency: int) -> int:
        """How many requests one run of ``bench_serving`` sends."""
        return self.requests if concurrency == 1 else max(self.requests, 3 * concurrency)

    def order(self, run: int) -> tuple[str, ...]:
        """Who plays when: there and back again, so that no server is always the first."""
        return self.servers if run % 2 == 0 else self.servers[::-1]


def _models(arguments: argparse.Namespace) -> Models:
    return Models(
        target=arguments.target,
        draft=arguments.draft,
        eagle3=arguments.eagle3 or None,
        question=arguments.question or None,
        common=tuple(shlex.split(arguments.flags)),
        parse_flags=tuple(shlex.split(arguments.parse_flags)),
        standalone_steps=arguments.standalone_steps,
        eagle3_steps=arguments.eagle3_steps,
    )


def _servers(text: str, remotes: tuple[str, ...]) -> tuple[str, ...]:
    """Started ones from ``--servers``; with URLs only those, unless both were asked for."""
    named = tuple(name.strip() for name in text.split(",") if name.strip())
    if not named:
        named = remotes or SERVERS
    servers = (*named, *(name for name in remotes if name not in named))
    if len(set(servers)) != len(servers):
        raise BenchError(f"--servers names a server twice: {text}")
    return servers


def _remote(text: str) -> tuple[str, Remote]:
    name, _, url = text.partition("=")
    if name not in TITLES or not url.startswith(("http://", "https://")):
        raise BenchError(
            f"--url is {text!r}; use NAME=http://host:port with a name of {', '.join(TITLES)}"
        )
    return name, Remote(name, url.rstrip("/").removesuffix("/v1"))


def _numbers(text: str, kind: Callable[[str], float]) -> list:
    try:
        numbers = [kind(word) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise BenchError(f"{text!r} is no list of numbers such as 1,4,16") from error
    if any(number < 0 for number in numbers):
        raise BenchError(f"{text!r} has a negative number")
    return numbers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``sglang-parse compare``; the defaults are the demo pair's."""
    models = parser.add_argument_group("models and servers")
    models.add_argument("--target", default=_demo("target"), help="path or name")
    models.add_argument("--draft", default=_demo("draft"), help="path or name")
    models.add_argument("--eagle3", default=_demo("eagle3"), help="'' for none")
    models.add_argument("--question", default=_demo("question.json"), help="'' for the built-in")
    models.add_argument("--tokenizer", help="to count prompt tokens with (default: the target's)")
    models.add_argument(
        "--model-name", default=MODEL_NAME, help="as it is served (default %(default)s)"
    )
    models.add_argument(
        "--flags", default=shlex.join(COMMON_FLAGS), help="of SGLang, for every server"
    )
    models.add_argument("--parse-flags", default="", help="more, for servers with PARSE")
    models.add_argument("--standalone-steps", type=at_least(1), default=4, help="draft tokens")
    models.add_argument("--eagle3-steps", type=at_least(1), default=3, help="draft tokens")
    models.add_argument("--servers", default="", help=f"default: {','.join(SERVERS)}")
    models.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="a running server instead of one started here; repeatable",
    )
    models.add_argument(
        "--max-alive",
        type=at_least(1),
        default=4,
        help="servers in memory at a time; 1 where one fills a GPU (default %(default)s)",
    )
    _add_load_arguments(parser.add_argument_group("load"))
    _add_task_arguments(parser.add_argument_group("task"))


def _demo(name: str) -> str:
    """A path of the demo pair, short where that is possible: it is shown in the conditions."""
    path, here = DEMO_PAIR / name, Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _add_load_arguments(load: argparse._ArgumentGroup) -> None:
    load.add_argument("--concurrency", default="1,4,16", help="requests at a time; 1 is always in")
    load.add_argument(
        "--thresholds",
        default="0,0.5,0.998,0.999,0.9995,1.5",
        help="of servers with PARSE, per request; models differ in their verdicts "
        "(default %(default)s)",
    )
    load.add_argument("--runs", type=at_least(1), default=3, help="medians are reported")
    load.add_argument("--requests", type=at_least(1), default=8, help="per run, one at a time")
    load.add_argument("--looks", type=at_least(1), default=4, help="per run, for stage times")
    load.add_argument("--seed", type=int, default=1, help="of bench_serving")
    load.add_argument("--output", type=Path, default=Path("build/compare"), help="folder")


def _add_task_arguments(task: argparse._ArgumentGroup) -> None:
    names = ", ".join((DEMO_TASK, *task_names()))
    task.add_argument("--task", default=DEMO_TASK, help=names)
    task.add_argument("--task-file", type=Path, help="the task's problems; nothing is downloaded")
    task.add_argument("--problems", type=at_least(1), default=200, help="graded per server")
    task.add_argument("--sweep-problems", type=at_least(1), default=50, help="per threshold")
    task.add_argument("--max-tokens", type=at_least(1), help="per answer (default: the task's)")
    task.add_argument(
        "--allow-code", action="store_true", help="run programs a model wrote, on this machine"
    )
    task.add_argument("--judge-url", help="an OpenAI-compatible server, for open answers")
    task.add_argument("--judge-model", default="default")
    task.add_argument("--judge-prompts", type=Path, help="FastChat's judge_prompts.jsonl")
