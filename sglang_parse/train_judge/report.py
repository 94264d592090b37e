"""A training described once: the terminal, and report.html."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_parse.client.sections import Cell, Facts, Grid, Sections, Text, with_interval
from sglang_parse.core.certificate import Fingerprint
from sglang_parse.train_judge.figures import Estimate, ReaderFigures
from sglang_parse.train_judge.result import COMPLETE, LOGPROB, QUESTION, JudgeReport

TITLES = {QUESTION: "the question", LOGPROB: "the likelihood"}


def summary(report: JudgeReport) -> list[str]:
    """States the result; bad news first."""
    counts, chosen, unit = report.counts, report.trained.candidate, report.unit
    layers = f"layers {', '.join(map(str, chosen.layers))}" if chosen.layers else "no layer"
    labels = f"{counts['num_right_units']} right and {counts['num_wrong_units']} wrong {unit}"
    area = f"AUROC {shown(report.head.auroc)}; 0.5 is a coin toss"
    found = (
        f"A head with {chosen.pooling} pooling on {layers} tells right from wrong on prompts that "
        f"it was not trained on ({area}; {labels})."
    )
    if report.is_useless:
        found = (
            f"The head may be no better than a coin toss ({area}; {labels}): do not serve it. More "
            "labeled drafts or other --layers may help; a target may also have nothing to know."
        )
    elif report.knows_prompts_only:
        within = shown(report.head.auroc_within_prompt)
        found += (
            f" Among drafts of ONE prompt it may be no better than a coin toss (AUROC {within}): "
            "it may know which prompts are hard, not which drafts are wrong."
        )
    beaten = [key for key in report.gains if key not in report.unbeaten]
    compared = [f"It is better than {_listed(beaten, report)}."] if beaten else []
    if report.unbeaten:
        worse = f"It is NOT clearly better than {_listed(report.unbeaten, report)}."
        compared = [f"{worse} A reader that needs no training is simpler.", *compared]
    return [*compared, found] if report.unbeaten and not report.is_useless else [found, *compared]


def _listed(keys: Sequence[str], report: JudgeReport) -> str:
    return " or ".join(f"{TITLES[key]} (AUROC {shown(report.others[key].auroc)})" for key in keys)


def sections(report: JudgeReport, fingerprint: Fingerprint, facts: dict[str, Any]) -> Sections:
    """Everything that a reader is told, by heading."""
    counts = report.counts
    origin = (
        f"{counts['num_drafts']} labeled drafts of {counts['num_prompts']} prompts, "
        f"{counts['num_wrong_drafts']} of them with an error. Every verdict of the head below is "
        "from a head that saw no draft of the same prompt. Its pooling, layers and strength were "
        "chosen by the same verdicts, which flatters it slightly."
    )
    return {
        "": [*summary(report), Text(origin, "low")],
        "Head, question and likelihood on the same drafts": [readers_grid(report)],
        "Draft tokens kept at a risk": [kept_grid(report)],
        "Learning curve": [curve_grid(report)],
        "Conditions": [Facts(facts | fingerprint.model_dump())],
    }


# -- tables -------------------------------------------------------------------------------


def shown(one: Estimate) -> str:
    """A number with its interval, in a sentence."""
    value, interval = _cell(one)
    return f"{value} ({interval})" if interval else value


def _cell(one: Estimate, percent: bool = False) -> tuple[str, str]:
    if one.value is None or one.low is None or one.high is None:
        return "unknown", ""
    if percent:
        return with_interval(100 * one.value, 100 * one.low, 100 * one.high, 1, " %")
    return with_interval(one.value, one.low, one.high, 3)


def rows(report: JudgeReport) -> list[tuple[str, ReaderFigures]]:
    """All readers, by name, the head first."""
    return [("the head", report.head), *((TITLES[key], one) for key, one in report.others.items())]


def readers_grid(report: JudgeReport) -> Grid:
    found = rows(report)
    cells = [(name, _cell(one.auroc), _cell(one.auroc_within_prompt)) for name, one in found]
    note = (
        f"Over {report.unit}. AUROC: 1 is perfect, 0.5 a coin toss; over all, and over those of "
        "one prompt."
    )
    return Grid(("", "AUROC", "within a prompt"), cells, note, (0, 1, 2))


def kept_grid(report: JudgeReport) -> Grid:
    error = "a wrong answer" if report.unit == COMPLETE else "an error"
    note = (
        f"By first-reject, at the threshold at which so many percent of all drafts have {error} "
        "accepted. sglang-parse calibrate certifies a threshold; these figures choose it in "
        "hindsight."
    )
    headings = ("", *(f"at {percent} % risk" for percent in report.head.kept_at_risk))
    cells: list[list[Cell]] = [
        [name, *(_cell(kept, percent=True) for kept in one.kept_at_risk.values())]
        for name, one in rows(report)
    ]
    return Grid(headings, cells, note, (0, 1, 2))


def curve_grid(report: JudgeReport) -> Grid:
    cells = [(f"{count}", _cell(area)) for count, area in report.curve]
    note = "Out of fold, on other prompts. If it still rises at the end, more labeled drafts help."
    return Grid(("labeled drafts that trained it", "AUROC"), cells, note, ())
