"""Which reading of a draft token tells best whether accepting it turns a right answer wrong.

    python examples/real_pair/readings.py read --out build/real_pair --target TARGET --draft DRAFT \
        --task 'gsm8k.jsonl:60:python examples/grade_math.py'
    python examples/real_pair/readings.py turn --out build/real_pair --url http://127.0.0.1:30000 \
        --tokenizer TARGET --task 'gsm8k.jsonl:60:python examples/grade_math.py'
    python examples/real_pair/readings.py table --out build/real_pair --tokenizer TARGET
    python examples/real_pair/readings.py label --out build/real_pair --tokenizer TARGET \
        --task 'gsm8k.jsonl:60:python examples/grade_math.py'

``read`` has both models read the draft model's own answers (the setting "draft" of answers.py),
into ``readings.jsonl``.

``turn`` finds the token that turns an answer wrong. Of drafts that are wrong where the target's own
answer (the setting "exact") is right, a PARSE server goes on, exactly, behind the draft's tokens up
to one that the target would not have chosen; bisection finds the first such token behind which the
answer is wrong: a harm (``turns.jsonl``). All such tokens before it, and those of drafts that are
right, are harmless. Both resume.

``table`` compares readings: the harms that pass at equal numbers of refusals.

``label`` writes these drafts for ``sglang-parse train-judge --data``: ``labeled.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import openai
import torch
from answers import read_lines, read_task
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_parse.client.conditions import of_now
from sglang_parse.client.program import write_json
from sglang_parse.client.records import Item
from sglang_parse.client.statistics import Separation
from sglang_parse.client.tables import add_bar, make_progress, make_table
from sglang_parse.core.strict import CLASSES
from sglang_parse.tasks.assignment import GraderCommand

Row = dict[str, Any]
WINDOW = 8
EVERY = (32, 64, 90)
"""Tokens between refusals at which readings are compared."""


def items_of(given: argparse.Namespace) -> dict[tuple[str, str], Item]:
    return {(task, item.key): item for task, some, _ in given.task for item in some}


def key_of(row: Row) -> tuple[str, str]:
    return row["task"], row["key"]


@torch.inference_mode()
def logprobs_of(model: Any, prompt: Sequence[int], draft: Sequence[int]) -> torch.Tensor:
    """fp32 [len(draft), vocab] log-probabilities at every draft token."""
    hidden = model.model(torch.tensor([[*prompt, *draft]])).last_hidden_state
    return model.lm_head(hidden[0, len(prompt) - 1 : -1]).float().log_softmax(-1)


def readings_of(target: torch.Tensor, own: torch.Tensor, draft: Sequence[int]) -> Row:
    """What both models' log-probabilities [n, vocab] say about a draft of n tokens."""
    ids = torch.tensor(draft)[:, None]
    chosen = target.gather(1, ids)
    return {
        "choice": target.argmax(-1).tolist(),
        "logprob": chosen[:, 0].tolist(),
        "entropy": torch.special.entr(target.exp()).sum(-1).tolist(),
        "rank": (target > chosen).sum(-1).tolist(),
        "ratio": (chosen - own.gather(1, ids))[:, 0].tolist(),
        "divergence": (own.exp() * (own - target)).sum(-1).tolist(),
    }


def read(given: argparse.Namespace, console: Console) -> None:
    items = items_of(given)
    done = {*map(key_of, read_lines(path := given.out / "readings.jsonl"))}
    rows = [row for row in read_lines(given.out / "answers.jsonl") if row["setting"] == "draft"]
    rows = [row for row in rows if key_of(row) in items and key_of(row) not in done]
    tokenizer = AutoTokenizer.from_pretrained(given.target)
    models = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        for path in (given.target, given.draft)
    ]
    with make_progress(console) as progress, path.open("a", encoding="utf-8") as file:
        bar = add_bar(progress, "drafts read", len(rows))
        for row in rows:
            chat = [{"role": "user", "content": items[key_of(row)].text}]
            prompt = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=False
            )
            draft = row["token_ids"]
            found = readings_of(*(logprobs_of(one, prompt, draft) for one in models), draft)
            same = {"task": row["task"], "key": row["key"], "prompt": prompt, "draft": draft}
            print(json.dumps(same | found), file=file, flush=True)
            progress.advance(bar)


