"""Streamed requests through the OpenAI API, and when each of their chunks came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import openai

from sglang_parse.client.ask import Asking
from sglang_parse.client.loop import closed_loop
from sglang_parse.client.records import BenchError, Item
from sglang_parse.client.servers import Endpoint

SWITCHED_OFF = {"parse": {"enabled": False}}


@dataclass(frozen=True, slots=True)
class Streamed:
    """One answer as it came; times are ``time.perf_counter``'s, in seconds.

    Attributes:
        is_off: it asked for the plain target.
        sent: when the request was sent.
        arrivals: when each chunk with new tokens came.
        tokens: with each of them, output tokens so far.
    """

    is_off: bool
    sent: float
    arrivals: tuple[float, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """What one loop sends.

    Attributes:
        items: one request each, in this order; of chats the first turn.
        is_off: per item, whether it switches PARSE off.
        max_tokens: per item, where its answer ends at the latest.
        asking: what all requests share, but for that.
    """

    items: Sequence[Item]
    is_off: Sequence[bool]
    max_tokens: Sequence[int]
    concurrency: int
    asking: Asking


def drive(
    endpoint: Endpoint, load: Load, on_done: Callable[[], None] = lambda: None
) -> list[Streamed]:
    """Send a load, so many requests at a time.

    Raises:
        BenchError: a request failed, or ended otherwise than by its text or its length.
    """
    try:
        return asyncio.run(_drive(endpoint, load, on_done))
    except openai.OpenAIError as error:
        endpoint.check_alive()  # its end, with the log, says more
        raise BenchError(f"a request to {endpoint.name} failed: {error!r}") from error


async def _drive(endpoint: Endpoint, load: Load, on_done: Callable[[], None]) -> list[Streamed]:
    # Without retries: a failure is not something to hide.
    async with openai.AsyncOpenAI(
        base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0, timeout=load.asking.limit_s
    ) as client:

        async def send(request: tuple[Item, bool, int]) -> Streamed:
            item, is_off, most = request
            asking = replace(load.asking, max_tokens=most)
            return await _stream(client, endpoint.name, item, is_off, asking)

        await client.models.list()  # the first request is not to wait for certificates
        requests = zip(load.items, load.is_off, load.max_tokens, strict=True)
        return await closed_loop(requests, send, load.concurrency, on_done)


async def _stream(
    client: openai.AsyncOpenAI, name: str, item: Item, is_off: bool, asking: Asking
) -> Streamed:
    custom = SWITCHED_OFF if is_off else dict(asking.custom_params or {})
    arrivals: list[float] = []
    tokens: list[int] = []
    reason, sent = None, time.perf_counter()
    stream = await client.chat.completions.create(
        model=asking.model,
        messages=[{"role": "user", "content": item.text}],
        temperature=asking.temperature,
        max_tokens=asking.max_tokens,
        stream=True,
        extra_body={
            # Tokens as the server counts them, with every chunk: a chunk may hold many.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **({"custom_params": custom} if custom else {}),
        },
    )
    async for chunk in stream:
        now = time.perf_counter()
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
        num_tokens = chunk.usage.completion_tokens if chunk.usage else 0
        if chunk.choices and num_tokens > (tokens[-1] if tokens else 0):
            arrivals.append(now)
            tokens.append(num_tokens)
    if reason not in ("stop", "length") or not tokens:
        raise BenchError(f"a request to {name} ended with {reason!r} after {len(tokens)} chunks")
    return Streamed(is_off, sent, tuple(arrivals), tuple(tokens))
