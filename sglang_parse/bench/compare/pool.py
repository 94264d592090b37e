"""Servers that take turns: started when first needed, suspended between turns, few at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from sglang_parse.bench.compare.records import CompareError
from sglang_parse.bench.demo.load import Endpoint
from sglang_parse.bench.demo.servers import (
    Server,
    ServerSpec,
    StartProcess,
    free_ports,
    start_process,
)


@dataclass(frozen=True, slots=True)
class Remote:
    """Somebody's server, by its URL: used as it is, never suspended or ended."""

    name: str
    url: str

    def check_alive(self) -> None:
        """Raises: CompareError, when it does not answer."""
        try:
            httpx.get(f"{self.url}/health", timeout=20).raise_for_status()
        except httpx.HTTPError as error:
            raise CompareError(f"{self.name} at {self.url} does not answer: {error!r}") from error


class Pool:
    """Servers by name; the one longest out of use ends when more than ``max_alive`` would live."""

    def __init__(
        self,
        specs: Sequence[ServerSpec],
        remotes: Mapping[str, Remote],
        logs: Path,
        max_alive: int,
        on_start: Callable[[str], None],
        start: StartProcess = start_process,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._remotes, self._logs, self._max_alive = remotes, logs, max_alive
        self._on_start, self._start = on_start, start
        self._alive: dict[str, Server] = {}  # in the order of their last use
        self._num_started = 0

    @contextlib.contextmanager
    def awake(self, *names: str) -> Iterator[list[Endpoint]]:
        """The named servers, running, for the length of a block.

        Raises:
            CompareError: a server does not start, or a remote one does not answer.
        """
        endpoints: list[Endpoint] = []
        try:
            for name in names:
                endpoints.append(self._remotes.get(name) or self._resumed(name))
                endpoints[-1].check_alive()
            yield endpoints
        finally:
            for endpoint in endpoints:
                if isinstance(endpoint, Server):
                    endpoint.suspend()

    def stop(self) -> None:
        """End every server of ours."""
        while self._alive:
            self._alive.popitem()[1].stop()

    def _resumed(self, name: str) -> Server:
        server = self._alive.pop(name, None)
        if server is None:
            return self._started(name)
        self._alive[name] = server
        server.resume()
        return server

    def _started(self, name: str) -> Server:
        suspended = [other for other, server in self._alive.items() if server.is_suspended]
        for other in suspended[: max(0, len(self._alive) - self._max_alive + 1)]:
            self._alive.pop(other).stop()
        self._on_start(name)
        self._num_started += 1
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{self._num_started:02}-{name}.log"
        server = Server(self._specs[name], free_ports(1)[0], log, self._start)
        self._alive[name] = server  # so that it is ended, whatever happens here
        server.wait_ready()
        return server
