"""Sends a soak's requests, ends some of them early, and looks at what came of each."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from sglang_parse.client.loop import closed_loop
from sglang_parse.client.records import BenchError
from sglang_parse.soak.load import SoakRequest, faults_of

PATIENCE_S = 600.0
"""Longest wait for one answer: with 64 requests at once on two cores they queue."""
IDLE_LIMIT_S = 60.0

Expected = Mapping[int, dict[str, Any]]
"""Request number -> the plain server's answer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request.

    Attributes:
        number: the request's.
        seconds: from sending it to its end.
        end: "finished", "aborted", "disconnected" or "failed".
        mode: ``meta_info["parse"]["mode"]``, "" where there is none.
        output_tokens: tokens that came back.
        faults: what is wrong with it.
    """

    number: int
    seconds: float
    end: str
    mode: str
    output_tokens: int
    faults: tuple[str, ...]


class RequestFailed(Exception):
    """The server did not answer a request with 200."""


def plain_answers(
    url: str, load: Sequence[SoakRequest], concurrency: int, on_done: Callable[[], None]
) -> dict[int, dict[str, Any]]:
    """The plain server's answers to the exact half, by request number.

    Raises:
        BenchError: it failed to answer.
    """

    async def ask(client: httpx.AsyncClient, request: SoakRequest) -> dict[str, Any]:
        return await _post(client, request.content(with_parse=False))

    exact = [request for request in load if request.is_exact]
    try:
        answers = asyncio.run(_send_all(url, exact, ask, concurrency, on_done))
    except (RequestFailed, httpx.HTTPError) as error:
        raise BenchError(f"the plain server did not answer: {error!r}") from error
    return {request.number: answer for request, answer in zip(exact, answers, strict=True)}


def drive(
    url: str,
    load: Sequence[SoakRequest],
    expected: Expected,
    concurrency: int,
    on_done: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Send the load to a PARSE server and judge every answer."""

    async def ask(client: httpx.AsyncClient, request: SoakRequest) -> Outcome:
        return await _outcome(client, request, expected.get(request.number))

    return asyncio.run(_send_all(url, load, ask, concurrency, on_done))


async def _send_all(
    url: str,
    load: Sequence[SoakRequest],
    ask: Callable[[httpx.AsyncClient, SoakRequest], Any],
    concurrency: int,
    on_done: Callable[[], None],
) -> list[Any]:
    limits = httpx.Limits(max_connections=None)  # aborts must not wait for a place
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:
        return await closed_loop(load, partial(ask, client), concurrency, on_done)


async def _outcome(
    client: httpx.AsyncClient, request: SoakRequest, expected: dict[str, Any] | None
) -> Outcome:
    started = time.perf_counter()
    try:
        answer = await _FATES[request.fate](client, request)
    except (RequestFailed, httpx.HTTPError) as error:
        seconds = time.perf_counter() - started
        return Outcome(request.number, seconds, "failed", "", 0, (f"error: {error!r}",))
    seconds = time.perf_counter() - started
    return Outcome(
        number=request.number,
        seconds=seconds,
        end=_end(answer),
        mode=(answer["meta_info"].get("parse") or [{}])[0].get("mode", ""),
        output_tokens=len(answer["output_ids"]),
        faults=tuple(faults_of(request, answer, expected)),
    )


def _end(answer: dict[str, Any]) -> str:
    reason = answer["meta_info"]["finish_reason"]
    if reason is None:
        return "disconnected"
    return "aborted" if reason["type"] == "abort" else "finished"


async def _post(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post("/generate", json=body)
    if response.status_code != 200:
        raise RequestFailed(f"HTTP {response.status_code}: {response.text[:300]}")
    return response.json()


async def _finish(client: httpx.AsyncClient, request: SoakRequest) -> dict[str, Any]:
    return await _post(client, request.content(with_parse=True))


async def _abort(client: httpx.AsyncClient, request: SoakRequest) -> dict[str, Any]:
    """Abort the request after a while, if it is still there."""
    rid = f"soak-{request.number}"
    body = request.content(with_parse=True) | {"rid": rid}
    sent = asyncio.create_task(_post(client, body))
    with suppress(asyncio.TimeoutError):
        return await asyncio.wait_for(asyncio.shield(sent), request.patience_s)
    await client.post("/abort_request", json={"rid": rid})
    return await sent


async def _stream(
    client: httpx.AsyncClient, request: SoakRequest, num_chunks: int | None = None
) -> dict[str, Any]:
    """The last message of the stream; after ``num_chunks`` of them, hang up."""
    body = request.content(with_parse=True) | {"stream": True}
    answer: dict[str, Any] = {}
    async with client.stream("POST", "/generate", json=body) as response:
        if response.status_code != 200:
            raise RequestFailed(f"HTTP {response.status_code}: {await response.aread()!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            message = json.loads(line.removeprefix("data: "))
            if "error" in message:
                raise RequestFailed(str(message["error"]))
            answer, num_chunks = message, None if num_chunks is None else num_chunks - 1
            if num_chunks == 0:
                break
    if not answer:
        raise RequestFailed("the stream ended without a message")
    return answer


async def _disconnect(client: httpx.AsyncClient, request: SoakRequest) -> dict[str, Any]:
    return await _stream(client, request, request.num_chunks)


_FATES: dict[str, Callable[..., Any]] = {
    "finish": _finish,
    "stream": _stream,
    "abort": _abort,
    "disconnect": _disconnect,
}


def leaks(url: str) -> list[str]:
    """What the server still holds once it should hold nothing; empties its radix cache."""
    with httpx.Client(base_url=url, timeout=60) as client:
        try:
            deadline = time.monotonic() + IDLE_LIMIT_S
            while (busy := _num_requests(client)) and time.monotonic() < deadline:
                time.sleep(0.1)
            if busy:
                return [f"{busy} requests still run or wait after {IDLE_LIMIT_S:.0f} s"]
            flushed = client.post("/flush_cache", params={"timeout": IDLE_LIMIT_S / 2})
            if flushed.status_code != 200:
                return [f"the cache cannot be emptied: {flushed.text[:200]}"]
            used = sum(load["num_used_tokens"] for load in _loads(client))
        except httpx.HTTPError as error:
            return [f"the server no longer answers: {error!r}"]
    return [f"{used} KV slots are still in use"] if used else []


def _loads(client: httpx.Client) -> list[dict[str, Any]]:
    return client.get("/v1/loads").raise_for_status().json()["loads"]


def _num_requests(client: httpx.Client) -> int:
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in _loads(client))
