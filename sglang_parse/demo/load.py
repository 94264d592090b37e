"""Send problems to a server through its OpenAI-compatible API."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any, TypeVar

import openai

from sglang_parse.demo.records import PARSE, TITLES, Answer, DemoError, Leg, Problem
from sglang_parse.demo.servers import MODEL_NAME, Server

MAX_TOKENS = 256
REQUEST_LIMIT_S = 180.0

IsRight = Callable[[Any, str], bool]
Result = TypeVar("Result")


def _client(server: Server) -> openai.OpenAI:
    # No retries: a request that fails is a failure of the demo, not something to hide.
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=REQUEST_LIMIT_S
    )


def send_problems(
    server: Server,
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

    def ask(index: int) -> Answer:
        return _ask(client, server, index, problems[index], is_right)

    # A client per leg: a connection kept over a suspension would be found closed.
    with _client(server) as client:
        started = time.perf_counter()
        answers = run_together([partial(ask, index) for index in indices], concurrency, on_answer)
        seconds = time.perf_counter() - started
    return Leg(server.name, run, concurrency, seconds, tuple(answers))


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


def trace_answer(server: Server, problem: Problem) -> tuple[str, dict[str, Any]]:
    """The answer's text and its ``meta_info["parse"]`` with the trace."""
    with _client(server) as client:
        choice = _complete(client, server, problem, {"parse": {"trace": True}}).choices[0]
    return choice.message.content or "", _parse_info(choice)


def _ask(
    client: openai.OpenAI, server: Server, index: int, problem: Problem, is_right: IsRight
) -> Answer:
    started = time.perf_counter()
    response = _complete(client, server, problem, None)
    wall_ms = (time.perf_counter() - started) * 1e3
    choice, text = response.choices[0], response.choices[0].message.content or ""
    parse = _parse_info(choice) if server.name == PARSE else {}
    if server.name == PARSE and parse.get("mode") != "parse":
        raise DemoError(f"PARSE did not serve problem {index}: meta_info['parse'] is {parse!r}")
    return Answer(
        problem=index,
        text=text,
        is_right=is_right(problem, text),
        output_tokens=response.usage.completion_tokens,
        wall_ms=wall_ms,
        parse=parse,
    )


def _complete(
    client: openai.OpenAI, server: Server, problem: Problem, custom_params: dict | None
) -> Any:
    extra: dict[str, Any] = {"return_meta_info": True}
    if custom_params:
        extra["custom_params"] = custom_params
    try:
        response = client.chat.completions.create(
            model=MODEL_NAME,
            messages=[{"role": "user", "content": problem.text}],
            temperature=0,
            max_tokens=MAX_TOKENS,
            extra_body=extra,
        )
    except openai.OpenAIError as error:
        server.check_alive()  # its end, with the log, says more
        raise DemoError(
            f"a request to the server for {TITLES[server.name]} failed: {error!r} "
            f"(log: {server.log})"
        ) from error
    reason = response.choices[0].finish_reason
    if reason not in ("stop", "length"):
        raise DemoError(f"a request to {TITLES[server.name]} ended with {reason!r}")
    return response


def _parse_info(choice: Any) -> dict[str, Any]:
    """SGLang's channel makes it a list of one object."""
    found = (choice.model_extra or {}).get("meta_info", {}).get("parse")
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, dict):
        raise DemoError(f"meta_info['parse'] is {found!r}, expected one object")
    return found
