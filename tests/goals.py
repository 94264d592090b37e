"""Compares results with the project's goals: for the demo pair, and of ``bench`` for one H100.

    PYTHONPATH=. python tests/goals.py build/compare/results.json

The files are those of ``compare``, ``demo``, ``load`` and ``bench``. A missed goal is no error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sglang_parse.client.records import (
    DRAFT,
    EAGLE3,
    PARSE,
    PARSE_EAGLE3,
    PARSE_ONE,
    PARSE_TOKEN,
    PLAIN,
    STANDALONE,
    TITLES,
    Variant,
)

MIN_OVER_STOCK = {1: 2.5, 16: 1.8}
MIN_OVER_TOKEN = {1: 2.0}
"""Semantic verification over PARSE's own token mode."""
MAX_STANDALONE_LENGTH = 4.0
"""Tokens per verification of STANDALONE: the pair words answers differently."""
MIN_OVER_ONE = 1.5
"""With parallel drafts over without, where several requests run."""
MIN_OVER_PLAIN, MIN_OVER_PLAIN_CONCURRENT, MIN_LIMIT_FRACTION = 5.0, 1.0, 0.9
MAX_ACCURACY_LOSS, MIN_ACCURACY_GAIN = 0.01, 0.1
MIDDLE = 0.5
BENCH_GOALS = {
    ("parse@1", PLAIN, 1): 15.0,
    ("parse@1", "eagle3@3", 16): 2.5,
    ("parse@every:32", PLAIN, 1): 7.0,
    ("parse@every:32", "eagle3@3", 16): 1.5,
    ("parse@0", PLAIN, 1): 0.98,
}
"""On an H100, shapes of 14B and 0.6B: (server, over, concurrency) -> speedup."""
SLACK = 1e-9
"""Because 0.97 - 0.96 > 0.01 in floating point."""


@dataclass(frozen=True)
class Goal:
    """A figure and what it should be.

    Attributes:
        kind: "at least", "at most" or "above" ``wanted``.
    """

    name: str
    value: float
    kind: str
    wanted: float

    @property
    def is_reached(self) -> bool:
        if self.kind == "above":
            return self.value > self.wanted
        lacking = self.wanted - self.value
        return (lacking if self.kind == "at least" else -lacking) <= SLACK

    @property
    def missed_by(self) -> float:
        """The distance as a fraction of the goal; 0 when reached."""
        return 0.0 if self.is_reached else abs(self.wanted - self.value) / self.wanted

    def __str__(self) -> str:
        missed = f"missed by {self.missed_by:.0%}"
        text = f"{self.name}: {self.value:.3f}, wanted {self.kind} {self.wanted}"
        return f"{'reached' if self.is_reached else missed}  {text}"


def goals_of(results: dict[str, Any]) -> list[Goal]:
    """The goals of what was measured."""
    if "failed" in results["conditions"]:
        return list(bench_goals(results))
    made = (speed_goals, length_goals, composition_goals, accuracy_goals)
    return [goal for goals in made for goal in goals(results)]


def find(results: dict[str, Any], server: str) -> dict[str, Any] | None:
    """A server's figures at its own threshold, all requests with PARSE."""
    wanted = (server, None, 0.0, "all")
    keys = ("server", "threshold", "off_fraction", "group")
    found = (one for one in results["variants"] if tuple(one[key] for key in keys) == wanted)
    return next(found, None)


def speed_goals(results: dict[str, Any]) -> Iterator[Goal]:
    parse = find(results, PARSE)
    for speed in parse["speeds"] if parse else ():
        is_one = speed["concurrency"] == 1
        wanted = {PLAIN: MIN_OVER_PLAIN if is_one else MIN_OVER_PLAIN_CONCURRENT}
        stock, token = (goal.get(speed["concurrency"]) for goal in (MIN_OVER_STOCK, MIN_OVER_TOKEN))
        wanted |= {STANDALONE: stock, EAGLE3: stock} if stock else {}
        wanted |= {PARSE_TOKEN: token} if token else {}
        wanted |= {} if is_one else {PARSE_ONE: MIN_OVER_ONE}
        over = {name: spread["median"] for name, spread in speed["over"].items()}
        for name, least in wanted.items():
            if name in over:
                title = f"PARSE over {TITLES[name]} at {speed['concurrency']}"
                yield Goal(title, over[name], "at least", least)
        if is_one and parse and parse["time"] and parse["time"]["limit"]:
            reached = over[PLAIN] / parse["time"]["limit"]
            yield Goal("fraction of the limit", reached, "at least", MIN_LIMIT_FRACTION)


def length_goals(results: dict[str, Any]) -> Iterator[Goal]:
    standalone = find(results, STANDALONE)
    if standalone and standalone["accept_length"]:
        title = "STANDALONE's tokens per verification"
        yield Goal(title, standalone["accept_length"], "at most", MAX_STANDALONE_LENGTH)


def composition_goals(results: dict[str, Any]) -> Iterator[Goal]:
    """PARSE+EAGLE3 against the better of its two parts in the same run, at every threshold."""
    rates = {
        (run["variant"]["server"], run["variant"]["threshold"], run["run"]): run["tokens_per_s"]
        for run in results["serving_runs"]
        if run["concurrency"] == 1 and run["variant"]["group"] == "all"
    }
    levels: list[tuple[float, float]] = []
    for one in results["variants"]:
        if one["server"] != PARSE_EAGLE3 or one["time"] is None:
            continue
        parts = ((PARSE, one["threshold"]), (EAGLE3, None))
        ratios = [
            min(rate / rates[*part, run] for part in parts)
            for (*who, run), rate in rates.items()
            if who == [PARSE_EAGLE3, one["threshold"]]
            and all((*part, run) in rates for part in parts)
        ]
        if not ratios:
            continue
        ratio, fraction = median(ratios), one["time"]["draft_fraction"]
        levels.append((fraction, ratio))
        label = Variant(PARSE_EAGLE3, one["threshold"]).label
        name = f"{label} over its better part, {fraction:.0%} accepted"
        yield Goal(name, ratio, "at least", 1.0)
    if levels:
        fraction, ratio = min(levels, key=lambda level: abs(level[0] - MIDDLE))
        name = f"the same nearest the middle, {fraction:.0%} accepted: faster than both"
        yield Goal(name, ratio, "above", 1.0)


def accuracy_goals(results: dict[str, Any]) -> Iterator[Goal]:
    found = {name: find(results, name) for name in (PLAIN, DRAFT, PARSE)}
    graded = {name: one["quality"] for name, one in found.items() if one and one["quality"]}
    scores = {name: one["score"] for name, one in graded.items() if one["score"] is not None}
    if {PLAIN, PARSE} <= set(scores):
        loss = scores[PLAIN] - scores[PARSE]
        yield Goal("accuracy lost against the target", loss, "at most", MAX_ACCURACY_LOSS)
    if {DRAFT, PARSE} <= set(scores):
        gain = scores[PARSE] - scores[DRAFT]
        yield Goal("accuracy gained over the draft", gain, "at least", MIN_ACCURACY_GAIN)


def bench_goals(results: dict[str, Any]) -> Iterator[Goal]:
    rows = {
        (one["server"], speed["concurrency"]): speed["over"]
        for one in results["variants"]
        for speed in one["speeds"]
    }
    for (server, other, concurrency), least in BENCH_GOALS.items():
        if spread := rows.get((server, concurrency), {}).get(other):
            title = f"{server} over {other} at {concurrency}"
            yield Goal(title, spread["median"], "at least", least)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        for goal in goals_of(json.loads(Path(path).read_text(encoding="utf-8"))):
            print(goal)
