"""Unsupported requests fall back to plain decoding next to drafting ones, and report it."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from support.client import Client, parse_info, random_prompts

PROMPT = random_prompts(1, 31)[0]
DRAFTING = random_prompts(4, 32)
LIMIT = {"max_new_tokens": 32, "ignore_eos": True}

TOPS = {"sampling mask": {"return_sampling_mask": True}}


def _batched_with_drafts(client: Client, **kwargs) -> dict:
    """Returns the response to a request while others draft in the same batch."""
    seed = {"sampling_seed": kwargs.get("sampling_seed")}
    with ThreadPoolExecutor(5) as pool:
        others = [pool.submit(client.generate, prompt, **LIMIT, **seed) for prompt in DRAFTING]
        answer = pool.submit(client.generate, PROMPT, **kwargs).result()
        assert all(parse_info(other.result())["mode"] == "parse" for other in others)
    return answer


def _assert_plain(answer: dict, reason: str) -> None:
    info = parse_info(answer)
    assert (info["mode"], info["reason"]) == ("plain", reason)
    assert info["drafted_tokens"] == 0


def test_output_equals_the_plain_servers(plain: Client, token: Client):
    """In one batch with drafts."""
    jobs = [(reason, {**LIMIT, "top": top}) for reason, top in TOPS.items()]
    with ThreadPoolExecutor(len(jobs) + len(DRAFTING)) as pool:
        others = [pool.submit(token.generate, prompt, **LIMIT) for prompt in DRAFTING]
        answers = list(pool.map(lambda job: token.generate(PROMPT, **job[1]), jobs))
        drafted = [other.result() for other in others]
    for (reason, params), answer in zip(jobs, answers, strict=True):
        assert answer["output_ids"] == plain.generate(PROMPT, **params)["output_ids"]
        _assert_plain(answer, reason)
    for prompt, answer in zip(DRAFTING, drafted, strict=True):
        assert answer["output_ids"] == plain.generate(prompt, **LIMIT)["output_ids"]
        assert parse_info(answer)["mode"] == "parse"


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.9, "top_k": 7, "top_p": 0.9, "sampling_seed": 3}],
    ids=["greedy", "sampled"],
)
def test_sampling_masks_equal_the_plain_servers(plain: Client, token: Client, params: dict):
    top = TOPS["sampling mask"]
    answer = _batched_with_drafts(token, top=top, **LIMIT, **params)
    expected = plain.generate(PROMPT, top=top, **LIMIT, **params)
    assert answer["output_ids"] == expected["output_ids"]
    ours, theirs = (a["meta_info"]["output_token_sampling_mask"] for a in (answer, expected))
    assert ours == theirs
    assert len(ours) == LIMIT["max_new_tokens"]
    assert max(map(len, ours)) > 1 or not params
    _assert_plain(answer, "sampling mask")


def test_adapters_are_refused_without_lora(plain: Client, token: Client):
    """Neither server was started with ``--enable-lora`` (test_lora.py's is): SGLang's own 400."""
    for client in (plain, token):
        body = {"input_ids": PROMPT, "lora_path": "adapter", "sampling_params": LIMIT}
        response = client.post("/generate", body)
        assert response.status_code == 400
        assert "lora" in response.text.lower()


def test_server_stays_healthy(token: Client):
    assert parse_info(token.generate(PROMPT, **LIMIT))["mode"] == "parse"
    token.assert_nothing_lost()
