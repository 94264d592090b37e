"""What texts as drafts gain on real work: Qwen2.5-Coder-0.5B, without a draft model, beside stock
SGLang.

    python examples/real/measure.py [--concurrency 6] [--max-tokens 160]

Sixty requests (real_requests.py), greedy, fp32, token mode; the two servers answer each kind of
work one after the other. Writes results.json and report.html. Exit code 1 if an answer differs from
the plain server's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from real_model import all_cores, find_model
from real_requests import EDITS, all_requests, other_edits
from rich.console import Console

from sglang_parse.client.ask import LONG_LIMIT_S, Asking, ask
from sglang_parse.client.conditions import of_now
from sglang_parse.client.flags import at_least
from sglang_parse.client.pool import Pool
from sglang_parse.client.program import ProgressLog, run_program
from sglang_parse.client.records import PARSE_TOKEN, PLAIN, Answer, Item, title_of
from sglang_parse.client.sections import Columns, Facts, Grid, Sections
from sglang_parse.client.servers import ServerSpec
from sglang_parse.client.tables import publish
from sglang_parse.client.targets import command_of

PARSE_FLAGS = (
    *("--speculative-algorithm", "PARSE", "--parse-verification", "token"),
    *("--parse-reuse-answers", "1000"),
)
WARM_UP = [Item("warm-up", f"Count from {start} to 70.", None) for start in range(1, 61, 10)]
OTHER_TOKENS = 64
"""The longest answer that is no edit. An edit's is as long as what is edited."""
TABLE = "Over plain SGLang"
NOTE = (
    "Over plain: the quotient of the requests' times. Accepted: output tokens that were drafted, "
    "from the text sent along, from earlier answers (questions), or by the schema (JSON)."
)


@dataclass(frozen=True)
class Pair:
    """One request's answers, of the plain server and of the one with PARSE."""

    item: Item
    plain: Answer
    parse: Answer

    @property
    def kind(self) -> str:
        return self.item.key

    @property
    def is_same(self) -> bool:
        return self.plain.token_ids == self.parse.token_ids


Pairs = Sequence[Pair]


def num_tokens(pairs: Pairs) -> int:
    return sum(pair.plain.output_tokens for pair in pairs)


def seconds(pairs: Pairs, server: str) -> float:
    return sum(getattr(pair, server).wall_ms for pair in pairs) / 1e3


def over_plain(pairs: Pairs) -> float:
    return seconds(pairs, "plain") / seconds(pairs, "parse")


def accepted_share(pairs: Pairs) -> float:
    return sum(pair.parse.parse["accepted_tokens"] for pair in pairs) / num_tokens(pairs)


COLUMNS: Columns = {
    "": lambda title, _: title,
    "requests": lambda _, pairs: str(len(pairs)),
    "tokens": lambda _, pairs: str(num_tokens(pairs)),
    "plain, s": lambda _, pairs: f"{seconds(pairs, 'plain'):.1f}",
    "PARSE, s": lambda _, pairs: f"{seconds(pairs, 'parse'):.1f}",
    "over plain": lambda _, pairs: f"{over_plain(pairs):.2f}x",
    "accepted": lambda _, pairs: f"{accepted_share(pairs):.0%}",
    "identical": lambda _, pairs: f"{sum(pair.is_same for pair in pairs)} of {len(pairs)}",
}


def sections(pairs: Pairs, facts: dict[str, Any]) -> Sections:
    kinds = [(kind, [*some]) for kind, some in groupby(pairs, attrgetter("kind"))]
    edits = [pair for pair in pairs if pair.kind in EDITS]
    each = [(f"{pair.kind}: {pair.item.text[:60]}", [pair]) for pair in pairs]
    return {
        TABLE: [Grid.of([*kinds, ("edits", edits), ("all", pairs)], COLUMNS, NOTE)],
        "Each request": [Grid.of(each, COLUMNS, "", ())],
        "Conditions": [Facts(facts)],
    }


def record(pair: Pair) -> dict[str, Any]:
    return {
        "kind": pair.kind,
        "prompt": pair.item.text,
        "answer": pair.parse.text,
        "is_same": pair.is_same,
        "tokens": pair.plain.output_tokens,
        "plain_ms": pair.plain.wall_ms,
        "parse_ms": pair.parse.wall_ms,
        "parse": pair.parse.parse,
    }


def measure(pool: Pool, items: Sequence[Item], asking: Asking, concurrency: int) -> Iterator[Pair]:
    """Both servers answer each kind of work, so that a machine that is busy with something else
    slows both; which of them begins changes."""

    def answers(server: str, some: Sequence[Item], asking: Asking) -> tuple[Answer, ...]:
        with pool.awake(server) as (endpoint,):
            run = ask(endpoint, some, range(len(some)), concurrency=concurrency, asking=asking)
        return run.answers

    turns = [PLAIN, PARSE_TOKEN]
    for server in turns:
        answers(server, WARM_UP, replace(asking, max_tokens=16))
    for kind, found in groupby(items, attrgetter("key")):
        some = [*found]
        longest = asking.max_tokens if kind in EDITS else min(OTHER_TOKENS, asking.max_tokens)
        limited = replace(asking, max_tokens=longest)
        of = {server: answers(server, some, limited) for server in turns}
        yield from map(Pair, some, of[PLAIN], of[PARSE_TOKEN])
        turns.reverse()


def run(arguments: argparse.Namespace, console: Console) -> int:
    log, output = ProgressLog(console), arguments.output
    target = ("--model-path", arguments.model or find_model(output / "model", log))
    threads = all_cores()
    specs = [
        ServerSpec(name, flags, environment=(("OMP_NUM_THREADS", threads),))
        for name, flags in ((PLAIN, target), (PARSE_TOKEN, (*target, *PARSE_FLAGS)))
    ]
    found = other_edits() if arguments.other_edits else all_requests()
    kinds = [[*some] for _, some in groupby(found, attrgetter("key"))]
    items = [item for kind in kinds for item in kind[: arguments.of_each_kind]]
    asking = Asking(max_tokens=arguments.max_tokens, limit_s=LONG_LIMIT_S, wants_tokens=True)
    pairs: list[Pair] = []
    with Pool(specs, output / "logs", on_start=lambda name: log(f"start {title_of(name)}")) as pool:
        pool.start_all()
        for pair in measure(pool, items, asking, arguments.concurrency):
            pairs.append(pair)
            log(f"{pair.kind}: {over_plain([pair]):.2f}x, {accepted_share([pair]):.0%}")
    facts = {
        **of_now(),
        "minutes": round(log.seconds / 60, 1),
        "threads": threads,
        "concurrency": arguments.concurrency,
        "max tokens": arguments.max_tokens,
        **{spec.name: command_of(spec) for spec in specs},
    }
    content = {"conditions": facts, "requests": [*map(record, pairs)]}
    title = "A real model's work, with texts as drafts"
    publish(console, output / "results.json", content, title, sections(pairs, facts))
    return 0 if all(pair.is_same for pair in pairs) else 1


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    number = partial(parser.add_argument, type=at_least(1))
    parser.add_argument("--model", help="folder or hub name (default: the 0.5B model, downloaded)")
    number("--concurrency", default=6, help="requests at a time (default 6)")
    number("--max-tokens", default=160, help="per edit (default 160); 64 for other answers")
    parser.add_argument("--other-edits", action="store_true", help="30 edits, of other functions")
    number("--of-each-kind", help="only so many requests of each kind of work")
    parser.add_argument("--output", type=Path, default=Path("build/demo-real"))
    return run_program("demo-real", run, parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
