"""Two PARSE servers behind SGLang's router, started as in examples/router/README.md."""

from __future__ import annotations

import os
import random
import re
import signal
import string
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_parse.client.servers import COMMON_FLAGS, DEFAULTS, ENVIRONMENT, free_ports, is_free
from support.client import HTTP, Client, wait_until
from support.servers import SEED
from support.warm import Nursery

pytestmark = pytest.mark.nightly("tests/e2e/test_multi_turn.py")

pytest.importorskip("sglang_router", reason="sglang-router is not installed on this machine")

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "router" / "serve.sh"
NUM_TURNS = 3


@dataclass(frozen=True)
class Routed:
    """The processes that ``serve.sh`` started on ``port``."""

    port: int

    def url(self, offset: int = 0) -> str:
        return f"http://127.0.0.1:{self.port + offset}"

    def is_ready(self) -> bool:
        with suppress(httpx.HTTPError):
            workers = HTTP.get(f"{self.url()}/workers", timeout=20).json()["workers"]
            if len(workers) == 2 and all(worker["is_healthy"] for worker in workers):
                answers = [HTTP.get(f"{self.url(n)}/health", timeout=20) for n in (100, 200)]
                return all(answer.status_code == 200 for answer in answers)
        return False

    def requests_by_server(self) -> list[int]:
        text = HTTP.get(f"{self.url(10)}/metrics", timeout=20).text
        counts = []
        for offset in (100, 200):
            pattern = rf'^smg_worker_cb_outcomes_total{{worker="{self.url(offset)}".*}} (\d+)$'
            counts.append(sum(map(int, re.findall(pattern, text, re.MULTILINE))))
        return counts


@pytest.fixture(scope="module")
def routed(
    pair: tuple[Path, Path], nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Routed]:
    taken = (10, 100, 200)  # by the script, beside the port
    port = next(one for one in free_ports(4) if all(is_free(one + offset) for offset in taken))
    target, draft = pair
    folder = tmp_path_factory.mktemp("router")
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *("sh", str(SCRIPT), "--model-path", str(target)),
                *("--speculative-draft-model-path", str(draft)),
                *("--parse-verification", "token", "--parse-draft-tokens", "16"),
                *(*COMMON_FLAGS, "--sleep-on-idle", *SEED),
            ],
            env={
                **DEFAULTS,
                **os.environ,
                **ENVIRONMENT,
                "PORT": str(port),
                "PYTHON": str(nursery.python(folder / "python")),
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        routed = Routed(port)
        wait_until(lambda: process.poll() is not None or routed.is_ready(), "all three", 300)
        assert process.poll() is None, log.read_text()[-3000:]
        yield routed
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def chat(url: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 24}
    body["separate_reasoning"] = False  # the plain server has a parser for it
    response = HTTP.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    response.raise_for_status()
    return response.json()


def session(url: str, seed: int) -> list[tuple[list[dict[str, str]], dict[str, Any]]]:
    """Turns of a chat: messages and responses."""
    rng = random.Random(seed)
    messages: list[dict[str, str]] = []
    turns = []
    for _ in range(NUM_TURNS):
        question = "".join(rng.choices(string.ascii_lowercase, k=150))
        messages = [*messages, {"role": "user", "content": question}]
        answer = chat(url, messages)
        turns.append((messages, answer))
        messages = [*messages, answer["choices"][0]["message"]]
        messages[-1] = {"role": "assistant", "content": messages[-1]["content"]}
    return turns


def test_sessions_stick_to_the_server_that_has_their_prefix(routed: Routed, plain: Client):
    with ThreadPoolExecutor(6) as pool:
        sessions = list(pool.map(lambda seed: session(routed.url(), seed), range(6)))
    for turns in sessions:
        known = 0
        for messages, answer in turns:
            usage = answer["usage"]
            cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
            # Sessions share only the first tokens of the chat template.
            assert cached >= known - 1 if known else cached < 20
            known = usage["prompt_tokens"]
            ours, expected = answer["choices"][0], chat(plain.url, messages)["choices"][0]
            assert ours["message"]["content"] == expected["message"]["content"]
    by_server = routed.requests_by_server()
    assert min(by_server) > 0
    assert sum(by_server) == len(sessions) * NUM_TURNS


def test_settings_per_request_need_a_direct_request(routed: Routed):
    """The router drops fields that it does not know, as in examples/router/README.md."""
    params = {"max_new_tokens": 8, "custom_params": {"parse": {"enabled": False}}}
    modes = []
    for offset in (0, 100):
        body = {"input_ids": [5, 6, 7, 8], "sampling_params": params}
        response = HTTP.post(f"{routed.url(offset)}/generate", json=body, timeout=120)
        response.raise_for_status()
        (info,) = response.json()["meta_info"]["parse"]
        modes.append(info["mode"])
    assert modes == ["parse", "plain"]
    body = {"model": "demo", "messages": [{"role": "user", "content": "a"}], "max_tokens": 8}
    body |= {"return_meta_info": True, "custom_params": {"parse": {"enabled": False}}}
    answer = HTTP.post(f"{routed.url()}/v1/chat/completions", json=body, timeout=120).json()
    assert not answer["choices"][0].get("meta_info")
