"""Send problems to a server through its OpenAI-compatible API."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import openai

from sglang_parse.bench.demo.records import PARSE, TITLES, Answer, DemoError, Leg, Problem
from sglang_parse.bench.demo.servers import MODEL_NAME

MAX_TOKENS = 256
REQUEST_LIMIT_S = 180.0

IsRight = Callable[[Any, str], bool]
Result = TypeVar("Result")


class Endpoint(Protocol):
    """A server that answers: one of ours (``demo.servers.Server``) or somebody's URL."""

    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...

    def check_alive(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Asking:
    """What all requests of one leg share.

    Attributes:
        model: the served model's name.
        temperature: 0 is greedy.
        custom_params: SGLang's own, per request; empty for none.
        limit_s: a request that takes longer has failed.
    """

    model: str = MODEL_NAME
    max_tokens: int = MAX_TOKENS
    temperature: float = 0.0
    custom_params: Mapping[str, Any] | None = None
    limit_s: float = REQUEST_LIMIT_S

    def extra_body(self) -> dict[str, Any]:
        """Fields of the request that the OpenAI API does not know."""
        custom = {"custom_params": dict(self.custom_params)} if self.custom_params else {}
        return {"return_meta_info": True, **custom}


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back for one problem, not yet graded.

    Attributes:
        problem: index into the list of problems.
        texts: one answer per turn; most problems have one turn.
        output_tokens, wall_ms: all turns together; tokens as the server counted them.
        meta: ``meta_info`` of the last turn.
    """

    problem: int
    texts: tuple[str, ...]
    output_tokens: int
    wall_ms: float
    meta: Mapping[str, Any]

    @property
    def parse(self) -> dict[str, Any]:
        """``meta_info["parse"]``; empty for a server without PARSE."""
        return parse_info(self.meta) if "parse" in self.meta else {}


def open_client(server: Endpoint, limit_s: float = REQUEST_LIMIT_S) -> openai.OpenAI:
    """An OpenAI client of that server, without retries: a failure is not something to hide."""
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=limit_s
    )


def send_problems(
    server: Endpoint,
    problems: Sequence[Problem],
    indices: Sequence[int],
    is_right: IsRight,
    *,
    run: int,
    concurrency: int,
    on_answer: Callable[[], None] = lambda: None,
) -> Leg:
    """One leg: ``problems[i] for i in indices``, ``concurrency`` at a time.

    Args:
        server: a server that is awake.
        is_right: (problem, written) -> whether the final answer is exactly right.
        on_answer: called once per answer, for progress.

    Raises:
        DemoError: a request failed.
    """
    seconds, replies = ask_all(server, problems, indices, concurrency, on_answer=on_answer)
    answers = tuple(_graded(server, reply, problems[reply.problem], is_right) for reply in replies)
    return Leg(server.name, run, concurrency, seconds, answers)


def ask_all(
    server: Endpoint,
    problems: Sequence[Problem],
    indices: Sequence[int],
    concurrency: int,
    *,
    asking: Asking = Asking(),  # noqa: B008 - frozen
    on_answer: Callable[[], None] = lambda: None,
) -> tuple[float, list[Reply]]:
    """(Seconds from first request to last answer, replies in the order of ``indices``).

    Raises:
        DemoError: a request failed.
    """

    def ask(index: int) -> Reply:
        return _ask(client, server, index, problems[index], asking)

    # A client per leg: a connection kept over a suspension would be found closed.
    with open_client(server, asking.limit_s) as client:
        started = time.perf_counter()
        replies = run_together([partial(ask, index) for index in indices], concurrency, on_answer)
        return time.perf_counter() - started, replies


def run_together(
    calls: Sequence[Callable[[], Result]],
    concurrency: int,
    on_result: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Results of the calls, in their order; the first failure is raised without waiting."""
    pool = ThreadPoolExecutor(concurrency)
    try:
        futures = [pool.submit(call) for call in calls]
        for future in as_completed(futures):
            future.result()
            on_result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return [future.result() for future in futures]


def trace_answer(server: Endpoint, problem: Problem) -> tuple[str, dict[str, Any]]:
    """The answer's text and its ``meta_info["parse"]`` with the trace."""
    asking = Asking(custom_params={"parse": {"trace": True}})
    with open_client(server) as client:
        reply = _ask(client, server, 0, problem, asking)
    return reply.texts[0], reply.parse


def _graded(server: Endpoint, reply: Reply, problem: Problem, is_right: IsRight) -> Answer:
    parse = reply.parse if server.name == PARSE else {}
    if server.name == PARSE and parse.get("mode") != "parse":
        raise DemoError(
            f"PARSE did not serve problem {reply.problem}: meta_info['parse'] is {parse!r}"
        )
    return Answer(
        problem=reply.problem,
        text=reply.texts[0],
        is_right=is_right(problem, reply.texts[0]),
        output_tokens=reply.output_tokens,
        wall_ms=reply.wall_ms,
        parse=parse,
    )


def _ask(
    client: openai.OpenAI, server: Endpoint, index: int, problem: Problem, asking: Asking
) -> Reply:
    messages: list[dict[str, str]] = []
    texts, output_tokens, meta = [], 0, {}
    started = time.perf_counter()
    for turn in (problem.text, *getattr(problem, "follow_ups", ())):
        messages.append({"role": "user", "content": turn})
        response = _complete(client, server, messages, asking)
        choice = response.choices[0]
        texts.append(choice.message.content or "")
        messages.append({"role": "assistant", "content": texts[-1]})
        output_tokens += response.usage.completion_tokens
        meta = (choice.model_extra or {}).get("meta_info", {})
    wall_ms = (time.perf_counter() - started) * 1e3
    return Reply(index, tuple(texts), output_tokens, wall_ms, meta)


def _complete(
    client: openai.OpenAI, server: Endpoint, messages: Sequence[Any], asking: Asking
) -> Any:
    title = TITLES.get(server.name, server.name)
    try:
        response = client.chat.completions.create(
            model=asking.model,
            messages=list(messages),
            temperature=asking.temperature,
            max_tokens=asking.max_tokens,
            extra_body=asking.extra_body(),
        )
    except openai.OpenAIError as error:
        server.check_alive()  # its end, with the log, says more
        raise DemoError(f"a request to the server for {title} failed: {error!r}") from error
    reason = response.choices[0].finish_reason
    if reason not in ("stop", "length"):
        raise DemoError(f"a request to {title} ended with {reason!r}")
    return response


def parse_info(meta: Mapping[str, Any]) -> dict[str, Any]:
    """``meta_info["parse"]``, which SGLang's channel makes a list of one object.

    Raises:
        DemoError: it is something else.
    """
    found = meta.get("parse")
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, dict):
        raise DemoError(f"meta_info['parse'] is {found!r}, expected one object")
    return found
