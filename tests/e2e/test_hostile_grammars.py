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
LIMIT = {"max_new_tokens": 72}
REFUSED = {"a million", "no end", "pattern"}
"""By llguidance, of its own accord: too many expressions, or items."""


@pytest.mark.parametrize("server", ["token", "semantic", "overlap", "blocks"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_hostile_grammars(request: pytest.FixtureRequest, plain: Client, server: str, name: str):
    """The answer is plain's, beside others', and the server lives on."""
    client: Client = request.getfixturevalue(server)
    options = {} if server == "token" else EXACT
    with ThreadPoolExecutor(4) as pool:
        free = [pool.submit(client.generate, p, parse=options, **FREE) for p in PROMPTS[:3]]
        body = {"parse": options, **LIMIT, **GRAMMARS[name]}
        if server == "blocks" and name in REFUSED:
            params = {"temperature": 0, **LIMIT, **GRAMMARS[name]}
            sent = {"input_ids": PROMPTS[3], "sampling_params": params}
            assert pool.submit(client.post, "/generate", sent).result().status_code != 200
        else:
            ours = pool.submit(client.generate, PROMPTS[3], **body).result()
            assert parse_info(ours)["mode"] == "parse"
            if server != "blocks":  # llguidance refuses some tokens that xgrammar allows
                assert_same(ours, plain.generate(PROMPTS[3], **LIMIT, **GRAMMARS[name]))
        answers = [job.result() for job in free]
    assert ids_of(answers) == ids_of(plain.generate_all(PROMPTS[:3], 3, **FREE))
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
