"""Servers that take turns: started when first needed, suspended between turns."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sglang_parse.client.records import title_of
from sglang_parse.client.servers import (
    STOP_LIMIT_S,
    Endpoint,
    Remote,
    Server,
    ServerSpec,
    awake,
    free_ports,
)

STARTS_AT_ONCE = 2
"""A start is mostly imports. More at once: SGLang sizes its KV by the memory that is free while it
loads, and one of nine may find none."""

Launch = Callable[[ServerSpec, int, Path], Server]


class Pool:
    """Servers by name. The least recently used ends before more than ``max_alive`` run.

    All servers end when the ``with`` block is left.

    Args:
        logs: folder for one log per start.
        remotes: servers that run already; not counted in ``max_alive``.
        log: is told what is started.
        launch: (spec, port, log) -> a server that is starting.
    """

    def __init__(
        self,
        specs: Sequence[ServerSpec],
        logs: Path,
        *,
        remotes: Mapping[str, Remote] | None = None,
        max_alive: int | None = None,
        log: Callable[[str], object] = lambda _: None,
        launch: Launch = Server,
        stop_limit_s: float = STOP_LIMIT_S,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._remotes, self._logs = remotes or {}, logs
        self._max_alive = max_alive or len(specs)
        self._log, self._launch, self._stop_limit_s = log, launch, stop_limit_s
        self._alive: dict[str, Server] = {}  # in the order of their last use
        self._num_started: dict[str, int] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends what was started here, all at the same time: each takes seconds."""
        servers = [*self._alive.values()]
        self._alive.clear()
        with ThreadPoolExecutor(len(servers) or 1) as threads:
            list(threads.map(lambda server: server.stop(self._stop_limit_s), servers))

    def start_all(self) -> None:
        """Those that do not run yet."""
        missing = [spec for name, spec in self._specs.items() if name not in self._alive]
        starting: deque[Server] = deque()
        for spec, port in zip(missing, free_ports(len(missing)), strict=True):
            if len(starting) == STARTS_AT_ONCE:
                _settle(starting.popleft())
            starting.append(self._start(spec, port))
        for server in starting:
            _settle(server)

    def server(self, spec: ServerSpec) -> Server:
        """Returns the server of that name; starts and suspends it if it does not run."""
        if spec.name in self._alive:
            server = self._alive[spec.name] = self._alive.pop(spec.name)
        else:
            self._make_room()
            server = self._start(spec, *free_ports(1))
        if not server.is_ready:  # a new one, or one that was starting when another one failed
            _settle(server)
        return server

    def end(self, name: str) -> None:
        """The server of that name; the next one who asks for it starts it anew."""
        self._alive.pop(name).stop(self._stop_limit_s)

    @contextlib.contextmanager
    def awake(self, *names: str) -> Iterator[list[Endpoint]]:
        """Resumes the named servers for the length of a block."""
        endpoints: list[Endpoint] = []
        with contextlib.ExitStack() as stack:
            for name in names:
                if name in self._remotes:
                    endpoints.append(self._remotes[name])
                    endpoints[-1].check_alive()
                else:
                    server = self.server(self._specs[name])
                    stack.enter_context(awake(server))
                    endpoints.append(server)
            yield endpoints

    def _start(self, spec: ServerSpec, port: int) -> Server:
        self._log(f"start {title_of(spec.name)}")
        self._logs.mkdir(parents=True, exist_ok=True)
        count = self._num_started[spec.name] = self._num_started.get(spec.name, 0) + 1
        file = self._logs / (f"{spec.name}.log" if count == 1 else f"{spec.name}-{count}.log")
        server = self._launch(spec, port, file)
        self._alive[spec.name] = server  # so that it is ended in any case
        return server

    def _make_room(self) -> None:
        suspended = [name for name, server in self._alive.items() if server.is_suspended]
        for name in suspended[: max(0, len(self._alive) - self._max_alive + 1)]:
            self.end(name)


def _settle(server: Server) -> None:
    server.wait_ready()
    server.suspend()
