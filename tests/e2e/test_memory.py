"""A KV pool too small for the load, pages, and forced retraction: same output, no leaked slot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from sglang_parse.client.servers import awake
from support.client import Client, parse_info, random_prompts
from support.servers import BLOCKS, OVERLAP, QUESTION, SEED, Start, parse_flags

NUM_REQUESTS, NEW_TOKENS = 10, 72
PROMPTS = random_prompts(NUM_REQUESTS, seed=31)
# Questions of about 12 tokens each: a verify pass may need more slots than its draft.
SEMANTIC = (*QUESTION, "--parse-segment", "tokens:4", "--parse-max-prefixes", "4")
SHORT_DRAFTS = ("--parse-draft-tokens", "24", "--parse-draft-chunk", "6", *SEED)
ONE = ("--parse-draft-parallel-tokens", "1")
"""Unless a server says otherwise."""
TOKEN = ("--parse-verification", "token")
LIKELIHOOD = ("--parse-judge", "likelihood", "--parse-segment", "tokens:4")
SERVERS = {
    # name: flags, and the environment that admits more requests than fit into the pool
    "tight-semantic": (*SEMANTIC, *SHORT_DRAFTS, "--max-total-tokens", "640"),
    "tight-token": (*TOKEN, *SHORT_DRAFTS, "--max-total-tokens", "520"),
    "tight-blocks": (*TOKEN, *SHORT_DRAFTS, "--max-total-tokens", "520", *BLOCKS, *OVERLAP),
    "tight-pages": (*SEMANTIC, *SHORT_DRAFTS, "--page-size", "16", "--max-total-tokens", "880"),
    "tight-overlap": (*SEMANTIC, *SHORT_DRAFTS, "--max-total-tokens", "640", *OVERLAP),
    "retracting": (*TOKEN, *SHORT_DRAFTS, *BLOCKS),
    "retracting-overlap": (*TOKEN, *SHORT_DRAFTS, *OVERLAP),
    "retracting-likelihood": (*LIKELIHOOD, *SHORT_DRAFTS, *OVERLAP),
}


class Tight(NamedTuple):
    """A server short of KV slots."""

    name: str
    client: Client

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


@pytest.fixture(scope="module", params=SERVERS)
def tight(
    request: pytest.FixtureRequest, start_server: Start, block_pair: tuple[Path, Path]
) -> Iterator[Tight]:
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "8")
        if request.param.startswith("retracting"):
            environ.setenv("SGLANG_TEST_RETRACT", "1")
            environ.setenv("SGLANG_TEST_RETRACT_INTERVAL", "5")
        server = start_server(
            request.param, *parse_flags(block_pair, *ONE, *SERVERS[request.param])
        )
    with awake(server):
        yield Tight(request.param, Client.of(server))
    server.stop(0)


@pytest.fixture(scope="module")
def expected(plain: Client) -> list[list[int]]:
    answers = plain.generate_all(PROMPTS, 4, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return [answer["output_ids"] for answer in answers]


def test_output_equals_the_plain_servers_and_no_request_starves(tight: Tight, expected: list):
    # Token mode accepts drafts and is still exact.
    answers = tight.run(threshold=0.5 if tight.is_token else 1.5)
    assert [answer["output_ids"] for answer in answers] == expected
    infos = [parse_info(answer) for answer in answers]
    retractions = sum(answer["meta_info"]["num_retractions"] for answer in answers)
    short = sum(info["kv_truncated_drafts"] for info in infos)
    # Not vacuous: the pool was too small, or requests were retracted.
    assert short + retractions > 0, (short, retractions)
    if tight.is_token:
        assert sum(info["accepted_tokens"] for info in infos) > 0
    tight.client.assert_nothing_lost()


def test_grammars_survive_the_pressure(tight: Tight, plain: Client):
    """After a retraction a request's matcher goes on where it was."""
    grammar = {"regex": "([a-c]: [0-9]{2,3}\n){9,12}", "max_new_tokens": NEW_TOKENS}
    threshold = 0.5 if tight.is_token else 1.5
    answers = tight.client.generate_all(PROMPTS, 10, parse={"threshold": threshold}, **grammar)
    theirs = plain.generate_all(PROMPTS, 4, **grammar)
    assert [a["text"] for a in answers] == [a["text"] for a in theirs]
    retractions = sum(answer["meta_info"]["num_retractions"] for answer in answers)
    assert retractions > 0 or tight.name.startswith("tight")


def test_accepted_text_survives_the_pressure(tight: Tight):
    answers = tight.run(threshold=0.2)
    for answer in answers:
        info = parse_info(answer)
        assert info["accepted_tokens"] + info["target_tokens"] == NEW_TOKENS
        assert info["mode"] == "parse"
    # Drafts got shorter.
    lengths = [len(r["draft_token_ids"]) for a in answers for r in parse_info(a)["trace"]]
    if tight.name.startswith("tight"):
        assert min(lengths) < 24, lengths
    tight.client.assert_nothing_lost()
