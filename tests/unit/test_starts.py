"""The log of a test run's server starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.starts import ServerStart, probe_folder, read_starts, reasons, record_starts, report
from support.warm import RUN_FOLDER


def start(
    name: str, worker: str, flags: str = "--model-path target", is_shared: bool = True
) -> ServerStart:
    return ServerStart(name, flags, worker, "tests/e2e/test_a.py::test_b", 8.0, is_shared)


def test_reasons():
    starts = [
        start("plain", "gw0"),
        start("plain", "gw1"),
        start("plain", "gw1"),
        start("plain", "gw1", flags="--model-path other"),
        start("token", "gw1"),
        start("parse", "gw1", is_shared=False),
        start("parse", "gw1", is_shared=False),
    ]
    assert [*reasons(starts)] == ["new", "copy", "evicted", "new", "new", "own", "own"]
    assert [*report(starts)][-1] == "  56.0 s  7 servers: 3 new, 2 own, 1 copy, 1 evicted"


def test_a_start_is_logged_when_the_server_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Server:
        def __init__(self, spec: Any, port: int) -> None:
            self.name, self.port, self.log = spec.name, port, tmp_path / f"{port}.log"
            probe_folder(self.log).mkdir()

        def wait_ready(self) -> None:
            pass

    monkeypatch.setenv(RUN_FOLDER, str(tmp_path))
    record_starts(Server)
    for port, worker in enumerate(("gw0", "gw1")):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        flags = ("--model-path", f"/x/pytest-7/popen-{worker}/pair0/target")
        server = Server(SimpleNamespace(name="plain", launcher=(), common=(), flags=flags), port)
        assert len(read_starts()) == (worker == "gw1")
        server.wait_ready()
    first, second = read_starts()
    assert first.flags == second.flags == "--model-path pair0/target"
    assert "test_a_start_is_logged" in first.test
    assert [*reasons([first, second])] == ["new", "copy"]
