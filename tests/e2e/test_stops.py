"""Stop conditions inside accepted drafts end the output exactly as plain decoding does."""

import pytest

from support.client import Client, assert_same, chunks_of, random_prompts

PROMPTS = random_prompts(2, 21)


@pytest.fixture(scope="module")
def free_running(plain: Client) -> list[dict]:
    return [plain.generate(p, max_new_tokens=60, ignore_eos=True) for p in PROMPTS]


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 9, 10, 17])
def test_max_new_tokens(plain: Client, token: Client, limit: int):
    for prompt in PROMPTS:
        params = {"max_new_tokens": limit, "ignore_eos": True}
        assert_same(token.generate(prompt, **params), plain.generate(prompt, **params))


@pytest.mark.parametrize("place", [1, 9, 20, 44])
def test_stop_token(plain: Client, token: Client, free_running: list[dict], place: int):
    for prompt, free in zip(PROMPTS, free_running, strict=True):
        params = {"max_new_tokens": 60, "stop_token_ids": [free["output_ids"][place]]}
        assert_same(token.generate(prompt, **params), plain.generate(prompt, **params))


@pytest.mark.parametrize("place", [3, 12, 30])
def test_stop_string(plain: Client, token: Client, free_running: list[dict], place: int):
    for prompt, free in zip(PROMPTS, free_running, strict=True):
        text = free["text"]
        start = len(text) * place // 60
        params = {"max_new_tokens": 60, "ignore_eos": True, "stop": [text[start : start + 3]]}
        assert_same(token.generate(prompt, **params), plain.generate(prompt, **params))


def test_the_first_of_several_stop_strings(plain: Client, token: Client, free_running: list[dict]):
    """The last stop string of the list comes first in the text and ends the output."""
    for prompt, free in zip(PROMPTS, free_running, strict=True):
        text = free["text"]
        places = [len(text) * tenths // 10 for tenths in (8, 6, 3, 4)]
        params = {"max_new_tokens": 60, "ignore_eos": True}
        params["stop"] = [text[place : place + 3] for place in places]
        assert_same(token.generate(prompt, **params), plain.generate(prompt, **params))


def test_streaming_gives_the_same_text(token: Client, free_running: list[dict]):
    for prompt, free in zip(PROMPTS, free_running, strict=True):
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True},
        }
        chunks = [*chunks_of(token, "/generate", body)]
        assert chunks[-1]["text"] == free["text"]
        texts = [chunk["text"] for chunk in chunks]
        assert all(b.startswith(a) for a, b in zip(texts, texts[1:], strict=False))
        assert len(chunks) > 3
        (info,) = chunks[-1]["meta_info"]["parse"]
        assert info["mode"] == "parse"
