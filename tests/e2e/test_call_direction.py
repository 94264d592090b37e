"""The road of a batch through a running server goes down: no function calls into a higher layer.

The layers are import-linter's (pyproject.toml). Imports alone do not show a call through a
callback or a singleton; a profile of one burst, one pass and one plain step does.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.client import Client
from support.demo_pair import DEMO, held_out
from support.random_pair import parallel_draft
from support.servers import QUESTION, Start, parse_flags, plugin, served

ROOT = Path(__file__).resolve().parents[2]
Place = tuple[str, str]
"""A module and a function in it."""


@pytest.fixture(scope="module", params=["off", "on"])
def road(
    request: pytest.FixtureRequest,
    start_server: Start,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[tuple[Place, Place]]:
    """Every call from one of PARSE's functions to another, of a drafting request and a plain one:
    in blocks, and token by token with the overlap schedule."""
    folder = tmp_path_factory.mktemp("road")
    path, draft = folder / "calls", parallel_draft(DEMO / "draft", folder / "draft")
    size = {"off": "4", "on": "1"}[request.param]
    flags = parse_flags(
        *((DEMO / "target", draft), *QUESTION, "--parse-overlap", request.param),
        *("--parse-draft-parallel-tokens", size),
    )
    with plugin("road", ROAD_FILE=str(path)):
        for client in served(start_server, f"road-{request.param}", *flags):
            record(client, path, held_out(1)[0].prompt)
    calls = [json.loads(line) for line in path.read_text().splitlines()]
    return [(tuple(caller), tuple(callee)) for caller, callee in calls]


def record(client: Client, path: Path, prompt: str) -> None:
    client.generate(prompt, max_new_tokens=4)
    path.with_suffix(".on").touch()
    client.generate(prompt, max_new_tokens=96)
    client.generate(prompt, max_new_tokens=8, parse={"enabled": False})
    path.with_suffix(".on").unlink()


def layers(container: str) -> dict[str, int]:
    """Name -> how low it lies, by import-linter's contract on that package."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (listed,) = (
        contract["layers"]
        for contract in contracts["contracts"]
        if contract.get("containers") == [container]
    )
    return {name.strip(): depth for depth, names in enumerate(listed) for name in names.split("|")}


def climbs(road: list[tuple[Place, Place]]) -> Iterator[tuple[Place, Place]]:
    rooms, engine = layers("sglang_parse"), layers("sglang_parse.engine")
    for caller, callee in road:
        (high, *inner), (low, *deeper) = (module.split(".")[1:] for module, _ in (caller, callee))
        if high == low == "engine":
            up = engine[deeper[0]] < engine[inner[0]]
        else:
            up = rooms[low] < rooms[high]
        if up:
            yield caller, callee


def test_it_was_a_burst_a_pass_and_a_step(road: list[tuple[Place, Place]]):
    called = {function for _, (_, function) in road}
    assert {
        "Iteration._launch_burst",
        "Iteration._launch_pass",
        "LaunchedPass.read",
        "Rounds.judged",
        "Iteration._launch_steps",
        "Rounds.stepped",
        "RequestState.write",
    } <= called
    assert {"TokenChunk._launch", "ParallelChunk._launch"} & called
    assert len(road) > 100


def test_no_call_goes_up(road: list[tuple[Place, Place]]):
    assert list(climbs(road)) == []


def test_a_climb_would_be_seen():
    up = (("sglang_parse.engine.kv", "grant"), ("sglang_parse.engine.rounds", "decide"))
    out = (("sglang_parse.core.request", "take"), ("sglang_parse.engine.kv", "grant"))
    down = (("sglang_parse.engine.worker", "launch"), ("sglang_parse.core.counters", "count"))
    assert list(climbs([up, out, down])) == [up, out]
