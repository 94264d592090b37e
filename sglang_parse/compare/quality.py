"""Scores of a variant's answers, and paired tests against the baseline's. Statistics only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from scipy import stats

from sglang_parse.client.records import BenchError, BenchRun


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


@dataclass(frozen=True, slots=True)
class Quality:
    """Scores of one variant.

    Attributes:
        problems: graded answers, or all where none could be graded.
        score: mean, 0 to 1: the fraction of right answers for most tasks; None if not graded.
        interval: 95 % (Wilson), for right and wrong answers only.
        test: against the baseline's first pass.
    """

    problems: int
    score: float | None
    interval: tuple[float, float] | None
    test: PairedTest | None


def quality_of(graded: BenchRun, baseline: BenchRun | None) -> Quality:
    """Scores of a run, tested against the baseline's unless they are its own."""
    scores = [score for score in graded.scores if score is not None]
    if not scores:
        return Quality(len(graded.scores), None, None, None)
    interval = None
    if is_binary(scores):
        found = stats.binomtest(round(sum(scores)), len(scores)).proportion_ci(method="wilson")
        interval = (float(found.low), float(found.high))
    test = None
    if baseline is not None and baseline.variant != graded.variant:
        # A sweep may answer only the first of the problems.
        test = paired_test(graded.scores, baseline.scores[: len(graded.scores)])
    return Quality(len(scores), fmean(scores), interval, test)


def is_binary(scores: Iterable[float | None]) -> bool:
    return set(scores) <= {0, 1}


def paired_test(
    scores: Sequence[float | None], baseline: Sequence[float | None]
) -> PairedTest | None:
    """Tests scores of the same problems in the same order; None if not graded.

    McNemar's exact test is the binomial test of the problems on which the two differ.

    Raises:
        BenchError: the numbers of problems differ.
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
