"""Terminal output of ``compare``, ``demo`` and ``load``: tables, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglang_parse.client.records import DRAFT, PARSE, PLAIN, STAGES, Variant, title_of
from sglang_parse.client.tables import make_table
from sglang_parse.compare.figures import Comparison, VariantFigures
from sglang_parse.compare.quality import Quality

LATENCIES = {"ttft": "TTFT", "itl": "ITL", "max_itl": "max ITL", "e2e": "E2E"}
NEXT = """
Next, for your own models (sglang-parse is in .venv/bin):
  sglang-parse doctor SERVER_FLAGS      will the server work? Nothing is loaded
  sglang-parse doctor --url URL         does PARSE pay on a running server, and if not, why?
  sglang-parse explain --url URL        what is accepted and rejected, segment by segment
  sglang-parse calibrate --help         which threshold keeps the error rate you allow
"""


def show_figures(console: Console, figures: Comparison, baseline: str, output: Path) -> None:
    """The table, stage times, paths of the files."""
    console.print(figures_table(figures, baseline))
    for one in figures.variants:
        if one.time is not None:
            spent = ", ".join(f"{stage} {ms:.0f}" for stage, ms in one.time.ms_per_request.items())
            console.print(f"ms per request of {one.variant.label}: {spent}", highlight=False)
    for one in figures.variants:
        passes = ", ".join(
            f"{speed.rows_per_pass:.0f} rows and {speed.ms_per_pass:.1f} ms at {speed.concurrency}"
            for speed in one.speeds
            if speed.rows_per_pass is not None and speed.ms_per_pass is not None
        )
        if passes:
            console.print(f"verify pass of {one.variant.label}: {passes}", highlight=False)
    console.print(f"{output / 'results.json'}\n{output / 'report.html'}")


def show_load(console: Console, figures: Comparison, baseline: str) -> None:
    """A table of latencies per concurrency."""
    for concurrency in figures.concurrencies:
        console.print(latency_table(figures, baseline, concurrency))


def show_demo(console: Console, figures: Comparison) -> None:
    """The result in sentences, then the next steps."""
    for line in (*demo_summary(figures), NEXT):
        console.print(line, highlight=False, markup=False)


def demo_summary(figures: Comparison) -> Iterator[str]:
    """How much faster, how right, and what limits it, as far as it was measured."""
    parse = figures.find(Variant(PARSE))
    if parse is None:
        return
    over = [(s.concurrency, s.over[PLAIN].median) for s in parse.speeds if PLAIN in s.over]
    if over:
        speedups = ", ".join(f"{ratio:.1f}x at {concurrency}" for concurrency, ratio in over)
        yield f"PARSE's speed over the plain target: {speedups} requests at a time."
    found = (figures.find(Variant(name)) for name in (PARSE, PLAIN, DRAFT))
    graded = [f"{one.variant.label} {_quality(one.quality)[0]}" for one in found if one]
    yield f"Right answers: {', '.join(graded)}."
    time = parse.time
    if time is not None:
        limit = f" The upper bound of the speedup is {time.limit:.1f}x." if time.limit else ""
        yield (
            f"{time.draft_fraction + time.matched_fraction:.1%} of PARSE's output came from the "
            f"draft model: {time.draft_fraction:.1%} accepted by a verdict, "
            f"{time.matched_fraction:.1%} matched by the target's own choice.{limit}"
        )
    faster = [s.concurrency for s in parse.speeds if DRAFT in s.over and s.over[DRAFT].median > 1]
    if faster:
        yield (
            f"It was faster than the draft alone at {' and '.join(map(str, faster))}: in PARSE a "
            "parallel draft model writes several tokens per forward, in stock SGLang one."
        )


def figures_table(figures: Comparison, baseline: str) -> Table:
    """One row per variant."""
    is_graded = any(one.quality for one in figures.variants)
    headings = ["", *(f"{concurrency} at a time" for concurrency in figures.concurrencies)]
    title = f"output tokens/s and speedup over {title_of(baseline)}"
    graded = ("tokens per pass", "right answers", "p, paired") if is_graded else ()
    table = make_table(title, [*headings, *graded])
    for one in figures.variants:
        speeds = [_speed(one, concurrency, baseline) for concurrency in figures.concurrencies]
        accepted = "" if one.accept_length is None else f"{one.accept_length:.1f}"
        quality = (accepted, *_quality(one.quality)) if is_graded else ()
        table.add_row(one.variant.label, *speeds, *quality)
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
    spread = f" ({over.median:.2f}x, {over.low:.2f}-{over.high:.2f})" if over else ""
    return f"{speed.tokens_per_s.median:.0f}{spread}"


def _quality(quality: Quality | None) -> tuple[str, str]:
    if quality is None or quality.score is None:
        return "not graded", ""
    p = "" if quality.test is None else f"{quality.test.p_value:.2g}"
    return f"{quality.score:.1%} of {quality.problems}", p
