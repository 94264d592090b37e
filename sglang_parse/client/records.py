"""What programs ask and measure: items, answers, legs of answers, runs of ``bench_serving``. Pure.

A way is one line of a comparison: a server, and the threshold its requests ask for if it runs
PARSE. One server with six thresholds is six ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PLAIN, DRAFT, PARSE, PARSE_ONE = "plain", "draft", "parse", "parse-one"
STANDALONE, EAGLE3, PARSE_EAGLE3 = "standalone", "eagle3", "parse-eagle3"
TITLES = {
    PLAIN: "plain target",
    DRAFT: "draft alone",
    PARSE: "PARSE",
    PARSE_ONE: "PARSE, draft token by token",
    STANDALONE: "STANDALONE",
    EAGLE3: "EAGLE3",
    PARSE_EAGLE3: "PARSE+EAGLE3",
}
WITH_PARSE = (PARSE, PARSE_ONE, PARSE_EAGLE3)
LATENCIES = ("ttft", "tpot", "itl", "e2e")
PERCENTILES = ("p50", "p90", "p99")


class BenchError(RuntimeError):
    """A program cannot go on or its figures would not be true; the text says why."""


@dataclass(frozen=True, slots=True)
class Item:
    """One problem.

    Attributes:
        key: its name in the task's file, for messages.
        text: the user's first turn.
        reference: what the grader compares with.
        follow_ups: the user's later turns.
    """

    key: str
    text: str
    reference: Any
    follow_ups: tuple[str, ...] = ()


Grader = Callable[[Item, Sequence[str]], float | None]
"""(Item, one answer per turn) -> 0 to 1; None where nothing can grade it."""
Locator = Callable[[Item, str, bool], int | None]
"""(Item, text of an answer, whether it is finished) -> how many leading characters are right; None
where nothing is wrong so far."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A task's problems and their grader.

    Attributes:
        title: for people, with what a reader must know.
        max_tokens: per answer.
        locate: finds where a text goes wrong, for tasks where that can be found.
    """

    title: str
    items: Sequence[Item]
    grade: Grader
    max_tokens: int
    locate: Locator | None = None


@dataclass(frozen=True, slots=True, order=True)
class Variant:
    """A server by its name; ``threshold`` is None for servers without PARSE, or for its own."""

    server: str
    threshold: float | None = None

    @property
    def custom_params(self) -> dict[str, Any]:
        """``custom_params`` of its requests."""
        return {} if self.threshold is None else {"parse": {"threshold": self.threshold}}

    @property
    def label(self) -> str:
        """Its name for people."""
        title = TITLES.get(self.server, self.server)
        return title if self.threshold is None else f"{title} at {self.threshold:g}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one item.

    Attributes:
        problem: index into the list of items.
        texts: one answer per turn; most problems have one turn.
        output_tokens, wall_ms: all turns together; tokens as the server counted them, the end
            token among them; request sent to answer received.
        meta: ``meta_info`` of the last turn.
        score: 0 to 1, ``ask.graded`` fills it in; None where nothing graded it.
        token_ids: of the last turn's answer, where they were asked for.
    """

    problem: int
    texts: tuple[str, ...]
    output_tokens: int
    wall_ms: float
    meta: Mapping[str, Any]
    score: float | None = None
    token_ids: tuple[int, ...] = ()

    @property
    def parse(self) -> dict[str, Any]:
        """``meta_info["parse"]``, which SGLang's channel makes a list of one object.

        Empty for a server without PARSE.

        Raises:
            BenchError: it is something else.
        """
        return one_object(self.meta.get("parse", {}))


def one_object(found: Any) -> dict[str, Any]:
    """A value of ``meta_info["parse"]`` as its one object. Raises: BenchError."""
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, dict):
        raise BenchError(f"meta_info['parse'] is {found!r}, expected one object")
    return found


@dataclass(frozen=True, slots=True)
class BenchRun:
    """Some items sent to one server in one go.

    Attributes:
        run: 0, 1, ...; legs of one run sent the same items, shortly after another. -1: not
            timed.
        concurrency: how many requests were under way at once.
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

    def per_token(self, key: str) -> float:
        """A counter of ``meta_info["parse"]``, summed over the answers, per output token."""
        return self._sum(key) / self.output_tokens

    def per_request(self, key: str) -> float:
        """The same, per request."""
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
    """One run of ``bench_serving``.

    Attributes:
        variant: server and threshold.
        run: 0, 1, ...; what has the same run sent the same problems, shortly after another.
        concurrency: requests at a time.
        requests, output_tokens: how many in this run.
        seconds: what it took.
        tokens_per_s: output tokens per second; tokens as the server counted them.
        requests_per_s: answers per second.
        latency_ms: (``ttft``, ``tpot``, ``itl`` or ``e2e``) -> (``p50``, ``p90`` or ``p99``) -> ms.
        accept_length: the server's own average at that moment, None without speculation.
    """

    variant: Variant
    run: int
    concurrency: int
    requests: int
    output_tokens: int
    seconds: float
    tokens_per_s: float
    requests_per_s: float
    latency_ms: Mapping[str, Mapping[str, float]]
    accept_length: float | None
