"""Terminal output of ``compare``, ``demo`` and ``load``: tables, and what to do next."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglang_parse.client.records import DRAFT, PARSE, PLAIN, STAGES, Variant, title_of
from sglang_parse.client.tables import make_table
from sglang_parse.compare.figures import Comparison, Spread, VariantFigures
from sglang_parse.compare.quality import Quality

LATENCIES = {"ttft": "TTFT", "itl": "ITL", "max_itl": "max ITL", "e2e": "E2E"}
NEXT = """\
Your own models: sglang-parse compare --target TARGET --draft DRAFT --question FILE --problems 0
Before you serve them: sglang-parse doctor (checks), explain (answers), calibrate (threshold)
"""


def show_figures(console: Console, figures: Comparison, baseline: str, output: Path) -> None:
    """The table, stage times, paths of the files."""
    console.print(figures_table(figures, baseline))
    for one in figures.variants:
        if one.time is not None:
            spent = ", ".join(f"{stage} {ms:.0f}" for stage, ms in one.time.ms_per_request.items())
            console.print(f"ms per request of {one.variant.label}: {spent}", highlight=False)
    console.print(f"{output / 'results.json'}\n{output / 'report.html'}")


def show_load(console: Console, figures: Comparison, baseline: str) -> None:
    """A table of latencies per concurrency."""
    for concurrency in figures.concurrencies:
        console.print(latency_table(figures, baseline, concurrency))


def show_demo(console: Console, figures: Comparison) -> None:
    """The result in a sentence, then the next steps."""
    parse, plain, draft = (figures.find(Variant(name)) for name in (PARSE, PLAIN, DRAFT))
    if parse and plain:
        over = [(s.concurrency, s.over[PLAIN]) for s in parse.speeds if PLAIN in s.over]
        times = ", ".join(f"{ratio.median:.1f}x at {c} at a time" for c, ratio in over)
        found = [(one, *_quality(one.quality)) for one in (parse, plain, draft) if one]
        exact = ", ".join(f"{one.variant.label} {text}" for one, text, _ in found if text)
        console.print(f"PARSE's speed over the plain target: {times}", highlight=False)
        console.print(f"Exact answers: {exact}\n", highlight=False)
    console.print(NEXT, highlight=False)


def figures_table(figures: Comparison, baseline: str) -> Table:
    """One row per variant."""
    is_graded = any(one.quality for one in figures.variants)
    headings = ["", *(f"{concurrency} at a time" for concurrency in figures.concurrencies)]
    title = f"output tokens/s and speedup over {title_of(baseline)}"
    table = make_table(title, [*headings, *(("exact", "p") if is_graded else ())])
    for one in figures.variants:
        speeds = [_speed(one, concurrency, baseline) for concurrency in figures.concurrencies]
        table.add_row(one.variant.label, *speeds, *(_quality(one.quality) if is_graded else ()))
    return table


def latency_table(figures: Comparison, baseline: str, concurrency: int) -> Table:
    """One row per variant at a concurrency: speed, latencies, stages."""
    title = f"{concurrency} at a time; ms, p50/p99; stages as fractions of the time"
    headings = ("server", "tokens/s", f"over {title_of(baseline)}", *LATENCIES.values(), *STAGES)
    table = make_table(title, headings)
    for one in figures.variants:
        speed = one.speed_at(concurrency)
        if speed is None:
            continue
        over = speed.over.get(baseline)
        latencies = (speed.latency_ms[kind] for kind in LATENCIES)
        table.add_row(
            one.variant.label,
            f"{speed.tokens_per_s.median:.0f}",
            f"{over.median:.2f}x" if over else "",
            *(f"{found['p50']:.0f}/{found['p99']:.0f}" for found in latencies),
            *(f"{speed.stages[stage]:.1%}" if speed.stages else "" for stage in STAGES),
        )
    return table


def _speed(one: VariantFigures, concurrency: int, baseline: str) -> str:
    speed = one.speed_at(concurrency)
    if speed is None:
        return ""
    over = speed.over.get(baseline)
    return f"{speed.tokens_per_s.median:.0f}" + (f" ({_spread(over)})" if over else "")


def _spread(value: Spread) -> str:
    return f"{value.median:.2f}x, {value.low:.2f}-{value.high:.2f}"


def _quality(quality: Quality | None) -> tuple[str, str]:
    if quality is None:
        return "", ""
    if quality.score is None:
        return "not graded", ""
    p = "" if quality.test is None else f"{quality.test.p_value:.2g}"
    return f"{quality.score:.1%} of {quality.problems}", p
