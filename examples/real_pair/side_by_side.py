"""Qwen2.5-Coder-1.5B with 0.5B as its draft: plain SGLang, stock STANDALONE, token mode and the
likelihood on ten real problems.

    python examples/real_pair/side_by_side.py [--problems 2] [--max-tokens 320]

Six problems of GSM8K and four of HumanEval (MIT licences), the first of those that docs/choosing.md
measured. One server after the other, one request at a time, greedy, bf16. ``answers.jsonl`` gets
every answer as it comes, so that another call goes on. Writes results.json and report.html.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from answers import read_lines
from pair import PAIR
from real_model import all_cores, find_model
from rich.console import Console
from summary import SPEEDS, by_counts, percent

from sglang_parse.client.ask import LONG_LIMIT_S, Asking, ask
from sglang_parse.client.conditions import of_now
from sglang_parse.client.flags import at_least
from sglang_parse.client.pool import Pool
from sglang_parse.client.program import ProgressLog, run_program
from sglang_parse.client.prompts import read_prompts
from sglang_parse.client.records import (
    PARSE_LIKELIHOOD,
    PARSE_TOKEN,
    PLAIN,
    STANDALONE,
    Item,
    title_of,
)
from sglang_parse.client.sections import Columns, Facts, Grid, Sections, Text
from sglang_parse.client.servers import ServerSpec
from sglang_parse.client.tables import publish, show
from sglang_parse.client.targets import Models, command_of, server_specs
from sglang_parse.roofline.run import speedups
from sglang_parse.roofline.settings import RooflineSettings
from sglang_parse.shapes.shape import Shape
from sglang_parse.tasks.assignment import GraderCommand

HERE = Path(__file__).parent
GRADERS = {"gsm8k": "grade_math.py", "humaneval": "grade_code.py"}
"""Problems of a file -> the program that grades them."""
SERVERS = PLAIN, STANDALONE, PARSE_TOKEN, PARSE_LIKELIHOOD
FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "bfloat16"),
    *("--host", "127.0.0.1", "--served-model-name", "demo"),
    *("--max-total-tokens", "8192", "--max-running-requests", "4"),
)
WARM_UP = [Item("warm-up", f"Count from {start} to 20.", None) for start in (1, 11)]
REFUSALS = {"token mode": 12, "the likelihood": 30}
"""Tokens between two refusals of this pair on mathematics (docs/choosing.md)."""
NOTE = (
    "Over plain: tokens/s over the plain server's, of a target so small that a draft token costs "
    "two fifths of its step. Draft at 0.14 and 0.035: by the counts of these rounds, beside a "
    "target whose step costs that much more than a draft token, one at a time or in blocks. Tokens "
    "a pass: output tokens per forward of the target. Same text: as the plain server's; in bf16 a "
    "forward of more rows rounds otherwise."
)
GPU_NOTE = (
    "Speedup over plain decoding on an H100, by the roofline: "
    + ", ".join(f"{name} refuses a token in {every}" for name, every in REFUSALS.items())
    + ". This target is so small that a forward is mostly its kernels, as the draft's is; larger "
    "targets gain more: sglang-parse roofline --target 14b --draft 0.6b."
)
Row = dict[str, Any]


def problems(count: int | None) -> list[tuple[str, Item]]:
    """All, or so many of each kind; with the names of their kinds."""
    items = {task: read_prompts(HERE / "problems" / f"{task}.jsonl")[:count] for task in GRADERS}
    return [(task, item) for task, some in items.items() for item in some]


class Turns:
    """Answers by server; what another call has answered is there already."""

    def __init__(self, path: Path, items: Sequence[tuple[str, Item]], max_tokens: int) -> None:
        self._path, self._items, self._max_tokens = path, items, max_tokens
        self._commands = {
            task: GraderCommand(shlex.join([sys.executable, str(HERE.parent / name)]))
            for task, name in GRADERS.items()
        }
        self._found = {
            (row["server"], row["key"], row["max_tokens"]): row for row in read_lines(path)
        }

    def missing(self, server: str) -> list[tuple[str, Item]]:
        return [one for one in self._items if self._place(server, one[1]) not in self._found]

    def rows(self, server: str) -> list[Row]:
        """In the order of the problems."""
        return [self._found[self._place(server, item)] for _, item in self._items]

    def answer(self, pool: Pool, server: str, log: ProgressLog) -> None:
        """Asks what is missing; two short requests warm the server up."""
        asking = Asking(max_tokens=self._max_tokens, limit_s=LONG_LIMIT_S, wants_tokens=True)
        if not (missing := self.missing(server)):
            return
        with pool.awake(server) as (endpoint,), self._path.open("a", encoding="utf-8") as file:
            ask(endpoint, WARM_UP, range(len(WARM_UP)), asking=replace(asking, max_tokens=48))
            for task, item in missing:
                (answer,) = ask(endpoint, [item], [0], asking=asking).answers
                row = {
                    **{"server": server, "task": task, "key": item.key},
                    **{"max_tokens": self._max_tokens, "text": answer.text},
                    **{"token_ids": answer.token_ids, "output_tokens": answer.output_tokens},
                    **{"ms": answer.wall_ms, "parse": answer.parse},
                    "accept_length": answer.meta.get("spec_accept_length"),
                    "right": self._commands[task].grade(item, answer.text),
                }
                print(json.dumps(row), file=file, flush=True)
                self._found[self._place(server, item)] = row
                log(f"{title_of(server)}, {item.key}: {answer_cell(row)[0]} tokens/s")

    def _place(self, server: str, item: Item) -> tuple[str, str, int]:
        return server, item.key, self._max_tokens


def seconds(rows: Sequence[Row]) -> float:
    return sum(row["ms"] for row in rows) / 1e3


def tokens(rows: Sequence[Row]) -> int:
    return sum(row["output_tokens"] for row in rows)


def num_forwards(rows: Sequence[Row], counts: Row) -> float:
    """Of the target; stock SGLang reports its own mean of output tokens per forward."""
    if counts:
        return counts["rounds"] + counts["decode_steps"]
    return sum(row["output_tokens"] / (row["accept_length"] or 1) for row in rows)


def figures(server: str, rows: Sequence[Row], plain: Sequence[Row]) -> Row:
    pairs = zip(rows, plain, strict=True)
    counts = by_counts(rows) if rows[0]["parse"] else {}
    found = {
        "server": server,
        "problems": len(rows),
        "right": int(sum(row["right"] for row in rows)),
        "output_tokens": tokens(rows),
        "seconds": seconds(rows),
        # Terser answers are not faster ones.
        "over_plain": tokens(rows) / seconds(rows) * seconds(plain) / tokens(plain),
        "tokens_per_pass": tokens(rows) / num_forwards(rows, counts),
        "same_text": sum(row["token_ids"] == other["token_ids"] for row, other in pairs),
    }
    return found | ({"by_counts": counts} if counts else {})


def counted(way: str, found: Row) -> str:
    return f"{found['by_counts']['speedup'][way]:.1f}x" if "by_counts" in found else ""


COLUMNS: Columns = {
    "server": lambda found: title_of(found["server"]),
    "right": lambda found: f"{found['right']} of {found['problems']}",
    "tokens": lambda found: str(found["output_tokens"]),
    "tokens/s": lambda found: f"{found['output_tokens'] / found['seconds']:.1f}",
    "over plain": lambda found: f"{found['over_plain']:.2f}x",
    "tokens a pass": lambda found: f"{found['tokens_per_pass']:.1f}",
    "kept": lambda found: percent(found["by_counts"]["kept"]) if "by_counts" in found else "",
    **{f"draft at {cost:g}": partial(counted, way) for way, cost in SPEEDS.items()},
    "same text": lambda found: f"{found['same_text']} of {found['problems']}",
}


def answer_cell(row: Row) -> tuple[str, str]:
    return f"{1e3 * row['output_tokens'] / row['ms']:.1f}", "" if row["right"] else "wrong"


def sections(
    found: Sequence[Row], rows: dict[str, list[Row]], gpu: Sections, facts: Row
) -> Sections:
    each = [
        [f"{one[0]['task']} {one[0]['key']}", *map(answer_cell, one)]
        for one in zip(*rows.values(), strict=True)
    ]
    return {
        "The real pair, side by side": [Grid.of([(one,) for one in found], COLUMNS, NOTE)],
        "Tokens/s, by problem": [Grid(["", *map(title_of, rows)], each, "", ())],
        "What a GPU would show": [
            Text(GPU_NOTE),
            *(part for parts in gpu.values() for part in parts),
        ],
        "Conditions": [Facts(facts)],
    }


def roofline(target: str, draft: str) -> Sections:
    """What the same pair gains on an H100."""
    shapes = (Shape.read(str(Path(path) / "config.json")) for path in (target, draft))
    chances = tuple(round(1 - 1 / every, 3) for every in REFUSALS.values())
    settings = RooflineSettings(*shapes, concurrencies=(1, 16), acceptances=chances)
    return speedups(settings)


def specs_of(target: str, draft: str) -> list[ServerSpec]:
    specs = server_specs(Models(target, draft, flags=FLAGS), SERVERS)
    return [replace(spec, environment={"OMP_NUM_THREADS": all_cores()}) for spec in specs]


def run(arguments: argparse.Namespace, console: Console) -> int:
    log, output = ProgressLog(console), arguments.output
    log(
        "about an hour on two cores, after a download of 1.6 GB that takes 5 minutes and 13 GB of "
        "disk; stopped, it goes on where it was"
    )
    target, draft = (
        getattr(arguments, name) or find_model(output / name, log, model)
        for name, model in PAIR.items()
    )
    show(console, gpu := roofline(target, draft))
    log(GPU_NOTE)
    items = problems(arguments.problems)
    turns = Turns(output / "answers.jsonl", items, arguments.max_tokens)
    specs, folder = specs_of(target, draft), output / "logs"
    with Pool(specs, folder, log=log, max_alive=1) as pool:
        for server in SERVERS:
            turns.answer(pool, server, log)
    rows = {server: turns.rows(server) for server in SERVERS}
    found = [figures(server, some, rows[PLAIN]) for server, some in rows.items()]
    facts = {
        **of_now(),
        "minutes of this call": round(log.seconds / 60, 1),
        "max tokens": arguments.max_tokens,
        **{spec.name: command_of(spec) for spec in specs},
    }
    content = {"conditions": facts, "servers": found}
    shown = sections(found, rows, gpu, facts)
    publish(console, output / "results.json", content, "A real pair of models", shown)
    return 0


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    for name in PAIR:
        parser.add_argument(f"--{name}", help="folder (default: downloaded)")
    number = partial(parser.add_argument, type=at_least(1))
    number("--problems", help="only so many of each of the two kinds")
    number("--max-tokens", default=320, help="per answer (default 320)")
    parser.add_argument("--output", type=Path, default=Path("build/real-pair"))
    return run_program("real-pair", run, parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
