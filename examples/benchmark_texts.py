"""Speed of texts as drafts on the demo pair: medians, each over the plain server in the same run.

    python examples/benchmark_texts.py [--runs 3] [--problems 8] [--endpoint]

Greedy answers, one request at a time; before each run of PARSE the same requests run on the plain
server. "k % changed": the answer as the prediction, with the digits of so many lines drawn anew,
each of them different. Exit code 1 if an answer differs from the plain server's in token mode.
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
JUDGE = ("--parse-judge", str(DEMO / "judge"))
SERVERS = {
    "plain": (*TARGET, "--disable-overlap-schedule"),
    "token": (*PARSE, *TOKEN, "--parse-reuse-answers", "1000"),
    "semantic": (*PARSE, *JUDGE),
}
ENDPOINT_SERVERS = {
    "draft": ("--model-path", DRAFT, "--disable-overlap-schedule"),
    "in process": (*PARSE, *JUDGE, "--speculative-draft-model-path", DRAFT),
}
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


class Bench:
    """Servers that are awake one at a time, and the answers of the plain one."""

    def __init__(self, servers: dict[str, Server], count: int) -> None:
        self.servers, self.client = servers, httpx.Client(timeout=300)
        self.messages = [
            [{"role": "user", "content": problem.text}]
            for problem in problems.held_out_problems(count, seed=8)
        ]
        self.answers: list[str] = []
        self.is_exact = True

    def ask(self, name: str, place: int, body: dict[str, Any]) -> dict[str, Any]:
        fixed = {"model": "demo", "temperature": 0, "max_tokens": MAX_TOKENS}
        fixed |= {"messages": self.messages[place], "return_meta_info": True}
        url = f"{self.servers[name].url}/v1/chat/completions"
        return self.client.post(url, json=fixed | body).raise_for_status().json()

    def run(self, name: str, bodies: list[dict[str, Any]], concurrency: int = 1) -> float:
        """Tokens per second."""
        started = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            jobs = [(name, place, body) for place, body in enumerate(bodies)]
            replies = [*pool.map(lambda job: self.ask(*job), jobs)]
        seconds = time.perf_counter() - started
        texts = [reply["choices"][0]["message"]["content"] for reply in replies]
        if not self.answers:
            self.answers = texts
        if name == "token" and texts != self.answers:
            self.is_exact = False
        return sum(reply["usage"]["completion_tokens"] for reply in replies) / seconds

    def compare(
        self, name: str, bodies: list[dict[str, Any]], runs: int, base: str = "plain", many: int = 1
    ) -> dict[str, float]:
        """Medians of tokens per second, and of the ratios within each run."""
        pairs = []
        for _ in range(runs + 1):  # the first warms up
            speeds = []
            for server in (base, name):
                with awake(*self.beside(server)):
                    speeds.append(self.run(server, bodies, many))
            pairs.append(speeds)
        bases, speeds = zip(*pairs[1:], strict=True)
        ratios = [speed / base for base, speed in pairs[1:]]
        return {
            "tokens_per_s": round(statistics.median(speeds), 1),
            "base_tokens_per_s": round(statistics.median(bases), 1),
            "ratio": round(statistics.median(ratios), 2),
            "lowest": round(min(ratios), 2),
            "highest": round(max(ratios), 2),
        }

    def beside(self, name: str) -> list[Server]:
        """The server, and the one that drafts for it."""
        names = [name, "draft"] if name.startswith("endpoint") else [name]
        return [self.servers[one] for one in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--endpoint", action="store_true", help="a draft model behind a URL, too")
    parser.add_argument("--only", default="", help="rows whose names contain this text")
    parser.add_argument("--output", type=Path, default=Path("build/texts/results.json"))
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        bench = start(stack, arguments)
        results = dict(rows(bench, arguments))
    arguments.output.write_text(json.dumps(results, indent=1))
    print("all answers in token mode equal the plain server's" if bench.is_exact else "NOT EXACT")
    return 0 if bench.is_exact else 1


def start(stack: ExitStack, arguments: argparse.Namespace) -> Bench:
    flags, logs = dict(SERVERS), Path(stack.enter_context(tempfile.TemporaryDirectory()))
    if arguments.endpoint:
        flags |= ENDPOINT_SERVERS
    ports = free_ports(len(flags) + arguments.endpoint)
    if arguments.endpoint:
        url = f"http://127.0.0.1:{ports[[*flags].index('draft')]}"
        flags["endpoint"] = (*PARSE, *JUDGE, "--parse-draft-url", url)
    servers = {}
    for (name, words), port in zip(flags.items(), ports, strict=True):
        spec = ServerSpec(name, (*words, "--sleep-on-idle"))
        servers[name] = server = Server(spec, port, logs / f"{name}.log")
        stack.callback(server.stop, 0)
        server.wait_ready()
        server.suspend()
    bench = Bench(servers, arguments.problems)
    with awake(servers["plain"]):
        bench.run("plain", [{}] * arguments.problems)
    return bench


def rows(bench: Bench, arguments: argparse.Namespace) -> Any:
    def show(name: str, *case: Any, **more: Any) -> Any:
        if arguments.only in name:
            found = bench.compare(*case, arguments.runs, **more)
            print(f"{name:44}", *(f"{key} {value}" for key, value in found.items()), flush=True)
            yield name, found

    rng = random.Random(1)
    for server in ("token", "semantic"):
        for fraction in FRACTIONS:
            texts = [changed(text, fraction, rng) for text in bench.answers]
            bodies = [{"prediction": {"type": "content", "content": text}} for text in texts]
            yield from show(f"{server}, prediction {fraction:.0%} changed", server, bodies)
    bodies = [{"cache_salt": "repeated"}] * len(bench.answers)
    yield from show("token, repeated questions", "token", bodies)
    yield from show("token, no text", "token", [{}] * len(bench.answers))
    if arguments.endpoint:
        for many in (1, 8):
            case = ("endpoint", [{}] * len(bench.answers))
            name = f"endpoint over in process, {many} at a time"
            yield from show(name, *case, base="in process", many=many)


if __name__ == "__main__":
    sys.exit(main())