def places_of(row: Row) -> list[int]:
    """Where the target would have chosen another token."""
    pairs = zip(row["draft"], row["choice"], strict=True)
    return [place for place, (ours, theirs) in enumerate(pairs) if ours != theirs]


def turning_place(places: Sequence[int], is_right: Callable[[int], bool]) -> int:
    """The first of ``places`` whose token turns a right answer wrong; the last one's is wrong.

    Args:
        is_right: whether the target's answer is right behind the draft's tokens up to a place.
    """
    right, wrong = -1, len(places) - 1
    while wrong - right > 1:
        middle = (right + wrong) // 2
        if is_right(places[middle]):
            right = middle
        else:
            wrong = middle
    return places[wrong]


def turn(given: argparse.Namespace, console: Console) -> None:
    items = items_of(given)
    graders = {task: GraderCommand(command) for task, _, command in given.task}
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    path = given.out / "turns.jsonl"
    done = {*map(key_of, read_lines(path))}
    scores = {
        (one["setting"], *key_of(one)): one["right"]
        for one in read_lines(given.out / "answers.jsonl")
    }
    rows = [row for row in read_lines(given.out / "readings.jsonl") if key_of(row) not in done]
    sound = [row for row in rows if scores["draft", *key_of(row)]]
    turned = [row for row in rows if row not in sound and scores["exact", *key_of(row)]]
    client = openai.OpenAI(base_url=f"{given.url}/v1", api_key="none", timeout=7200, max_retries=0)
    one_at_a_time = threading.Lock()

    def is_right(row: Row, place: int) -> bool:
        """Whether the target's answer is right that begins with the draft's tokens up to there."""
        start = row["draft"][: place + 1]
        if start[-1] == tokenizer.eos_token_id:
            text = tokenizer.decode(start[:-1])
        else:
            reply = client.completions.create(
                model="default",
                prompt=row["prompt"] + start,
                temperature=0,
                max_tokens=max(1, given.max_tokens - len(start)),
                extra_body={"custom_params": {"parse": {"threshold": 1.5}}},
            )
            text = tokenizer.decode(start) + reply.choices[0].text
        with one_at_a_time:  # a grader answers in the order in which it is asked
            return bool(graders[row["task"]].grade(items[key_of(row)], text))

    def find(row: Row) -> int:
        return turning_place(places_of(row), lambda place: is_right(row, place))

    pool = ThreadPoolExecutor(given.concurrency)
    with make_progress(console) as progress, path.open("a", encoding="utf-8") as file:

        def keep(row: Row, harm: int | None) -> None:
            task, key = key_of(row)
            print(json.dumps({"task": task, "key": key, "harm": harm}), file=file, flush=True)

        for row in sound:
            keep(row, None)
        bar = add_bar(progress, "turns found", len(turned))
        futures = {pool.submit(find, row): row for row in turned if places_of(row)}
        for future in as_completed(futures):
            keep(futures[future], future.result())
            progress.advance(bar)


def labeled(prompt: str, row: Row, turned: Row, tokenizer: Any) -> Row:
    """A line of ``train-judge --data``."""
    end = len(row["draft"]) - (row["draft"][-1] == tokenizer.eos_token_id)
    text, harm = tokenizer.decode(row["draft"][:end]), turned["harm"]
    right_chars = None if harm is None else len(tokenizer.decode(row["draft"][:harm]))
    messages = [{"role": "user", "content": prompt}]
    found = {"messages": messages, "draft": text, "score": int(harm is None)}
    return found | {"right_chars": None if right_chars is None else min(right_chars, len(text))}


def label(given: argparse.Namespace, console: Console) -> None:
    items = items_of(given)
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    rows = {key_of(row): row for row in read_lines(given.out / "readings.jsonl")}
    path = given.out / "labeled.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for one in read_lines(given.out / "turns.jsonl"):
            row = rows[key_of(one)]
            # Whether a draft that the length limit has cut is right to its end, nobody knows.
            if one["harm"] is not None or row["draft"][-1] == tokenizer.eos_token_id:
                found = labeled(items[key_of(one)].text, row, one, tokenizer)
                print(json.dumps(found), file=file)
    console.print(f"labeled drafts are in {path}")


def means(values: Sequence[float]) -> list[float]:
    """[n] each with up to WINDOW - 1 before it."""
    sums = [0.0, *accumulate(values)]
    starts = [max(0, end - WINDOW) for end in range(1, len(sums))]
    pairs = zip(starts, range(1, len(sums)), strict=True)
    return [(sums[end] - sums[start]) / (end - start) for start, end in pairs]


