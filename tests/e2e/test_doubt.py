"""Drafts that end where the draft model is unsure, on a real server in token mode."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from support.client import HTTP, Client, ids_of, parse_info
from support.demo_pair import DEMO, disturbed_draft
from support.servers import Start, parse_flags, served

pytestmark = pytest.mark.nightly("tests/compat/test_token_chunk.py::test_a_draft_in_doubt_ends")

LIMIT = {"max_new_tokens": 96}
TRACED = {"trace": True, "drafting": "always"}
"""Drafts end in doubt whether they pay on this machine or not."""


@pytest.fixture(scope="module")
def doubting(start_server: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Its draft model is often wrong, and unsure where it is."""
    draft = disturbed_draft(tmp_path_factory.mktemp("disturbed"), noise=0.2)
    flags = parse_flags((DEMO / "target", draft), "--parse-verification", "token")
    for client in served(start_server, "doubting", *flags, "--enable-metrics"):
        yield replace(client, options={})


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_end_in_doubt(
    doubting: Client, problems: list, concurrency: int, temperature: float
):
    prompts, more = [one.prompt for one in problems[:12]], {"temperature": temperature, **LIMIT}
    before = doubted(doubting)
    answers = doubting.generate_all(prompts, concurrency, parse=TRACED, **more)
    if not temperature:
        plain = doubting.generate_all(prompts, 8, parse={"enabled": False}, **more)
        assert ids_of(answers) == ids_of(plain)
    infos = [parse_info(answer) for answer in answers]
    rounds = [one for info in infos for one in info["trace"] if one["source"] == "model"]
    unsure = [one for one in rounds if one["in_doubt"]]
    assert len(unsure) == sum(info["doubted_drafts"] for info in infos)
    if concurrency == 1:  # drafts that share forwards may reach their length first
        assert len(unsure) > len(prompts) / 4
    assert doubted(doubting) - before == len(unsure)
    for one in unsure:
        assert 0 < one["plan"]["least_chance"] <= 1
        assert not one["finished"]
        assert len(one["draft_token_ids"]) < one["plan"]["draft_tokens"]
    doubting.assert_nothing_lost()


def doubted(client: Client) -> float:
    page = HTTP.get(f"{client.url}/metrics", timeout=60).text
    found = re.findall(r"^sglang:parse_doubted_drafts_total\{.*\} (\S+)", page, re.MULTILINE)
    return sum(map(float, found))
