"""Calls in a running server go down: no function calls into a higher layer.

The layers are import-linter's (pyproject.toml). Imports alone do not show a call through a callback
or a singleton; a profile of one draft chunk, one verify pass and one decode step does.
"""

from __future__ import annotations

import ast
import json
import re
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


MORE = pytest.mark.nightly("tests/e2e/test_call_direction.py::test_no_call_goes_up")
CHAPTERS = (
    "core.block",
    "core.notes",
    "core.policy",
    "core.request_telemetry",
    "engine.drafting",
    "engine.prefill",
    "engine.sources",
    "patches",
    "telemetry",
)
VERIFY_ITERATION = {
    *("engine.worker", "engine.overlap", "engine.step", "engine.schedule", "engine.verify"),
    *("engine.forward", "engine.commit", "engine.result", "engine.target", "engine.timing"),
    "engine.row_results",
    *("engine.batch", "engine.requests", "engine.parts", "engine.judge.judge"),
    *("engine.logits.adjust", "engine.logits.sampling"),
    *("core.request", "core.round", "core.kv_demand", "core.counters", "core.mask"),
    *("attention.spec_input", "attention.native"),
}
"""At most 25, the eight of the engine's page among them."""


@pytest.fixture(scope="module", params=["off", pytest.param("on", marks=MORE)])
def calls(
    request: pytest.FixtureRequest,
    start_server: Start,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[tuple[Place, Place]]:
    """Calls between PARSE's functions of a drafting and a plain request: in parallel drafting, and
    token by token with the overlap schedule."""
    folder = tmp_path_factory.mktemp("calls")
    path, draft = folder / "lines", parallel_draft(DEMO / "draft", folder / "draft")
    size = {"off": "4", "on": "1"}[request.param]
    flags = parse_flags(
        *((DEMO / "target", draft), *QUESTION, "--parse-overlap", request.param),
        *("--parse-draft-parallel-tokens", size),
    )
    with plugin("call_direction", CALLS_FILE=str(path)):
        for client in served(start_server, f"calls-{request.param}", *flags):
            record(client, path, held_out(1)[0].prompt)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [(tuple(caller), tuple(callee)) for caller, callee in found]


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


def upward(calls: list[tuple[Place, Place]]) -> Iterator[tuple[Place, Place]]:
    packages, engine = layers("sglang_parse"), layers("sglang_parse.engine")
    for caller, callee in calls:
        (high, *inner), (low, *deeper) = (module.split(".")[1:] for module, _ in (caller, callee))
        if high == low == "engine":
            up = engine[deeper[0]] < engine[inner[0]]
        else:
            up = packages[low] < packages[high]
        if up:
            yield caller, callee


def test_the_profile_covers_draft_verify_and_decode(calls: list[tuple[Place, Place]]):
    called = {function for _, (_, function) in calls}
    assert {
        "Schedule.plan_iteration",
        "Step._draft",
        "Verifier.verify",
        "Verifier.decode",
        "TargetForward.wait",
        "Committer.accept",
        "Committer._select",
        "Committer._move_on",
        "PendingResult.fill",
        "RequestState.write",
    } <= called
    assert {"TokenChunk._launch", "ParallelChunk._launch"} & called
    assert len(calls) > 80


def test_no_call_goes_up(calls: list[tuple[Place, Place]]):
    assert list(upward(calls)) == []


def test_a_verify_iteration_is_followed_in_few_files(calls: list[tuple[Place, Place]]):
    """Who calls others between SGLang's scheduler and its result. What is called and calls nobody
    is read by its docstring; drafting, sources, prefills, the policy, notes and telemetry are
    chapters of their own."""
    callers = {
        caller.removeprefix("sglang_parse.")
        for (caller, _), (callee, _) in calls
        if caller != callee
    }
    assert {name for name in callers if not name.startswith(CHAPTERS)} <= VERIFY_ITERATION
    assert len(VERIFY_ITERATION) <= 25


def test_an_upward_call_is_found():
    up = (("sglang_parse.engine.verify", "wait"), ("sglang_parse.engine.commit", "commit"))
    out = (("sglang_parse.core.request", "take"), ("sglang_parse.engine.schedule", "apply"))
    down = (("sglang_parse.engine.worker", "launch"), ("sglang_parse.core.counters", "count"))
    assert list(upward([up, out, down])) == [up, out]


def test_the_engines_page_names_the_files_of_a_verify_iteration(calls: list[tuple[Place, Place]]):
    """At most eight to read, all of them entered; every other one that is entered is listed too."""
    source = (ROOT / "sglang_parse/engine/__init__.py").read_text(encoding="utf-8")
    text = ast.get_docstring(ast.parse(source)) or ""
    to_read, others = (
        re.findall(r"^ {4}(\w+) {2,}", part, re.M) for part in text.split("Beside them")
    )
    engine = [module.split(".")[2:3] for _, (module, _) in calls if ".engine." in module]
    entered = {name for (name,) in engine}
    # Calls from SGLang are not in the profile: it enters PARSE through these two.
    entered |= {"worker", "overlap"}
    assert len(to_read) <= 8
    assert set(to_read) <= entered
    assert entered - set(to_read) <= set(others)
