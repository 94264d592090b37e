"""The client of a server that writes drafts, against one whose faults the test chooses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from sglang_parse.client.servers import free_ports
from sglang_parse.doctor.endpoint import sample_draft
from sglang_parse.doctor.finding import Problem
from sglang_parse.engine.sources import endpoint_client
from sglang_parse.engine.sources.endpoint_client import (
    MAX_BYTES,
    MAX_CHARS,
    DraftRequest,
    EndpointClient,
    Stream,
)
from sglang_parse.engine.sources.incoming import TextEncoder
from support.demo_pair import DEMO
from support.fake_endpoint import ELSEWHERE, FakeEndpoint, fake_endpoint
from support.models import load_tokenizer

pytestmark = pytest.mark.unit

ANSWER = "one two three four five six"
CHAT = DraftRequest([("user", "count")], [1], [ord(c) for c in "one "], 64, 0.0)


def decode(token_ids: list[int]) -> str:
    """A token per character."""
    return "".join(map(chr, token_ids))


def encode(_before: str, text: str) -> list[int]:
    return [*map(ord, text)]


@pytest.fixture
def fake() -> Iterator[FakeEndpoint]:
    with fake_endpoint(*free_ports(1)) as fake:
        fake.draft = lambda _question, answer: ANSWER[len(answer) :]
        yield fake


def client_of(url: str) -> EndpointClient:
    return EndpointClient(url, decode, encode, 0.25)


def drafted(client: EndpointClient, question: DraftRequest = CHAT) -> Stream:
    (stream,) = all_drafted([client.ask(question)])
    return stream


def all_drafted(streams: Sequence[Stream]) -> Sequence[Stream]:
    deadline = time.monotonic() + 20
    while not all(stream.is_complete for stream in streams) and time.monotonic() < deadline:
        time.sleep(0.005)
    return streams


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_chat(fake: FakeEndpoint, suffix: str):
    stream = drafted(client_of(fake.url + suffix))
    assert (decode(stream.token_ids), stream.fault) == ("two three four five six", "")
    assert stream.ends_answer
    (body,) = fake.bodies
    turns = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "one "}]
    assert body["messages"] == turns
    assert (body["max_tokens"], body["model"]) == (64, "fake")


def test_a_prompt(fake: FakeEndpoint):
    prompt = [*map(ord, "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n")]
    stream = drafted(client_of(fake.url), DraftRequest((), prompt, CHAT.answer_ids, 64, 0.7))
    assert decode(stream.token_ids) == "two three four five six"
    assert fake.bodies[0]["prompt"].endswith("assistant\none ")
    assert fake.bodies[0]["temperature"] == 0.7


def take_all(client: EndpointClient) -> list[int]:
    """The tokens of an answer, as they arrive; none of them changes."""
    stream, seen = client.ask(CHAT), []
    while not stream.is_complete:
        client.arrived.wait(5)
        client.arrived.clear()
        added, has_changed = stream.take()
        assert not has_changed
        seen += added
    seen += stream.take()[0]
    return seen


def test_it_arrives_in_parts(fake: FakeEndpoint):
    assert decode(take_all(client_of(fake.url))) == "two three four five six"


@pytest.mark.parametrize("part", [1, 2, 3, 4, 7])
def test_tokens_do_not_depend_on_the_parts(fake: FakeEndpoint, part: int):
    """They may end inside of the target's tokens."""
    text, fake.part, fake.part_s = "a: 66 + 29 = 95\nb: 95 - 18 = 77\nAnswer: 77", part, 0.002
    fake.draft = lambda _question, _answer: text
    encoder = TextEncoder(load_tokenizer(DEMO / "target"), 1000)
    client = EndpointClient(fake.url, decode, encoder.encode_after, 0.25)
    assert take_all(client) == encoder.encode_after("one ", text)


def test_tokens_that_change_later_end_it():
    stream = Stream([1, 2, 3])
    assert stream.take() == ([1, 2, 3], False)
    stream.token_ids = [1, 2, 4, 5]
    assert stream.take() == ((), True)


@pytest.mark.parametrize(
    ("kind", "fault", "text"),
    [
        ("status", "status 503", ""),
        ("refuse", "status 400", ""),
        ("error", "an error in its answer", ""),
        ("garbage", "in its answer", ""),
        ("json", "no text", ""),
        ("half", "", "t"),
        ("whole", "", "two three four five six"),
        ("break", "", "two three fo"),
    ],
)
def test_faults(fake: FakeEndpoint, kind: str, fault: str, text: str):
    fake.kind = kind
    stream = drafted(client_of(fake.url))
    assert fault in stream.fault
    assert bool(fault) == bool(stream.fault)
    assert stream.is_refused == (kind in ("refuse", "error"))
    assert not stream.is_late
    assert decode(stream.token_ids).startswith(text)
    if kind != "whole":
        assert not stream.ends_answer


