"""First drafts and graded answers to figures. Pure.

Intervals are exact (Clopper and Pearson), 95 % and two-sided, unless stated otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_parse.calibrate.certify import (
    Proportion,
    learn_then_test,
    paired_difference,
    upper_bound,
)
from sglang_parse.calibrate.first_draft import FirstDraft, Loss
from sglang_parse.client.figures import limit_of
from sglang_parse.core.selection import SELECTIONS

NUM_BINS = 12


@dataclass(frozen=True, slots=True)
class AtThreshold:
    """One selection at one threshold, on the calibration set.

    Attributes:
        threshold: smallest verdict that accepts.
        p_value: of "the error rate is above alpha".
        certified: this threshold and all stricter ones passed.
        error_rate: first drafts with an accepted error, of all.
        false_accepts: the same, of the drafts with an error.
        false_rejects: drafts without an error that are not accepted whole, of those without one.
        wrong_answers: drafts accepted whole whose answer is wrong, of all.
        accept_ratio: accepted fraction of the drafted tokens.
        speedup: expected over the plain target, if all rounds went like the first; null where the
            plain target was not measured.
    """

    threshold: float
    p_value: float
    certified: bool
    error_rate: Proportion
    false_accepts: Proportion
    false_rejects: Proportion
    wrong_answers: Proportion
    accept_ratio: float
    speedup: float | None


@dataclass(frozen=True, slots=True)
class GradedAnswer:
    """One graded answer.

    Attributes:
        problem: index into the list of items.
        variant: "plain", or the selection and the threshold.
        score: 0 or 1.
        output_tokens, accepted_tokens: as the server counted them.
        seconds: the request's fraction of the time that its wave took.
        decode_ms: the request's fraction of the target's decode steps.
    """

    problem: int
    variant: str
    score: float
    output_tokens: int
    accepted_tokens: int
    seconds: float
    decode_ms: float


@dataclass(frozen=True, slots=True)
class ServedFigures:
    """Whole answers at a threshold compared with the plain target's, on other problems.

    Attributes:
        threshold: the requests' threshold.
        problems: number of problems.
        accuracy, plain_accuracy: right answers with PARSE and of the plain target.
        regressions: wrong answers, of the problems that the plain target answers right.
        regression_bound: exact one-sided upper bound, with confidence 1 - delta, of the fraction
            of all requests that regress.
        difference, difference_low, difference_high: accuracy minus the plain target's, with its
            paired 95 % interval (Bonett and Price).
        speedup: output tokens per second over the plain target's, at this concurrency.
        draft_ratio: fraction of the output tokens that are accepted draft tokens.
    """

    threshold: float
    problems: int
    accuracy: Proportion
    plain_accuracy: Proportion
    regressions: Proportion
    regression_bound: float
    difference: float
    difference_low: float
    difference_high: float
    speedup: float
    draft_ratio: float


@dataclass(frozen=True, slots=True)
class Bin:
    """Verified prefixes with similar verdicts.

    Attributes:
        low, high, mean: of their verdicts.
        right: prefixes without an error.
    """

    low: float
    high: float
    mean: float
    right: Proportion


@dataclass(frozen=True, slots=True)
class Calibration:
    """The figures beside the certificate.

    Attributes:
        errors_allowed: the most errors with which a threshold passes; -1 where none passes.
        wrong_drafts: first drafts with an error.
        selections: selection -> its thresholds, strictest first. All are about the same drafts,
            and each selection is tested by itself.
        served: one per threshold that was served.
        bins: verified prefixes by verdict: is a verdict of 0.9 right nine times of ten?
    """

    errors_allowed: int
    wrong_drafts: Proportion
    selections: dict[str, tuple[AtThreshold, ...]]
    served: tuple[ServedFigures, ...]
    bins: tuple[Bin, ...]


def loosest_certified(rows: Sequence[AtThreshold]) -> AtThreshold | None:
    """Returns the certified threshold of a selection; the rows are strictest first."""
    return next((row for row in reversed(rows) if row.certified), None)


def relative_costs(
    drafts: Sequence[FirstDraft], plain: Sequence[GradedAnswer]
) -> tuple[float, float] | None:
    """Returns r and v per drafted token (see ``client.figures``); None without plain answers."""
    if not plain:
        return None
    plain_ms = sum(answer.decode_ms for answer in plain) / _num_tokens(plain)
    unit = plain_ms * max(1, sum(draft.num_drafted for draft in drafts))
    r, v = sum(draft.draft_ms for draft in drafts), sum(draft.verify_ms for draft in drafts)
    return r / unit, v / unit


def make_selections(
    drafts: Sequence[FirstDraft],
    grid: Sequence[float],
    loss: Loss,
    levels: tuple[float, float],
    costs: tuple[float, float] | None,
) -> dict[str, tuple[AtThreshold, ...]]:
    """Tests every selection at every threshold.

    Args:
        drafts: the calibration set's.
        grid: thresholds, strictest first.
        levels: alpha and delta.
        costs: r and v.
    """
    found = {}
    for selection in SELECTIONS:
        scores = [draft.score(selection, loss) for draft in drafts]
        errors = [sum(score >= threshold for score in scores) for threshold in grid]
        tests = learn_then_test(errors, len(drafts), *levels)
        found[selection] = tuple(
            _at_threshold(drafts, selection, loss, costs, *test)
            for test in zip(grid, errors, *tests, strict=True)
        )
    return found


def _at_threshold(
    drafts: Sequence[FirstDraft],
    selection: str,
    loss: Loss,
    costs: tuple[float, float] | None,
    threshold: float,
    errors: int,
    p_value: float,
    certified: bool,
) -> AtThreshold:
    accepted = [draft.accepted_len(selection, threshold) for draft in drafts]
    whole = [n == draft.prefix_ends[-1] for n, draft in zip(accepted, drafts, strict=True)]
    rejected = [not draft.is_wrong(loss) and not w for w, draft in zip(whole, drafts, strict=True)]
    bad = [draft.is_answer_right is False and w for w, draft in zip(whole, drafts, strict=True)]
    num_wrong = sum(draft.is_wrong(loss) for draft in drafts)
    accept_ratio = sum(accepted) / max(1, sum(draft.num_drafted for draft in drafts))
    return AtThreshold(
        threshold=threshold,
        p_value=p_value,
        certified=certified,
        error_rate=Proportion.of(errors, len(drafts)),
        false_accepts=Proportion.of(errors, num_wrong),
        false_rejects=Proportion.of(sum(rejected), len(drafts) - num_wrong),
        wrong_answers=Proportion.of(sum(bad), len(drafts)),
        accept_ratio=accept_ratio,
        speedup=limit_of(*costs, accept_ratio) if costs else None,
    )


def reliability(drafts: Sequence[FirstDraft]) -> tuple[Bin, ...]:
    """Bins verified prefixes by verdict, equal in size; empty where no grader locates errors."""
    if all(draft.first_wrong is None for draft in drafts):
        return ()
    verified = sorted(
        (verdict, draft.first_wrong is None or place < draft.first_wrong)
        for draft in drafts
        for place, verdict in enumerate(draft.verdicts)
    )
    size = math.ceil(len(verified) / NUM_BINS)
    bins = []
    for start in range(0, len(verified), size):
        verdicts, is_right = zip(*verified[start : start + size], strict=True)
        right = Proportion.of(sum(is_right), len(verdicts))
        bins.append(Bin(verdicts[0], verdicts[-1], sum(verdicts) / len(verdicts), right))
    return tuple(bins)


def compare_served(
    threshold: float, answers: Sequence[GradedAnswer], plain: Sequence[GradedAnswer], delta: float
) -> ServedFigures:
    """Compares answers with the plain target's to the same problems, in the same order."""
    total = len(answers)
    pairs = [(ours.score, theirs.score) for ours, theirs in zip(answers, plain, strict=True)]
    both, better, worse = (pairs.count(pair) for pair in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)))
    difference, low, high = paired_difference(better, worse, total)
    return ServedFigures(
        threshold=threshold,
        problems=total,
        accuracy=Proportion.of(both + better, total),
        plain_accuracy=Proportion.of(both + worse, total),
        regressions=Proportion.of(worse, both + worse),
        regression_bound=upper_bound(worse, total, delta),
        difference=difference,
        difference_low=low,
        difference_high=high,
        speedup=_tokens_per_s(answers) / _tokens_per_s(plain),
        draft_ratio=sum(answer.accepted_tokens for answer in answers) / _num_tokens(answers),
    )


def _num_tokens(answers: Sequence[GradedAnswer]) -> int:
    return max(1, sum(answer.output_tokens for answer in answers))


def _tokens_per_s(answers: Sequence[GradedAnswer]) -> float:
    return _num_tokens(answers) / sum(answer.seconds for answer in answers)
