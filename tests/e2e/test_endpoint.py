"""Drafts from another server: one whose drafts and faults the test chooses, and a real one.

The target, the question pair's draft, runs on two tensor-parallel ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_parse.client.servers import Server, ServerSpec, free_ports
from support.client import Client, assert_same, parse_info, wait_until
from support.demo_pair import DEMO, held_out
from support.fake_endpoint import FakeEndpoint, fake_endpoint, rest_of
from support.servers import PARSE, SEED, Start, plain_flags, served, two_ranks_environment
from support.warm import Nursery

PROBLEMS = held_out(4)
(PORT,) = free_ports(1)
TIMEOUT_S = 5.0
"""Long enough for a busy machine: where nothing fails, no draft may be lost."""
FLAGS = (
    *("--model-path", str(DEMO / "draft"), *PARSE, "--parse-verification", "token", *SEED),
    *("--parse-draft-url", f"http://127.0.0.1:{PORT}/v1", "--enable-metrics"),
    *("--parse-draft-timeout", str(TIMEOUT_S), "--parse-drafting", "always"),
    *("--tp-size", "2"),
)


@pytest.fixture(scope="module")
def target(start_server: Start) -> Iterator[Client]:
    """Starts although nobody answers at the URL."""
    with two_ranks_environment():
        yield from served(start_server, "endpoint-target", *FLAGS)


@pytest.fixture(scope="module")
def answers(small_plain: Client) -> list[dict[str, Any]]:
    return [ask(small_plain, place) for place in range(len(PROBLEMS))]


@pytest.fixture
def fake(answers: list) -> Iterator[FakeEndpoint]:
    """Knows the answers, unless told otherwise."""
    with fake_endpoint(PORT) as fake:
        fake.draft = rest_of(right_texts(answers))
        yield fake


def right_texts(answers: list) -> dict[str, str]:
    texts = [plain["text"].removesuffix("<|im_end|>") for plain in answers]
    return {one.problem.text: text for one, text in zip(PROBLEMS, texts, strict=True)}


def ask(client: Client, place: int, **more: Any) -> dict[str, Any]:
    return client.generate(PROBLEMS[place].prompt, max_new_tokens=160, **more)


def by_endpoint(answer: dict[str, Any]) -> dict[str, float]:
    return parse_info(answer)["sources"].get("endpoint", {"accepted_tokens": 0, "rounds": 0})


def recover(target: Client, fake: FakeEndpoint) -> None:
    """The server's faults are over: asks until it drafts again, and loses no draft.

    After many faults it is asked again ``MAX_PAUSE`` drafts later, which are 60 answers or more:
    all problems are asked at once for them.
    """
    fake.kind, fake.delay_s = "stream", 0.0
    before = num_faults(target)
    wait_until(lambda: drafts_again(target), "drafts to come again")
    assert num_faults(target) == before


def drafts_again(target: Client) -> bool:
    if by_endpoint(ask(target, 0))["accepted_tokens"]:
        return True
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda place: ask(target, place % len(PROBLEMS)), range(8)))
    return False


def ask_drafted(target: Client, place: int, plain: dict[str, Any]) -> dict[str, float]:
    """Asks once: the answer is the plain one, and no draft is lost; returns what was drafted."""
    before = num_faults(target)
    answer = ask(target, place)
    assert_same(answer, plain)
    assert num_faults(target) == before
    return by_endpoint(answer)


def num_faults(target: Client) -> float:
    text = httpx.get(f"{target.url}/metrics", timeout=20).text
    lines = [line for line in text.splitlines() if "source_faults_total{" in line]
    return sum(float(line.split()[-1]) for line in lines if 'source="endpoint"' in line)


def num_said(log: Path) -> int:
    return log.read_text(errors="replace").count("PARSE: no drafts from")


def test_predictions_come_first(target: Client, answers: list, fake: FakeEndpoint):
    recover(target, fake)
    for place, plain in enumerate(answers[:3]):
        text = plain["text"].removesuffix("<|im_end|>")
        answer = ask(target, place, parse={"draft": text})
        assert_same(answer, plain)
        assert parse_info(answer)["sources"]["prediction"]["accepted_tokens"] > 40
        answer = ask(target, place, parse={"draft": text[: len(text) // 2] + "77\n" + text})
        assert_same(answer, plain)


def test_right_drafts(target: Client, answers: list, fake: FakeEndpoint):
    recover(target, fake)
    fake.bodies.clear()
    for place, plain in enumerate(answers):
        found = ask_drafted(target, place, plain)
        assert found["accepted_tokens"] > 0.8 * len(plain["output_ids"])
    assert len(fake.bodies) <= 2 * len(answers)  # one question each, or one more
    assert all(body["model"] == "fake" and body["temperature"] == 0 for body in fake.bodies)


def test_drafts_that_are_not_streamed(target: Client, answers: list, fake: FakeEndpoint):
    recover(target, fake)
    fake.kind = "whole"
    assert ask_drafted(target, 1, answers[1])["accepted_tokens"] > 40


def test_chats_are_asked_with_roles_and_texts(target: Client, answers: list, fake: FakeEndpoint):
    recover(target, fake)
    fake.bodies.clear()
    content = [{"type": "text", "text": PROBLEMS[2].problem.text}]
    messages = [{"role": "user", "content": content, "name": "secret", "field": "secret"}]
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 160, "n": 2}
    reply = target.post("/v1/chat/completions", body | {"return_meta_info": True}).json()
    for choice in reply["choices"]:
        assert choice["message"]["content"] == answers[2]["text"].removesuffix("<|im_end|>")
        (info,) = choice["meta_info"]["parse"]
        assert info["sources"]["endpoint"]["accepted_tokens"] > 40
    assert len(reply["choices"]) == 2
    for body in fake.bodies:
        first, answer = body["messages"]
        assert first == {"role": "user", "content": PROBLEMS[2].problem.text}
        assert answer["role"] == "assistant"  # the prefill's token


@pytest.mark.nightly("tests/e2e/test_endpoint.py::test_right_drafts")
def test_a_real_server(target: Client, nursery: Nursery, answers: list, tmp_path: Path):
    """Stock SGLang serves the demo draft at the URL and streams to a target of two ranks."""
    flags = (*plain_flags(DEMO / "draft"), "--stream-interval", "4", "--sleep-on-idle")
    draft = Server(ServerSpec("draft", flags), PORT, tmp_path / "draft.log", nursery.start)
    try:
        draft.wait_ready()
        stock = Client(draft.url)
        for one in PROBLEMS[:2]:  # its first forwards take longer than anybody waits
            stock.generate(one.prompt, max_new_tokens=32)
        wait_until(lambda: drafts_again(target), "drafts to come again")
        for place, plain in enumerate(answers):
            assert ask_drafted(target, place, plain)["accepted_tokens"] > 20
    finally:
        draft.stop(0)
    before = num_faults(target)
    assert_same(ask(target, 1), answers[1])
    wait_until(lambda: num_faults(target) > before, "the fault to be counted")
    target.assert_nothing_lost()


@pytest.mark.nightly("tests/e2e/test_endpoint.py::test_right_drafts")
def test_wrong_drafts(target: Client, answers: list, fake: FakeEndpoint):
    recover(target, fake)
    right = fake.draft
    fake.draft = lambda question, answer: right(question, answer)[:20] + "77\nAnswer: 7"
    for place, plain in enumerate(answers[:3]):
        found = ask_drafted(target, place, plain)
        assert 0 < found["accepted_tokens"] < found["drafted_tokens"]
    fake.draft = lambda *_: "😀 完全に違う答え <|im_end|>\x00"
    ask_drafted(target, 0, answers[0])
    fake.draft = lambda *_: "a: 81 " * 10_000
    ask_drafted(target, 0, answers[0])


SLOW = pytest.mark.nightly("tests/compat/test_sources.py")


@pytest.mark.parametrize("kind", ["status", pytest.param("break", marks=SLOW)])
def test_answers_go_on_without_a_draft_that_fails(
    target: Client, answers: list, fake: FakeEndpoint, kind: str
):
    """Which kinds there are, and that no redirect is followed: test_endpoint_client.py."""
    recover(target, fake)
    fake.kind = kind
    if kind == "break":  # no fault: the draft ends there
        for place, plain in enumerate(answers[:2]):
            assert ask_drafted(target, place, plain)["accepted_tokens"]
        return
    before = num_faults(target)
    for place, plain in enumerate(answers[:2]):
        assert_same(ask(target, place), plain)
    wait_until(lambda: num_faults(target) > before, "the fault to be counted")


def test_one_requests_fault_is_its_own(target: Client, answers: list, fake: FakeEndpoint):
    """Refused, and unanswered, requests beside others, whose drafts go on."""
    recover(target, fake)
    fake.kinds = {PROBLEMS[0].problem.text: "refuse", PROBLEMS[1].problem.text: "mute"}
    before = num_faults(target)
    with ThreadPoolExecutor(2) as pool:
        lost = [pool.submit(ask, target, place) for place in (0, 1)]
        wait_until(lambda: num_faults(target) > before, "the refusal to be counted")
        for place in (2, 3):
            found = by_endpoint(answer := ask(target, place))
            assert_same(answer, answers[place])
            assert found["accepted_tokens"] > 0.8 * len(answers[place]["output_ids"])
        for place, one in enumerate(lost):
            assert_same(one.result(), answers[place])
            assert not by_endpoint(one.result())["rounds"]
    wait_until(lambda: num_faults(target) == before + 2, "both to be counted")
    ask_drafted(target, 2, answers[2])


@pytest.mark.nightly("tests/compat/test_sources.py")
@pytest.mark.parametrize("kind", ["stream", "stall"])
def test_a_slow_endpoint_holds_nobody_up(
    target: Client, answers: list, fake: FakeEndpoint, kind: str
):
    recover(target, fake)
    fake.kind, fake.delay_s = kind, 0.0 if kind == "stall" else 4 * TIMEOUT_S
    started = time.perf_counter()
    assert_same(ask(target, 0), answers[0])
    waited = time.perf_counter() - started
    plain_s = answers[0]["meta_info"]["e2e_latency"]
    assert waited < 6 * plain_s + 2 * TIMEOUT_S + 1  # two ranks on few cores
    switched_off = ask(target, 1, parse={"enabled": False})
    assert_same(switched_off, answers[1])


@pytest.mark.nightly("tests/compat/test_sources.py")
def test_it_dies_under_load(target: Client, start_server: Start, answers: list):
    """Eight requests have drafts on their way when every connection ends; nobody answers then."""
    log = start_server("endpoint-target", *FLAGS).log
    places = [place % len(PROBLEMS) for place in range(24)]
    with ThreadPoolExecutor(8) as pool:
        with fake_endpoint(PORT) as fake:
            fake.draft = rest_of(right_texts(answers))
            recover(target, fake)
            before, said = num_faults(target), num_said(log)
            fake.bodies.clear()
            fake.part_s = 0.05
            found = [pool.submit(ask, target, place) for place in places]
            wait_until(lambda: len(fake.bodies) >= 8, "eight drafts to be on their way")
            time.sleep(1.2)  # some of each has been verified
            fake.kind = "killed"
        found = [one.result() for one in found]
    for place, answer in zip(places, found, strict=True):
        assert_same(answer, answers[place])
    assert sum(by_endpoint(answer)["rounds"] > 0 for answer in found) > 4
    wait_until(lambda: num_faults(target) >= before + 8, "the faults to be counted")
    assert num_said(log) == said + 1


def test_said_once_and_nothing_lost(target: Client, start_server: Start, fake: FakeEndpoint):
    recover(target, fake)
    log = start_server("endpoint-target", *FLAGS).log
    text = Path(log).read_text(errors="replace")
    assert text.count("PARSE: no drafts from") == text.count("come again")
    assert "Start with" not in text  # no contents
    target.assert_nothing_lost()
