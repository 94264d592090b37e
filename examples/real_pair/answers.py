"""Answers problems with several settings of one PARSE server, and goes on where it was stopped.

    python examples/real_pair/answers.py --url http://127.0.0.1:30000 --out build/real_pair \
        --setting exact='{"threshold": 1.5}' --setting likelihood-0.5='{"threshold": 0.5}' \
        --task 'gsm8k.jsonl:60:python examples/grade_math.py' \
        --task 'humaneval.jsonl:40:python examples/grade_code.py'

A task is FILE:NUMBER:GRADER, a fixed draw of so many problems; 60-100 are 40 others. Settings of
one problem are asked together, so whenever this is stopped, the problems answered so far are
answered by every setting. A setting without an object asks the server as it is: a plain server of
the draft model has the draft's own answers. ``answers.jsonl`` has a line per answer.
"""

from __future__ import annotations

import argparse
import json
import random
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_parse.client.ask import LONG_LIMIT_S, Asking, ask
from sglang_parse.client.records import Item
from sglang_parse.client.servers import Remote
from sglang_parse.client.tables import add_bar, make_progress
from sglang_parse.tasks.assignment import GraderCommand, read_prompts

SEED = "the real pair's problems"


@dataclass(frozen=True)
class Job:
    """One answer to be had: a problem, and how its request is set."""

    task: str
    item: Item
    setting: str
    options: dict[str, Any] | None


def read_task(text: str) -> tuple[str, list[Item], str]:
    """FILE:NUMBER:GRADER -> the file's name, a fixed draw of its problems, the grader's command."""
    path, number, grader = text.split(":", 2)
    first, _, last = number.partition("-")
    items, draw = read_prompts(Path(path)), random.Random(SEED)
    chosen = draw.sample(items, int(first))
    if last:
        keys = {item.key for item in chosen}
        others = [item for item in items if item.key not in keys]
        chosen = draw.sample(others, int(last) - int(first))
    return Path(path).stem, chosen, grader


def read_setting(text: str) -> tuple[str, dict[str, Any] | None]:
    name, _, options = text.partition("=")
    return name, json.loads(options) if options else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of them; none where there is no file yet."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [*map(json.loads, lines)]


def answer_of(server: Remote, job: Job, max_tokens: int) -> dict[str, Any]:
    asking = Asking(
        max_tokens=max_tokens, parse=job.options or {}, limit_s=4 * LONG_LIMIT_S, wants_tokens=True
    )
    (answer,) = ask(server, [job.item], [0], asking=asking).answers
    return {
        **{"task": job.task, "key": job.item.key, "setting": job.setting, "text": answer.text},
        **{"output_tokens": answer.output_tokens, "token_ids": answer.token_ids},
        "parse": answer.meta.get("parse") and answer.parse,
    }


def jobs_of(given: argparse.Namespace, path: Path) -> list[Job]:
    """What ``path`` has no answer to, problem by problem, tasks in turn."""
    done = {(row["task"], row["key"], row["setting"]) for row in read_lines(path)}
    turns = zip_longest(*([(task, item) for item in items] for task, items, _ in given.task))
    problems = (problem for turn in turns for problem in turn if problem)
    jobs = [Job(*problem, *setting) for problem in problems for setting in given.setting]
    return [job for job in jobs if (job.task, job.item.key, job.setting) not in done]


def answer_all(given: argparse.Namespace, path: Path, console: Console) -> None:
    jobs = jobs_of(given, path)
    graders = {task: GraderCommand(command) for task, _, command in given.task}
    server = Remote.read("parse" if given.setting[0][1] else "plain", given.url)
    pool = ThreadPoolExecutor(given.concurrency)
    try:
        with make_progress(console) as progress, path.open("a", encoding="utf-8") as file:
            bar = add_bar(progress, "answers", len(jobs))
            futures = {pool.submit(answer_of, server, job, given.max_tokens): job for job in jobs}
            for future in as_completed(futures):
                job, row = futures[future], future.result()
                row["right"] = graders[job.task].grade(job.item, row["text"])
                print(json.dumps(row), file=file, flush=True)
                progress.advance(bar)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", type=read_task, action="append", required=True)
    parser.add_argument("--setting", type=read_setting, action="append", required=True)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=320)
    given, console = parser.parse_args(), Console()
    given.out.mkdir(parents=True, exist_ok=True)
    answer_all(given, path := given.out / "answers.jsonl", console)
    console.print(f"all answers are in {path}")


if __name__ == "__main__":
    main()
