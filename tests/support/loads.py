"""Loads to replay: what ``record_loads`` observe of real servers, and a price list as of a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.policy.limits import Limits
from sglang_parse.core.policy.stage_cost import Stage, StageCost
from support.replay import Controlled, Fixed, Policy, Price, Prices, Replay, Script, Segment

RECORD = Path(__file__).resolve().parents[1] / "unit" / "loads.json"
QUESTION_ROWS = 12
"""Of the demo pair's question."""
GRID = [
    *(
        Fixed(length, prefixes, burst)
        for length in (8, 16, 32, 64, 128)
        for prefixes in (1, 4, 8, 16)
        for burst in (4, 16, 128)
    ),
    Fixed(drafts=False),
]
"""Fixed settings the controller has to keep up with; no drafts the last."""


@dataclass
class Load:
    """Requests at a time, whose drafts are cut as ``scripts`` say; phases follow each other."""

    name: str
    prices: Prices
    phases: Sequence[tuple[int, Sequence[Script]]]
    max_itl_ratio: float = 0.0

    def play(self, policy: Policy) -> float:
        """Output tokens per second of all phases."""
        tokens, ms = 0, 0.0
        for requests, scripts in self.phases:
            replay = Replay(scripts, requests, self.prices, policy, QUESTION_ROWS)
            replay.play()
            tokens, ms = tokens + replay.tokens, ms + replay.ms
        return 1e3 * tokens / ms

    def controlled(self) -> float:
        limits = Limits(question_rows=QUESTION_ROWS, max_itl_ratio=self.max_itl_ratio)
        return self.play(Controlled(Controller(limits)))


@cache
def recorded() -> dict[str, Any]:
    return json.loads(RECORD.read_text())


def prices_of(pair: str) -> Prices:
    """A server's, as recorded; steps and prefills those of the plain one."""
    found = recorded()["pairs"]
    drafting, plain = found[pair], found["plain"]
    overhead = [[run["requests"], run["overhead_ms"]] for run in drafting["runs"]]
    prefill = [[run["requests"], run["prefill_ms"]] for run in plain["runs"]]
    return Prices(
        draft_step=_line(drafting["prices"][Stage.DRAFT.value]),
        verify=_line(drafting["prices"][Stage.VERIFY.value]),
        step=_line(plain["prices"][Stage.DECODE.value]),
        prefill=_each(_line(prefill)),
        overhead=_line(overhead),
    )


def _each(price: Price) -> Price:
    """Of all of them, where ``price`` is one's share."""
    return lambda count: count * price(count)


def _line(points: Sequence[Sequence[float]]) -> Price:
    cost = StageCost()
    for size, ms in points:
        cost.add(size, ms)
    return lambda size: cost.at(size) or 0.0


def gpu_prices() -> Prices:
    """An arithmetic-bound GPU: up to 300 rows cost as one, then each costs.

    A prefill costs as two or three at once do: who begin together end together where nothing is
    drafted, which is luck.
    """
    return Prices(
        draft_step=lambda count: 1.5 + 0.01 * count,
        verify=lambda rows: max(12.0, 0.04 * rows),
        step=lambda count: 12.0 + 0.02 * count,
        prefill=lambda count: 10.0 * count,
    )


def scripts_of(pair: str, threshold: float, count: int) -> list[Script]:
    """Answers of a recorded server at one threshold, over and over."""
    found = [
        [Segment(length, bool(is_bad), agreed) for length, is_bad, agreed in script]
        for run in recorded()["pairs"][pair]["runs"]
        if run["threshold"] == threshold
        for script in run["scripts"]
    ]
    return list(islice(cycle(found), count))


def loads() -> Iterator[Load]:
    """Six, and one that jumps between them."""
    high = ("blocks", 0.5)
    middle = ("blocks", 0.9985)
    none = ("disagreeing", 0.5)

    def answers(kind: tuple[str, float], requests: int) -> tuple[int, list[Script]]:
        return requests, scripts_of(*kind, max(80, 16 * requests))

    blocks, one = prices_of("blocks"), prices_of("one")
    yield Load("1, high", blocks, [answers(high, 1)])
    yield Load("4, middle", blocks, [answers(middle, 4)])
    yield Load("16, high", blocks, [answers(high, 16)])
    yield Load("16, none, token by token", one, [answers(none, 16)])
    yield Load("64, high, a GPU's prices", gpu_prices(), [answers(high, 64)])
    yield Load("64, middle, a GPU's prices", gpu_prices(), [answers(middle, 64)])
    jumps = [answers(kind, requests) for kind in (high, none, middle) for requests in (1, 16, 4)]
    yield Load("jumps", blocks, jumps)


def best_fixed(load: Load) -> Mapping[str, float]:
    """The fastest of the grid, as fields of ``Fixed``; and its tokens per second."""
    rates = [(load.play(fixed), fixed) for fixed in GRID]
    rate, best = max(rates, key=lambda found: found[0])
    settings = {key: getattr(best, key) for key in ("draft_tokens", "max_prefixes", "burst")}
    return {**settings, "drafts": best.drafts, "tokens_per_s": round(rate, 2)}
