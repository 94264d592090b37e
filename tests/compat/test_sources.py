"""Sources of drafts and their chain, without a server."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.options import RequestOptions
from sglang_parse.core.phases import (
    ANSWERS,
    EAGLE3,
    ENDPOINT,
    GRAMMAR,
    MODEL,
    PREDICTION,
    PROMPT,
    Draft,
    Phase,
    RequestPolicy,
)
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.request import RequestState
from sglang_parse.core.round import Round
from sglang_parse.core.stage import Stage, StageTime
from sglang_parse.core.text_match import TextMatch
from sglang_parse.engine.logits import grammar as grammar_module
from sglang_parse.engine.sources import chain as chain_module
from sglang_parse.engine.sources import endpoint as endpoint_module
from sglang_parse.engine.sources.chain import NOTHING
from sglang_parse.engine.sources.eagle import take_chain
from sglang_parse.engine.sources.endpoint import FIRST_PAUSE, MAX_LATE
from sglang_parse.engine.sources.endpoint_client import Stream
from sglang_parse.engine.sources.incoming import TextEncoder
from sglang_parse.engine.sources.prompt import LOOK_UP_MS
from sglang_parse.engine.sources.source import News
from sglang_parse.engine.sources.text import SEARCH_MS_PER_TOKEN
from support.engine_parts import engine_parts
from support.rounds import round_of
from support.watched import Watched

pytestmark = pytest.mark.compat

SCOPE = ("tenant", None, None)
STOP = 0


class Characters:
    """A tokenizer with a token per character."""

    all_special_ids = (STOP,)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [*map(ord, text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


class Client:
    """An endpoint's client whose drafts a test fills."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.questions: list[Any] = []
        self.num_closed = 0
        self.arrived = SimpleNamespace(wait=lambda _: False)

    def ask(self, question: Any) -> Stream:
        self.questions.append(question)
        self.streams.append(Stream(task=SimpleNamespace(cancel=self.count_closed)))
        return self.streams[-1]

    def count_closed(self) -> None:
        self.num_closed += 1


class Request(SimpleNamespace):
    """A request; it can be referred to weakly, as SGLang's."""


