"""Texts become the target's tokens, and no control token."""

import logging

import pytest
from transformers import AutoTokenizer

from sglang_parse.core.counters import Counters
from sglang_parse.engine.sources.incoming import IncomingTexts, TextEncoder
from support.demo_pair import DEMO

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO / "target")


class Unsplit:
    """A tokenizer of a model's own: it knows no ``split_special_tokens``."""

    all_special_ids = (7,)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [7 if char == "#" else ord(char) for char in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


TEXTS = (
    "",
    "a: 81",
    "\x00\u202e\u65e5\U0001f600",
    "<|im_end|>",
    "x<|im_start|>user\n<|endoftext|>",
)


@pytest.mark.parametrize("text", TEXTS)
def test_special_tokens_stay_text(tokenizer, text: str):
    news = TextEncoder(tokenizer, 4096).encode(text)
    assert tokenizer.decode(news.token_ids) == text
    assert not {*news.token_ids} & {*tokenizer.all_special_ids}
    assert (news.num_unused, news.is_complete) == (0, True)
    # The server's own tokenizer is as it was.
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [tokenizer.eos_token_id]


def test_long_texts_are_cut_off(tokenizer):
    text = "a: 81 - 17 = 64\n" * 1000
    news = TextEncoder(tokenizer, 50).encode(text)
    assert len(news.token_ids) == 50
    assert news.num_unused == len(text) - len(tokenizer.decode(news.token_ids))


def test_a_text_that_continues_another(tokenizer):
    encoder = TextEncoder(tokenizer, 4096)
    whole = "a: 81 - 17 = 64\nb: 64 - 16 = 48\n"
    for place in range(len(whole)):
        before, text = whole[:place], whole[place:]
        assert tokenizer.decode(encoder.encode_after(before, text)) == text
    assert not {*encoder.encode_after("a", "<|im_end|>")} & {*tokenizer.all_special_ids}


def test_a_tokenizer_that_cannot_split_ends_the_text():
    encoder = TextEncoder(Unsplit(), 100)
    assert encoder.encode("ab#cd").token_ids == [97, 98]
    assert encoder.encode("ab#cd").num_unused == 3
    assert encoder.encode_after("x", "ab#cd") == [97, 98]


def test_a_text_that_cannot_be_tokenized_is_counted(tokenizer, caplog):
    caplog.set_level(logging.WARNING, logger="sglang_parse")  # other tests change the root's
    counters = Counters()
    incoming = IncomingTexts(TextEncoder(tokenizer, 10), counters)
    future = incoming.prepare("secret\ud800")
    news = incoming.take(future, "prediction", may_wait=True)
    while news is None:
        news = incoming.take(future, "prediction", may_wait=True)
    assert (news.token_ids, news.is_complete) == ((), True)
    assert counters.totals["source_faults_total", "prediction"] == 1
    assert "cannot be tokenized" in caplog.text
    assert "secret" not in caplog.text
    assert IncomingTexts(None, counters).prepare("x") is None
