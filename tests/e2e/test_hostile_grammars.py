"""Grammars that force a million characters, text without an end, or half a character."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.client import EXACT, Client, assert_same, ids_of, parse_info, random_prompts
from support.demo_pair import DEMO
from support.hostile_grammars import GRAMMARS
from support.models import load_tokenizer

PROMPTS = random_prompts(4, 64)
FREE = {"max_new_tokens": 40, "ignore_eos": True}
LIMIT = {"max_new_tokens": 48}
REFUSED = {"a million", "no end", "pattern"}
"""By llguidance, of its own accord: too many expressions, or items."""


@pytest.mark.parametrize("server", ["token", "semantic", "overlap", "blocks"])
def test_hostile_grammars(request: pytest.FixtureRequest, plain: Client, server: str):
    """All at once: the answers are plain's, others' beside them are, and the server lives on."""
    client: Client = request.getfixturevalue(server)
    options = {} if server == "token" else EXACT
    with ThreadPoolExecutor(3 + len(GRAMMARS)) as pool:
        free = [pool.submit(client.generate, p, parse=options, **FREE) for p in PROMPTS[:3]]
        jobs = {
            name: pool.submit(client.send, PROMPTS[3], parse=options, **LIMIT, **grammar)
            for name, grammar in GRAMMARS.items()
        }
    for name, job in jobs.items():
        ours = job.result()
        if server == "blocks" and name in REFUSED:
            assert ours.status_code != 200, name
            continue
        assert parse_info(ours.json())["mode"] == "parse", name
        if server != "blocks":  # llguidance refuses some tokens that xgrammar allows
            assert_same(ours.json(), plain.generate(PROMPTS[3], **LIMIT, **GRAMMARS[name]))
    theirs = plain.generate_all(PROMPTS[:3], 3, **FREE)
    assert ids_of([job.result() for job in free]) == ids_of(theirs)
    client.assert_nothing_lost()


@pytest.mark.parametrize("server", ["token", "overlap"])
def test_a_grammars_end_ends_an_answer_that_ignores_the_models(
    request: pytest.FixtureRequest, plain: Client, server: str
):
    """With the grammar's stop token, as under SGLang's own speculative decoding. Plain decoding
    looks at the grammar one step late, and outputs one token more, which no grammar masks."""
    client: Client = request.getfixturevalue(server)
    wish = {"regex": "[0-9]{40}", "max_new_tokens": 60, "ignore_eos": True}
    theirs = plain.generate(PROMPTS[0], **wish)["output_ids"]
    for _ in range(2):  # the second finds its grammar compiled
        ours = client.generate(PROMPTS[0], **wish, parse={} if server == "token" else EXACT)
        digits, end = ours["output_ids"][:-1], ours["output_ids"][-1]
        assert re.fullmatch("[0-9]{40}", tokenizer.decode(digits))
        assert end == tokenizer.eos_token_id
        assert ours["output_ids"] == theirs[: len(digits) + 1]
    client.assert_nothing_lost()


tokenizer = load_tokenizer(DEMO / "target")