class Server:
    """The sources of one server, and a request."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        model: bool = False,
        head: Any = None,
        mode: str = "always",
        is_first_rank: bool = True,
        prompt_drafts: str = "off",
        **more: Any,
    ) -> None:
        monkeypatch.setattr(chain_module, "broadcast_object", lambda value: value)
        monkeypatch.setattr(grammar_module, "can_fork_grammars", lambda: True)
        path = "head" if head else ""
        self.config = ParseConfig(
            verification="token", prompt_drafts=prompt_drafts, eagle3_path=path, **more
        )
        self.client = Client()
        parts = engine_parts(
            self.config,
            Controller(mode=mode),
            encoder=TextEncoder(Characters(), 1000) if is_first_rank else None,
            drafter=object() if model else None,
            head=head,
            client=self.client if is_first_rank else None,
        )
        self.controller, self.counters, self.chain = parts.controller, parts.counters, parts.sources

    def request(self, prompt: str = "prompt", prediction: str = "", **more: Any) -> Any:
        req = Request(
            **{"extra_key": None, "cache_salt": None, "lora_id": None, "tokenizer": None},
            grammar=None,
            parse_messages=(),
            origin_input_ids=[*map(ord, prompt)],
            vocab_size=200_000,
            sampling_params=SimpleNamespace(
                max_new_tokens=500, top_k=1, temperature=1.0, custom_params=None
            ),
        )
        vars(req).update(more)
        req.parse_policy = RequestPolicy(threshold=0.5, stop_ids=frozenset({STOP}))
        self.chain.receive(req, RequestOptions(enabled=True, threshold=0.5, draft=prediction))
        req.parse_state = RequestState(req.parse_policy)
        self.chain.begin(req)
        req.parse_state.restart(len(prompt), ())
        while prediction and not req.parse_state.notes.texts[PREDICTION].is_complete:
            self.chain.poll([req], after_prefill=True)
        return req

    def start(self, req: Any, text: str) -> str:
        """The request writes ``text``, and then starts a draft."""
        write(req, text)
        return self.chain.start(req)


class Forces:
    """A walk of a grammar that forces a text, whatever comes before."""

    def __init__(self, text: str, num_allowed: int = 100) -> None:
        self.text, self.num_allowed = text, num_allowed

    def rows(self, _: Any, after: Sequence[int], __: int) -> list:
        allowed = torch.full((4,), -1, dtype=torch.int32)
        return [allowed if k < self.num_allowed else None for k in range(1 + len(after))]

    def forced(self, *_: Any) -> list[int]:
        return [*map(ord, self.text)][: _[-1]]


def constrained(server: Server, walk: Forces, **more: Any) -> Any:
    req = server.request(grammar=walk, **more)
    req.parse_state.notes.grammar = walk
    return req


def drafted(req: Any) -> str:
    assert req.parse_state.phase is Phase.VERIFYING
    return "".join(map(chr, req.parse_state.draft.token_ids))


def write(req: Any, text: str) -> None:
    req.parse_state.write([*map(ord, text)])


def test_the_order_of_sources(monkeypatch: pytest.MonkeyPatch):
    server = Server(monkeypatch, model=True, reuse_answers="9", draft_url="http://host:1")
    req = server.request(prediction="Answer: 42", cache_salt="tenant")
    assert [*req.parse_state.notes.texts] == [PREDICTION, ANSWERS, ENDPOINT]
    assert server.start(req, "A") == ""
    assert drafted(req) == "nswer: 42"
    assert req.parse_state.draft.source == PREDICTION
    assert not server.client.questions
    req = server.request(prediction="x")
    assert server.start(req, "A") == ""
    assert req.parse_state.phase is Phase.WAITING
    assert ANSWERS not in req.parse_state.notes.texts
    assert Server(monkeypatch, model=True).chain.start(server.request()) == ""


@pytest.mark.parametrize(("speedup", "source"), [(1.1, PREDICTION), (30.0, MODEL)])
def test_a_text_drafts_where_it_brings_more_than_the_draft_model(
    monkeypatch: pytest.MonkeyPatch, speedup: float, source: str
):
    """The first draft tells whether a text fits, and this one does, beside a model of this speedup
    over decode steps."""
    server = Server(monkeypatch, model=True, mode="auto")
    for _ in range(8):
        for stage, size in ((Stage.DECODE, 1), (Stage.VERIFY, 8), (Stage.VERIFY, 32)):
            server.controller.observe([StageTime(stage, size, 1, 10.0)], [(None, 1)])
    req = server.request(prediction="one two three four five six seven eight nine ten")
    server.controller.stats(req.parse_state.draft_key).switch(1).speedup = speedup
    assert server.start(req, "o") == ""
    assert req.parse_state.draft.source == PREDICTION
    text = drafted(req)
    outcome = round_of(*[len(text)] * 3, source=PREDICTION)
    server.chain.observe(req, outcome)
    assert server.start(req, text) == ""
    assert req.parse_state.draft.source == source


def test_the_text_that_has_brought_more_drafts_first(monkeypatch: pytest.MonkeyPatch):
    """What a text has cost changes no order: one that does not fit is not asked anyway."""
    server = Server(monkeypatch, reuse_answers="9")
    for losses, source in (((0.5, 0.0), PREDICTION), ((-1.0, -3.0), ANSWERS)):
        req = server.request(prediction="one two three", cache_salt="tenant")
        req.parse_state.notes.texts[ANSWERS].extend([*map(ord, "one two four")])
        for name, loss in zip((PREDICTION, ANSWERS), losses, strict=True):
            req.parse_state.notes.texts[name].length.lose(loss)
        assert server.start(req, "one") == ""
        assert req.parse_state.draft.source == source


def test_nothing_drafts(monkeypatch: pytest.MonkeyPatch):
    server = Server(monkeypatch)
    assert server.start(server.request(), "A") == NOTHING
    req = server.request(prediction="zzz")
    assert server.start(req, "A") == "prediction: does not fit here"
    off = Server(monkeypatch, mode="never", drafting="never")
    assert "drafting is off" in off.start(off.request(prediction="Answer"), "A")


def test_no_longer_than_the_answer(monkeypatch: pytest.MonkeyPatch):
    server = Server(monkeypatch)
    req = server.request(prediction="Answer: 42")
    req.sampling_params.max_new_tokens = 4
    server.start(req, "A")
    assert drafted(req) == "nsw"
    req = server.request(prediction="Answer: 42")
    req.sampling_params.max_new_tokens = 2
    assert server.start(req, "A")


def test_answers_of_a_scope(monkeypatch: pytest.MonkeyPatch):
    server = Server(monkeypatch, reuse_answers="9")
    first = server.request("question", cache_salt="tenant")
    assert server.start(first, "A")
    first.finished_reason, first.output_ids_through_stop = None, [*map(ord, "Answer: 42")]
    server.chain.finish(first)
    again = server.request("question", cache_salt="tenant")
    assert server.start(again, "A") == ""
    assert drafted(again) == "nswer: 42"
    for other in ({"cache_salt": "x"}, {"cache_salt": "tenant", "extra_key": "x"}, {}):
        req = server.request("question", **other)
        assert server.start(req, "A")
    server.chain.flush()
    assert server.start(server.request("question", cache_salt="tenant"), "A")


def test_a_step_reads_the_newest_tokens_only(monkeypatch: pytest.MonkeyPatch):
    """Its work does not grow with the answer, whether the answer follows the text or not."""
    server = Server(monkeypatch, reuse_answers="9")
    req = server.request(prediction="Answer: 42" * 9, cache_salt="tenant")
    output = req.parse_state.output_ids = Watched()
    assert server.start(req, "A") == ""
    write(req, "x" * 16_000)
    server.start(req, "x")  # what is new is read once
    output.num_read = 0
    for text in ("y", "Answer: 4", "2"):
        server.start(req, text)
    assert 0 < output.num_read < 60


def busy_server(monkeypatch: pytest.MonkeyPatch, **more: Any) -> Server:
    """64 requests on a server of 25 ms per step."""
    server = Server(monkeypatch, mode="auto", **more)
    server.controller.num_running = 64
    for _ in range(3):
        step = StageTime(Stage.DECODE, 64, 64, 25.0)
        server.controller.observe([step], [(None, 1)] * 64)
    return server


def test_a_text_that_never_fits_stops_to_be_searched(monkeypatch: pytest.MonkeyPatch):
    """64 such requests on a server of 25 ms per step: looking for their places may take 2 % of the
    time. Other texts are looked through 1,000 times: there are none."""
    server = busy_server(monkeypatch)
    req, num_tokens = server.request(prediction="x"), 1000
    text = req.parse_state.notes.texts[PREDICTION]
    text.match = TextMatch(range(200, 100_200))
    for place in range(num_tokens):
        reason = server.start(req, chr(1 + place % 100))
        assert reason.startswith("prediction: ")
    spent_ms = 64 * SEARCH_MS_PER_TOKEN * text.match.num_searched
    assert 0 < spent_ms < 0.02 * 25 * num_tokens
    assert text.length.net_loss == pytest.approx(spent_ms / 25)


@pytest.mark.parametrize(("brought", "least", "most"), [(40, 0.015, 0.024), (0, 0.003, 0.008)])
def test_searches_of_long_prompts_take_a_small_part_of_a_step(
    monkeypatch: pytest.MonkeyPatch, brought: int, least: float, most: float
):
    """2 % of the time for all of 64 requests, and what each may save; less where no request of the
    server copies. Where no time is left, it decodes, and the loss budget is not charged."""
    server, num_steps = busy_server(monkeypatch, prompt_drafts="on"), 200
    prompt = "".join(map(chr, range(300, 50_300)))
    reqs = [server.request(prompt + prompt) for _ in range(64)]
    copying = server.request("0123456789" * 20)
    server.start(copying, "x")
    for step in range(num_steps):
        copying.parse_state.draft = Draft([*range(brought)], PROMPT)
        server.chain.observe(copying, Round(copying.parse_state.draft, brought))
        for req in reqs:
            assert server.start(req, chr(1 + step)) == NOTHING
    texts = [req.parse_state.notes.texts[PROMPT] for req in reqs]
    num_searched = sum(text.match.num_searched for text in texts)
    num_look_ups = num_searched / len(reqs[0].origin_input_ids)
    spent_ms = SEARCH_MS_PER_TOKEN / 4 * num_searched + LOOK_UP_MS * num_look_ups
    assert least < spent_ms / (25 * num_steps) <= most
    assert {text.length.net_loss for text in texts} == {0.0}


def test_a_short_prompts_look_up_has_a_price(monkeypatch: pytest.MonkeyPatch):
    """0.1 ms, a quarter of the request's part of a step, of which it may save 2 %."""
    server = busy_server(monkeypatch, prompt_drafts="on")
    req = server.request("0123456789" * 20)
    for place in range(100):
        server.start(req, chr(1 + place))
    num_searched = req.parse_state.notes.texts[PROMPT].match.num_searched
    assert 7 * 200 < num_searched < 13 * 200


