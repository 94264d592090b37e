"""SGLang servers as process groups: start, wait, suspend, resume, end.

An idle SGLang server keeps a CPU core busy, so idle servers are suspended (SIGSTOP).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx

from sglang_parse.client.records import TITLES, BenchError, title_of

START_LIMIT_S = 600.0
STOP_LIMIT_S = 15.0
LOG_TAIL_LINES = 25
MODEL_NAME = "demo"
MAX_RUNNING_REQUESTS = 16

COMMON_FLAGS: tuple[str, ...] = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
    *("--host", "127.0.0.1", "--served-model-name", MODEL_NAME),
    *("--max-total-tokens", "16384", "--max-running-requests", str(MAX_RUNNING_REQUESTS)),
)
ENVIRONMENT = {
    # Models are on disk: no server waits for a network.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # /health answers at once. SGLang has had an answer to its own warm-up request by then, and
    # waits a second for each further one.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
}
DEFAULTS = {
    # Models this small are slower on two threads than on one, and noisier beside other programs.
    "OMP_NUM_THREADS": "1",
    # Compiling costs seconds per new batch shape on a CPU and gains nothing for models this small.
    "TORCHDYNAMO_DISABLE": "1",
}
"""Variables that this process's environment overrides."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Command line of a server: ``launcher``, ``common``, ``flags``; and more environment."""

    name: str
    flags: tuple[str, ...]
    common: tuple[str, ...] = COMMON_FLAGS
    launcher: tuple[str, ...] = ("-m", "sglang.launch_server")
    environment: Mapping[str, str] = field(default_factory=dict)


Process = subprocess.Popen[bytes]


def start_process(command: Sequence[str], env: Mapping[str, str], output: IO[bytes]) -> Process:
    """Starts a process in a separate process group, which Ctrl-C does not reach."""
    return subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
    )


StartProcess = Callable[[Sequence[str], Mapping[str, str], IO[bytes]], Process]


class Server:
    """One running server, by its first process; ``start`` instead of ``start_process``."""

    def __init__(
        self, spec: ServerSpec, port: int, log: Path, start: StartProcess | None = None
    ) -> None:
        self.name, self.port, self.log = spec.name, port, log
        self.is_suspended = self.is_ready = False
        command = [sys.executable, *spec.launcher, *spec.common, *spec.flags]
        with log.open("wb") as output:
            environment = {**DEFAULTS, **os.environ, **ENVIRONMENT, **spec.environment}
            start = start or start_process
            self.process = start([*command, "--port", str(port)], environment, output)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Raises: BenchError, with the log's tail."""
        deadline = time.monotonic() + limit_s
        # One client: each new one reads the system's certificates, 50 ms of CPU.
        with httpx.Client(timeout=20) as client:
            while time.monotonic() < deadline:
                self.check_alive()
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{self.url}/health").status_code == 200:
                        self.is_ready = True
                        return
                time.sleep(0.2)
        raise self._error(f"was not ready after {limit_s:.0f} s")

    def check_alive(self) -> None:
        """Raises: BenchError, when the server has ended."""
        code = self.process.poll()
        if code is not None:
            raise self._error(f"ended with exit code {code}")

    def suspend(self) -> None:
        self._signal(signal.SIGSTOP)
        self.is_suspended = True

    def resume(self) -> None:
        self.check_alive()
        self._signal(signal.SIGCONT)
        self.is_suspended = False

    def stop(self, limit_s: float = STOP_LIMIT_S) -> None:
        """Ends the process group: SIGTERM (unless the limit is 0), then SIGKILL."""
        self._signal(signal.SIGCONT)
        if limit_s:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(limit_s)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        # The group exists as long as one process does, also without its leader.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _error(self, what: str) -> BenchError:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        tail = "\n".join(f"  | {line}" for line in lines)
        return BenchError(
            f"the server for {title_of(self.name)} {what}. The end of {self.log}:\n{tail}"
        )


@dataclass(frozen=True, slots=True)
class Remote:
    """A server that runs already, by its URL; never suspended or ended."""

    name: str
    url: str

    @classmethod
    def read(cls, name: str, url: str) -> Remote:
        """A server by the ``--url`` of a command line."""
        if not url.startswith(("http://", "https://")):
            raise BenchError(f"--url is {url!r}; use http://host:port")
        return cls(name, url.rstrip("/").removesuffix("/v1"))

    def check_alive(self) -> None:
        """Raises: BenchError, when it does not answer."""
        try:
            httpx.get(f"{self.url}/health", timeout=20).raise_for_status()
        except httpx.HTTPError as error:
            raise BenchError(f"{self.name} at {self.url} does not answer: {error!r}") from error

    def model_path(self) -> str:
        """Path of the served model; "" if the server does not report it."""
        with contextlib.suppress(httpx.HTTPError, ValueError):
            found = httpx.get(f"{self.url}/model_info", timeout=20).raise_for_status().json()
            return found.get("model_path", "")
        return ""


Endpoint = Server | Remote
"""A server that takes requests."""


@contextlib.contextmanager
def awake(*chosen: Server) -> Iterator[None]:
    """Resumes servers for the length of a block."""
    for server in chosen:
        server.resume()
    try:
        yield
    finally:
        for server in chosen:
            server.suspend()


def free_ports(count: int) -> list[int]:
    """Free ports far apart: SGLang takes more ports near the one that it is given."""
    # Below the range from which the system picks ports for outgoing connections.
    first = random.randrange(20_000, 24_000)
    starts = range(first, first + 2_000 * count, 2_000)
    return [next(filter(is_free, range(start, start + 2_000))) for start in starts]


def is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def read_remotes(texts: Sequence[str]) -> dict[str, Remote]:
    """A setting's ``read``: running servers by their names, of NAME=URL each."""
    remotes = {}
    for text in texts:
        name, _, url = text.partition("=")
        if name not in TITLES:
            known = ", ".join(TITLES)
            raise BenchError(f"--url is {text!r}; use NAME=http://host:port with a name of {known}")
        remotes[name] = Remote.read(name, url)
    return remotes


NAMED_URLS: dict[str, Any] = {
    "name": "--url",
    "action": "append",
    "metavar": "NAME=URL",
    "read": read_remotes,
}
"""Words of ``flags.option`` for a setting of running servers."""
