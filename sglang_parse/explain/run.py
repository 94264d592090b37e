"""``sglang-parse explain``: prints a table per answer and writes the page."""

from __future__ import annotations

import argparse

from rich.console import Console

from sglang_parse.client import conditions
from sglang_parse.client.program import write_json
from sglang_parse.client.tables import make_progress
from sglang_parse.client.traced import ExplainedAnswer, explain_answer
from sglang_parse.client.traced_table import answer_table
from sglang_parse.core.selection import contradicts_target
from sglang_parse.explain import page, sources
from sglang_parse.explain.settings import ExplainSettings


def run(arguments: argparse.Namespace, console: Console) -> int:
    settings = ExplainSettings.read(arguments)
    with make_progress(console) as progress:
        bar = progress.add_task("asking", total=None, visible=bool(settings.url))
        traced = sources.answers(settings, lambda: progress.advance(bar))
        decode = sources.decoder(settings)
        answers = [explain_answer(one, decode) for one in traced]
    for number, answer in enumerate(answers, 1):
        console.print(answer_table(answer, f"Answer {number}"))
        console.print(summary(answer), markup=False, highlight=False)
    write_json(settings.output / "answers.json", [sources.as_json(one) for one in traced])
    path = settings.output / "explain.html"
    source = ", ".join([*map(str, settings.traces), *([settings.url] if settings.url else [])])
    facts = {"date": conditions.date(), "source": source}
    path.write_text(page.render(answers, facts), encoding="utf-8")
    console.print(f"the page: {path}", soft_wrap=True)
    return 0


def summary(answer: ExplainedAnswer) -> str:
    parse = answer.parse
    if parse.get("mode") != "parse":
        return f"  served by plain decoding: {parse.get('reason', 'no reason given')}"
    times = ", ".join(f"{stage} {ms:.0f}" for stage, ms, _ in page.stages(answer))
    said = (
        f"  {len(answer.rounds)} rounds, {parse['accepted_tokens']} of {parse['drafted_tokens']} "
        f"draft tokens accepted; ms: {times}"
    )
    matched = parse.get("matched_prefixes", 0)
    if refused := parse.get("rejected_matched_prefixes", 0):
        said += f"\n  the target itself would have written {matched} prefixes"
        said += f"; the verdicts refused {refused} of them"
        if contradicts_target(matched, refused):
            said += f": the {parse.get('judge', 'question')} does not work for this model"
    return said
