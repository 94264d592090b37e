"""What texts as drafts gain on real work: Qwen2.5-Coder-0.5B, without a draft model, beside stock
SGLang. Once nothing is sent along, and the prompt drafts; once what the requests have is sent.

    python examples/real/measure.py [--concurrency 6] [--max-tokens 160]

Sixty requests (real_requests.py), greedy, fp32, token mode; each kind of work is answered by plain
SGLang and twice by PARSE, one after the other. Writes results.json and report.html. Exit code 1 if
an answer differs from the plain server's.
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
from sglang_parse.client.records import PARSE_TOKEN, PLAIN, Answer, Item
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
    "Over plain: the quotient of the requests' times. Nothing sent: the prompt drafts, and the "
    "schema (JSON). Sent: the request's text, too, or the scope of earlier answers (questions). "
    "Accepted: output tokens that were drafted."
)
BARE, SENT = "nothing sent", "sent"
SENT_FIELDS = ("prediction", "cache_salt")
"""Fields of a request that bring a text."""


@dataclass(frozen=True)
class Trio:
    """One request's answers: the plain server's, PARSE's without and with what is sent along."""

    item: Item
    plain: Answer
    bare: Answer
    sent: Answer

    @property
    def kind(self) -> str:
        return self.item.key

    @property
    def is_same(self) -> bool:
        return self.plain.token_ids == self.bare.token_ids == self.sent.token_ids


Trios = Sequence[Trio]


def num_tokens(trios: Trios) -> int:
    return sum(trio.plain.output_tokens for trio in trios)


def seconds(trios: Trios, way: str) -> float:
    return sum(getattr(trio, way).wall_ms for trio in trios) / 1e3


def over_plain(trios: Trios, way: str) -> float:
    return seconds(trios, "plain") / seconds(trios, way)


def accepted_share(trios: Trios, way: str) -> float:
    accepted = sum(getattr(trio, way).parse["accepted_tokens"] for trio in trios)
    return accepted / num_tokens(trios)


def speedup(trios: Trios, way: str) -> str:
    return f"{over_plain(trios, way):.2f}x, {accepted_share(trios, way):.0%}"


COLUMNS: Columns = {
    "": lambda title, _: title,
    "requests": lambda _, trios: str(len(trios)),
    "tokens": lambda _, trios: str(num_tokens(trios)),
    "plain, s": lambda _, trios: f"{seconds(trios, 'plain'):.1f}",
    "nothing sent, s": lambda _, trios: f"{seconds(trios, 'bare'):.1f}",
    "sent, s": lambda _, trios: f"{seconds(trios, 'sent'):.1f}",
    "nothing sent: over plain, accepted": lambda _, trios: speedup(trios, "bare"),
    "sent: over plain, accepted": lambda _, trios: speedup(trios, "sent"),
    "identical": lambda _, trios: f"{sum(trio.is_same for trio in trios)} of {len(trios)}",
}


def sections(trios: Trios, facts: dict[str, Any]) -> Sections:
    kinds = [(kind, [*some]) for kind, some in groupby(trios, attrgetter("kind"))]
    edits = [trio for trio in trios if trio.kind in EDITS]
    each = [(f"{trio.kind}: {trio.item.text[:60]}", [trio]) for trio in trios]
    return {
        TABLE: [Grid.of([*kinds, ("edits", edits), ("all", trios)], COLUMNS, NOTE)],
        "Each request": [Grid.of(each, COLUMNS, "", ())],
        "Conditions": [Facts(facts)],
    }


def record(trio: Trio) -> dict[str, Any]:
    return {
        "kind": trio.kind,
        "prompt": trio.item.text,
        "answer": trio.sent.text,
        "is_same": trio.is_same,
        "tokens": trio.plain.output_tokens,
        "plain_ms": trio.plain.wall_ms,
        "nothing_sent_ms": trio.bare.wall_ms,
        "sent_ms": trio.sent.wall_ms,
        "nothing_sent": trio.bare.parse,
        "sent": trio.sent.parse,
    }


def measure(pool: Pool, items: Sequence[Item], asking: Asking, concurrency: int) -> Iterator[Trio]:
    """All ways answer each kind of work, so that a machine that is busy with something else slows
    all of them; which of them begins changes."""

    def answers(server: str, some: Sequence[Item], asking: Asking) -> tuple[Answer, ...]:
        with pool.awake(server) as (endpoint,):
            run = ask(endpoint, some, range(len(some)), concurrency=concurrency, asking=asking)
        return run.answers

    for server in (PLAIN, PARSE_TOKEN):
        answers(server, WARM_UP, replace(asking, max_tokens=16))
    ways = {PLAIN: PLAIN, BARE: PARSE_TOKEN, SENT: PARSE_TOKEN}
    turns = [*ways]
    for kind, found in groupby(items, attrgetter("key")):
        some = [*found]
        longest = asking.max_tokens if kind in EDITS else min(OTHER_TOKENS, asking.max_tokens)
        limited = replace(asking, max_tokens=longest)
        of = {
            way: answers(ways[way], [bare(item) if way == BARE else item for item in some], limited)
            for way in turns
        }
        yield from map(Trio, some, of[PLAIN], of[BARE], of[SENT])
        turns.append(turns.pop(0))


def bare(item: Item) -> Item:
    """The request as a client sends it that knows nothing of drafts. A salt of its own keeps it
    from earlier answers, and its prompt from being in the prefix cache for the next way."""
    left = {name: value for name, value in item.request.items() if name not in SENT_FIELDS}
    return replace(item, request={**left, "cache_salt": f"alone: {item.text}"})


def run(arguments: argparse.Namespace, console: Console) -> int:
    log, output = ProgressLog(console), arguments.output
    target = ("--model-path", arguments.model or find_model(output / "model", log))
    threads = all_cores()
    specs = [
        ServerSpec(name, flags, environment={"OMP_NUM_THREADS": threads})
        for name, flags in ((PLAIN, target), (PARSE_TOKEN, (*target, *PARSE_FLAGS)))
    ]
    found = other_edits() if arguments.other_edits else all_requests()
    kinds = [[*some] for _, some in groupby(found, attrgetter("key"))]
    items = [item for kind in kinds for item in kind[: arguments.of_each_kind]]
    asking = Asking(max_tokens=arguments.max_tokens, limit_s=LONG_LIMIT_S, wants_tokens=True)
    trios: list[Trio] = []
    with Pool(specs, output / "logs", log=log) as pool:
        pool.start_all()
        for trio in measure(pool, items, asking, arguments.concurrency):
            trios.append(trio)
            log(f"{trio.kind}: {speedup([trio], 'bare')}; sent {speedup([trio], 'sent')}")
    facts = {
        **of_now(),
        "minutes": round(log.seconds / 60, 1),
        "threads": threads,
        "concurrency": arguments.concurrency,
        "max tokens": arguments.max_tokens,
        **{spec.name: command_of(spec) for spec in specs},
    }
    content = {"conditions": facts, "requests": [*map(record, trios)]}
    title = "A real model's work, with texts as drafts"
    publish(console, output / "results.json", content, title, sections(trios, facts))
    return 0 if all(trio.is_same for trio in trios) else 1


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
