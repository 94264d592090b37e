"""Servers that start from a process which has imported SGLang already.

Most of a server's start is imports: three processes, each up to 20 seconds of a CPU. Here one
process imports once and is forked for each process of each server; everything after the imports
is real: ``python -m sglang.launch_server`` with its own arguments and environment, and
the processes it starts, each its child, with the arguments and environment multiprocessing's
"spawn" gives them. The wheel's server starts without this.

It saves 25 to 30 CPU seconds a server, on two cores of November 2026: ``test_exact``, 3 servers,
took 84 with it and 173 without; ``test_stops``, 4 servers, 91 and 190, each with its tests.

    Nursery (in pytest) --unix socket--> this file as a program --fork--> a server's first process,
    which forks itself, before it does anything else, into spares that wait to be its children.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import re
import runpy
import selectors
import shlex
import signal
import site
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from sglang_parse.client.servers import DEFAULTS, ENVIRONMENT, Process, start_process

ROOT = Path(__file__).resolve().parents[2]
RUN_FOLDER = "PARSE_TEST_RUN"
"""The variable that names the folder of a run of tests, for all of its processes."""
CHECKS = {
    # SGLang asserts its slot accounting on every iteration, not only when idle.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    # Before it ends a server, SGLang otherwise waits 65 s for dumps of processes on a GPU.
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
}
"""In the environment of every server under test."""
PRELOADED = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
    "sglang.benchmark.serving",
)
SPEC_UTILS = "sglang.srt.speculative.spec_utils"
READ_ON_IMPORT = {
    "SGLANG_TEST_RETRACT_INTERVAL": (
        "sglang.srt.managers.scheduler",
        "TEST_RETRACT_INTERVAL",
        int,
    ),
    "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": (
        "sglang.srt.managers.schedule_policy",
        "CLIP_MAX_NEW_TOKENS",
        int,
    ),
    "SGLANG_SIMULATE_ACC_LEN": (SPEC_UTILS, "SIMULATE_ACC_LEN", float),
    "SGLANG_SIMULATE_ACC_METHOD": (SPEC_UTILS, "SIMULATE_ACC_METHOD", str),
}
"""Variables SGLang reads only once, where it keeps each, and of what type."""
READ_WHEN_USED = ("SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_MAMBA_CONV_DTYPE")
READ_WHEN_USED += ("SGLANG_SWA_EVICTION_INTERVAL",)
NUM_SPARES = 3
"""A scheduler, a detokenizer, and another scheduler (tensor parallel); more are started by
multiprocessing."""
IMPORT_LIMIT_S = 180
"""A nursery that does not answer for so long has ended."""
SPAWN = re.compile(r"spawn_main\((.*)\)")


class Nursery:
    """The side of pytest: starts the program below, and asks it for servers."""

    def __init__(self) -> None:
        """This run's: the first of its processes that needs one starts it."""
        env = {**DEFAULTS, **os.environ, **ENVIRONMENT}
        folder = Path(env[RUN_FOLDER])
        owner = os.getppid() if "PYTEST_XDIST_WORKER" in env else os.getpid()
        self._name = f"sglang-parse-{folder.name}"
        self._settings = _sglang_settings(env)
        with (folder / "nursery").open("a") as started:
            fcntl.flock(started, fcntl.LOCK_EX)
            if os.fstat(started.fileno()).st_size:
                return
            started.write("1")
            paths = [str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")]
            # As a module from the root: servers then import what `python -m` from there imports.
            subprocess.Popen(
                [sys.executable, "-m", "support.warm", self._name, str(owner)],
                env={**env, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                cwd=ROOT,
                start_new_session=True,
            )

    def start(self, command: Sequence[str], env: Mapping[str, str], output: Any) -> Process:
        """Instead of ``subprocess.Popen``: ``command`` is [python, -m, module, flags...],
        [python, -c, program, words...] or [python, file, words...].

        SGLang reads some of its variables when it is imported. A server with others than this
        nursery has starts anew, unless it is known what they change.

        Args:
            output: an open file for stdout and stderr.
        """
        if _sglang_settings(env) != self._settings:
            return start_process(command, env, output)
        return ask(self._name, command[1:], env, output.fileno())

    def run(self, *words: object, limit_s: float = 600) -> str:
        """Returns the output of ``python words`` from the repository's root; it must succeed."""
        with tempfile.NamedTemporaryFile() as output:
            command = [sys.executable, *map(str, words)]
            process = self.start(command, {**DEFAULTS, **os.environ, **ENVIRONMENT}, output)
            code = process.wait(limit_s)
            printed = Path(output.name).read_text()
        assert code == 0, printed
        return printed

    def python(self, path: Path) -> Path:
        """Writes a program that stands for ``python`` in scripts: servers start from here."""
        python, here = shlex.quote(sys.executable), shlex.quote(__file__)
        path.write_text(
            f'#!/bin/sh\n[ "$2" = sglang.launch_server ] && exec {python} {here} --ask '
            f'{self._name} "$@"\nexec {python} "$@"\n'
        )
        path.chmod(0o755)
        return path


def ask(name: str, command: Sequence[str], env: Mapping[str, str], output: int) -> WarmProcess:
    """A server from the nursery of that name, when that has imported what it imports.

    Raises:
        ConnectionRefusedError: it does not answer.
    """
    deadline = time.monotonic() + IMPORT_LIMIT_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(_address(name))
            break
        except ConnectionRefusedError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    _send(connection, {"command": [str(word) for word in command], "env": dict(env)}, [output])
    return WarmProcess(connection)


class WarmProcess:
    """The part of ``subprocess.Popen`` that ``Server`` uses."""

    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile("r")
        self._connection = connection
        self.pid = int(self._lines.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired("server", timeout or 0)
            self.returncode = int(self._lines.readline())
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def _sglang_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that SGLang, or Triton, reads when it is imported; none of PARSE's."""
    known = (*READ_ON_IMPORT, *READ_WHEN_USED)
    return {
        name: value
        for name, value in env.items()
        if name == "TRITON_INTERPRET"
        or name.startswith("SGLANG_")
        and not name.startswith("SGLANG_PARSE_")
        and name not in known
    }


def _address(name: str) -> str:
    """A Unix socket without a file, whose path could be too long."""
    return f"\0{name}"


def _send(connection: socket.socket, content: dict[str, Any], fds: Sequence[int]) -> None:
    data = json.dumps(content).encode()
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([len(data).to_bytes(8, "big")], ancillary)
    connection.sendall(data)


def _receive(connection: socket.socket, max_fds: int = 8) -> tuple[dict[str, Any], list[int]]:
    """Raises: EOFError, when the other side is gone."""
    size, fds, _, _ = socket.recv_fds(connection, 8, max_fds)
    if not size:
        raise EOFError
    data = b""
    length = int.from_bytes(size, "big")
    while len(data) < length:
        data += connection.recv(length - len(data))
    return json.loads(data), list(fds)


# -- the program ------------------------------------------------------------------


def serve(name: str, owner: int) -> None:
    """Import, then fork a server for each connection, and report its end there.

    Ends with its owner, however that ends, and takes every server with it.
    """
    for module in PRELOADED:
        importlib.import_module(module)
    _index_bindings()
    gc.collect()
    gc.freeze()  # forks then share these pages as long as nobody writes to them
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_address(name))
    listener.listen()
    connections: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while _lives(owner):
            if selector.select(0.05):
                connection, _ = listener.accept()
                content, (output,) = _receive(connection)
                pid = os.fork()
                if not pid:
                    listener.close()
                    for other in (*connections.values(), connection):
                        other.close()
                    return _become_server(content, output)
                os.close(output)
                connections[pid] = connection
                connection.sendall(b"%d\n" % pid)
            _report_ends(connections)
    for pid in connections:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _lives(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody waited for has no command line."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


def _index_bindings() -> None:
    """Makes SGLang's hook registry look bindings up. Otherwise it walks over all attributes of all
    modules for each hook, in each process: 7 of 13 CPU seconds of a server's start.

    Modules that are imported later are walked.
    """
    from sglang.srt.plugins import hook_registry

    indexed, places = {*sys.modules}, {}
    for module, name, value in _attributes(sys.modules):
        places.setdefault(id(value), []).append((module, name))

    def propagate(original: object, wrapped: object, source: object) -> int:
        later = _attributes({*sys.modules} - indexed)
        found = places.get(id(original), []) + [
            (module, name) for module, name, value in later if value is original
        ]
        stale = [
            (module, name)
            for module, name in found
            if module is not source and vars(module).get(name) is original
        ]
        for module, name in stale:
            setattr(module, name, wrapped)
        places[id(wrapped)] = found
        return len(stale)

    hook_registry._propagate_patch = propagate


def _attributes(modules: Iterable[str]) -> Iterator[tuple[ModuleType, str, object]]:
    for module in [sys.modules[name] for name in modules]:
        if isinstance(module, ModuleType):
            for name, value in [*vars(module).items()]:
                yield module, name, value


def _report_ends(connections: dict[int, socket.socket]) -> None:
    while connections:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with contextlib.suppress(BrokenPipeError), connections.pop(pid) as connection:
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _become_server(content: dict[str, Any], output: int) -> None:
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    _take_environment(content["env"])
    if not _leave_spares():
        return  # this is a spare, and its work is done
    _run_as_python(*content["command"])


def _run_as_python(first: str, *words: str) -> None:
    """Where the program succeeds, the process ends as Python ends one, but for the last step: it
    frees no object. That would copy all that the nursery has imported, for 2 s of a CPU."""
    try:
        _run(first, *words)
    except SystemExit as end:
        if end.code:
            raise
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(first: str, *words: str) -> None:
    if first == "-c":
        sys.argv = [first, *words[1:]]
        exec(words[0], sys.modules["__main__"].__dict__)
    elif first == "-m":
        sys.argv = list(words)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *words]
        runpy.run_path(first, run_name="__main__")


def _take_environment(env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    for path in filter(None, env.get("PYTHONPATH", "").split(os.pathsep)):
        site.addsitedir(path)  # Python itself reads this variable only when it starts
    for name, (module, constant, kind) in READ_ON_IMPORT.items():
        if name in env:
            assert hasattr(sys.modules[module], constant), f"SGLang keeps {name} elsewhere now"
            _set_constant(sys.modules[module], constant, kind(env[name]))


def _set_constant(module: ModuleType, name: str, value: object) -> None:
    """Also where the module's functions have the constant as a default."""
    old = getattr(module, name)
    setattr(module, name, value)
    for function in vars(module).values():
        if isinstance(function, FunctionType) and function.__defaults__:
            function.__defaults__ = tuple(
                value if default is old else default for default in function.__defaults__
            )


def _leave_spares() -> bool:
    """Fork children that have imported everything and nothing more; False in those, in the end."""
    spares: list[tuple[int, socket.socket]] = []
    for _ in range(NUM_SPARES):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            for _, other in spares:
                other.close()
            ours.close()
            _wait_as_spare(theirs)
            return False
        theirs.close()
        spares.append((pid, ours))
    _spawn_from(spares)
    return True


def _spawn_from(spares: list[tuple[int, socket.socket]]) -> None:
    """Make multiprocessing's "spawn" take a spare instead of a new interpreter."""
    from multiprocessing import util

    spawn_anew = util.spawnv_passfds

    def spawn(path: Any, args: Sequence[Any], fds: Sequence[int]) -> int:
        command = [os.fsdecode(word) for word in args]
        if not spares or not any("spawn_main" in word for word in command):
            return spawn_anew(path, args, fds)
        pid, connection = spares.pop(0)
        content = {"command": command, "env": dict(os.environ), "fds": list(fds)}
        _send(connection, content, list(fds))
        connection.close()
        return pid

    util.spawnv_passfds = spawn  # type: ignore[assignment]


def _wait_as_spare(connection: socket.socket) -> None:
    high = os.dup2(connection.fileno(), 900)  # out of the way of the numbers that come
    connection.close()
    with socket.socket(fileno=high) as connection:
        try:
            content, fds = _receive(connection)
        except EOFError:
            os._exit(0)  # the server ended without need of this one
    _place(dict(zip(content["fds"], fds, strict=True)))
    _take_environment(content["env"])
    from multiprocessing import spawn

    (code,) = (word for word in content["command"] if "spawn_main" in word)
    arguments = dict(pair.split("=") for pair in SPAWN.search(code)[1].split(", "))
    sys.argv = ["-c", "--multiprocessing-fork"]
    spawn.spawn_main(**{name: int(value) for name, value in arguments.items()})


def _place(places: dict[int, int]) -> None:
    """Descriptors to the numbers the parent uses: {wanted: received}."""
    held = {wanted: os.dup2(fd, 800 + i) for i, (wanted, fd) in enumerate(places.items())}
    for fd in places.values():
        os.close(fd)
    for wanted, fd in held.items():
        os.dup2(fd, wanted)
        os.close(fd)


# -- a stand-in for python --------------------------------------------------------


def stand_in(name: str, command: Sequence[str]) -> int:
    """Be a server's first process, for whoever started this one: its signals, its exit code."""
    server = ask(name, command, os.environ, sys.stdout.fileno())

    def pass_on(number: int, _: Any) -> None:
        os.kill(server.pid, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    code = server.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    if sys.argv[1] == "--ask":
        sys.exit(stand_in(sys.argv[2], sys.argv[3:]))
    serve(sys.argv[1], owner=int(sys.argv[2]))