def test_the_prompt_does_not_draft_behind_a_predictions_end(monkeypatch: pytest.MonkeyPatch):
    """What follows the same tokens in the prompt would not be the answer: that ends, or closes the
    code block that the prediction is in."""
    server, prompt = Server(monkeypatch, prompt_drafts="on"), "one two three four"
    assert server.start(server.request(prompt), "two three") == ""
    req = server.request(prompt, prediction="two three")
    assert server.start(req, "two three") == "prediction: does not fit here"
    assert server.start(req, "; and one ") == ""
    assert req.parse_state.draft.source == PROMPT


def test_beside_a_prediction_one_token_tells_the_prompt_less(monkeypatch: pytest.MonkeyPatch):
    """Where the prediction does not go on, a copy of what it is made from does not, either."""
    server = Server(monkeypatch, mode="auto", prompt_drafts="on")
    for stage, rows, ms in [(Stage.DECODE, 1, 10), (Stage.VERIFY, 9, 20)] * 4:
        server.controller.observe([StageTime(stage, rows, 1, ms, num_rows=rows)], [(None, 1)])
    assert server.start(server.request("one two three"), "Aw") == ""
    assert server.start(server.request("one two three", prediction="xyz"), "Aw")


def test_no_token_of_an_image_is_drafted(monkeypatch: pytest.MonkeyPatch):
    server = Server(monkeypatch, prompt_drafts="on")
    req = server.request("one two three")
    req.origin_input_ids[7:7] = [2**40, 200_000]
    assert server.start(req, "one ") == ""
    assert (drafted(req), req.parse_state.draft.source) == ("two", PROMPT)
    assert server.start(req, "two") == NOTHING


