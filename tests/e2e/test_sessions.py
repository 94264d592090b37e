"""Turns of streaming sessions, which go on from the KV of the turn before, equal the plain server's
answers to the same tokens in one prompt."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_parse.client.demo_pair import DEMO_PAIR
from support.client import Client, parse_info
from support.servers import AHEAD, ALWAYS, OVERLAP, PARSE, SEED, Start, parse_flags, served

TOKEN = ("--parse-verification", "token", "--parse-draft-tokens", "12", *ALWAYS, *SEED)
SESSIONS = "--enable-streaming-session"
LOGPROBS = {"return_logprob": True, "logprob_start_len": -1}
NUM_TURNS = 5
STOPPED, ABORTED = 1, 3
"""The turns that end at a stop string, and by an abort."""
MORE = pytest.mark.nightly("tests/e2e/test_sessions.py::test_turns")
KINDS = ("pages", pytest.param("head", marks=MORE), pytest.param("head-pages", marks=MORE))


@pytest.fixture(scope="module", params=KINDS)
def servers(
    request: pytest.FixtureRequest, start_server: Start, pair: tuple[Path, Path]
) -> Iterator[tuple[Client, Client]]:
    """A server with sessions, and a plain one of its target.

    A draft model and pages, under the overlap schedule; an EAGLE-3 head, also with pages.
    """
    kind = request.param
    pages = ("--page-size", "16") if "pages" in kind else ()
    if kind == "pages":
        plain = request.getfixturevalue("plain")
        flags = (*parse_flags(pair, *TOKEN), *pages, *OVERLAP)
    else:
        plain = request.getfixturevalue("wordings_plain")
        head = ("--parse-eagle3-path", str(DEMO_PAIR / "eagle3"))
        flags = ("--model-path", str(DEMO_PAIR / "target"), *PARSE, *head, *TOKEN, *pages)
    variables = AHEAD if kind == "pages" else {}
    for client in served(start_server, f"sessions-{kind}", *flags, SESSIONS, **variables):
        yield client, plain


@contextmanager
def opened(client: Client) -> Iterator[dict[str, Any]]:
    """What a request in a session of its own has."""
    reply = client.post("/open_session", {"capacity_of_str_len": 99_999, "streaming": True})
    session = reply.json()
    yield {"session_params": {"id": session}}
    client.post("/close_session", {"session_id": session}).raise_for_status()


def talk(servers: tuple[Client, Client], seed: int) -> int:
    """Compares the turns of a session; returns how many draft tokens were accepted."""
    client, plain = servers
    rng, history, accepted = random.Random(seed), [], 0
    with opened(client) as session:
        for turn in range(NUM_TURNS):
            new = [rng.randrange(3, 300) for _ in range(rng.randrange(5, 40))]
            limit = {"max_new_tokens": rng.randrange(9, 40), "ignore_eos": True}
            if turn == ABORTED:
                abort(client, new, session, f"gone-{seed}")
                continue
            theirs = plain.generate([*history, *new], top=LOGPROBS, **limit)
            if turn == STOPPED and len(theirs["text"]) > 8:
                limit["stop"] = [theirs["text"][4:7]]
                theirs = plain.generate([*history, *new], top=LOGPROBS, **limit)
            ours = client.generate(new, top=LOGPROBS | session, **limit)
            assert ours["output_ids"] == theirs["output_ids"], turn
            assert first_logprob(ours) == pytest.approx(first_logprob(theirs), abs=1e-4), turn
            if turn < ABORTED:  # whose KV the session gives up
                assert ours["meta_info"]["cached_tokens"] >= len(history) - 1
            history += [*new, *ours["output_ids"]]
            accepted += parse_info(ours)["accepted_tokens"]
    return accepted


def first_logprob(answer: dict[str, Any]) -> float:
    return answer["meta_info"]["output_token_logprobs"][0][0]


def abort(client: Client, prompt: list[int], session: dict[str, Any], rid: str) -> None:
    """A turn that a client ends; the next one goes on from the turn before."""
    with ThreadPoolExecutor(1) as pool:
        top = session | {"rid": rid}
        job = pool.submit(client.generate, prompt, top=top, max_new_tokens=1500, ignore_eos=True)
        time.sleep(0.3)
        client.abort(rid)
        reason = job.result()["meta_info"]["finish_reason"]["type"]
    assert reason == "abort"


def test_turns(servers: tuple[Client, Client]):
    with ThreadPoolExecutor(6) as pool:
        accepted = list(pool.map(lambda seed: talk(servers, seed), range(6)))
    assert sum(accepted) > 0
    servers[0].assert_nothing_lost()