def likelihood(row: Row) -> list[float]:
    """Today's: log-probability and entropy."""
    return [a + b for a, b in zip(row["logprob"], row["entropy"], strict=True)]


READINGS: dict[str, Callable[[Row], Sequence[float]]] = {
    "likelihood": likelihood,
    "probability": lambda row: row["logprob"],
    "probability over the draft model's": lambda row: row["ratio"],
    "KL(draft || target)": lambda row: [-value for value in row["divergence"]],
    "rank in the target": lambda row: [-value for value in row["rank"]],
    "likelihood, mean of the last 8": lambda row: means(likelihood(row)),
}
"""Name -> per draft token, the higher the more acceptable."""


def strict_places(row: Row, text_of: Callable[[int], str]) -> list[bool]:
    """Per draft token, whether it or the target's choice is a number, and they differ."""
    pairs = zip(row["draft"], row["choice"], strict=True)
    is_number = CLASSES["numbers"]
    return [a != b and any(is_number(text_of(one), False) for one in (a, b)) for a, b in pairs]


def compare(rows: Sequence[Row], turns: Sequence[Row], text_of: Callable[[int], str]) -> Iterator:
    """Figures of every reading, alone and with numbers strict."""
    row_of = {key_of(row): number for number, row in enumerate(rows)}
    seen = [(row_of[key_of(one)], one["harm"]) for one in turns]
    strict = [strict_places(row, text_of) for row in rows]
    for name, reading in READINGS.items():
        values = [np.asarray(reading(row), dtype=float) for row in rows]
        for classes in ((), ("numbers",)):
            if classes:
                values = [np.where(s, -np.inf, v) for v, s in zip(values, strict, strict=True)]
            harms = np.array([values[i][harm] for i, harm in seen if harm is not None])
            harmless = np.array(
                [
                    values[i][place]
                    for i, harm in seen
                    for place in places_of(rows[i])
                    if harm is None or place < harm
                ]
            )
            every = np.sort(np.concatenate(values))
            bounds = {n: every[len(every) // n] for n in EVERY}
            yield {
                "reading": name,
                "strict": list(classes),
                "auroc": asdict(Separation.of([*harmless], [*harms])),
                "harms": len(harms),
                "harmless": len(harmless),
                "harms_passed": {n: int((harms >= bound).sum()) for n, bound in bounds.items()},
            }


def table(given: argparse.Namespace, console: Console) -> None:
    rows, turns = (read_lines(given.out / f"{name}.jsonl") for name in ("readings", "turns"))
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    results = []
    for task in sorted({row["task"] for row in turns}):
        sides = ([row for row in some if row["task"] == task] for some in (rows, turns))
        results += [{"task": task, **found} for found in compare(*sides, tokenizer.decode)]
    headings = ["task", "reading", "strict", "AUROC", "harms", *(f"pass at {n}" for n in EVERY)]
    shown = make_table("harms that pass where a token in ... is refused", headings)
    for one in results:
        area = one["auroc"]
        passed = [str(count) for count in one["harms_passed"].values()]
        cells = [f"{area['auroc']:.2f} ({area['low']:.2f} to {area['high']:.2f})"]
        shown.add_row(
            one["task"], one["reading"], *one["strict"] or ["-"], *cells, str(one["harms"]), *passed
        )
    console.print(shown)
    if given.json:
        write_json(given.json, {"conditions": of_now(), "results": results})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    programs = {read: ("target", "draft"), turn: ("url", "tokenizer"), label: ("tokenizer",)}
    for run, flags in programs.items():
        one = commands.add_parser(run.__name__)
        one.set_defaults(run=run)
        one.add_argument("--task", type=read_task, action="append", required=True)
        for name in flags:
            one.add_argument(f"--{name}", required=True)
    commands.choices["turn"].add_argument("--concurrency", type=int, default=64)
    commands.choices["turn"].add_argument("--max-tokens", type=int, default=320)
    last = commands.add_parser("table")
    last.set_defaults(run=table)
    last.add_argument("--tokenizer", required=True)
    last.add_argument("--json", type=Path)
    for one in commands.choices.values():
        one.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.run(given, Console())


if __name__ == "__main__":
    main()