def test_a_draft_arrives_in_parts(monkeypatch: pytest.MonkeyPatch):
    server = Server(monkeypatch, draft_url="http://host:1")
    req = server.request()
    state = req.parse_state
    assert server.start(req, "A") == ""
    assert state.phase is Phase.WAITING
    (stream,), (question,) = server.client.streams, server.client.questions
    assert (question.answer_ids, question.temperature) == ([ord("A")], 0.0)
    server.chain.poll([req])
    assert server.chain.resume(req) == ""
    assert state.phase is Phase.WAITING
    stream.token_ids = [*map(ord, "nswer of")]
    server.chain.poll([req])
    server.chain.resume(req)
    assert state.phase is Phase.WAITING  # 16 tokens, or its end
    stream.token_ids = [*map(ord, "nswer of many words")]
    server.chain.poll([req])
    assert server.chain.resume(req) == ""
    assert drafted(req) == "nswer of many wo"
    server.start(req, "nswer of many wo")  # all of it is right
    assert state.phase is Phase.WAITING
    stream.token_ids = [*map(ord, "nswer of many words.")]
    stream.is_complete = stream.ends_answer = True
    server.chain.poll([req])
    server.chain.resume(req)
    assert drafted(req) == "rds."
    assert len(server.client.questions) == 1


def test_a_divergence_asks_anew(monkeypatch: pytest.MonkeyPatch):
    server = Server(monkeypatch, draft_url="http://host:1")
    req = server.request()
    server.start(req, "A")
    stream = server.client.streams[0]
    stream.token_ids, stream.is_complete = [*map(ord, "nswer")], True
    server.chain.poll([req])
    server.chain.resume(req)
    assert drafted(req) == "nswer"
    server.start(req, "nother")
    assert req.parse_state.phase is Phase.WAITING
    assert server.client.questions[1].answer_ids == [*map(ord, "Another")]
    req.finished_reason = None
    server.chain.finish(req)
    assert server.client.num_closed == 2


@pytest.mark.parametrize(("num_matched", "num_closed"), [(5, 0), (4, 1)])
def test_a_refused_draft_that_the_target_writes_too_is_no_divergence(
    monkeypatch: pytest.MonkeyPatch, num_matched: int, num_closed: int
):
    server = Server(monkeypatch, draft_url="http://host:1")
    req = server.request()
    server.start(req, "A")
    server.client.streams[0].token_ids = [*map(ord, "nswer of many words")]
    server.chain.poll([req])
    server.chain.resume(req)
    outcome = round_of(5, 5, 0, reject_end=5, num_matched=num_matched, source=ENDPOINT)
    server.chain.observe(req, outcome)
    assert server.client.num_closed == num_closed


