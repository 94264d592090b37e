"""What PARSE cannot serve faithfully is served plainly, beside drafting requests, and says so."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from client import Client, parse_info, random_prompts

PROMPT = random_prompts(1, 31)[0]
DRAFTING = random_prompts(4, 32)
LIMIT = {"max_new_tokens": 32, "ignore_eos": True}

CASES = {
    "penalties": {"frequency_penalty": 0.7},
    "penalties ": {"presence_penalty": 0.9},
    "penalties  ": {"repetition_penalty": 1.4},
    "min_new_tokens": {"min_new_tokens": 8, "ignore_eos": False},
    "logit_bias": {"logit_bias": {"17": 12.0}},
    "grammar": {"regex": "(ab|cd){4,6}", "ignore_eos": False},
    "grammar ": {"json_schema": '{"type": "boolean"}', "ignore_eos": False},
}


def _beside_drafting(client: Client, **kwargs) -> dict:
    """The answer to one request while others draft in the same batch."""
    with ThreadPoolExecutor(5) as pool:
        others = [pool.submit(client.generate, prompt, **LIMIT) for prompt in DRAFTING]
        answer = pool.submit(client.generate, PROMPT, **kwargs).result()
        assert all(parse_info(other.result())["mode"] == "parse" for other in others)
    return answer


@pytest.mark.parametrize("name", CASES)
def test_output_is_the_plain_servers(plain: Client, token: Client, name: str):
    params = LIMIT | CASES[name]
    answer = _beside_drafting(token, **params)
    assert answer["output_ids"] == plain.generate(PROMPT, **params)["output_ids"]
    info = parse_info(answer)
    assert (info["mode"], info["reason"]) == ("plain", name.strip())
    assert info["drafted_tokens"] == 0


def test_log_probabilities_are_the_plain_servers(plain: Client, token: Client):
    top = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
        "token_ids_logprob": [5, 9],
    }
    left = _beside_drafting(token, top=top, **LIMIT)
    right = plain.generate(PROMPT, top=top, **LIMIT)
    assert left["output_ids"] == right["output_ids"]
    assert parse_info(left)["reason"] == "log probabilities"
    for key in (
        "output_token_logprobs",
        "output_top_logprobs",
        "output_token_ids_logprobs",
        "input_token_logprobs",
    ):
        ours, theirs = left["meta_info"][key], right["meta_info"][key]
        assert len(ours) == len(theirs) > 0
        assert _flat(ours) == pytest.approx(_flat(theirs), abs=1e-4)


def _flat(nested) -> list[float]:
    if isinstance(nested, (list, tuple)):
        return [x for item in nested for x in _flat(item)]
    return [float(nested)] if isinstance(nested, (int, float)) else []


def test_server_lives_on(token: Client):
    assert parse_info(token.generate(PROMPT, **LIMIT))["mode"] == "parse"
    token.flush()
