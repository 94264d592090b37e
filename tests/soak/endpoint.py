"""The server that drafts for a soak: mostly right, often faulty, sometimes dead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from threading import Event, Thread
from typing import Any

from support.fake_endpoint import fake_endpoint

KINDS = ("stream", "half", "whole", "garbage", "stream", "json", "break", "stream", "stall", "dead")
"""What it does, one after another: see ``FakeEndpoint.kind``."""
PERIOD_S = 1.5


@contextmanager
def dying_endpoint(port: int, problems: Sequence[Any]) -> Iterator[None]:
    """It knows the answers of ``problems``, objects with ``text`` and ``solution``."""
    solutions = {problem.text: problem.solution for problem in problems}

    def draft(question: str, answer: str) -> str:
        last = question.rpartition("user\n")[2].removesuffix("<|im_end|>\n")
        return solutions.get(last, "数学 = 77\n")[len(answer) :]

    def live() -> None:
        kinds = cycle(KINDS)
        while not ended.is_set():
            with fake_endpoint(port) as fake:
                fake.draft = draft
                while not ended.wait(PERIOD_S) and (kind := next(kinds)) != "dead":
                    fake.kind = kind
                fake.kind = "killed"
            ended.wait(PERIOD_S)

    ended, thread = Event(), Thread(target=live)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
