"""``sglang-parse explain``: loads answers with traces, prints a table of each, writes the page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_parse.client import conditions
from sglang_parse.client.ask import ANY_MODEL, Asking, decode_there, trace_answers
from sglang_parse.client.program import write_json
from sglang_parse.client.prompts import prompts_for
from sglang_parse.client.records import BenchError, Item, one_object
from sglang_parse.client.servers import Remote
from sglang_parse.client.tables import make_progress
from sglang_parse.client.traced import Decode, ExplainedAnswer, Traced, explain_answer
from sglang_parse.client.traced_table import answer_table
from sglang_parse.core.selection import contradicts_target
from sglang_parse.explain import page
from sglang_parse.explain.settings import ExplainSettings

_WANTED = (
    "save answers of /generate, or of chat completions with return_token_ids and return_meta_info"
)


def load_answers(settings: ExplainSettings, on_answer: Callable[[], None]) -> list[Traced]:
    """Loads answers from the files, then from the server."""
    found = [traced for path in settings.traces for traced in read(path)]
    if not settings.url or (found and not settings.prompt and not settings.prompts):
        return found
    server = Remote.read("the server", settings.url)
    server.check_alive()
    items = [Item(str(number), text, None) for number, text in enumerate(settings.prompt)]
    if not items or settings.prompts:
        items += prompts_for(settings.prompts, server.model_path(), settings.requests)
    options: dict[str, Any] = {"drafting": "always"}
    if settings.threshold is not None:
        options["threshold"] = settings.threshold
    asking = Asking(model=ANY_MODEL, max_tokens=settings.max_tokens, parse=options)
    return found + trace_answers(server, items, asking, on_answer)


def read(path: Path) -> list[Traced]:
    """Reads a file of one answer or of a list, in the format of SGLang's APIs."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchError(f"{path} cannot be read as JSON: {error}") from error
    entries = content if isinstance(content, list) else [content]
    return [_traced(path, entry) for entry in entries]


def _traced(path: Path, entry: Any) -> Traced:
    if not isinstance(entry, dict):
        raise BenchError(f"{path} holds {entry!r}; fix: {_WANTED}")
    prompt = entry.get("prompt", "")
    for choice in entry.get("choices", ())[:1]:  # of a chat completion
        entry = {**choice, "output_ids": choice.get("response_token_ids")}
    output, meta = entry.get("output_ids"), entry.get("meta_info")
    if not isinstance(output, list) or not isinstance(meta, dict) or "parse" not in meta:
        raise BenchError(
            f"{path} has an answer without output_ids and meta_info['parse']; fix: {_WANTED}"
        )
    return Traced(prompt, output, one_object(meta["parse"]))


def as_json(traced: Traced) -> dict[str, Any]:
    """An answer as ``read`` takes it."""
    return {
        "prompt": traced.prompt,
        "output_ids": list(traced.output_ids),
        "meta_info": {"parse": [dict(traced.parse)]},
    }


def decoder(settings: ExplainSettings) -> Decode:
    """Decodes by the given tokenizer, else by the server."""
    if not settings.tokenizer:
        return partial(decode_there, settings.url.rstrip("/"))
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(settings.tokenizer)
    except (OSError, ValueError) as error:
        raise BenchError(f"--tokenizer is {settings.tokenizer!r}: {error}") from error
    return lambda texts: [tokenizer.decode(list(ids)) for ids in texts]


def run(arguments: argparse.Namespace, console: Console) -> int:
    settings = ExplainSettings.read(arguments)
    with make_progress(console) as progress:
        bar = progress.add_task("asking", total=None, visible=bool(settings.url))
        traced = load_answers(settings, lambda: progress.advance(bar))
        decode = decoder(settings)
        answers = [explain_answer(one, decode) for one in traced]
    for number, answer in enumerate(answers, 1):
        console.print(answer_table(answer, f"Answer {number}"))
        console.print(summary(answer), markup=False, highlight=False)
    write_json(settings.output / "answers.json", [as_json(one) for one in traced])
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
    if doubted := parse.get("doubted_drafts", 0):
        said += f"; {doubted} drafts ended in doubt"
    matched = parse.get("matched_prefixes", 0)
    if refused := parse.get("rejected_matched_prefixes", 0):
        said += f"\n  the target itself would have written {matched} prefixes"
        said += f"; the verdicts refused {refused} of them"
        if contradicts_target(matched, refused):
            said += f": the {parse.get('judge', 'question')} does not work for this model"
    return said
