"""A KV pool too small for the load, pages, and forced retraction: same output, no leaked slot."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_parse.client.servers import awake
from support.client import Client, parse_info, random_prompts, retractions
from support.servers import BLOCKS, OVERLAP, QUESTION, SEED, Start, parse_flags

NUM_REQUESTS, NEW_TOKENS = 10, 56
PROMPTS = random_prompts(NUM_REQUESTS, seed=31)
# Questions of about 12 tokens each: a verify pass may need more slots than its draft.
SEMANTIC = (*QUESTION, "--parse-segment", "tokens:4", "--parse-max-prefixes", "4")
SHORT_DRAFTS = (
    *("--parse-draft-tokens", "24", "--parse-draft-chunk", "6", *SEED),
    *("--parse-reuse-answers", "20"),
)
TOKEN = ("--parse-verification", "token")
LIKELIHOOD = ("--parse-judge", "likelihood", "--parse-segment", "tokens:4")
ONE = ("--parse-draft-parallel-tokens", "1")
SERVERS = {
    # KV slots for about a third of the load
    "tight-semantic": (*SEMANTIC, *ONE, *OVERLAP, "--page-size", "16", "--max-total-tokens", "720"),
    "tight-token": (*TOKEN, *BLOCKS, "--max-total-tokens", "420"),
    "tight-likelihood": (*LIKELIHOOD, *ONE, *OVERLAP, "--max-total-tokens", "520"),
}
MORE = pytest.mark.nightly("tests/e2e/test_memory.py::test_output_equals_the_plain_servers")
pressures = pytest.mark.parametrize("pressure", ["retraction", pytest.param("pool", marks=MORE)])
"""What requests suffer from: the pool alone, or retractions every few iterations, too."""


class Tight(NamedTuple):
    """A server short of KV slots."""

    name: str
    client: Client
    is_retracting: bool = False

    @property
    def is_token(self) -> bool:
        return TOKEN[0] in SERVERS[self.name]

    def run(self, threshold: float) -> list[dict]:
        """Sends all prompts at once."""
        return self.client.generate_all(
            PROMPTS,
            NUM_REQUESTS,
            max_new_tokens=NEW_TOKENS,
            ignore_eos=True,
            parse={"threshold": threshold, "trace": True},
        )


@pytest.fixture(
    scope="module",
    params=["tight-semantic", "tight-token", pytest.param("tight-likelihood", marks=MORE)],
)
def server(
    request: pytest.FixtureRequest, start_server: Start, block_pair: tuple[Path, Path]
) -> Iterator[Tight]:
    with pytest.MonkeyPatch.context() as environ:
        # Admits more requests than fit into the pool.
        environ.setenv("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "8")
        environ.setenv("SGLANG_TEST_RETRACT_INTERVAL", "5")
        server = start_server(
            request.param, *parse_flags(block_pair, *SHORT_DRAFTS, *SERVERS[request.param])
        )
    with awake(server):
        yield Tight(request.param, Client.of(server))


@pytest.fixture
def tight(server: Tight, pressure: str) -> Iterator[Tight]:
    with retractions(server.client, pressure == "retraction"):
        yield server._replace(is_retracting=pressure == "retraction")


@pytest.fixture(scope="module")
def expected(plain: Client) -> list[list[int]]:
    answers = plain.generate_all(PROMPTS, 4, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return [answer["output_ids"] for answer in answers]


@pressures
def test_output_equals_the_plain_servers(tight: Tight, expected: list):
    # Token mode accepts drafts and is still exact.
    answers = tight.run(threshold=0.5 if tight.is_token else 1.5)
    assert [answer["output_ids"] for answer in answers] == expected
    infos = [parse_info(answer) for answer in answers]
    num_retractions = sum(answer["meta_info"]["num_retractions"] for answer in answers)
    short = sum(info["kv_truncated_drafts"] for info in infos)
    # Not vacuous: the pool was too small, or requests were retracted.
    assert short + num_retractions > 0, (short, num_retractions)
    assert num_retractions > 0 or not tight.is_retracting
    assert all(info["kv_slots_granted"] > info["drafted_tokens"] for info in infos)
    if tight.is_token:
        assert sum(info["accepted_tokens"] for info in infos) > 0
    tight.client.assert_nothing_lost()


@pressures
def test_grammars_survive_the_pressure(tight: Tight, plain: Client):
    """After a retraction a request's matcher goes on where it was."""
    grammar = {"regex": "([a-c]: [0-9]{2,3}\n){9,12}", "max_new_tokens": NEW_TOKENS}
    threshold = 0.5 if tight.is_token else 1.5
    answers = tight.client.generate_all(PROMPTS, 10, parse={"threshold": threshold}, **grammar)
    theirs = plain.generate_all(PROMPTS, 4, **grammar)
    assert [a["text"] for a in answers] == [a["text"] for a in theirs]
    num_retractions = sum(answer["meta_info"]["num_retractions"] for answer in answers)
    assert num_retractions > 0 or not tight.is_retracting


@pressures
def test_texts_survive_the_pressure(tight: Tight, expected: list, tokenizer: Any):
    """Drafts from predictions, and then from the answers to the same prompts."""
    texts = [tokenizer.decode(ids) for ids in expected]
    threshold = 0.5 if tight.is_token else 1.5

    def ask(place: int, **parse: Any) -> dict:
        return tight.client.generate(
            PROMPTS[place],
            parse={"threshold": threshold, **parse},
            top={"cache_salt": "texts"},
            max_new_tokens=NEW_TOKENS,
            ignore_eos=True,
        )

    num_short = 0
    for source, drafts in (("prediction", texts), ("answers", [""] * NUM_REQUESTS)):
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            jobs = [pool.submit(ask, i, draft=draft) for i, draft in enumerate(drafts)]
        answers = [job.result() for job in jobs]
        assert [answer["output_ids"] for answer in answers] == expected
        found = (parse_info(answer)["sources"].get(source) for answer in answers)
        counts = [count for count in found if count]
        assert len(counts) > NUM_REQUESTS / 2
        if tight.is_token:
            assert sum(count["accepted_tokens"] for count in counts) > 0
        num_short += sum(answer["meta_info"]["num_retractions"] for answer in answers)
        num_short += sum(parse_info(answer)["kv_truncated_drafts"] for answer in answers)
    assert num_short > 0
    tight.client.assert_nothing_lost()


@pressures
def test_accepted_text_survives_the_pressure(tight: Tight):
    answers = tight.run(threshold=0.2)
    for answer in answers:
        info = parse_info(answer)
        assert info["accepted_tokens"] + info["target_tokens"] == NEW_TOKENS
        assert info["mode"] == "parse"
    # Drafts got shorter.
    lengths = [len(r["draft_token_ids"]) for a in answers for r in parse_info(a)["trace"]]
    assert min(lengths) < 24, lengths
    tight.client.assert_nothing_lost()
