"""Sends a soak's requests, ends some of them early, and checks every answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

from soak.faults import faults_of
from soak.load import SoakRequest
from soak.loop import closed_loop

ANSWER_LIMIT_S = 600.0
"""Longest wait for one answer: 64 requests at once queue on two cores."""
IDLE_LIMIT_S = 60.0

Answers = dict[int, dict[str, Any]]
"""Request number -> the plain server's answer."""


class RequestError(Exception):
    """The server did not answer a request with 200, but with ``status``."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request's result.

    Attributes:
        seconds: request sent to end.
        end: "finished", "aborted", "disconnected", "hung up", "refused" or "failed".
        faults: descriptions of everything wrong with it.
        mode: ``meta_info["parse"]["mode"]``, "" where there is none.
        drafted: draft tokens by their source.
    """

    number: int
    seconds: float
    end: str
    faults: tuple[str, ...] = ()
    mode: str = ""
    output_tokens: int = 0
    drafted: dict[str, int] = field(default_factory=dict)


def plain_answers(
    url: str, load: Sequence[SoakRequest], concurrency: int, on_done: Callable[[], None]
) -> Answers:
    """Sends the exact half of the load to a plain server.

    Raises:
        RequestError: the server returned an error.
        httpx.HTTPError: it did not answer.
    """

    async def ask(client: httpx.AsyncClient, request: SoakRequest) -> tuple[int, dict[str, Any]]:
        return request.number, await _post(client, request.content(with_parse=False))

    exact = [request for request in load if request.is_exact]
    return dict(asyncio.run(_send_all(url, exact, ask, concurrency, on_done)))


def drive(
    url: str,
    load: Sequence[SoakRequest],
    expected: Answers,
    concurrency: int,
    on_done: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Sends the load to a PARSE server and checks every answer."""

    async def ask(client: httpx.AsyncClient, request: SoakRequest) -> Outcome:
        started = time.perf_counter()
        try:
            answer = await _send(client, request)
        except (RequestError, httpx.HTTPError) as error:
            return _failed(request, error, time.perf_counter() - started)
        seconds = time.perf_counter() - started
        if answer is None:
            return Outcome(request.number, seconds, "hung up")
        meta, faults = answer["meta_info"], faults_of(request, answer, expected.get(request.number))
        if request.is_refused:
            faults.append("a malformed request is answered")
        (info,) = meta.get("parse") or [{}]
        sources = info.get("sources", {}).items()
        return Outcome(
            number=request.number,
            seconds=seconds,
            end=_end_of(meta["finish_reason"]),
            faults=tuple(faults),
            mode=info.get("mode", ""),
            output_tokens=len(answer["output_ids"]),
            drafted={source: counts["drafted_tokens"] for source, counts in sources},
        )

    return asyncio.run(_send_all(url, load, ask, concurrency, on_done))


def _failed(request: SoakRequest, error: Exception, seconds: float) -> Outcome:
    if request.is_refused and getattr(error, "status", 0) == 400:
        return Outcome(request.number, seconds, "refused")
    return Outcome(request.number, seconds, "failed", (f"error: {error!r}",))


def _end_of(reason: dict[str, Any] | None) -> str:
    if reason is None:
        return "disconnected"
    return "aborted" if reason["type"] == "abort" else "finished"


async def _send_all(
    url: str,
    load: Sequence[SoakRequest],
    ask: Callable[[httpx.AsyncClient, SoakRequest], Awaitable[Any]],
    concurrency: int,
    on_done: Callable[[], None],
) -> list[Any]:
    limits = httpx.Limits(max_connections=None)  # an abort must not wait for a connection
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_LIMIT_S, limits=limits) as client:
        return await closed_loop(load, partial(ask, client), concurrency, on_done)


async def _send(client: httpx.AsyncClient, request: SoakRequest) -> dict[str, Any] | None:
    """Returns the last message of the answer, after the request's fate; None where the client has
    hung up before any."""
    body = request.content(with_parse=True)
    if request.fate == "half sent":
        return await _send_half(client, body)
    if request.fate == "hang up":
        with suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(_post(client, body), request.end_after_s)
        return None
    if request.fate in ("stream", "disconnect"):
        return await _stream(client, body, request.num_chunks * (request.fate == "disconnect"))
    if request.fate == "finish":
        return await _post(client, body)
    rid = f"soak-{request.number}-"  # SGLang aborts every request whose rid begins with it
    send = _stream if request.fate == "abort stream" else _post
    sent = asyncio.create_task(send(client, body | {"rid": rid}))
    with suppress(asyncio.TimeoutError):
        return await asyncio.wait_for(asyncio.shield(sent), request.end_after_s)
    await client.post("/abort_request", json={"rid": rid})
    return await sent


async def _post(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post("/generate", json=body)
    if response.status_code != 200:
        status = response.status_code
        raise RequestError(f"HTTP {status}: {response.text[:300]}", status)
    return response.json()


async def _send_half(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Ends the connection in the middle of the body."""
    content = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: soak\r\ncontent-length: {len(content)}\r\n\r\n"
    _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(head.encode() + content[: len(content) // 2])
    await writer.drain()
    writer.close()
    await writer.wait_closed()


async def _stream(
    client: httpx.AsyncClient, body: dict[str, Any], num_chunks: int = 0
) -> dict[str, Any]:
    """Disconnects after ``num_chunks`` messages; 0 reads all of them."""
    received: list[dict[str, Any]] = []
    async with client.stream("POST", "/generate", json=body | {"stream": True}) as response:
        if response.status_code != 200:
            raise RequestError(f"HTTP {response.status_code}: {await response.aread()!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            received.append(json.loads(line.removeprefix("data: ")))
            if "error" in received[-1]:
                raise RequestError(str(received[-1]["error"]))
            if len(received) == num_chunks:
                break
    if not received:
        raise RequestError("the stream ended without a message")
    return received[-1]


def leaks_of(url: str) -> list[str]:
    """Lists requests and KV slots that an idle server still holds; flushes its radix cache."""

    def total(*keys: str) -> int:
        loads = client.get("/v1/loads").raise_for_status().json()["loads"]
        return sum(load[key] for load in loads for key in keys)

    with httpx.Client(base_url=url, timeout=60) as client:
        try:
            deadline = time.monotonic() + IDLE_LIMIT_S
            while busy := total("num_running_reqs", "num_waiting_reqs"):
                if time.monotonic() > deadline:
                    return [f"{busy} requests still run or wait after {IDLE_LIMIT_S:.0f} s"]
                time.sleep(0.1)
            flushed = client.post("/flush_cache", params={"timeout": IDLE_LIMIT_S / 2})
            if flushed.status_code != 200:
                return [f"the cache cannot be flushed: {flushed.text[:200]}"]
            used = total("num_used_tokens")
        except httpx.HTTPError as error:
            return [f"the server no longer answers: {error!r}"]
    return [f"{used} KV slots are still in use"] if used else []
