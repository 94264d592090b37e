"""First drafts and served answers to figures. Statistics only.

Intervals are exact (Clopper and Pearson), 95 % and two-sided, unless said otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scipy import stats

from sglang_parse.calibrate.certify import (
    Tested,
    certified_threshold,
    learn_then_test,
)
from sglang_parse.calibrate.losses import FirstDraft, Loss
from sglang_parse.client.figures import limit_of
from sglang_parse.core.selection import SELECTIONS

NUM_BINS = 12


@dataclass(frozen=True, slots=True)
class Share:
    """How many of how many, with the exact interval.

    Attributes:
        count, total: ``count`` of ``total``.
        share: 0 to 1; 0 where ``total`` is.
        low, high: 95 % interval; 0 and 1 where ``total`` is 0.
    """

    count: int
    total: int
    share: float
    low: float
    high: float

    @classmethod
    def of(cls, count: int, total: int) -> Share:
        if not total:
            return cls(0, 0, 0.0, 0.0, 1.0)
        found = stats.binomtest(count, total).proportion_ci(0.95, method="exact")
        return cls(count, total, count / total, float(found.low), float(found.high))

    @property
    def text(self) -> str:
        """For people: 1.2 % (0.8 to 1.7, 24 of 2,000)."""
        if not self.total:
            return "none to count"
        bounds = f"{100 * self.low:.2f} to {100 * self.high:.2f}"
        return f"{100 * self.share:.2f} % ({bounds}; {self.count:,} of {self.total:,})"


@dataclass(frozen=True, slots=True)
class AtThreshold:
    """What a rule does at a threshold, on the calibration set.

    Attributes:
        threshold: smallest verdict that accepts.
        p_value: of "the loss is above alpha".
        certified: whether it and all stricter ones passed.
        loss: first drafts that lose, of all.
        false_accepts: the same, of those with an error.
        false_rejects: drafts without an error that are not kept whole, of those without.
        kept: share of the drafted tokens that is kept.
        speedup: over the plain target, if all rounds went like the first; None before the plain
            target's time is known.
    """

    threshold: float
    p_value: float
    certified: bool
    loss: Share
    false_accepts: Share
    false_rejects: Share
    kept: float
    speedup: float | None


@dataclass(frozen=True, slots=True)
class RuleFigures:
    """One rule of selection.

    Attributes:
        rule: a key of ``core.selection.SELECTIONS``.
        certified: the loosest certified threshold; None where none qualified.
        errors: requests that lose there.
        thresholds: the strictest first.
    """

    rule: str
    certified: float | None
    errors: int | None
    thresholds: tuple[AtThreshold, ...]

    def at(self, threshold: float) -> AtThreshold:
        return next(row for row in self.thresholds if row.threshold == threshold)


@dataclass(frozen=True, slots=True)
class Served:
    """Whole answers at a threshold beside the plain target's, of other problems.

    Attributes:
        rule: how the server selects.
        threshold: what the requests asked for.
        problems: how many were answered.
        right, plain_right: right answers, with PARSE and of the plain target.
        wrong_where_plain_right: of the problems that the plain target answers right, those that
            PARSE answers wrong.
        bound: the exact upper bound of the share of all requests that are answered wrong where the
            plain target is right, with confidence 1 - delta, one-sided.
        difference: right answers less the plain target's, as a share of the problems.
        difference_low, difference_high: its 95 % interval (Bonett and Price, paired).
        tokens_per_s, plain_tokens_per_s: output tokens per second at this concurrency.
        draft_share: output tokens that are accepted draft tokens, 0 to 1.
    """

    rule: str
    threshold: float
    problems: int
    right: Share
    plain_right: Share
    wrong_where_plain_right: Share
    bound: float
    difference: float
    difference_low: float
    difference_high: float
    tokens_per_s: float
    plain_tokens_per_s: float
    draft_share: float

    @property
    def speedup(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s


@dataclass(frozen=True, slots=True)
class Bin:
    """Verdicts between two values: how often the prefix is right.

    Attributes:
        low, high: of the verdicts in it.
        mean: of them.
        right: prefixes without an error.
    """

    low: float
    high: float
    mean: float
    right: Share


@dataclass(frozen=True, slots=True)
class Calibration:
    """Everything the page shows.

    Attributes:
        rule: the server's own; the certificate is about it.
        loss: which error counts, see ``losses``.
        alpha, delta: what was asked for.
        requests: of the calibration set.
        errors_allowed: so many of them may lose where a threshold passes; -1: not even none.
        wrong: first drafts with an error.
        rules: every rule on the same drafts; each test stands for itself.
        answers: whole drafts with a wrong answer kept, the other loss, at the certified threshold;
            None without one, or where it is the loss itself.
        served: the check, none or one per threshold.
        bins: of all judged prefixes: is a verdict of 0.9 right nine times of ten?
    """

    rule: str
    loss: Loss
    alpha: float
    delta: float
    requests: int
    errors_allowed: int
    wrong: Share
    rules: tuple[RuleFigures, ...]
    answers: Share | None
    served: tuple[Served, ...]
    bins: tuple[Bin, ...]

    @property
    def own(self) -> RuleFigures:
        return next(figures for figures in self.rules if figures.rule == self.rule)

    def as_json(self) -> dict[str, Any]:
        """Plain data. Not rounded: verdicts live in the fourth place."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds per token at the concurrency of the measurement.

    Attributes:
        draft, verification: per drafted token.
        plain: of the plain target, per output token; None before it has answered.
    """

    draft: float
    verification: float
    plain: float | None

    def speedup(self, kept: float) -> float | None:
        """1 / (r + v + 1 - a), with the share kept of the drafts for a."""
        if not self.plain:
            return None
        return limit_of(self.draft / self.plain, self.verification / self.plain, kept)


def costs_of(drafts: Sequence[FirstDraft], plain_ms: float | None) -> Costs:
    drafted = max(1, sum(draft.num_drafted for draft in drafts))
    draft_ms = sum(draft.draft_ms for draft in drafts)
    verify_ms = sum(draft.verify_ms for draft in drafts)
    return Costs(draft_ms / drafted, verify_ms / drafted, plain_ms)


def make_rules(
    drafts: Sequence[FirstDraft],
    grid: Sequence[float],
    loss: Loss,
    alpha: float,
    delta: float,
    costs: Costs,
) -> tuple[RuleFigures, ...]:
    """Every rule's table on the calibration set.

    Args:
        drafts: the calibration set's.
        grid: thresholds, the strictest first.
        loss: one of ``losses.LOSSES``.
        alpha, delta: see ``learn_then_test``.
        costs: what speedups are expected from.
    """
    return tuple(
        _rule_figures(rule, drafts, grid, loss, (alpha, delta), costs) for rule in SELECTIONS
    )


def _rule_figures(
    rule: str,
    drafts: Sequence[FirstDraft],
    grid: Sequence[float],
    loss: Loss,
    levels: tuple[float, float],
    costs: Costs,
) -> RuleFigures:
    tests = learn_then_test([draft.score(rule, loss) for draft in drafts], grid, *levels)
    best = certified_threshold(tests)
    rows = tuple(_at_threshold(rule, drafts, test, loss, costs) for test in tests)
    if best is None:
        return RuleFigures(rule, None, None, rows)
    return RuleFigures(rule, best.threshold, best.errors, rows)


def _at_threshold(
    rule: str, drafts: Sequence[FirstDraft], test: Tested, loss: Loss, costs: Costs
) -> AtThreshold:
    threshold = test.threshold
    num_wrong = sum(draft.is_wrong(loss) for draft in drafts)
    num_right = len(drafts) - num_wrong
    rejected = sum(
        not draft.is_wrong(loss) and not draft.is_kept_whole(rule, threshold) for draft in drafts
    )
    drafted = max(1, sum(draft.num_drafted for draft in drafts))
    kept = sum(draft.kept(rule, threshold) for draft in drafts) / drafted
    return AtThreshold(
        threshold=threshold,
        p_value=test.p_value,
        certified=test.certified,
        loss=Share.of(test.errors, len(drafts)),
        false_accepts=Share.of(test.errors, num_wrong),
        false_rejects=Share.of(rejected, num_right),
        kept=kept,
        speedup=costs.speedup(kept),
    )


def whole_wrong_answers(drafts: Sequence[FirstDraft], rule: str, threshold: float) -> Share:
    """Drafts kept whole with a wrong answer, of all."""
    count = sum(
        draft.is_answer_right is False and draft.is_kept_whole(rule, threshold) for draft in drafts
    )
    return Share.of(count, len(drafts))


def reliability(drafts: Sequence[FirstDraft]) -> tuple[Bin, ...]:
    """Judged prefixes in bins of equal size, by their verdicts; empty where no grader says where a
    text goes wrong."""
    judged = sorted(
        (verdict, draft.first_wrong is None or place < draft.first_wrong)
        for draft in drafts
        for place, verdict in enumerate(draft.verdicts)
    )
    if not any(draft.first_wrong is not None for draft in drafts):
        return ()
    size = math.ceil(len(judged) / NUM_BINS)
    bins = []
    for start in range(0, len(judged), size):
        part = judged[start : start + size]
        verdicts = [verdict for verdict, _ in part]
        right = Share.of(sum(is_right for _, is_right in part), len(part))
        bins.append(Bin(verdicts[0], verdicts[-1], sum(verdicts) / len(part), right))
    return tuple(bins)


def paired_difference(better: int, worse: int, total: int) -> tuple[float, float, float]:
    """(Difference of two shares on the same problems, low, high), 95 %.

    Bonett and Price, "Adjusted Wald confidence interval for a difference of binomial proportions
    based on paired data" (2012): a Wald interval over two problems more, one better and one worse.

    Args:
        better, worse: problems that only the first way, only the second way got right.
        total: problems.
    """
    up, down = (better + 1) / (total + 2), (worse + 1) / (total + 2)
    spread = math.sqrt((up + down - (up - down) ** 2) / (total + 2))
    half = float(stats.norm.ppf(0.975)) * spread
    middle = up - down
    return (better - worse) / total, max(-1.0, middle - half), min(1.0, middle + half)


def upper_bound(count: int, total: int, delta: float) -> float:
    """Exact upper bound of a share, with confidence 1 - delta, one-sided (Clopper and Pearson)."""
    test = stats.binomtest(count, total, alternative="less")
    return float(test.proportion_ci(1 - delta, method="exact").high)
