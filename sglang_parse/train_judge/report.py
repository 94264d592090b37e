"""A training described once: the terminal, and report.html with its plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from sglang_parse.client.page import PALETTE, error_bars
from sglang_parse.client.sections import (
    Cell,
    Columns,
    Facts,
    Grid,
    Plot,
    Sections,
    Text,
    with_interval,
)
from sglang_parse.client.statistics import CHANCE
from sglang_parse.core.certificate import Fingerprint
from sglang_parse.train_judge.figures import Estimate, ReaderFigures
from sglang_parse.train_judge.result import COMPLETE, LOGPROB, QUESTION, JudgeReport

TITLES = {QUESTION: "the question", LOGPROB: "the likelihood"}
HEAD = "the head"
COLOURS = ("blue", "orange", "green")


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
    figures = {key: report.others[key] for key in keys}
    return " or ".join(
        f"{TITLES[key]} (AUROC {shown(one.auroc)})" for key, one in figures.items() if one
    )


def sections(report: JudgeReport, fingerprint: Fingerprint, facts: dict[str, Any]) -> Sections:
    """Everything that a reader is told, by heading."""
    counts = report.counts
    origin = (
        f"{counts['num_drafts']} labeled drafts of {counts['num_prompts']} prompts, "
        f"{counts['num_wrong_drafts']} of them with an error. Every verdict of the head below is "
        "from a head that saw no draft of the same prompt. Its pooling, layers and strength were "
        "chosen by the same verdicts, which flatters it slightly."
    )
    more = "If it still rises on the right, more labeled drafts help."
    return {
        "": [*summary(report), Text(origin, "low")],
        "Head, question and likelihood on the same drafts": [readers_grid(report)],
        "Draft tokens kept at a risk": [Plot("risk", risk_plot(report)), kept_grid(report)],
        "Learning curve": [Plot("curve", curve_plot(report), more)],
        "Candidates": [candidates_grid(report)],
        "Conditions": [Facts(facts | fingerprint.model_dump())],
    }


# -- tables and plots ---------------------------------------------------------------------


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


def _percents(found: Mapping[str, Estimate]) -> list[Cell]:
    return [_cell(one, percent=True) for one in found.values()]


def rows(report: JudgeReport) -> list[tuple[str, ReaderFigures]]:
    """All readers with figures, by name, the head first."""
    others = [(TITLES[key], one) for key, one in report.others.items() if one]
    return [(HEAD, report.head), *others]


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
    cells = [[name, *_percents(one.kept_at_risk)] for name, one in rows(report)]
    return Grid(headings, cells, note, (0, 1, 2))


def candidates_grid(report: JudgeReport) -> Grid:
    columns: Columns = {
        "pooling": lambda one, _: one.pooling,
        "layers": lambda one, _: ", ".join(map(str, one.layers)) or "none",
        "log-probability and entropy": lambda one, _: "yes" if one.uses_scalars else "no",
        "strength C": lambda one, _: f"{one.strength}",
        "tokens kept at 2 %": lambda _, rank: f"{rank[0]:.0%}",
        "AUROC": lambda _, rank: f"{rank[1]:.3f}",
    }
    note = "Out of fold; the first one was trained on all drafts and written."
    return Grid.of(report.trained.tried, columns, note, ())


def _bar(one: Estimate, factor: float = 1.0) -> tuple[float, float, float]:
    """Low, value, high."""
    return tuple(factor * (part or 0.0) for part in (one.low, one.value, one.high))  # type: ignore[return-value]


def risk_plot(report: JudgeReport) -> go.Figure:
    """Tokens kept over the accepted risk, a line per reader."""
    plot = go.Figure()
    for colour, (name, found) in zip(COLOURS, rows(report), strict=False):
        bars = [_bar(one, 100) for one in found.kept_at_risk.values()]
        plot.add_scatter(
            name=name,
            x=[float(risk) for risk in found.kept_at_risk],
            y=[middle for _, middle, _ in bars],
            error_y=error_bars(bars),
            mode="lines+markers",
            marker={"color": PALETTE[colour], "size": 9},
            hovertemplate="%{y:.1f} % at %{x} %<extra>%{fullData.name}</extra>",
        )
    plot.update_xaxes(title="drafts with an accepted error, %", rangemode="tozero")
    plot.update_yaxes(title="draft tokens kept, %", rangemode="tozero")
    return plot


def curve_plot(report: JudgeReport) -> go.Figure:
    """The head's AUROC over the number of drafts that trained it."""
    bars = [_bar(one) for _, one in report.curve]
    plot = go.Figure()
    plot.add_scatter(
        name=HEAD,
        x=[count for count, _ in report.curve],
        y=[middle for _, middle, _ in bars],
        error_y=error_bars(bars),
        mode="lines+markers",
        marker={"color": PALETTE["blue"], "size": 9},
        hovertemplate="%{x} drafts: %{y:.3f}<extra></extra>",
    )
    plot.add_hline(y=CHANCE, line={"color": PALETTE["grey"], "dash": "dash"})
    plot.update_xaxes(title="labeled drafts that trained it", type="log")
    plot.update_yaxes(title="AUROC on other prompts")
    return plot
