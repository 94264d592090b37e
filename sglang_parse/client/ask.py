"""Sends items to a server through its OpenAI-compatible API and grades the answers.

Answers come with their ``meta_info``, which ``bench_serving`` does not record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import httpx
import openai

from sglang_parse.client.records import (
    Answer,
    BenchError,
    BenchRun,
    Grader,
    Item,
    Variant,
    has_parse,
    title_of,
)
from sglang_parse.client.servers import MODEL_NAME, Endpoint
from sglang_parse.client.traced import Traced

MAX_TOKENS = 256
REQUEST_LIMIT_S, LONG_LIMIT_S = 180.0, 1800.0
"""The second one for servers that are kept busy."""

ANY_MODEL = "default"
"""A model's name that every server of one model accepts."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Asking:
    """Parameters that all requests of a run share.

    Attributes:
        limit_s: a request that takes longer has failed.
        wants_tokens: whether answers come with token ids.
        parse: ``custom_params["parse"]`` of the requests.
        options_of: index of an item -> more keys of its own.
    """

    model: str = MODEL_NAME
    max_tokens: int = MAX_TOKENS
    temperature: float = 0.0
    parse: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float = REQUEST_LIMIT_S
    wants_tokens: bool = False
    options_of: Callable[[int], Mapping[str, Any]] | None = None

    def extra_body(self, index: int) -> dict[str, Any]:
        options = {**self.parse, **(self.options_of(index) if self.options_of else {})}
        custom = {"custom_params": {"parse": options}} if options else {}
        tokens = {"return_token_ids": True} if self.wants_tokens else {}
        return {"return_meta_info": True, **custom, **tokens}


def ask(
    server: Endpoint,
    items: Sequence[Item],
    indices: Sequence[int],
    variant: Variant | None = None,
    run: int = -1,
    concurrency: int = 1,
    *,
    asking: Asking = Asking(),  # noqa: B008 - frozen
    on_answer: Callable[[], None] = lambda: None,
) -> BenchRun:
    """Sends ``items[i] for i in indices``, timed from the first request to the last answer; scores
    are not filled in.

    Args:
        server: awake; with PARSE, it is an error where it serves an answer without.
        variant: whose options are sent, too; default: the server without any.
        on_answer: called after each answer, from any thread.
    """
    variant = variant or Variant(server.name)
    asking = replace(asking, parse={**asking.parse, **variant.parse})
    # A client per run: servers close connections while they are suspended. Failures are reported.
    url = f"{server.url}/v1"
    with openai.OpenAI(
        base_url=url, api_key="none", max_retries=0, timeout=asking.limit_s
    ) as client:
        calls = [partial(_ask, client, server, i, items[i], asking) for i in indices]
        started = time.perf_counter()
        answers = run_together(calls, concurrency, on_answer)
        seconds = time.perf_counter() - started
    for found in answers if has_parse(server.name) else ():
        if found.parse.get("mode") != "parse":
            raise BenchError(
                f"{title_of(server.name)} did not serve problem {found.problem} with PARSE: "
                f"meta_info['parse'] is {found.parse!r}"
            )
    return BenchRun(variant, run, concurrency, seconds, tuple(answers))


def graded(bench_run: BenchRun, items: Sequence[Item], grade: Grader) -> BenchRun:
    answers = (replace(a, score=grade(items[a.problem], a.text)) for a in bench_run.answers)
    return replace(bench_run, answers=tuple(answers))


def trace_answers(
    server: Endpoint,
    items: Sequence[Item],
    asking: Asking = Asking(),  # noqa: B008 - frozen
    on_answer: Callable[[], None] = lambda: None,
) -> list[Traced]:
    """Answers ``items`` with traces, one at a time."""
    asking = replace(asking, parse={**asking.parse, "trace": True}, wants_tokens=True)
    answers = ask(server, items, range(len(items)), asking=asking, on_answer=on_answer).answers
    return [Traced(items[a.problem].text, a.token_ids, a.parse) for a in answers]


def run_together(
    calls: Sequence[Callable[[], Result]],
    concurrency: int,
    on_result: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Returns the results in the order of the calls; raises the first failure at once.

    One at a time they run in this thread, where Ctrl-C ends a call at once.
    """
    if concurrency == 1:
        results = []
        for call in calls:
            results.append(call())
            on_result()
        return results
    pool = ThreadPoolExecutor(concurrency)
    try:
        futures = [pool.submit(call) for call in calls]
        for future in as_completed(futures):
            future.result()
            on_result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return [future.result() for future in futures]


def _ask(client: openai.OpenAI, server: Endpoint, index: int, item: Item, asking: Asking) -> Answer:
    title, extra = title_of(server.name), asking.extra_body(index)
    messages: Any = list(item.messages) or [{"role": "user", "content": item.text}]
    if messages[-1]["role"] == "assistant":
        extra["continue_final_message"] = True
    started = time.perf_counter()
    try:
        response: Any = client.chat.completions.create(
            model=asking.model,
            messages=messages,
            temperature=asking.temperature,
            max_tokens=asking.max_tokens,
            extra_body={**item.request, **extra},
        )
    except openai.OpenAIError as error:
        server.check_alive()  # the log of a server that ended explains more
        raise BenchError(f"a request to the server for {title} failed: {error!r}") from error
    wall_ms = (time.perf_counter() - started) * 1e3
    (choice,) = response.choices
    if choice.finish_reason not in ("stop", "length"):
        raise BenchError(f"a request to {title} ended with {choice.finish_reason!r}")
    more = choice.model_extra or {}
    return Answer(
        problem=index,
        text=choice.message.content or "",
        output_tokens=response.usage.completion_tokens,
        wall_ms=wall_ms,
        meta=more.get("meta_info", {}),
        token_ids=tuple(more.get("response_token_ids", ())),
    )


def decode_there(url: str, texts: Sequence[Sequence[int]]) -> list[str]:
    """Decodes a batch of token ids by the server's tokenizer, special tokens included."""
    tokens = [list(ids) for ids in texts]
    body = {"model": ANY_MODEL, "tokens": tokens, "skip_special_tokens": False}
    try:
        answer = httpx.post(f"{url}/v1/detokenize", json=body, timeout=60)
        return answer.raise_for_status().json()["text"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise BenchError(f"{url}/v1/detokenize does not answer: {error!r}") from error
