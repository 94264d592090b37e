"""The closed loop of requests."""

from __future__ import annotations

import asyncio

import pytest

from sglang_parse.client.records import BenchError
from soak.loop import closed_loop

pytestmark = pytest.mark.unit


def test_a_new_one_as_soon_as_one_has_ended_and_results_in_order():
    ends: dict[int, asyncio.Future[str]] = {}
    done: list[int] = []

    async def send(number: int) -> str:
        ends[number] = asyncio.get_running_loop().create_future()
        return await ends[number]

    async def scenario() -> list[str]:
        loop = asyncio.create_task(closed_loop(range(5), send, 2, lambda: done.append(1)))
        for ended, under_way in ((1, [0, 1]), (2, [0, 2]), (3, [0, 3]), (0, [0, 4]), (4, [4])):
            for _ in range(5):
                await asyncio.sleep(0)
            assert [number for number, end in ends.items() if not end.done()] == under_way
            ends[ended].set_result(f"answer {ended}")
        return await loop

    assert asyncio.run(scenario()) == [f"answer {number}" for number in range(5)]
    assert len(done) == 5


def test_the_first_failure_ends_the_loop():
    async def send(number: int) -> int:
        if number == 2:
            raise BenchError("no")
        await asyncio.sleep(60)
        return number

    with pytest.raises(BenchError):
        asyncio.run(closed_loop(range(4), send, 4))
