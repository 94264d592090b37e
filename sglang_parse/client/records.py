"""Records of what programs ask and measure: items, answers, runs. Pure.

A server is named by its kind, or KIND@VALUE where it simulates acceptance: with PARSE a value of
``core.simulation.ENV_VAR``, else an accept length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

PLAIN, DRAFT, PARSE, PARSE_ONE = "plain", "draft", "parse", "parse-one"
STANDALONE, EAGLE3, PARSE_EAGLE3 = "standalone", "eagle3", "parse-eagle3"
NEXTN, PARSE_MTP = "nextn", "parse-mtp"
DFLASH, NGRAM = "dflash", "ngram"
PARSE_HEAD, PARSE_QUESTION = "parse-head", "parse-question"
PARSE_LIKELIHOOD, PARSE_TOKEN = "parse-likelihood", "parse-token"
TITLES = {
    PLAIN: "plain target",
    STANDALONE: "STANDALONE",
    EAGLE3: "EAGLE3",
    NEXTN: "NEXTN",
    PARSE_ONE: "PARSE, draft token by token",
    PARSE_TOKEN: "PARSE, token mode",
    PARSE: "PARSE",
    PARSE_HEAD: "PARSE, verdict head",
    PARSE_QUESTION: "PARSE, question",
    PARSE_LIKELIHOOD: "PARSE, likelihood",
    PARSE_EAGLE3: "PARSE+EAGLE3",
    PARSE_MTP: "PARSE+MTP",
    DRAFT: "draft alone",
    DFLASH: "DFLASH",
    NGRAM: "NGRAM",
}
"""Kind of server -> its name for people, in the order of pages."""
OTHER_JUDGES = (PARSE_HEAD, PARSE_QUESTION, PARSE_LIKELIHOOD)
"""Servers that are compared only if they are named: ``PARSE`` has the best judge there is."""
WITH_LAYER = (NEXTN, PARSE_MTP)
"""Servers that draft with an MTP layer, which few targets have; compared where they are named."""
WITH_PARSE = (PARSE, PARSE_ONE, PARSE_TOKEN, PARSE_EAGLE3, PARSE_MTP, *OTHER_JUDGES)
STOCK = (STANDALONE, EAGLE3, NEXTN, DFLASH, NGRAM)
ON_GPU = (DFLASH, NGRAM)
"""Those whose kernels SGLang has for GPUs only; compared where they are named."""
ALL, DRAFTING, SWITCHED_OFF = "all", "drafting", "off"
LATENCIES = ("ttft", "tpot", "itl", "max_itl", "e2e")
PERCENTILES = ("p50", "p90", "p99")
STAGES = ("prefill", "draft", "verify", "decode")


def kind_of(server: str) -> str:
    """The server's name without its simulated acceptance."""
    return server.partition("@")[0]


def has_parse(server: str) -> bool:
    return kind_of(server) in WITH_PARSE


def title_of(server: str) -> str:
    kind, _, simulated = server.partition("@")
    title, (way, _, every) = TITLES.get(kind, kind), simulated.partition(":")
    if kind in STOCK and simulated:
        return f"{title}, accept length {simulated}"
    if way in ("every", "doubt"):
        where = ", in doubt" if way == "doubt" else ""
        return f"{title}, a refusal every {every.partition(':')[0]} tokens{where}"
    return f"{title}, {float(simulated):.0%} accepted" if simulated else title


class BenchError(RuntimeError):
    """A program cannot continue, or its figures would be wrong.

    Nearly everything here may raise it; ``run_program`` prints it and ends with exit code 1.
    """


@dataclass(frozen=True, slots=True)
class Item:
    """One problem.

    Attributes:
        key: its name in the task's file.
        reference: what the grader compares with.
        messages: the conversation; empty for the user's ``text`` alone. One that ends with the
            assistant's is continued there.
        request: more fields of its request, such as ``response_format`` or ``regex``.
    """

    key: str
    text: str
    reference: Any
    messages: Sequence[Mapping[str, Any]] = ()
    request: Mapping[str, Any] = field(default_factory=dict)


