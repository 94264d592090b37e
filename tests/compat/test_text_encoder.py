"""Texts become the target's tokens, and no control token."""

import logging
import threading
import time
from array import array
from collections.abc import Iterator

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from transformers import AutoTokenizer

from sglang_parse.core.counters import Counters
from sglang_parse.engine.sources.incoming import (
    PIECE_CHARS,
    WAIT_S,
    IncomingTexts,
    News,
    TextEncoder,
)
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


@pytest.mark.parametrize("line", ["a: 81 - 17 = 64\n", "a\n\n\n", "\u65e5\u672c ", "word " * 9])
def test_a_text_in_pieces_is_the_same_text(tokenizer, line: str):
    text = line * (3 * PIECE_CHARS // len(line))
    news = TextEncoder(tokenizer, 10**6).encode(text)
    assert tokenizer.decode(news.token_ids) == text
    assert news.num_unused == 0
    if "\n" in line:  # cut at its lines
        assert news.token_ids == tokenizer.encode(text, add_special_tokens=False)
    used = len(tokenizer.decode(news.token_ids[:9000]))
    assert TextEncoder(tokenizer, 9000).encode(text).num_unused == len(text) - used


def test_no_more_is_tokenized_than_an_answer_may_have(tokenizer, monkeypatch: pytest.MonkeyPatch):
    encoder, lengths = TextEncoder(tokenizer, 100), []
    tokens = encoder._tokens
    monkeypatch.setattr(encoder, "_tokens", lambda text: lengths.append(len(text)) or tokens(text))
    text = "a: 81 - 17 = 64\n" * 100_000
    assert len(encoder.encode(text).token_ids) == 100
    assert sum(lengths) <= 2 * PIECE_CHARS


def test_tokens_that_are_text_for_the_model_come_from_texts():
    """Some models write ``<think>`` as one token that is no special one."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    tokenizer.add_tokens(["<think>"])
    (think,) = tokenizer.encode("<think>", add_special_tokens=False)
    ids = TextEncoder(tokenizer, 100).encode("<think>a<|im_end|>").token_ids
    assert ids[0] == think
    assert not {*ids} & {*tokenizer.all_special_ids}


class Owner:
    """A request."""


class Held:
    """An encoder that waits until it may go on."""

    def __init__(self) -> None:
        self.may_go, self.begun = threading.Event(), threading.Semaphore(0)

    def encode(self, text: str) -> News:
        self.begun.release()
        assert self.may_go.wait(60)
        return News([len(text)])


@pytest.fixture
def held() -> Iterator[Held]:
    encoder = Held()
    yield encoder
    encoder.may_go.set()


def test_a_prefill_waits_once_for_all_its_texts(held: Held):
    incoming, owner = IncomingTexts(held, Counters()), Owner()
    texts = [incoming.prepare("x", owner) for _ in range(64)]

    def wait_s() -> float:
        started = time.monotonic()
        incoming.wait(texts)
        return time.monotonic() - started

    assert WAIT_S <= wait_s() < 10 * WAIT_S
    assert incoming._wait_left_s == 0  # nor do other prefills before the next decode iteration
    incoming.end_prefills()
    assert wait_s() >= WAIT_S
    assert incoming.take(texts[0], "prediction") is None
    incoming.end_prefills()
    incoming.wait([incoming.prepare("x" * (PIECE_CHARS + 1), owner)])  # it takes too long anyway
    assert incoming._wait_left_s > WAIT_S / 2
    held.may_go.set()
    incoming.wait(texts)
    assert incoming.take(texts[0], "prediction") == News([1])


def test_short_texts_do_not_queue_behind_long_ones(held: Held):
    incoming, owner = IncomingTexts(held, Counters()), Owner()
    for length in (PIECE_CHARS + 1, 1):
        incoming.prepare("x" * length, owner)
        assert held.begun.acquire(timeout=60)


def test_an_aborted_requests_text_is_left(held: Held):
    """SGLang tells nobody of a request that it aborts in the queue."""
    params = SamplingParams(temperature=0)
    params.normalize(None)
    incoming = IncomingTexts(held, Counters())
    first, aborted = (Req("0", "", array("q", [1]), params, vocab_size=9) for _ in "12")
    texts = [incoming.prepare("x", req) for req in (first, aborted)]
    assert held.begun.acquire(timeout=60)
    aborted.parse_incoming = {"prediction": texts[1]}
    del aborted
    assert texts[1].future.cancelled()
    held.may_go.set()
    incoming.wait(texts[:1])
    assert incoming.take(texts[0], "prediction") == News([1])


def test_a_text_that_cannot_be_tokenized_is_counted(tokenizer, caplog):
    caplog.set_level(logging.WARNING, logger="sglang_parse")  # other tests change the root's
    counters, owner = Counters(), Owner()
    incoming = IncomingTexts(TextEncoder(tokenizer, 10), counters)
    text = incoming.prepare("secret\ud800", owner)
    while (news := incoming.take(text, "prediction")) is None:
        incoming.end_prefills()
        incoming.wait([text])
    assert (news.token_ids, news.is_complete) == ((), True)
    assert counters.totals["source_faults_total", "prediction"] == 1
    assert "cannot be tokenized" in caplog.text
    assert "secret" not in caplog.text
    assert IncomingTexts(None, counters).prepare("x", owner) is None
