"""Statistics of answers and runs; intervals are 95 %, two-sided. Notation of limits:

    t  ms per output token of the plain target, prefill included
    r  ms of drafting per output token / t
    v  ms of verification per output token / t
    a  draft tokens that are output, accepted or matched / output tokens

The limit 1 / (r + v + 1 - a) is the speedup if nothing but drafting, verification and the target's
own tokens took time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from sglang_parse.client.records import BenchError, BenchRun, ServingRun, Variant

CHANCE, WEAK = 0.5, 0.7
"""Areas under the ROC curve: of verdicts that know nothing, and that hardly help."""
NORMAL_975 = float(stats.norm.ppf(0.975))


@dataclass(frozen=True, slots=True)
class Proportion:
    """``count`` of ``total`` with its exact interval (Clopper and Pearson); of none: 0, 0 and 1."""

    count: int
    total: int
    ratio: float
    low: float
    high: float

    @classmethod
    def of(cls, count: int, total: int) -> Proportion:
        if not total:
            return cls(0, 0, 0.0, 0.0, 1.0)
        interval = stats.binomtest(count, total).proportion_ci(0.95, method="exact")
        return cls(count, total, count / total, float(interval.low), float(interval.high))


def upper_bound(count: int, total: int, delta: float) -> float:
    """The exact one-sided upper bound of a proportion, with confidence 1 - delta."""
    test = stats.binomtest(count, total, alternative="less")
    return float(test.proportion_ci(1 - delta, method="exact").high)


def paired_difference(better: int, worse: int, total: int) -> tuple[float, float, float]:
    """The difference of two proportions on the same problems, and its interval; ``better``,
    ``worse``: problems that only the first, only the second answered correctly.

    Bonett and Price, "Adjusted Wald confidence interval for a difference of binomial proportions
    based on paired data" (2012): a Wald interval with one better and one worse problem added.
    """
    up, down = (better + 1) / (total + 2), (worse + 1) / (total + 2)
    middle = up - down
    half = NORMAL_975 * math.sqrt((up + down - middle**2) / (total + 2))
    return (better - worse) / total, max(-1.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True, slots=True)
class PairedTest:
    """A test of two variants' scores on the same problems.

    Attributes:
        method: ``McNemar, exact`` for right and wrong answers, ``Wilcoxon`` for other scores.
        problems: answered by both.
        better, worse: problems on which the variant's score is above, below the baseline's.
        p_value: of "no difference"; 1 where no problem differs.
    """

    method: str
    problems: int
    better: int
    worse: int
    p_value: float


def paired_test(
    scores: Sequence[float | None], baseline: Sequence[float | None]
) -> PairedTest | None:
    """Tests scores of the same problems in the same order; None if not graded.

    McNemar's exact test is the binomial test of the problems on which the two differ.
    """
    if len(scores) != len(baseline):
        raise BenchError(f"a paired test of {len(scores)} scores with {len(baseline)}")
    pairs = [
        (a, b) for a, b in zip(scores, baseline, strict=True) if a is not None and b is not None
    ]
    if not pairs:
        return None
    differences = [ours - theirs for ours, theirs in pairs if ours != theirs]
    better = sum(difference > 0 for difference in differences)
    if is_binary(score for pair in pairs for score in pair):
        method, test = "McNemar, exact", lambda: stats.binomtest(better, len(differences))
    else:
        method, test = "Wilcoxon", lambda: stats.wilcoxon(differences)
    p_value = float(test().pvalue) if differences else 1.0
    return PairedTest(method, len(pairs), better, len(differences) - better, p_value)


def is_binary(scores: Iterable[float | None]) -> bool:
    return set(scores) <= {0, 1}


@dataclass(frozen=True, slots=True)
class Separation:
    """How well verdicts on complete drafts separate right from wrong ones.

    Attributes:
        right, wrong: numbers of drafts.
        auroc: probability that a right draft has a higher verdict than a wrong one, ties counted
            half: 1 is perfect, 0.5 is chance; null without drafts of both kinds.
        low, high: 95 % interval (Newcombe's method 5); 0 and 1 where ``auroc`` is null.
    """

    right: int
    wrong: int
    auroc: float | None
    low: float
    high: float

    @property
    def is_at_chance(self) -> bool:
        """Whether right and wrong drafts get the same verdicts, as far as anyone would care."""
        return self.auroc is not None and self.low <= CHANCE and self.high < WEAK

    @classmethod
    def of(cls, right: Sequence[float], wrong: Sequence[float]) -> Separation:
        """Compares the verdicts of right and wrong drafts.

        Newcombe, "Confidence intervals for an effect size measure based on the Mann-Whitney
        statistic, part 2" (2006): the areas whose Hanley-McNeil error reaches the measured one.
        """
        n, m = len(right), len(wrong)
        if not n or not m:
            return cls(n, m, None, 0.0, 1.0)
        area = float(stats.mannwhitneyu(right, wrong).statistic) / (n * m)
        areas = np.linspace(0, 1, 10_001)
        spread = 1 + ((n + m) / 2 - 1) * ((1 - areas) / (2 - areas) + areas / (1 + areas))
        error = np.sqrt(areas * (1 - areas) * spread / (n * m))
        inside = areas[np.abs(areas - area) <= NORMAL_975 * error + 1e-4]
        return cls(n, m, area, float(inside[0]), float(inside[-1]))


def costs_of(run: BenchRun, t: float) -> tuple[float, float, float]:
    """r, v and a of a run of PARSE, by the server's own stage times and tokens."""
    accepted = run.per_token("accepted_tokens") + run.per_token("matched_tokens")
    return run.per_token("draft_ms") / t, run.per_token("verify_ms") / t, accepted


def limit_of(r: float, v: float, a: float) -> float:
    """The limit in the notation of this module."""
    cost = r + v + 1 - a
    if not cost > 0:
        raise BenchError(f"stage times give no limit: r {r:.3f}, v {v:.3f}, a {a:.3f}")
    return 1 / cost


def speedups(
    timed: Iterable[BenchRun | ServingRun], variant: Variant, other: Variant
) -> list[float]:
    """Ratios of tokens per second at one concurrency, one per run that has both variants."""
    rates = {(item.variant, item.run): item.tokens_per_s for item in timed}
    runs = sorted({run for _, run in rates})
    return [
        rates[variant, run] / rates[other, run]
        for run in runs
        if (variant, run) in rates and (other, run) in rates
    ]


def rounded(value: Any) -> Any:
    """Plain data as JSON has it, its floats rounded to 4 places."""
    return json.loads(json.dumps(value), parse_float=lambda text: round(float(text), 4))
