"""What a start says: one line for an error, and a warning where ordinary requests are plain."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.demo_pair import DEMO
from support.warm import Nursery

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("clean_environment")]
PARSE = ("--speculative-algorithm", "PARSE", "--device", "cpu")
PARSE += ("--attention-backend", "torch_native", "--dtype", "float32")
PARSE += ("--speculative-draft-model-path", str(DEMO / "draft"))
PARSE += ("--parse-question", str(DEMO / "question.json"))


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["launch_server"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


def prepared(*flags: str, target: Path = DEMO / "target"):
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args(["--model-path", str(target), *flags])


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """The messages of a logger; SGLang's parser replaces the root's handlers, pytest's too."""
    handler, found = logging.Handler(logging.WARNING), []
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--parse-treshold", "0.5"),
            "unrecognized arguments: --parse-treshold 0.5: did you mean --parse-threshold?",
        ),
        ((*PARSE, "--tp-sise=2"), "unrecognized arguments: --tp-sise=2: did you mean --tp-size?"),
        (("--parse-draft-chunk", "many"), "argument --parse-draft-chunk: invalid int"),
    ],
)
def test_an_unknown_flag_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags, message: str
):
    monkeypatch.setattr(sys, "argv", ["launch_server", *flags])
    with pytest.raises(SystemExit) as error:
        prepared(*flags)
    shown = capsys.readouterr().err
    assert error.value.code == 2
    assert shown.startswith(f"sglang serve: error: {message}")
    assert shown.count("\n") == 1


def test_sglangs_own_usage_stays_without_parse(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        prepared("--tp-sise=2")
    shown = capsys.readouterr().err
    assert shown.startswith("usage: sglang serve")
    assert "did you mean" not in shown


def test_only_errors_of_parse_are_shown_without_traceback(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ValueError, match="threshold") as ours:
        prepared(*PARSE, "--parse-threshold", "2.5")
    sys.excepthook(ours.type, ours.value, ours.tb)
    line = capsys.readouterr().err
    assert line.startswith("PARSE: --parse-threshold is 2.5. Fix: use a number")
    assert line.count("\n") == 1
    other = ValueError("SGLang's")
    sys.excepthook(ValueError, other, None)
    assert capsys.readouterr().err == "ValueError: SGLang's\n"


def test_flags_of_parse_without_parse_are_named():
    with logged("sglang_parse.patches.parse.cli_flags") as messages:
        prepared("--parse-verification", "token", "--parse-draft-tokens", "32")
        prepared(*PARSE, "--parse-draft-tokens", "32")
        prepared()
    assert messages == [
        "PARSE: --parse-draft-tokens, --parse-verification without --speculative-algorithm PARSE: "
        "this server runs without PARSE."
    ]


def test_the_scheduler_logs_errors_of_parse_without_traceback():
    from sglang_parse.attention.support import BackendError

    prepared()
    scheduler = "sglang.srt.managers.scheduler"
    error_of_parse = BackendError("--x is 'y'", "z")
    with logged(scheduler) as messages:
        for error in (error_of_parse, ValueError(str(error_of_parse))):
            try:
                raise error
            except ValueError:
                logging.getLogger(scheduler).error("Scheduler hit an exception: Traceback ...")
    assert messages == ["PARSE: --x is 'y'. Fix: z", "Scheduler hit an exception: Traceback ..."]


def test_a_used_port_is_refused_before_models_are_loaded():
    args = prepared(*PARSE, "--host", "127.0.0.1", "--port", "0")
    from sglang.srt.entrypoints.http_server import launch_server

    from sglang_parse.startup.checks import check_port

    with socket.create_server(("127.0.0.1", 0)) as other:
        args.port = other.getsockname()[1]
        with pytest.raises(ValueError, match=rf"--port is {args.port}: .*127\.0\.0\.1.*Fix: use"):
            launch_server(args)
    check_port(SimpleNamespace(host="127.0.0.1", port=args.port))


@pytest.mark.parametrize("words", [("--speculative-algorithm", "PARSE"), ("--parse-overlap=on",)])
def test_a_registration_that_fails_is_named(words: tuple[str, ...], monkeypatch):
    """As on a read-only disk, where SGLang's own imports fail; other servers go on."""
    from sglang_parse import algorithm, patches, plugin

    def fail() -> None:
        raise OSError("Read-only file system: 'jit.log'")

    monkeypatch.setattr(algorithm, "register_algorithm", lambda *_: True)
    monkeypatch.setattr(patches, "register_all", fail)
    monkeypatch.setattr(sys, "argv", ["launch_server.py", "--model-path", "target"])
    with pytest.raises(OSError, match="Read-only"):
        plugin.register()
    monkeypatch.setattr(sys, "argv", [*sys.argv, *words])
    with pytest.raises(SystemExit, match=r"PARSE: cannot be registered \(OSError: Read-only.*Fix:"):
        plugin.register()


@pytest.mark.nightly(
    "tests/compat/test_start_errors.py::test_only_errors_of_parse_are_shown_without_traceback"
)
def test_a_refused_start_ends_with_its_line(nursery: Nursery, tmp_path: Path):
    flags = ("--model-path", str(DEMO / "target"), *PARSE, "--enable-pdmux")
    command = [sys.executable, "-m", "sglang.launch_server", *flags]
    with (tmp_path / "log").open("wb") as log:
        assert nursery.start(command, os.environ, log).wait(300) == 1
    printed = (tmp_path / "log").read_text()
    assert "Traceback" not in printed
    assert printed.splitlines()[-1].startswith("PARSE: --enable-pdmux is True. Fix: ")
