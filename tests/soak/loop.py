"""A closed loop: so many requests at a time, a new one as soon as one has ended; one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")


async def closed_loop(
    requests: Iterable[Request],
    send: Callable[[Request], Awaitable[Result]],
    concurrency: int,
    on_done: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Returns the result of ``send`` for each request, in order; raises the first failure.

    Args:
        send: sends one request and waits for its end.
        concurrency: requests under way at a time.
        on_done: called once per result, for progress.
    """
    places = asyncio.Semaphore(concurrency)

    async def one(request: Request) -> Result:
        async with places:
            result = await send(request)
        on_done()
        return result

    return await asyncio.gather(*map(one, requests))
