"""Faults end the affected requests with a clear error, or the server with the reason.

Every wait here has a limit, so a hang fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from sglang_parse.client.servers import Server, ServerSpec, free_ports
from support.client import Client, parse_info, random_prompts, wait_until
from support.random_pair import PairShape, make_pair
from support.servers import SEED, parse_flags, start_probed
from support.warm import Nursery

TARGET_POISON, DRAFT_POISON = 301, 302
"""Tokens whose embedding is NaN in the target, and in the draft."""


def _poison(folder: Path, token_id: int) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][token_id] = float("nan")
    # Both models give both tokens the logit 0, far below the maximum: no model writes them.
    weights["lm_head.weight"][[TARGET_POISON, DRAFT_POISON]] = 0
    save_file(weights, path, metadata={"format": "pt"})


LIMIT_S = 120
PROMPTS = random_prompts(6, 62)
LIMIT = {"max_new_tokens": 32, "ignore_eos": True}
DOOMED = ("failing", "broken", "hanging")
"""Servers that start together; each ends in its one test."""
MORE = pytest.mark.nightly("tests/e2e/test_faults.py::test_only_the_affected_requests_end")


@contextlib.contextmanager
def started(folder: Path, nursery: Nursery, *names: str) -> Iterator[dict[str, Server]]:
    """Servers whose models have a poisonous token each."""
    pair = make_pair(folder / "pair", PairShape(num_layers=2, seed=3))
    _poison(pair[0], TARGET_POISON)
    _poison(pair[1], DRAFT_POISON)
    flags = (
        *parse_flags(pair, "--parse-verification", "token", "--parse-draft-tokens", "12", *SEED),
        *("--parse-draft-chunk", "4", "--chunked-prefill-size", "64", "--sleep-on-idle"),
    )
    more = {"hanging": ("--watchdog-timeout", "8")}
    servers: dict[str, Server] = {}
    try:
        for name, port in zip(names, free_ports(len(names)), strict=True):
            log = folder / f"{name}.log"
            spec = ServerSpec(name, (*flags, *more.get(name, ())))
            servers[name] = start_probed(spec, port, log, nursery.start)
        for server in servers.values():
            server.wait_ready()
            server.suspend()
        yield servers
    finally:
        for server in servers.values():
            server.stop(0)


@pytest.fixture(scope="module")
def doomed(
    tmp_path_factory: pytest.TempPathFactory, nursery: Nursery
) -> Iterator[dict[str, Server]]:
    with started(tmp_path_factory.mktemp("doomed"), nursery, *DOOMED) as servers:
        yield servers


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Server]:
    """It survives its faults."""
    with started(tmp_path_factory.mktemp("faulty"), nursery, "faulty") as servers:
        servers["faulty"].resume()
        yield servers["faulty"]


@pytest.fixture
def faulty(server: Server) -> Client:
    return Client.of(server)


@pytest.fixture(scope="module")
def expected(server: Server) -> list[list[int]]:
    """The target's own answers: PARSE is switched off."""
    answers = Client.of(server).generate_all(PROMPTS, 6, parse={"enabled": False}, **LIMIT)
    return [answer["output_ids"] for answer in answers]


def _send(client: Client, prompt: list[int], **params) -> httpx.Response:
    return client.send(prompt, **{**LIMIT, **params})


def _send_all(client: Client) -> list[httpx.Response]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: _send(client, prompt), PROMPTS))


def _error(response: httpx.Response) -> str:
    """Returns the error of a request, or ""."""
    if response.status_code == 200:
        reason = response.json()["meta_info"]["finish_reason"]
        return reason["message"] if reason["type"] == "abort" else ""
    assert response.status_code == 500
    return response.text


@pytest.mark.parametrize("length", [12, 200])
@pytest.mark.parametrize("temperature", [0, pytest.param(1, marks=MORE)])
@pytest.mark.parametrize(
    ("token_id", "whose"), [(TARGET_POISON, "target"), (DRAFT_POISON, "draft")]
)
def test_nan_logits(
    server: Server,
    faulty: Client,
    token_id: int,
    whose: str,
    temperature: float,
    length: int,
):
    """Covers NaN in the first of several prefill chunks."""
    healthy, sick = random_prompts(2, 61)
    sick = [*sick[:4], token_id, *(sick * 50)[: length - 5]]
    error = _error(_send(faulty, sick, temperature=temperature))
    assert f"NaN in the {whose} model's logits" in error
    answer = faulty.generate(healthy, temperature=temperature, top_k=20, **LIMIT)
    assert parse_info(answer)["mode"] == "parse"
    written = [token for path in faulty.look()["tree"] for token in path["written"][0]]
    assert TARGET_POISON not in written
    faulty.assert_nothing_lost()
    if whose == "target":  # of any number of them, once
        said = server.log.read_text(errors="replace").count("the target answers NaN")
        assert said == 1


