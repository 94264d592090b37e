"""examples/remote_draft/serve.sh: SmolLM2 behind a URL drafts for a target of another family, with
another vocabulary and another chat template."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from sglang_parse.client.servers import (
    COMMON_FLAGS,
    Process,
    Server,
    ServerSpec,
    free_ports,
    start_process,
)
from support.client import Client, parse_info, wait_until
from support.demo_pair import DEMO, held_out
from support.pages import ROOT
from support.servers import Start, plain_flags, served

PROBLEMS = held_out(4)
FLAGS = ("--parse-verification", "token", "--parse-drafting", "always")


@pytest.fixture(scope="module")
def remote(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """The script's target. It waits for a draft as long as SmolLM2 takes on a CPU."""
    port, draft_port = free_ports(2)
    script = ROOT / "examples" / "remote_draft" / "serve.sh"
    variables = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "DRAFT_PORT": str(draft_port),
        "DRAFT_FLAGS": shlex.join([*COMMON_FLAGS, "--sleep-on-idle"]),
    }

    def start(command: Sequence[str], env: Mapping[str, str], output: IO[bytes]) -> Process:
        flags = command[3:]  # after python -m sglang.launch_server
        return start_process([str(script), str(DEMO / "target"), str(pair[0]), *flags], env, output)

    flags = (*FLAGS, "--parse-draft-timeout", "60", "--sleep-on-idle")
    spec = ServerSpec("remote", flags, environment=variables)
    server = Server(spec, port, tmp_path_factory.mktemp("remote") / "serve.log", start)
    try:
        server.wait_ready()
        wait_until(lambda: is_ready(draft_port), "SmolLM2 to be ready", 300)
        yield Client(server.url)
    finally:
        server.stop(0)


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health_generate", timeout=60).is_success
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def alone(start_server: Start) -> Iterator[Client]:
    """Stock SGLang with the same target."""
    yield from served(start_server, "demo-plain", *plain_flags(DEMO / "target"))


def chat(client: Client, text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 48}
    reply = client.post("/v1/chat/completions", body | {"return_meta_info": True})
    return reply.raise_for_status().json()["choices"][0]


def test_another_vocabulary(remote: Client, alone: Client):
    """Answers are the target's own, and drafts came."""
    drafted = accepted = 0
    for one in PROBLEMS:
        choice = chat(remote, one.problem.text)
        assert choice["message"] == chat(alone, one.problem.text)["message"]
        (info,) = choice["meta_info"]["parse"]
        drafted += info["sources"]["endpoint"]["drafted_tokens"]
        accepted += info["accepted_tokens"]
    print(f"SmolLM2 for the demo target: {accepted} of {drafted} draft tokens accepted")
    assert drafted > 0


def test_a_prompt_without_a_template(remote: Client, alone: Client):
    text = "a: 23 + 45 = 68\nb: 68 - 31 = 37\nc: 37 + 50 = 87\nd: 87 - "
    ours, theirs = (client.generate(text, max_new_tokens=32) for client in (remote, alone))
    assert ours["output_ids"] == theirs["output_ids"]
    assert parse_info(ours)["sources"]["endpoint"]["drafted_tokens"] > 0