def test_it_is_killed_while_it_writes(fake: FakeEndpoint):
    fake.part_s, client = 0.05, client_of(fake.url)
    stream = client.ask(CHAT)
    assert client.arrived.wait(20)
    fake.kind = "killed"
    while not stream.is_complete:
        time.sleep(0.005)
    assert stream.fault
    assert not stream.ends_answer


def test_nobody_answers():
    (port,) = free_ports(1)
    stream = drafted(client_of(f"http://127.0.0.1:{port}"))
    assert "Connect" in stream.fault
    assert not stream.is_late
    assert not stream.is_refused
    stream = drafted(client_of("http://no.such.host.invalid:1"))
    assert stream.fault


def test_a_stall_and_a_flood(fake: FakeEndpoint):
    fake.kind, client = "stall", client_of(fake.url)
    stream = drafted(client)
    assert stream.fault  # nothing for a second
    assert stream.is_late
    fake.kind, fake.part = "stream", 1000
    fake.draft = lambda *_: "x" * 10**6
    assert len(drafted(client).token_ids) <= MAX_CHARS


def test_half_a_character_in_the_answer_asks_nothing(fake: FakeEndpoint):
    stream = drafted(client_of(fake.url), DraftRequest((), [1], [0xFFFD], 64, 0.0))
    assert (stream.token_ids, stream.fault, fake.bodies) == ((), "", [])


def test_a_draft_that_nobody_waits_for(fake: FakeEndpoint):
    fake.delay_s = 0.2
    stream = client_of(fake.url).ask(CHAT)
    time.sleep(0.05)
    stream.close()
    time.sleep(0.4)
    assert (stream.is_complete, stream.token_ids) == (True, ())


@pytest.mark.parametrize("status", ["status", "refuse"])
def test_no_list_of_models_is_the_servers_fault(fake: FakeEndpoint, status: str):
    fake.models_kind = status
    stream = drafted(client_of(fake.url))
    assert "of /v1/models" in stream.fault
    assert not stream.is_refused
    assert not fake.bodies


@pytest.mark.parametrize("place", ["models", "draft"])
def test_a_redirect_is_not_followed(fake: FakeEndpoint, place: str):
    if place == "models":
        fake.models_kind = "redirect"
    else:
        fake.kind = "redirect"
    stream = drafted(client_of(fake.url))
    assert "status 307" in stream.fault
    assert not stream.is_refused
    assert ELSEWHERE not in fake.paths
    assert not stream.token_ids


def test_200_drafts_at_once(fake: FakeEndpoint):
    """More than aiohttp opens connections by default; later drafts use them again."""
    client = EndpointClient(fake.url, decode, encode, 5.0)
    drafted(client)
    fake.delay_s = 2.0
    streams = all_drafted([client.ask(CHAT) for _ in range(200)])
    assert {(decode(one.token_ids), one.fault) for one in streams} == {(ANSWER[4:], "")}
    assert fake.most_open == 200
    num_connections = fake.num_connections
    fake.delay_s = 0.0
    assert not drafted(client).fault
    assert fake.num_connections == num_connections


def test_an_answer_of_many_bytes_is_a_fault(fake: FakeEndpoint):
    fake.kind, fake.draft = "whole", lambda *_: "x" * MAX_BYTES
    assert "bytes" in drafted(client_of(fake.url)).fault


def test_a_draft_ends_in_time(fake: FakeEndpoint, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(endpoint_client, "MAX_DRAFT_S", 2.0)
    fake.draft, fake.part, fake.part_s = (lambda *_: "x " * 1000), 1, 0.02
    started, stream = time.monotonic(), drafted(client_of(fake.url))
    assert time.monotonic() - started < 10
    assert (stream.fault, stream.is_late) == ("TimeoutError", True)


# -- sglang-parse doctor --------------------------------------------------------------------


class Characters:
    def encode(self, text: str, **_: object) -> list[int]:
        return encode("", text)


def test_a_sample_draft(fake: FakeEndpoint):
    fake.kind, fake.draft = "whole", lambda _question, answer: f"{answer}, two"[len(answer) :]
    found = sample_draft(f"{fake.url}/v1", 1.0, Characters())
    assert found.startswith("fake drafts ', two': 5 of the target's tokens in ")


@pytest.mark.parametrize(("kind", "draft"), [("status", "x"), ("garbage", "x"), ("whole", "")])
def test_no_sample_draft(fake: FakeEndpoint, kind: str, draft: str):
    fake.kind, fake.draft = kind, lambda *_: draft
    with pytest.raises(Problem, match="drafts? nothing|does not draft"):
        sample_draft(fake.url, 1.0, Characters())
