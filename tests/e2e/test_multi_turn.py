"""A five-turn chat reuses the earlier turns as the plain server does, also for the draft model."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from support.client import Client, parse_info

LIMITS = (18, 40, 35, 50, 33)
"""max_new_tokens of the five turns. The first one's last token is the target's own (1 + 16 + 1);
the third falls back to plain decoding: the draft model prefills it before the fourth."""
STOPS = list(range(3, 300, 12))
"""Stop tokens of every other turn; some fall inside accepted drafts."""


def _turns(client: Client, seed: int) -> list[dict]:
    rng = random.Random(seed)
    history: list[int] = []
    answers = []
    for number, limit in enumerate(LIMITS):
        history += [rng.randrange(3, 300) for _ in range(rng.randrange(8, 30))]
        stops = {"stop_token_ids": STOPS} if number % 2 else {"ignore_eos": True}
        options = {"enabled": number != 2}
        answers.append(client.generate(history, parse=options, max_new_tokens=limit, **stops))
        history += answers[-1]["output_ids"]
    return answers


def _seen(answers: list[dict]) -> list[tuple]:
    return [
        (answer["output_ids"], answer["meta_info"]["cached_tokens"], answer["text"])
        for answer in answers
    ]


def _acceptance(answer: dict) -> float:
    info = parse_info(answer)
    return info["accepted_tokens"] / info["drafted_tokens"]


def _chats(client: Client, concurrency: int) -> list[list[dict]]:
    client.flush()
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda seed: _turns(client, seed), range(81, 84)))


@pytest.fixture(scope="module")
def expected(plain: Client) -> list[list[tuple]]:
    return [_seen(chat) for chat in _chats(plain, 3)]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_five_turns(equal: Client, expected: list, concurrency: int):
    """The draft model is the target: any rejection shows wrong draft KV."""
    chats = _chats(equal, concurrency)
    assert [_seen(chat) for chat in chats] == expected
    stopped = [len(chat[n]["output_ids"]) < LIMITS[n] for chat in chats for n in (1, 3)]
    assert any(stopped)
    for chat in chats:
        cached = [answer["meta_info"]["cached_tokens"] for answer in chat]
        assert cached[0] == 0
        assert cached == sorted(set(cached))
        assert _acceptance(chat[-1]) >= _acceptance(chat[0])
        drafted = [answer for answer in chat if parse_info(answer)["rounds"]]
        assert [_acceptance(answer) for answer in drafted] == [1.0] * len(drafted)
        assert len(drafted) >= 3
        assert parse_info(chat[2])["mode"] == "plain"


def test_five_turns_through_the_chat_api(plain: Client, equal: Client):
    chats = [_chat(client) for client in (plain, equal)]
    for theirs, ours in zip(*chats, strict=True):
        assert ours.message.content == theirs.message.content
        ours_meta, their_meta = (c.model_extra["meta_info"] for c in (ours, theirs))
        assert ours_meta["cached_tokens"] == their_meta["cached_tokens"]
        (info,) = ours_meta["parse"]
        assert info["accepted_tokens"] == info["drafted_tokens"] > 0
    assert chats[1][-1].model_extra["meta_info"]["cached_tokens"] > 0


def _chat(client: Client) -> list:
    client.flush()
    api = openai.OpenAI(base_url=f"{client.url}/v1", api_key="none")
    messages: list = []
    choices = []
    for number, limit in enumerate(LIMITS):
        messages.append({"role": "user", "content": f"Start with {number + 12}\na: + 45"})
        reply = api.chat.completions.create(
            model="demo",
            messages=messages,
            max_tokens=limit,
            temperature=0,
            extra_body={
                "return_meta_info": True,
                "ignore_eos": True,
                "separate_reasoning": False,  # the plain server has a parser for thoughts
                "custom_params": {"parse": client.options_of(None)},
            },
        )
        choices.append(reply.choices[0])
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    return choices