def test_a_fault_is_counted_and_pauses(monkeypatch: pytest.MonkeyPatch, caplog):
    caplog.set_level(logging.WARNING, logger="sglang_parse")  # other tests change the root's
    server = Server(monkeypatch, draft_url="http://user:secret@host:1")
    for number in range(1, 3):
        req = server.request()
        write(req, "A")
        while server.chain.start(req):
            pass
        stream = server.client.streams[-1]
        stream.fault, stream.is_complete = "ClientConnectorError", True
        server.chain.poll([req])
        assert server.chain.resume(req) == "endpoint: no draft came"
        req.parse_state.skip_draft("")
        assert server.counters.totals["source_faults_total", ENDPOINT] == number
        refused = [server.start(server.request(), "A") for _ in range(FIRST_PAUSE)]
        assert set(refused) == {"endpoint: it failed before"}
        assert server.start(req, "A")  # not again for this answer
    assert caplog.text.count("no drafts from host:1: ClientConnectorError") == 1
    assert "secret" not in caplog.text


def test_drafts_that_end_together_are_one_fault(monkeypatch: pytest.MonkeyPatch, caplog):
    caplog.set_level(logging.INFO, logger="sglang_parse")
    server = Server(monkeypatch, draft_url="http://host:1")
    reqs = [server.request() for _ in range(8)]
    for req in reqs:
        assert server.start(req, "A") == ""
    for number, stream in enumerate(server.client.streams):
        stream.token_ids = [*map(ord, "nswer")]
        server.chain.poll(reqs)  # the others' text arrives, and then they fail, too
        stream.fault, stream.is_complete = "ClientPayloadError", True
        server.chain.poll(reqs)
        assert server.counters.totals["source_faults_total", ENDPOINT] == number + 1
    assert caplog.text.count("no drafts from") == 1
    assert "come again" not in caplog.text
    refused = [server.start(server.request(), "A") for _ in range(FIRST_PAUSE)]
    assert set(refused) == {"endpoint: it failed before"}
    assert server.start(server.request(), "A") == ""


def lose(server: Server, **fault: Any) -> str:
    """A request asks for a draft, which is lost; returns why no draft was asked for, if so."""
    req = server.request()
    if reason := server.start(req, "A"):
        return reason
    stream = server.client.streams[-1]
    stream.fault, stream.is_complete = "some fault", True
    for name, value in fault.items():
        setattr(stream, name, value)
    server.chain.poll([req])
    assert server.chain.resume(req) == "endpoint: no draft came"
    return ""


def test_a_refused_request_pauses_nobody(monkeypatch: pytest.MonkeyPatch, caplog):
    caplog.set_level(logging.WARNING, logger="sglang_parse")
    server = Server(monkeypatch, draft_url="http://user:secret@host:1")
    for _ in range(100):
        assert lose(server, fault="status 400", is_refused=True) == ""
    assert server.counters.totals["source_faults_total", ENDPOINT] == 100
    assert caplog.text.count("a draft from host:1 is lost: status 400") == 1
    assert "no drafts from" not in caplog.text
    req = server.request()
    assert server.start(req, "A") == ""
    stream = server.client.streams[-1]
    stream.fault, stream.is_complete, stream.is_refused = "status 400", True, True
    server.chain.poll([req])
    server.chain.resume(req)
    assert server.start(req, "n") == "endpoint: its drafts do not pay"  # not in this answer
    assert server.start(server.request(), "A") == ""


def test_late_drafts_in_a_row_pause(monkeypatch: pytest.MonkeyPatch):
    server = Server(monkeypatch, draft_url="http://host:1")
    for _ in range(2):  # a text between them starts the count anew
        for _ in range(MAX_LATE - 1):
            assert lose(server, is_late=True) == ""
        req = server.request()
        assert server.start(req, "A") == ""
        server.client.streams[-1].token_ids = [*map(ord, "nswer")]
        server.chain.poll([req])
    for _ in range(MAX_LATE):
        assert lose(server, is_late=True) == ""
    refused = [server.start(server.request(), "A") for _ in range(FIRST_PAUSE)]
    assert set(refused) == {"endpoint: it failed before"}
    assert lose(server, is_late=True) == ""  # one more is enough
    assert lose(server) == "endpoint: it failed before"