Grader = Callable[[Item, str], float]
"""(Item, answer) -> score from 0 to 1."""
Locator = Callable[[Item, str, bool], int | None]
"""(Item, text of an answer, whether it is finished) -> how many leading characters are right; None
where nothing is wrong so far."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A task's problems and their grader; ``locate`` where errors can be found."""

    title: str
    items: Sequence[Item]
    grade: Grader
    max_tokens: int
    locate: Locator | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """One line of a comparison: a server and some of its requests.

    Attributes:
        server: its name; NAME@VALUE with simulated acceptance.
        threshold: of its requests; null for ``--parse-threshold``, or without PARSE.
        off_fraction: fraction of the load's requests that switch PARSE off.
        group: "all" requests of the load; of a mixed load, "drafting" or "off".
    """

    server: str
    threshold: float | None = None
    off_fraction: float = 0.0
    group: str = ALL

    @property
    def parse(self) -> dict[str, Any]:
        """``custom_params["parse"]`` of its requests."""
        return {} if self.threshold is None else {"threshold": self.threshold}

    @property
    def label(self) -> str:
        at = "" if self.threshold is None else f" at {self.threshold:g}"
        groups = {ALL: "", DRAFTING: ": drafting", SWITCHED_OFF: ": switched off"}
        group = ": all switched off" if self.off_fraction == 1 else groups[self.group]
        return f"{title_of(self.server)}{at}{group}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one item.

    Attributes:
        problem: index into the list of items.
        output_tokens: as the server counts them, the end token included.
        score: 0 to 1, filled in by ``ask.graded``.
    """

    problem: int
    text: str
    output_tokens: int
    wall_ms: float
    meta: Mapping[str, Any]
    score: float | None = None
    token_ids: tuple[int, ...] = ()

    @property
    def parse(self) -> dict[str, Any]:
        """``meta_info["parse"]``, which SGLang makes a list of one object; {} without PARSE."""
        return one_object(self.meta.get("parse", {}))


def one_object(found: Any) -> dict[str, Any]:
    """A value of ``meta_info["parse"]`` as its one object."""
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, dict):
        raise BenchError(f"meta_info['parse'] is {found!r}, expected one object")
    return found


@dataclass(frozen=True, slots=True)
class BenchRun:
    """Some items sent to one server in one go.

    Attributes:
        run: 0, 1, ...; runs of one number send the same items. -1: not timed.
        seconds: first request sent to last answer received.
    """

    variant: Variant
    run: int
    concurrency: int
    seconds: float
    answers: tuple[Answer, ...]

    @property
    def output_tokens(self) -> int:
        return sum(answer.output_tokens for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def scores(self) -> tuple[float | None, ...]:
        return tuple(answer.score for answer in self.answers)

    @property
    def accept_length(self) -> float | None:
        """The answers' mean of what SGLang counts for each; None without speculation."""
        metas = (answer.meta for answer in self.answers)
        counts = [meta["spec_accept_length"] for meta in metas if "spec_accept_length" in meta]
        return fmean(counts) if counts else None

    def per_token(self, key: str) -> float:
        """A counter of ``meta_info["parse"]``, per output token."""
        return self._sum(key) / self.output_tokens

    def per_request(self, key: str) -> float:
        return self._sum(key) / len(self.answers)

    def _sum(self, key: str) -> float:
        try:
            return float(sum(answer.parse[key] for answer in self.answers))
        except KeyError as error:
            raise BenchError(
                f"an answer of {self.variant.label} has no {key!r} in meta_info['parse']"
            ) from error


@dataclass(frozen=True, slots=True)
class ServingRun:
    """A run of ``bench_serving``; of a mixed load, one group of its requests.

    Attributes:
        variant: server and requests.
        run: 0, 1, ...; runs of one number send the same problems, shortly after one another.
        concurrency: requests at a time.
        requests, output_tokens: numbers of them.
        seconds: duration of the run.
        tokens_per_s: output tokens per second, as the server counts tokens.
        latency_ms: latency -> percentile -> ms. ``itl`` is the time between two chunks of an
            answer, ``max_itl`` an answer's longest; a chunk may hold a whole accepted draft.
        accept_length: SGLang's average at that moment, None without speculation.
        stages: stage -> fraction of the run's time, all requests of the server together; empty
            where the server publishes no metrics of PARSE.
        rows_per_pass, ms_per_pass: rows and time of verified drafts per verify pass, all requests
            of the server together; None without a pass.
    """

    variant: Variant
    run: int
    concurrency: int
    requests: int
    output_tokens: int
    seconds: float
    tokens_per_s: float
    latency_ms: Mapping[str, Mapping[str, float]]
    accept_length: float | None
    stages: Mapping[str, float] = field(default_factory=dict)
    rows_per_pass: float | None = None
    ms_per_pass: float | None = None
