"""Speed of texts as drafts on the demo pair: medians, each over the plain server in the same run.

    python examples/benchmark_texts.py [--runs 3] [--problems 8] [--only endpoint]

Greedy answers, one request at a time unless a row says otherwise; before each run of PARSE the same
requests run on the plain server. "k % changed": the answer as the prediction, with the digits of so
many lines drawn anew, each of them different. "endpoint over in process": the draft model on a
server of its own, over the same in the target's process, in blocks or token by token. The
last columns are the median run's times, in ms per output token. Exit code 1 if an answer differs
from the plain server's in token mode.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sglang_parse.client.servers import Server, ServerSpec, awake, free_ports

DEMO = Path(__file__).resolve().parent / "demo_pair"
sys.path.insert(0, str(DEMO))

import problems  # noqa: E402

TARGET, DRAFT = ("--model-path", str(DEMO / "target")), str(DEMO / "draft")
PARSE = (*TARGET, "--speculative-algorithm", "PARSE")
TOKEN = ("--parse-verification", "token")
MODEL = ("--speculative-draft-model-path", DRAFT)
JUDGE = ("--parse-judge", str(DEMO / "judge"))
SERVERS = {
    "plain": (*TARGET, "--disable-overlap-schedule"),
    "token": (*PARSE, *TOKEN, "--parse-reuse-answers", "1000"),
    "semantic": (*PARSE, *JUDGE, "--parse-reuse-answers", "1000"),
    "draft": ("--model-path", DRAFT, "--disable-overlap-schedule", "--stream-interval", "4"),
    "in process": (*PARSE, *JUDGE, *MODEL),
    "in process, token by token": (*PARSE, *JUDGE, *MODEL, "--parse-draft-parallel-tokens", "1"),
    "token in process": (*PARSE, *TOKEN, *MODEL),
    "endpoint": (*PARSE, *JUDGE, "--parse-draft-url"),
}
PARSE_SERVERS = [name for name, flags in SERVERS.items() if "PARSE" in flags]
STAGES = ("prefill_ms", "draft_ms", "verify_ms", "decode_ms", "wait_ms")
FRACTIONS = (0.0, 0.05, 0.2, 1.0)
MAX_TOKENS = 160


def changed(text: str, fraction: float, rng: random.Random) -> str:
    """The text with the numbers of some lines drawn anew, at least one unless the fraction is 0;
    a text has few lines, so 5 % is one line in every second one."""
    lines = text.split("\n")
    count = fraction * len(lines)
    number = int(count) + (rng.random() < count % 1)
    for place in rng.sample(range(len(lines)), number):
        while (line := redrawn(lines[place], rng)) == lines[place]:
            pass
        lines[place] = line
    return "\n".join(lines)


def redrawn(line: str, rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") if char.isdigit() else char for char in line)


@dataclass(frozen=True)
class Run:
    """Tokens per second, and each stage's ms per token; none of the plain server's."""

    speed: float
    stages: dict[str, float]


class Bench:
    """Servers, started when needed and awake one at a time, and the plain one's answers."""

    def __init__(self, stack: ExitStack, count: int) -> None:
        self.stack, self.client = stack, httpx.Client(timeout=300)
        self.logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.ports = dict(zip(SERVERS, free_ports(len(SERVERS)), strict=True))
        self.servers: dict[str, Server] = {}
        self.messages = [
            [{"role": "user", "content": problem.text}]
            for problem in problems.held_out_problems(count, seed=8)
        ]
        self.answers: list[str] = []
        self.expected: list[str] = []
        self.is_exact = True
        with awake(self.server("plain")):
            self.run("plain", [{}] * count)

    def server(self, name: str) -> Server:
        """The server of that name, suspended."""
        if name not in self.servers:
            flags = [*SERVERS[name], "--sleep-on-idle"]
            if name == "endpoint":
                flags.insert(len(SERVERS[name]), f"http://127.0.0.1:{self.ports['draft']}")
            spec = ServerSpec(name, tuple(flags))
            server = Server(spec, self.ports[name], self.logs / f"{name}.log")
            self.servers[name] = server
            self.stack.callback(server.stop, 0)
            server.wait_ready()
            server.suspend()
        return self.servers[name]

    def ask(self, name: str, place: int, body: dict[str, Any]) -> dict[str, Any]:
        fixed = {"model": "demo", "temperature": 0, "max_tokens": MAX_TOKENS}
        fixed |= {"messages": self.messages[place], "return_meta_info": True}
        url = f"{self.servers[name].url}/v1/chat/completions"
        return self.client.post(url, json=fixed | body).raise_for_status().json()

    def run(self, name: str, bodies: list[dict[str, Any]], concurrency: int = 1) -> Run:
        started = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            jobs = [(name, place, body) for place, body in enumerate(bodies)]
            replies = [*pool.map(lambda job: self.ask(*job), jobs)]
        seconds = time.perf_counter() - started
        choices = [reply["choices"][0] for reply in replies]
        texts = [choice["message"]["content"] for choice in choices]
        if not self.answers:
            self.answers = texts
        if name == "plain":
            self.expected = texts
        if name.startswith("token") and texts != self.expected:
            self.is_exact = False
        num_tokens = sum(reply["usage"]["completion_tokens"] for reply in replies)
        infos = [choice["meta_info"]["parse"][0] for choice in choices if name in PARSE_SERVERS]
        stages = {stage: sum(time_of(info, stage) for info in infos) for stage in STAGES}
        per_token = {stage: round(ms / num_tokens, 2) for stage, ms in stages.items() if ms}
        return Run(num_tokens / seconds, per_token)

    def compare(
        self, name: str, bodies: list[dict[str, Any]], runs: int, base: str = "plain", many: int = 1
    ) -> dict[str, Any]:
        """Medians of tokens per second, and of the ratios within each run."""
        pairs = []
        for _ in range(runs + 1):  # the first warms up
            pair = []
            for server in (base, name):
                with awake(*self.beside(server)):
                    pair.append(self.run(server, bodies, many))
            pairs.append(pair)
        pairs = sorted(pairs[1:], key=lambda pair: pair[1].speed / pair[0].speed)
        ratios = [run.speed / base.speed for base, run in pairs]
        of_base, of_run = pairs[len(pairs) // 2]
        return {
            "tokens_per_s": round(statistics.median(run.speed for _, run in pairs), 1),
            "base_tokens_per_s": round(statistics.median(base.speed for base, _ in pairs), 1),
            "ratio": round(statistics.median(ratios), 2),
            "lowest": round(ratios[0], 2),
            "highest": round(ratios[-1], 2),
            "stages": of_run.stages,
            "base_stages": of_base.stages,
        }

    def beside(self, name: str) -> list[Server]:
        """The server, and the one that drafts for it."""
        names = ["draft", name] if name == "endpoint" else [name]
        return [self.server(one) for one in names]


def time_of(info: dict[str, Any], stage: str) -> float:
    sources = info["sources"].values()
    return info[stage] if stage in info else sum(source[stage] for source in sources)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--only", default="", help="rows whose names contain this text")
    parser.add_argument("--output", type=Path, default=Path("build/texts/results.json"))
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        bench = Bench(stack, arguments.problems)
        results = dict(rows(bench, arguments))
    arguments.output.write_text(json.dumps(results, indent=1))
    print("all answers in token mode equal the plain server's" if bench.is_exact else "NOT EXACT")
    return 0 if bench.is_exact else 1


def rows(bench: Bench, arguments: argparse.Namespace) -> Any:
    def show(name: str, *case: Any, **more: Any) -> Any:
        if arguments.only in name:
            found = bench.compare(*case, arguments.runs, **more)
            print(f"{name:40}", *(f"{key} {value}" for key, value in found.items()), flush=True)
            yield name, found

    rng = random.Random(1)
    for server in ("token", "semantic"):
        for fraction in FRACTIONS:
            texts = [changed(text, fraction, rng) for text in bench.answers]
            bodies = [{"prediction": {"type": "content", "content": text}} for text in texts]
            yield from show(f"{server}, prediction {fraction:.0%} changed", server, bodies)
    nothing, salted = [{}] * len(bench.answers), [{"cache_salt": "one"}] * len(bench.answers)
    for server in ("token", "semantic"):
        yield from show(f"{server}, repeated questions", server, salted)
        yield from show(f"{server}, no text", server, nothing)
    for many in (1, 8):
        row = f"endpoint's model alone, {many} at a time"
        yield from show(row, "draft", nothing, many=many)
    for base in ("in process, token by token", "in process"):
        for many in (1, 8):
            row = f"endpoint over {base}, {many} at a time"
            yield from show(row, "endpoint", nothing, base=base, many=many)


if __name__ == "__main__":
    sys.exit(main())
