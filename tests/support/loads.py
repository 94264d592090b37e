"""Loads to replay: answers and costs recorded by ``record_loads`` on real servers, costs as of a
GPU, and first drafts of a real pair (``tests/data/real_drafts.json``)."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, cycle, islice, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.policy.limits import Limits
from sglang_parse.core.stage import Stage
from support.replay import Controlled, Cost, Costs, Fixed, Policy, Replay, Script, Segment

TESTS = Path(__file__).resolve().parents[1]
RECORD, REAL_DRAFTS = TESTS / "unit" / "loads.json", TESTS / "data" / "real_drafts.json"
QUESTION_ROWS = 12
"""Rows of the demo pair's question."""
GRID = [
    *(
        Fixed(length, prefixes, chunk)
        for length in (8, 16, 32, 64, 128)
        for prefixes in (1, 4, 8, 16)
        for chunk in (4, 16, 128)
    ),
    Fixed(drafts=False),
]
"""Fixed settings that the controller is compared with; the last never drafts."""


@dataclass
class Load:
    """Phases of (concurrent requests, their scripts), one after another."""

    name: str
    costs: Costs
    phases: Sequence[tuple[int, Sequence[Script]]]
    question_rows: int = QUESTION_ROWS
    max_itl_ratio: float = 0.0
    forwards_ahead: int = 0
    cold_ms: Mapping[Stage, float] | None = None

    def run(self, policy: Policy) -> float:
        """Returns output tokens per second over all phases."""
        tokens, ms = 0, 0.0
        for requests, scripts in self.phases:
            replay = Replay(
                *(scripts, requests, self.costs, policy, self.question_rows),
                every_token=not self.question_rows,
                cold_ms=self.cold_ms,
                forwards_ahead=self.forwards_ahead,
            )
            replay.run()
            tokens, ms = tokens + replay.num_tokens, ms + replay.ms
        return 1e3 * tokens / ms

    def controlled(self, *, allows_doubt: bool = True) -> float:
        """Under the controller; drafts that are verified at every token may end in doubt."""
        fixed = frozenset() if self.question_rows else frozenset({"max_prefixes"})
        limits = Limits(
            fixed=fixed,
            question_rows=self.question_rows,
            allows_doubt=allows_doubt and not self.question_rows,
            max_itl_ratio=self.max_itl_ratio,
        )
        return self.run(Controlled(Controller(limits)))


@cache
def recorded() -> dict[str, Any]:
    return json.loads(RECORD.read_text())


def costs_of(pair: str) -> Costs:
    """Returns a server's recorded costs; decode steps and prefills are the plain server's."""
    found = recorded()["pairs"]
    drafting, plain = found[pair], found["plain"]
    overhead = [[run["requests"], run["overhead_ms"]] for run in drafting["runs"]]
    prefill = [[run["requests"], run["prefill_ms"]] for run in plain["runs"]]
    return Costs(
        draft_step=_line(drafting["costs"][Stage.DRAFT.value]),
        verify=_line(drafting["costs"][Stage.VERIFY.value]),
        decode=_line(plain["costs"][Stage.DECODE.value]),
        prefill=_each(_line(prefill)),
        overhead=_line(overhead),
    )


def _each(cost: Cost) -> Cost:
    """Multiplies a cost per request by the number of requests."""
    return lambda count: count * cost(count)


def _line(points: Sequence[Sequence[float]]) -> Cost:
    """Interpolates the means of (size, ms) per half octave, raised to the maximum so far; flat
    below the first point, with the last slope above."""
    grouped: dict[int, list[Sequence[float]]] = defaultdict(list)
    for point in points:
        grouped[round(2 * math.log2(point[0]))].append(point)
    means = sorted(
        [fmean(values) for values in zip(*group, strict=True)] for group in grouped.values()
    )
    sizes, ms = zip(*means, strict=True)
    points = [*zip(sizes, accumulate(ms, max), strict=True)]

    def cost(size: float) -> float:
        if size <= points[0][0] or len(points) == 1:
            return points[0][1]
        pairs = (pair for pair in pairwise(points) if size <= pair[1][0])
        (x0, y0), (x1, y1) = next(pairs, points[-2:])
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)

    return cost


def gpu_costs() -> Costs:
    """A GPU that is compute-bound from 300 rows on.

    Prefills are not batched: without drafts, requests that start together end together, and
    batching would favour them by chance.
    """
    return Costs(
        draft_step=lambda count: 1.5 + 0.01 * count,
        verify=lambda rows: max(12.0, 0.04 * rows),
        decode=lambda count: 12.0 + 0.02 * count,
        prefill=lambda count: 10.0 * count,
    )


def h100_costs() -> Costs:
    """A 14B target and a draft model of 1.5B on one H100, token by token: a step 11.5 ms, 129 rows
    18.9."""
    return Costs(
        draft_step=_line([(1, 1.64), (8, 2.96), (16, 4.0), (32, 6.0)]),
        verify=lambda rows: max(12.0, 9.3 + 0.0375 * 16 * math.ceil(rows / 16)),
        decode=_line([(1, 11.5), (8, 12.2), (16, 12.7), (64, 15.0)]),
        prefill=lambda count: 8.0 + 6.7 * count,
        overhead=lambda count: 0.5 + 0.02 * count,
    )


