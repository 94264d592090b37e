"""A log of every server that a run of tests starts: name, seconds, worker and why.

Worker processes append to one file; the process that the user started prints it at the end, and
fails the run if a server was started twice.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.warm import RUN_FOLDER

TEMPORARY = re.compile(r"\S*/pytest-\d+/(popen-gw\d+/)?")
"""Start of a path that differs between workers."""


@dataclass(frozen=True, slots=True)
class ServerStart:
    """One start of a server.

    Attributes:
        flags: its command line, the same in every worker.
        worker: process of pytest-xdist.
        test: the first test that needed it.
        seconds: until it was ready.
        is_shared: it runs until its memory is needed; a program under test starts its own anew.
    """

    name: str
    flags: str
    worker: str
    test: str
    seconds: float
    is_shared: bool


def probe_folder(log: Path) -> Path:
    """Of the probe in the server with that log, if tests share it."""
    return log.with_suffix(".probe")


def log_of_run() -> Path:
    return Path(os.environ[RUN_FOLDER]) / "starts.jsonl"


def record_starts(server_class: Any) -> None:
    """Makes every server of this process append to the run's log when it is ready."""
    start, wait_ready = server_class.__init__, server_class.wait_ready

    @functools.wraps(start)
    def started(self: Any, spec: Any, *args: Any) -> None:
        self.flags = TEMPORARY.sub("", " ".join((*spec.launcher, *spec.common, *spec.flags)))
        self.started_at = time.monotonic()
        start(self, spec, *args)

    @functools.wraps(wait_ready)
    def ready(self: Any, *args: float) -> None:
        wait_ready(self, *args)
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("@")[0].partition(" ")[0]
        seconds = round(time.monotonic() - self.started_at, 1)
        is_shared = probe_folder(self.log).is_dir()
        entry = ServerStart(self.name, self.flags, worker, test, seconds, is_shared)
        with log_of_run().open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(entry)) + "\n")

    server_class.__init__, server_class.wait_ready = started, ready


def read_starts() -> list[ServerStart]:
    """The run's, so far."""
    log = log_of_run()
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return [ServerStart(**json.loads(line)) for line in lines]


def reasons(starts: Sequence[ServerStart]) -> Iterator[str]:
    """Why each server was started: "new"; "copy", as another worker had started it; "evicted", as
    its own worker had; or "own", a program's."""
    seen: dict[tuple[str, str], set[str]] = {}
    for start in starts:
        if not start.is_shared:
            yield "own"
            continue
        workers = seen.setdefault((start.name, start.flags), set())
        yield "evicted" if start.worker in workers else "copy" if workers else "new"
        workers.add(start.worker)


def report(starts: Sequence[ServerStart]) -> Iterator[str]:
    """A line for each server, and one for all."""
    kinds = [*reasons(starts)]
    for start, reason in zip(starts, kinds, strict=True):
        test = start.test.rpartition("/")[2]
        yield f"{start.seconds:6.1f} s  {start.worker:5} {reason:8} {start.name:22} {test}"
    counts = ", ".join(f"{count} {reason}" for reason, count in Counter(kinds).most_common())
    yield f"{sum(start.seconds for start in starts):6.1f} s  {len(starts)} servers: {counts}"