def test_a_retracted_request_has_no_draft_on_its_way(monkeypatch: pytest.MonkeyPatch):
    """It may be aborted in the waiting queue, where nobody tells PARSE; else it asks anew."""
    server = Server(monkeypatch, draft_url="http://host:1")
    req = server.request()
    assert server.start(req, "A") == ""
    server.client.streams[0].token_ids = [*map(ord, "nswer")]
    server.chain.poll([req])
    server.chain.retract(req)
    assert server.client.num_closed == 1
    req.parse_state.restart(7, [ord("A")])
    server.chain.poll([req])
    assert server.start(req, "n") == ""
    assert req.parse_state.phase is Phase.WAITING
    assert server.client.questions[1].answer_ids == [*map(ord, "An")]


def test_a_request_that_ends_without_notice_ends_its_draft(monkeypatch: pytest.MonkeyPatch):
    server = Server(monkeypatch, draft_url="http://host:1")
    req = server.request()
    assert server.start(req, "A") == ""
    assert server.client.num_closed == 0
    del req
    gc.collect()
    assert server.client.num_closed == 1


def test_a_request_waits_no_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch):
    now = SimpleNamespace(value=100.0)
    monkeypatch.setattr(endpoint_module.time, "monotonic", lambda: now.value)
    server = Server(monkeypatch, draft_url="http://host:1", draft_timeout=0.5)
    req = server.request()
    server.start(req, "A")
    server.chain.poll([req])
    now.value += 0.4
    server.chain.poll([req])
    assert server.chain.resume(req) == ""
    now.value += 0.2
    server.chain.poll([req])
    assert server.chain.resume(req) == "endpoint: no draft came"
    assert server.client.num_closed == 1


def test_news_for_other_ranks(monkeypatch: pytest.MonkeyPatch):
    """Rank 1 has no client and does as rank 0's news say."""
    server = Server(monkeypatch, draft_url="http://host:1", is_first_rank=False)
    req = server.request()
    assert server.start(req, "A") == ""
    news = News([*map(ord, "nswer of many words")], is_complete=False, ends_answer=False)
    monkeypatch.setattr(chain_module, "broadcast_object", lambda found: [news for _ in found])
    server.chain.poll([req])
    server.chain.resume(req)
    assert drafted(req) == "nswer of many wo"


def test_forced_text_drafts_where_nothing_else_does(monkeypatch: pytest.MonkeyPatch):
    forces = Forces('name": "')
    server = Server(monkeypatch)
    req = constrained(server, forces)
    assert server.start(req, '{"') == ""
    assert (drafted(req), req.parse_state.draft.source) == ('name": "', GRAMMAR)
    req = constrained(server, forces, prediction='{"name": "Ada"}')
    assert server.start(req, '{"') == ""
    assert req.parse_state.draft.source == PREDICTION
    req = constrained(Server(monkeypatch, model=True), forces)
    assert server.chain.start(server.request()) == NOTHING  # no grammar
    with_model = Server(monkeypatch, model=True)
    assert with_model.start(req := constrained(with_model, forces), "{") == ""
    assert req.parse_state.phase is Phase.DRAFTING


def test_forced_text_that_does_not_draft(monkeypatch: pytest.MonkeyPatch):
    server = Server(monkeypatch)
    for walk in (Forces(""), Forces("abc")):
        assert server.start(constrained(server, walk), "{") == NOTHING
    off = Server(monkeypatch, mode="never", drafting="never")
    assert off.start(constrained(off, Forces("a longer text")), "{") == NOTHING


def test_forced_text_that_the_target_spells_otherwise_ends(monkeypatch: pytest.MonkeyPatch):
    server = Server(monkeypatch, mode="auto")
    outcome = round_of(6, 6, 0, source=GRAMMAR)
    num_drafts = 0
    while not server.start(req := constrained(server, Forces("abcdef")), "{"):
        server.chain.observe(req, outcome)
        num_drafts += 1
    assert 5 < num_drafts < 100
    # Now and then it is tried again.
    tries = [server.start(constrained(server, Forces("abcdef")), "{") for _ in range(200)]
    assert 1 <= tries.count("") <= 5