def real_scripts(text: str, errors: str, count: int) -> list[Script]:
    """First drafts of a real pair, verified at every token.

    Args:
        text: "prose" or "code".
        errors: "differs" from the target's choice, or "refused" by the likelihood.
    """
    found = []
    for draft in json.loads(REAL_DRAFTS.read_text())[text]:
        ends = [place + 1 for place in draft[errors]]
        levels = [int(digit, 16) for digit in draft["levels"]]
        script = [
            Segment(end - start, True, end - start - 1, tuple(levels[start:end]))
            for start, end in pairwise([0, *ends])
        ]
        start, end = (ends[-1] if ends else 0), draft["tokens"]
        rest = Segment(end - start, False, end - start, tuple(levels[start:]))
        found.append([*script, rest] if end > start else script)
    return list(islice(cycle(found), count))


def real_loads() -> Iterator[Load]:
    """An error every 12 to 240 tokens, which the exact check and the likelihood find."""
    for text, errors, requests in (
        ("prose", "differs", 1),
        ("prose", "differs", 16),
        ("prose", "refused", 8),
        ("code", "refused", 32),
    ):
        scripts = real_scripts(text, errors, max(16, 3 * requests))
        name = f"{requests}, real {text}, {errors}"
        yield Load(name, h100_costs(), [(requests, scripts)], question_rows=0)


def mixed_scripts(errors: str, count: int) -> list[Script]:
    """Prose and code in turn."""
    pairs = zip(*(real_scripts(text, errors, count) for text in ("prose", "code")), strict=True)
    return [script for pair in pairs for script in pair][:count]


def doubtful_loads() -> Iterator[Load]:
    """Real drafts by what a draft token costs, in decode steps: one token a forward on this
    repository's CPU and on a GPU, and in blocks."""
    for cost, ahead in ((0.42, 0), (0.14, 1), (0.035, 1)):
        for text in ("prose", "code", "mixed"):
            for errors, requests in (("differs", 1), ("refused", 1), ("differs", 4)):
                if text != "mixed" and (errors, requests) != ("differs", 1):
                    continue
                make = mixed_scripts if text == "mixed" else partial(real_scripts, text)
                found = make(errors, 32)
                yield Load(
                    f"{requests}, {text}, {errors}, {cost}",
                    step_costs(cost),
                    [(requests, found)],
                    question_rows=0,
                    forwards_ahead=ahead,
                )


def step_costs(draft_token: float) -> Costs:
    """Decode steps of 10 ms; a pass takes 1.1 of them and 0.004 a row."""
    return Costs(
        draft_step=lambda count: 10 * draft_token * (1 + 0.02 * count),
        verify=lambda rows: 11 + 0.04 * rows,
        decode=lambda count: 10 + 0.1 * count,
        prefill=lambda count: 8.0 + 6.7 * count,
        overhead=lambda count: 0.05 + 0.02 * count,
    )


def scripts_of(pair: str, threshold: float, count: int) -> list[Script]:
    """Repeats the recorded answers of a server at one threshold."""
    found = [
        [Segment(length, bool(is_bad), agreed) for length, is_bad, agreed in script]
        for run in recorded()["pairs"][pair]["runs"]
        if run["threshold"] == threshold
        for script in run["scripts"]
    ]
    return list(islice(cycle(found), count))


def loads() -> Iterator[Load]:
    """Six loads, and one that jumps between some of them."""
    high = ("blocks", 0.5)
    middle = ("blocks", 0.9985)
    none = ("disagreeing", 0.5)

    def answers(kind: tuple[str, float], requests: int) -> tuple[int, list[Script]]:
        return requests, scripts_of(*kind, max(80, 16 * requests))

    blocks, one = costs_of("blocks"), costs_of("one")
    yield Load("1, high", blocks, [answers(high, 1)])
    yield Load("4, middle", blocks, [answers(middle, 4)])
    yield Load("16, high", blocks, [answers(high, 16)])
    yield Load("16, none, token by token", one, [answers(none, 16)])
    yield Load("64, high, GPU costs", gpu_costs(), [answers(high, 64)])
    yield Load("64, middle, GPU costs", gpu_costs(), [answers(middle, 64)])
    jumps = [answers(kind, requests) for kind in (high, none, middle) for requests in (1, 16, 4)]
    yield Load("jumps", blocks, jumps)


def best_fixed(load: Load) -> Mapping[str, float]:
    """Returns the fastest settings of the grid, as fields of ``Fixed``, and their tokens/s."""
    rates = [(load.run(fixed), fixed) for fixed in GRID]
    rate, best = max(rates, key=lambda found: found[0])
    settings = {key: getattr(best, key) for key in ("draft_tokens", "max_prefixes", "draft_chunk")}
    return {**settings, "drafts": best.drafts, "tokens_per_s": round(rate, 2)}
