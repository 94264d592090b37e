"""Drafts from another server: one whose drafts and faults the test chooses, and a real one.

The target runs on two tensor-parallel ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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

PROBLEMS = held_out(6)
(PORT,) = free_ports(1)
TIMEOUT_S = 1.5
FLAGS = (
    *("--model-path", str(DEMO / "target"), *PARSE, "--parse-verification", "token", *SEED),
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
def answers(demo_plain: Client) -> list[dict[str, Any]]:
    return [ask(demo_plain, place) for place in range(len(PROBLEMS))]


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
    """Faults are over: asks until it drafts again.

    After many faults it is asked again ``MAX_PAUSE`` drafts later, which are 60 answers or more:
    all problems are asked at once for them.
    """
    fake.kind, fake.delay_s = "stream", 0.0

    def drafts_again() -> bool:
        if by_endpoint(ask(target, 0))["accepted_tokens"]:
            return True
        with ThreadPoolExecutor(len(PROBLEMS)) as pool:
            list(pool.map(lambda place: ask(target, place), range(len(PROBLEMS))))
        return False

    wait_until(drafts_again, "drafts to come again")


def ask_in_time(
    target: Client, place: int, plain: dict[str, Any], is_enough: Callable[[dict], bool]
) -> int:
    """Asks until the endpoint's drafts were enough: on a busy machine its text may come too late,
    and then it is not asked for the next drafts. Every answer is the plain one.

    Returns:
        How often the target was asked.
    """
    tries: list[dict[str, Any]] = []

    def asked() -> bool:
        tries.append(ask(target, place))
        assert_same(tries[-1], plain)
        return is_enough(by_endpoint(tries[-1]))

    wait_until(asked, "the endpoint's drafts to come in time")
    return len(tries)


def num_faults(target: Client) -> float:
    text = httpx.get(f"{target.url}/metrics", timeout=20).text
    lines = [line for line in text.splitlines() if "source_faults_total{" in line]
    return sum(float(line.split()[-1]) for line in lines if 'source="endpoint"' in line)


def num_said(log: Path) -> int:
    return log.read_text(errors="replace").count("PARSE: no drafts from")


def test_nobody_answers(target: Client, answers: list):
    for place in range(3):
        answer = ask(target, place)
        assert_same(answer, answers[place])
        assert not by_endpoint(answer)["rounds"]
    wait_until(lambda: num_faults(target) > 0, "the fault to be counted")


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
    num_asked = 0
    for place, plain in enumerate(answers):
        least = 0.8 * len(plain["output_ids"])
        num_asked += ask_in_time(
            *(target, place, plain), lambda found, least=least: found["accepted_tokens"] > least
        )
    assert len(fake.bodies) <= 2 * num_asked  # one question each, or one more
    assert all(body["model"] == "fake" and body["temperature"] == 0 for body in fake.bodies)


def test_drafts_that_are_not_streamed(target: Client, answers: list, fake: FakeEndpoint):
    recover(target, fake)
    fake.kind = "whole"
    ask_in_time(target, 1, answers[1], lambda found: found["accepted_tokens"] > 40)


def test_chats_are_asked_with_their_messages(target: Client, answers: list, fake: FakeEndpoint):
    recover(target, fake)
    fake.bodies.clear()
    messages = [{"role": "user", "content": PROBLEMS[2].problem.text}]
    body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 160}

    def asked() -> bool:
        reply = target.post("/v1/chat/completions", body | {"return_meta_info": True}).json()
        (choice,) = reply["choices"]
        assert choice["message"]["content"] == answers[2]["text"].removesuffix("<|im_end|>")
        (info,) = choice["meta_info"]["parse"]
        return info["sources"].get("endpoint", {"accepted_tokens": 0})["accepted_tokens"] > 40

    wait_until(asked, "the endpoint's drafts to come in time")
    first = fake.bodies[0]
    assert first["messages"][: len(messages)] == messages
    assert first["messages"][-1]["role"] == "assistant"  # the prefill's token


def test_wrong_drafts(target: Client, answers: list, fake: FakeEndpoint):
    recover(target, fake)
    right = fake.draft
    fake.draft = lambda question, answer: right(question, answer)[:20] + "77\nAnswer: 7"
    for place, plain in enumerate(answers[:3]):
        ask_in_time(
            *(target, place, plain),
            lambda found: 0 < found["accepted_tokens"] < found["drafted_tokens"],
        )
    fake.draft = lambda *_: "😀 完全に違う答え <|im_end|>\x00"
    assert_same(ask(target, 0), answers[0])
    fake.draft = lambda *_: "a: 81 " * 100_000
    assert_same(ask(target, 0), answers[0])


@pytest.mark.parametrize("kind", ["status", "garbage", "json", "half", "break"])
def test_faults(target: Client, answers: list, fake: FakeEndpoint, kind: str):
    recover(target, fake)
    before = num_faults(target)
    fake.kind = kind
    for place, plain in enumerate(answers[:2]):
        assert_same(ask(target, place), plain)
    if kind in ("status", "garbage", "json"):
        wait_until(lambda: num_faults(target) > before, "the fault to be counted")


@pytest.mark.parametrize("kind", ["stream", "stall"])
def test_a_slow_endpoint_holds_nobody_up(
    target: Client, answers: list, fake: FakeEndpoint, kind: str
):
    recover(target, fake)
    fake.kind, fake.delay_s = kind, 0.0 if kind == "stall" else 6.0
    started = time.perf_counter()
    assert_same(ask(target, 0), answers[0])
    waited = time.perf_counter() - started
    plain_s = answers[0]["meta_info"]["e2e_latency"]
    assert waited < 6 * plain_s + 2 * TIMEOUT_S + 1  # two ranks on few cores
    switched_off = ask(target, 1, parse={"enabled": False})
    assert_same(switched_off, answers[1])


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
        wait_until(lambda: by_endpoint(ask(target, 0))["accepted_tokens"], "drafts to come again")
        for place, plain in enumerate(answers):
            ask_in_time(target, place, plain, lambda found: found["accepted_tokens"] > 20)
    finally:
        draft.stop(0)
    assert_same(ask(target, 1), answers[1])
    target.assert_nothing_lost()
