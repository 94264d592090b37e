"""What the demo measures: one record per answer, one per leg. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

PLAIN, DRAFT, PARSE = "plain", "draft", "parse"
TITLES = {PLAIN: "plain target", DRAFT: "draft alone", PARSE: "PARSE"}


class DemoError(RuntimeError):
    """The demo cannot go on or its figures would not be true; the text says why."""


class Problem(Protocol):
    """A problem of the demo pair (``examples/demo_pair/problems.py``)."""

    @property
    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """One answered request.

    Attributes:
        problem: index into the demo's list of held-out problems.
        text: what was answered.
        is_right: whether its final number is exactly right.
        output_tokens: as the server counted them, the end token among them.
        wall_ms: request sent to answer received.
        parse: ``meta_info["parse"]``; empty for servers without PARSE.
    """

    problem: int
    text: str
    is_right: bool
    output_tokens: int
    wall_ms: float
    parse: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Leg:
    """Some problems sent to one server in one go.

    Attributes:
        server: ``plain``, ``draft`` or ``parse``.
        run: 0, 1, ...; legs of one run are compared with each other. -1: not timed.
        concurrency: how many requests were under way at once.
        seconds: first request sent to last answer received.
    """

    server: str
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
            raise DemoError(
                f"an answer of {TITLES[self.server]} has no {key!r} in meta_info['parse']"
            ) from error