@pytest.mark.parametrize("always", [False, True])
def test_who_asks_for_drafts_gets_them_whatever_a_pass_costs(
    monkeypatch: pytest.MonkeyPatch, always: bool
):
    server = Server(monkeypatch, mode="auto")
    for _ in range(4):
        server.controller.observe([StageTime(Stage.DECODE, 1, 1, 10.0)], [(None, 1)])
        server.controller.observe([StageTime(Stage.VERIFY, 8, 0, 1e4)], [(None, 1)])
    text = "one two three four five six seven"
    changed = server.request(prediction=text)
    forced = constrained(server, Forces("abcdef"))
    for req in (changed, forced):
        req.parse_state.policy = replace(req.parse_state.policy, always_drafts=always)
    server.start(changed, "x")
    write(changed, "xtwo three")
    server.start(changed, " ")
    server.start(forced, "{")
    drafts = [req.parse_state.phase is Phase.VERIFYING for req in (changed, forced)]
    assert drafts == [always, always]


# -- tails of others' drafts ------------------------------------------------------------

HEAD = SimpleNamespace(num_steps=3, steps_for=lambda _: 3)
SPLIT = "one two three four five six"
SURE = 12
"""Level of a draft token."""


def proposed(
    monkeypatch: pytest.MonkeyPatch,
    chain: str,
    prediction: str = SPLIT,
    *,
    limit: int = 100,
    judge: str | None = None,
    written: str = "zzzz",
    **more: Any,
) -> tuple[Server, Any]:
    """A request whose answer has left its texts; the head proposes the characters of ``chain``."""
    server = Server(monkeypatch, head=HEAD, **more)
    req = server.request(prediction=prediction)
    state = req.parse_state
    state.policy = replace(state.policy, proposer=EAGLE3, judge=judge)
    assert server.start(req, written) == ""
    assert (state.phase, state.draft.source) == (Phase.DECODING, EAGLE3)
    take_chain(req, [*map(ord, chain)])
    server.chain.extend(req, limit)
    return server, req


def tail_of(req: Any) -> tuple[str, str]:
    """The text behind the chain, and whose it is."""
    draft = req.parse_state.draft
    at = len(draft.token_ids) if draft.tail_at is None else draft.tail_at
    return "".join(map(chr, draft.token_ids[at:])), draft.tail_source


def verified(server: Server, req: Any, num_output: int) -> None:
    """The request's draft is kept as far as that."""
    one = Round(req.parse_state.draft, num_output, bonus=(ord("#"),))
    server.chain.observe(req, one)
    req.parse_state.count_round(one)
    req.parse_state.write(one.tokens)


def test_a_text_goes_on_where_a_chain_ends(monkeypatch: pytest.MonkeyPatch):
    """``room`` slots are planned for it, and it drafts alone behind what was output of it."""
    server, req = proposed(monkeypatch, "four")
    assert tail_of(req) == (" five six", PREDICTION)
    assert req.parse_state.draft.judge is None
    verified(server, req, 4 + 5)
    counts = req.parse_state.notes.telemetry.sources
    assert (counts[EAGLE3].accepted_tokens, counts[EAGLE3].drafted_tokens) == (4, 4)
    assert (counts[PREDICTION].accepted_tokens, counts[PREDICTION].drafted_tokens) == (5, 9)
    assert (counts[EAGLE3].rounds, counts[PREDICTION].rounds) == (1, 0)
    text = req.parse_state.notes.texts[PREDICTION]
    assert text.length.net_loss == -5.0  # tried for nothing where nothing is timed
    assert server.start(req, "") == ""
    assert server.start(req, "six") == ""


def test_a_chain_that_is_in_no_text_stays_alone(monkeypatch: pytest.MonkeyPatch):
    _, req = proposed(monkeypatch, "abcd")
    assert tail_of(req) == ("", "")
    assert req.parse_state.draft.tail_at is None
    _, req = proposed(monkeypatch, "six")  # where the text ends
    assert tail_of(req) == ("", "")


@pytest.mark.parametrize(("limit", "tail"), [(0, ""), (1, " "), (3, " fi"), (100, " five six")])
def test_a_tail_has_slots(monkeypatch: pytest.MonkeyPatch, limit: int, tail: str):
    assert tail_of(proposed(monkeypatch, "four", limit=limit)[1])[0] == tail


