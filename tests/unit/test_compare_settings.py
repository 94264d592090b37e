"""Whose models are compared: the project's figures to reach are about the demo pair's only."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from sglang_parse.client.demo_pair import DEMO_PAIR
from sglang_parse.client.records import Variant
from sglang_parse.compare.settings import CompareSettings, add_arguments

pytestmark = pytest.mark.unit


class Model(BaseHTTPRequestHandler):
    """A server that says what it serves."""

    path_of_model: str | None = str(DEMO_PAIR / "target")

    def do_GET(self) -> None:  # noqa: N802 - the library's name
        self.send_response(404 if self.path_of_model is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"model_path": self.path_of_model}).encode())

    def log_message(self, *arguments: object) -> None:
        """Not into the test's output."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def settings(*words: str) -> CompareSettings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return CompareSettings.read(parser.parse_args(words))


def test_servers_that_are_started_have_the_models_of_the_flags():
    assert settings().is_demo_pair()
    assert not settings("--target", "Qwen/Qwen3-32B").is_demo_pair()
    assert not settings("--draft", "Qwen/Qwen3-1.7B").is_demo_pair()


def test_servers_that_run_are_asked(url: str, monkeypatch: pytest.MonkeyPatch):
    remote = ("--url", f"plain={url}", "--url", f"parse={url}")
    assert settings(*remote).is_demo_pair()
    assert settings(*remote, "--servers", "plain,eagle3,parse").is_demo_pair()
    other = ("--servers", "eagle3", "--target", "Qwen/Qwen3-32B")
    assert not settings(*remote, *other).is_demo_pair()
    monkeypatch.setattr(Model, "path_of_model", "Qwen/Qwen3-32B")
    assert not settings(*remote).is_demo_pair()
    # A router, say, that serves no model itself.
    monkeypatch.setattr(Model, "path_of_model", None)
    assert not settings(*remote).is_demo_pair()


def test_token_by_token_is_measured_at_its_own_threshold_only():
    assert settings().ways("parse-one") == (Variant("parse-one", 0.5),)


def test_a_flag_is_read_once_and_for_all():
    found = settings("--concurrency", "16,4", "--thresholds", "1.5,0.5,0", "--problems", "30")
    assert found.concurrencies == (1, 4, 16)
    assert found.thresholds == (0, 1.5)  # its own, 0.5, is measured anyway
    assert found.sweep_problems == 30
    assert found.tokenizer == found.target
