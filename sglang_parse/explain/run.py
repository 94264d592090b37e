"""``sglang-parse explain``: answers, a table of each, and the page."""

from __future__ import annotations

import argparse

from rich.console import Console

from sglang_parse.client import conditions
from sglang_parse.client.program import write_json
from sglang_parse.client.tables import make_progress
from sglang_parse.client.traced import Made, answer_table, take_apart
from sglang_parse.explain import page, sources
from sglang_parse.explain.settings import ExplainSettings


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Raises: BenchError."""
    settings = ExplainSettings.read(arguments)
    with make_progress(console) as progress:
        bar = progress.add_task("asking", total=None, visible=bool(settings.url))
        traced = sources.answers(settings, lambda: progress.advance(bar))
        decode = sources.decoder(settings)
        answers = [take_apart(one, decode) for one in traced]
    for number, made in enumerate(answers, 1):
        console.print(answer_table(made, f"Answer {number}"))
        console.print(summary(made), markup=False, highlight=False)
    write_json(settings.output / "answers.json", [sources.as_json(one) for one in traced])
    path = settings.output / "explain.html"
    source = ", ".join([*map(str, settings.traces), *([settings.url] if settings.url else [])])
    facts = {"date": conditions.date(), "source": source}
    path.write_text(page.render(answers, facts), encoding="utf-8")
    console.print(f"the page: {path}", soft_wrap=True)
    return 0


def summary(made: Made) -> str:
    """How the answer was served, and where its time went."""
    parse = made.parse
    if parse.get("mode") != "parse":
        return f"  served by the plain target: {parse.get('reason', 'no reason given')}"
    kept, drafted = parse["accepted_tokens"], parse["drafted_tokens"]
    times = ", ".join(f"{stage} {ms:.0f}" for stage, ms, _ in page.stages(made))
    return f"  {len(made.rounds)} rounds, {kept} of {drafted} draft tokens kept; ms: {times}"