@pytest.mark.parametrize(
    ("place", "kind", "named"),
    [
        ("target-verify", "nan", "NaN in the target model's logits"),
        pytest.param("draft-chunk", "nan", "NaN in the draft model's logits", marks=MORE),
        ("draft-chunk", "raise", "the draft model failed: InjectedError"),
        pytest.param("draft-prefill", "raise", "the draft model failed: InjectedError", marks=MORE),
    ],
)
def test_only_the_affected_requests_end(
    faulty: Client, expected: list[list[int]], place: str, kind: str, named: str
):
    skip = 0 if place == "draft-prefill" else 4
    with faulty.probe.fault(place, kind, skip=skip, times=1) as fault:
        responses = _send_all(faulty)
        assert fault.num_fired() == 1
    errors = [error for response in responses if (error := _error(response))]
    assert errors
    assert all(named in error for error in errors)
    if kind == "nan":
        assert len(errors) == 1
    for response, ids in zip(responses, expected, strict=True):
        produced = response.json().get("output_ids", [])
        assert produced == (ids[: len(produced)] if _error(response) else ids)
    _assert_well(faulty, expected)


def test_a_failed_draft_prefill_is_repeated(faulty: Client, expected: list[list[int]]):
    """The radix cache has the prompt; only its draft KV is missing."""
    faulty.flush()
    with faulty.probe.fault("draft-prefill", "raise", times=1) as fault:
        assert "the draft model failed" in _error(_send(faulty, PROMPTS[0], **LIMIT))
        assert fault.num_fired() == 1
    (path,) = faulty.look()["tree"]
    assert path["written"][0] == PROMPTS[0]
    _assert_well(faulty, expected)


def _assert_well(client: Client, expected: list[list[int]]) -> None:
    client.assert_nothing_lost()
    answers = client.generate_all(PROMPTS, 6, **LIMIT)
    assert [answer["output_ids"] for answer in answers] == expected
    assert {parse_info(answer)["mode"] for answer in answers} == {"parse"}
    # Another turn: the cached draft KV is correct.
    turns = [prompt + ids for prompt, ids in zip(PROMPTS, expected, strict=True)]
    warm = client.generate_all(turns, 6, **LIMIT)
    client.assert_nothing_lost()
    cold = client.generate_all(turns, 6, **LIMIT)
    for left, right in zip(warm, cold, strict=True):
        assert left["output_ids"] == right["output_ids"]
        assert left["meta_info"]["cached_tokens"] > right["meta_info"]["cached_tokens"]
        assert parse_info(left)["accepted_tokens"] == parse_info(right)["accepted_tokens"]


def _assert_ends(server: Server, client: Client, reason: str) -> None:
    """Under load, every client gets a response, and the server exits with the reason in its log."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        jobs = [pool.submit(_send, client, prompt) for prompt in PROMPTS]
        assert server.process.wait(LIMIT_S) != 0
        for job in jobs:
            with contextlib.suppress(httpx.TransportError):
                assert _error(job.result(LIMIT_S))
    assert reason in server.log.read_text()


@MORE
def test_a_draft_model_that_keeps_failing_ends_the_server(doomed: dict[str, Server]):
    """The server must not stay up while it fails every request."""
    server = doomed["failing"]
    client = Client.of(server)
    server.resume()
    with client.probe.fault("draft-chunk", "raise"):
        for prompt in PROMPTS[:2]:
            assert "the draft model failed" in _error(_send(client, prompt))
        _assert_ends(server, client, "InjectedError('injected')); 3 times in a row")


@MORE
def test_an_attention_error_in_a_verify_pass_ends_the_server(doomed: dict[str, Server]):
    """Any error in the target's forward ends the server, as without PARSE: its state is unknown."""
    server = doomed["broken"]
    client = Client.of(server)
    server.resume()
    with client.probe.fault("target-verify", "attention", skip=3):
        _assert_ends(server, client, "injected into the attention backend")


@MORE
def test_a_hanging_verify_pass_ends_the_server(doomed: dict[str, Server]):
    """SGLang's watchdog covers PARSE's iterations, also those that emit nothing."""
    server = doomed["hanging"]
    client = Client.of(server)
    server.resume()
    with client.probe.fault("draft-chunk", "slow", seconds=1, times=10):
        assert not _error(_send(client, PROMPTS[0]))
    with client.probe.fault("target-verify", "slow", seconds=10 * LIMIT_S, skip=3):
        _assert_ends(server, client, "watchdog timeout")


def test_sigterm_under_load(server: Server, expected: list[list[int]]):
    """Runs last: running requests finish correctly, then the server exits."""
    client = Client.of(server)
    with (
        client.probe.fault("target-verify", "slow", seconds=0.3),
        ThreadPoolExecutor(len(PROMPTS)) as pool,
    ):
        jobs = [pool.submit(_send, client, prompt) for prompt in PROMPTS]
        wait_until(lambda: len(client.look()["running"]) == len(PROMPTS), "all to run")
        server.process.terminate()  # as a container runtime does
        responses = [job.result(LIMIT_S) for job in jobs]
    assert [response.json()["output_ids"] for response in responses] == expected
    assert server.process.wait(LIMIT_S) == 0
