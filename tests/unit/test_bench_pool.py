"""A pool of servers: starts, suspends and ends them; no process is started."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier

import pytest

from sglang_parse.client.pool import Pool
from sglang_parse.client.servers import ServerSpec

pytestmark = pytest.mark.unit


class Sleeper:
    """The part of ``Server`` that a pool uses."""

    def __init__(self, spec: ServerSpec, port: int, log: Path) -> None:
        self.name, self.port, self.log = spec.name, port, log
        self.is_suspended, self.is_ready, self.stopped_within = False, False, None
        self.num_starting = 0  # servers that start when it does

    def wait_ready(self) -> None:
        if self.name == "broken":
            raise RuntimeError("never ready")
        self.is_ready = True

    def suspend(self) -> None:
        self.is_suspended = True

    def resume(self) -> None:
        self.is_suspended = False

    def stop(self, limit_s: float) -> None:
        self.stopped_within = limit_s


SPECS = [ServerSpec(name, ()) for name in ("a", "b", "c", "broken")]


@pytest.fixture
def started() -> list[Sleeper]:
    return []


@pytest.fixture
def pool(tmp_path: Path, started: list[Sleeper]) -> Pool:
    def launch(*arguments) -> Sleeper:
        started.append(Sleeper(*arguments))
        started[-1].num_starting = sum(not server.is_suspended for server in started)
        return started[-1]

    return Pool(SPECS, tmp_path / "logs", max_alive=2, launch=launch, stop_limit_s=3)


def ended(started: list[Sleeper]) -> list[str]:
    return [server.log.name for server in started if server.stopped_within == 3]


def test_the_least_recently_used_server_ends(pool: Pool, started: list[Sleeper]):
    for name in ("a", "b", "a", "c", "b"):
        with pool.awake(name) as (server,):
            assert not server.is_suspended
        assert server.is_suspended
    assert [server.log.name for server in started] == ["a.log", "b.log", "c.log", "b-2.log"]
    assert ended(started) == ["a.log", "b.log"]


def test_a_server_ends_before_its_room_is_needed(pool: Pool, started: list[Sleeper]):
    for name in ("a", "b"):
        with pool.awake(name):
            pass
    pool.end("b")
    with pool.awake("c"), pool.awake("a"):
        assert ended(started) == ["b.log"]


def test_a_server_that_is_awake_is_not_ended(pool: Pool, started: list[Sleeper]):
    with pool.awake("a", "b", "c") as servers:
        assert [server.name for server in servers] == ["a", "b", "c"]
        assert ended(started) == []


def test_all_end_after_an_error(pool: Pool, started: list[Sleeper]):
    with pytest.raises(RuntimeError, match="never ready"), pool, pool.awake("a", "broken"):
        pytest.fail("it was not ready")
    assert started[0].is_suspended
    assert sorted(ended(started)) == ["a.log", "broken.log"]


def test_all_end_at_once(pool: Pool, monkeypatch: pytest.MonkeyPatch):
    """None waits for another one that takes long to end."""
    meeting = Barrier(2)
    monkeypatch.setattr(Sleeper, "stop", lambda *_: meeting.wait(10))
    with pool, pool.awake("a", "b"):
        pass
    assert not meeting.broken


def test_a_server_that_was_starting_when_another_failed_is_awaited(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
):
    with pool:
        pool._specs = {name: pool._specs[name] for name in ("a", "broken", "c")}
        with pytest.raises(RuntimeError, match="never ready"):
            pool.start_all()
        awaited: list[str] = []
        monkeypatch.setattr(Sleeper, "wait_ready", lambda server: awaited.append(server.name))
        with pool.awake("a"), pool.awake("c"):
            assert awaited == ["c"]


def test_a_server_that_is_awake_stays_awake(pool: Pool):
    """Whoever asks for it again."""
    with pool, pool.awake("a"):
        assert not pool.server(SPECS[0]).is_suspended


def test_all_start_few_at_a_time(pool: Pool, started: list[Sleeper]):
    with pytest.raises(RuntimeError, match="never ready"), pool:
        pool.start_all()
    assert [server.is_suspended for server in started] == [True, True, True, False]
    assert [server.num_starting for server in started] == [1, 2, 2, 2]
    assert len({server.port for server in started}) == 4
    assert len(ended(started)) == 4
