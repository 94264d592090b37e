"""``sglang serve``, SGLang's other way to start a server, knows PARSE and its flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_parse.client.servers import Server, ServerSpec, free_ports
from support.client import Client, parse_info, random_prompts
from support.servers import parse_flags
from support.warm import Nursery

pytestmark = pytest.mark.nightly("tests/compat/test_patches.py")

# As .venv/bin/sglang does; that script contains the path of its environment.
SGLANG_SERVE = ("-c", "from sglang.cli.main import main; main()", "serve")


def test_sglang_serve(pair: tuple[Path, Path], nursery: Nursery, tmp_path: Path):
    flags = parse_flags(pair, "--parse-verification", "token", "--parse-draft-tokens", "7")
    spec = ServerSpec("serve", (*flags, "--sleep-on-idle"), launcher=SGLANG_SERVE)
    server = Server(spec, free_ports(1)[0], tmp_path / "serve.log", nursery.start)
    try:
        server.wait_ready()
        (prompt,) = random_prompts(1, seed=5)
        answer = Client(server.url).generate(
            prompt, max_new_tokens=30, ignore_eos=True, parse={"trace": True}
        )
    finally:
        server.stop()
    info = parse_info(answer)
    assert info["mode"] == "parse"
    # The flag reached the scheduler: no round drafts more.
    assert [len(record["draft_token_ids"]) for record in info["trace"]][0] == 7