def test_the_answers_end_is_the_targets(monkeypatch: pytest.MonkeyPatch):
    """No tail ends the answer: by a stop token, or by its length."""
    prompt = "one two three fo" + chr(STOP)
    for judge in (None, "likelihood"):
        server, req = proposed(monkeypatch, "two ", "", written="one ", prompt_drafts="off")
        assert tail_of(req) == ("", "")
        server = Server(monkeypatch, head=HEAD, prompt_drafts="on")
        req = server.request(prompt)
        req.parse_state.policy = replace(req.parse_state.policy, proposer=EAGLE3, judge=judge)
        assert server.start(req, "xyz") == ""
        take_chain(req, [*map(ord, "two ")])
        server.chain.extend(req, 100)
        assert tail_of(req) == ("three fo", PROMPT)
    server, req = proposed(monkeypatch, "four")
    req.sampling_params.max_new_tokens = 4 + 4 + 3
    req.parse_state.draft.token_ids[4:] = []
    server.chain.extend(req, 100)
    assert tail_of(req)[0] == " f"


@pytest.mark.parametrize("is_exact", [False, True])
def test_a_copy_makes_a_chain_exact_and_no_judged_draft(
    monkeypatch: pytest.MonkeyPatch, is_exact: bool
):
    """All of a draft is verified alike, by the stricter rule; what a draft model wrote for a judge
    is extended by texts of the same rule only."""
    prompt_drafts = "on" if is_exact else "off"
    server = Server(monkeypatch, head=HEAD, model=True, prompt_drafts=prompt_drafts)
    for source in (EAGLE3, MODEL):
        req = server.request(SPLIT, prediction="" if is_exact else SPLIT)
        state = req.parse_state
        state.policy = replace(state.policy, proposer=EAGLE3, judge="likelihood")
        write(req, "zzzz")
        for text in state.notes.texts.values():
            text.follow(state.output_ids)
        assert server.chain.start(req) == ""  # the draft model's
        assert state.draft.source == MODEL
        if source == EAGLE3:
            state.wait_for_proposal(4, EAGLE3, is_exact=False)
            take_chain(req, [*map(ord, "four")])
        else:
            state.add_draft([*map(ord, "four")], 4, num_launched=0, levels=[SURE] * 4)
        server.chain.extend(req, 100)
        extends = not is_exact or source == EAGLE3
        assert tail_of(req)[0][:9] == (" five six" if extends else "")
        assert state.draft.judge == (None if is_exact and extends else "likelihood")


def test_a_draft_that_its_writer_ended_is_not_extended(monkeypatch: pytest.MonkeyPatch):
    server = Server(monkeypatch, model=True)
    for ids, tail in (([*map(ord, "four")], " five six"), ([*map(ord, "four"), STOP], "")):
        req = server.request(prediction=SPLIT)
        assert server.start(req, "zzzz") == ""
        assert (req.parse_state.draft.source, req.parse_state.draft.room) == (MODEL, 32)
        levels = [SURE] * len(ids)
        req.parse_state.add_draft(ids, len(ids), num_launched=0, levels=levels)
        server.chain.extend(req, 100)
        assert tail_of(req)[0] == tail


def test_a_grammar_ends_a_tail(monkeypatch: pytest.MonkeyPatch):
    server = Server(monkeypatch, head=HEAD)
    walk = Forces("", num_allowed=7)
    req = constrained(server, walk, prediction=SPLIT)
    req.parse_state.policy = replace(req.parse_state.policy, proposer=EAGLE3)
    assert server.start(req, "zzzz") == ""
    take_chain(req, [*map(ord, "four")])
    server.chain.extend(req, 100)
    assert tail_of(req)[0] == " fi"


def test_tails_that_are_never_reached_stop(monkeypatch: pytest.MonkeyPatch):
    """Their rows are charged to the text's budget, with which room for them ends; and that a chain
    of this match is not kept is remembered."""
    server, req = proposed(monkeypatch, "four")
    text, kept = req.parse_state.notes.texts[PREDICTION], []
    source = server.chain._by_name[PREDICTION]
    for _ in range(60):
        kept.append(source._kept.chance(text.match_len))
        text.cost = 0.2
        verified(server, req, 0)
        assert server.start(req, "zzzz") == ""
        take_chain(req, [*map(ord, "four")])
        server.chain.extend(req, 100)
        if not tail_of(req)[0]:
            break
    assert kept[-1] < kept[0]
    assert text.length.left(len(req.parse_state.output_ids)) <= 0 == req.parse_state.draft.room
