"""Figures in words: calibration.json, the terminal, and the sentences that the page shows too."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from sglang_parse.calibrate.certify import CHANCE, Proportion
from sglang_parse.calibrate.figures import AtThreshold, Calibration, loosest_certified
from sglang_parse.client.tables import make_table
from sglang_parse.core.certificate import Certificate

GUARANTEE = (
    "With confidence {confidence:g} over the draw of the calibration set: at most a fraction "
    "{alpha:g} of the first drafts of requests exchangeable with these {event}, at this threshold "
    "and at every stricter one. Not covered: later rounds of an answer (the check by whole answers "
    "bounds those), other data, other models, other judges."
)
EVENTS = {
    "token": "have their first wrong token accepted",
    "answer": "are accepted whole with a wrong answer",
}


def content(
    figures: Calibration, certificate: Certificate, conditions: dict[str, Any]
) -> dict[str, Any]:
    """``calibration.json`` as plain data; not rounded, verdicts differ in the fourth place."""
    words = {"guarantee": guarantee(certificate), "conditions": conditions}
    return {**certificate.model_dump(), **words, "results": asdict(figures)}


def guarantee(certificate: Certificate) -> str:
    if certificate.threshold is None:
        return "No threshold qualifies: there is no guarantee."
    confidence, event = 1 - certificate.delta, EVENTS[certificate.loss]
    return GUARANTEE.format(confidence=confidence, alpha=certificate.alpha, event=event)


def chosen(figures: Calibration, selection: str) -> list[AtThreshold]:
    """A selection at the thresholds that matter: the served ones, and its certified one."""
    rows = figures.selections[selection]
    served = {figures.served_threshold, *(one.threshold for one in figures.served)}
    return [row for row in rows if row.threshold in served or row is loosest_certified(rows)]


def summary(figures: Calibration, certificate: Certificate) -> list[str]:
    """States the result: the certified threshold, the served one, the verdicts; bad news first."""
    results = [_certified(figures, certificate), _served(figures, certificate)]
    separation = _separation(figures)
    return [separation, *results] if figures.separation.is_at_chance else [*results, separation]


def _certified(figures: Calibration, certificate: Certificate) -> str:
    rows = figures.selections[certificate.fingerprint.selection]
    levels = f"alpha {100 * certificate.alpha:g} %, delta {100 * certificate.delta:g} %"
    if row := loosest_certified(rows):
        return f"Threshold {row.threshold:g} is certified ({levels}): {_fares(row, certificate)}."
    few = f"{certificate.requests} requests are too few to certify anything"
    allowed = f"{figures.errors_allowed} are allowed" if figures.errors_allowed >= 0 else few
    return (
        f"No threshold qualifies ({levels}): even at {rows[0].threshold:g}, the strictest one, "
        f"{_fares(rows[0], certificate)}; {allowed}. More requests, a larger alpha, another "
        "judge (--judge), or a target with better verdicts may help."
    )


def _served(figures: Calibration, certificate: Certificate) -> str:
    rows = figures.selections[certificate.fingerprint.selection]
    (row,) = (row for row in rows if row.threshold == figures.served_threshold)
    verdict = "is certified, too" if row.certified else "is NOT certified"
    return f"The server's threshold {row.threshold:g} {verdict}: {_fares(row, certificate)}."


def _fares(row: AtThreshold, certificate: Certificate) -> str:
    risk = row.error_rate
    return (
        f"{risk.count} of {risk.total} first drafts {EVENTS[certificate.loss]} "
        f"({100 * risk.ratio:.1f} %, 95 % interval {100 * risk.low:.1f} to {100 * risk.high:.1f}), "
        f"and {100 * row.accept_ratio:.1f} % of the drafted tokens are accepted"
    )


def _separation(figures: Calibration) -> str:
    found = figures.separation
    counts = f"{found.right} right and {found.wrong} wrong first drafts"
    if found.auroc is None:
        return f"Whether verdicts tell right from wrong is unknown: there were {counts}."
    interval = f"95 % interval {found.low:.2f} to {found.high:.2f}, 0.5 is a coin toss"
    area = f"AUROC {found.auroc:.2f}, {interval}; {counts}"
    if found.low > CHANCE:
        return f"Right drafts get higher verdicts than wrong ones ({area})."
    if not found.is_at_chance:
        return f"Whether right drafts get higher verdicts is open ({area}): give more --requests."
    verdicts = "LOWER verdicts than" if found.high < CHANCE else "the SAME verdicts as"
    return (
        f"Right drafts get {verdicts} wrong ones ({area}). The judge does not work for this "
        "model, and no threshold can mend that: do not serve it. Fix: --parse-judge likelihood, "
        "which accepts what the target would have written; a head of sglang-parse train-judge; "
        "another --parse-question; or --parse-verification token."
    )


def show(console: Console, figures: Calibration, certificate: Certificate) -> None:
    """Prints the thresholds that matter, at most 80 characters wide, and the summary."""
    selection = certificate.fingerprint.selection
    headings = ("threshold", "certified", "accepted tokens", "error rate", "refused if right")
    table = make_table(f"first drafts, {selection}", headings)
    for row in chosen(figures, selection):
        rates = _percent(row.error_rate, "drafts"), _percent(row.false_rejects, "right")
        certified = "yes" if row.certified else "no"
        table.add_row(f"{row.threshold:.6g}", certified, f"{row.accept_ratio:.1%}", *rates)
    console.print(table)
    answers = [
        f"Whole answers at {one.threshold:g}: {one.accuracy.ratio:.1%} right, the plain target's "
        f"{one.plain_accuracy.ratio:.1%}; at most {one.regression_bound:.2%} of requests regress."
        for one in figures.served
    ]
    for sentence in (*answers, *summary(figures, certificate)):
        console.print(sentence, highlight=False)


def _percent(found: Proportion, of: str) -> str:
    interval = f"{100 * found.low:.2f} to {100 * found.high:.2f}"
    return f"{found.ratio:.2%}\n{interval}\n{found.count} of {found.total} {of}"
