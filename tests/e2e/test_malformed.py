"""Malformed requests in every API are refused with a reason and do not affect others.

SGLang answers some of them anyway; the server must stay up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from sglang_parse.client.servers import MODEL_NAME
from support.client import EXACT, HTTP, Client, random_prompts, wait_until

PROMPT = random_prompts(1, 51)[0]
SAMPLING = {"max_new_tokens": 4}
HUGE = 10**9
OUTSIDE = "this model's token ids are 0.."
NO_TOKENS = "the prompt has no tokens"


def generate(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"sampling_params": SAMPLING, **fields}


def sampled(**sampling: Any) -> tuple[str, dict[str, Any]]:
    return generate(input_ids=PROMPT, sampling_params=SAMPLING | sampling)


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": "m", "prompt": PROMPT, "max_tokens": 4} | fields


def talk(path: str, said: object = "hi", **fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": said}]
    return path, {"model": "m", "messages": messages, "max_tokens": 4} | fields


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return talk("/v1/chat/completions", **fields)


def anthropic(**fields: Any) -> tuple[str, dict[str, Any]]:
    return talk("/v1/messages", **fields)


def response(**fields: Any) -> tuple[str, dict[str, Any]]:
    asked = {"model": MODEL_NAME, "input": "hi", "max_output_tokens": 4}  # of another: a 404
    return "/v1/responses", asked | fields


def ollama(**fields: Any) -> tuple[str, dict[str, Any]]:
    asked = {"model": "m", "prompt": "hi", "stream": False, "options": {"num_predict": 4}}
    return "/api/generate", asked | fields


REFUSED = [
    (NO_TOKENS, generate(text="")),
    (NO_TOKENS, generate(text=["hi", ""])),
    (NO_TOKENS, generate(text=["hi", ""], stream=True)),
    (NO_TOKENS, generate(text="", sampling_params=SAMPLING | {"n": 2})),
    (NO_TOKENS, generate(input_ids=[[5, 6], []])),
    (OUTSIDE, generate(input_ids=[5, HUGE])),
    (OUTSIDE, generate(input_ids=[5, -1])),
    (OUTSIDE, generate(input_ids=[5, -1], stream=True)),
    (OUTSIDE, generate(input_ids=[[5, 6], [HUGE]])),
    (OUTSIDE, generate(input_ids=[HUGE], sampling_params=SAMPLING | {"n": 2})),
    (NO_TOKENS, completion(prompt=["hi", ""])),
    (OUTSIDE, completion(prompt=[HUGE])),
    (OUTSIDE, completion(prompt=[[5], [-1]])),
    (OUTSIDE, completion(prompt=[HUGE], stream=True)),
    (OUTSIDE, completion(prompt=[HUGE], echo=True, logprobs=1)),
    (OUTSIDE, ("/vertex_generate", {"instances": [{"input_ids": [HUGE]}]})),
    (OUTSIDE, sampled(min_new_tokens=2, stop_token_ids=[HUGE])),
    (OUTSIDE, completion(min_tokens=2, stop_token_ids=[-1])),
    (OUTSIDE, chat(min_tokens=2, stop_token_ids=[HUGE])),
    ("top_k is", sampled(top_k=2**40)),
    ("top_logprobs_num is", generate(input_ids=PROMPT, return_logprob=True, top_logprobs_num=HUGE)),
    ("top_logprobs_num is", completion(logprobs=HUGE)),
    ("top_logprobs_num is", chat(logprobs=True, top_logprobs=HUGE)),
    (
        "logprob_start_len is",
        generate(input_ids=PROMPT, return_logprob=True, logprob_start_len=-5),
    ),
    ("positional_embed", generate(input_ids=PROMPT, positional_embed_overrides=[1])),
    (
        "custom_logit_processor cannot be read",
        generate(input_ids=PROMPT, custom_logit_processor="x"),
    ),
]
"""Error -> request. Each would crash a server without the check."""


def each(make: Callable, **values: Sequence[Any]) -> list[tuple[str, dict[str, Any]]]:
    """A request for every value of every field."""
    return [make(**{name: value}) for name, given in values.items() for value in given]


ODD: dict[str, dict[int, list[tuple[str, dict[str, Any]]]]] = {
    "generate": {
        200: [
            generate(text=[]),
            generate(input_ids=PROMPT, image_data="x"),
            *each(sampled, max_new_tokens=[0], n=[0]),
        ],
        400: [
            generate(),
            *each(generate, input_ids=[[], [2**63], [1.5], [[[5]]], [5] * 5000]),
            generate(input_ids=PROMPT, sampling_params="x"),
            generate(input_ids=PROMPT, lora_path="none"),
            generate(input_ids=PROMPT, session_params={"id": "none"}),
            generate(input_ids=PROMPT, return_logprob=True, logprob_start_len=HUGE),
            generate(input_ids=PROMPT, return_logprob=True, token_ids_logprob=[HUGE]),
            *each(sampled, max_new_tokens=[-1, 4.5], temperature=[-1, "a"], top_p=[0], top_k=[1.5]),
            *each(sampled, logit_bias=[{"999999": 1}, {"5": "a"}, [5]], regex=["("]),
            *each(sampled, custom_params=[5, {"parse": []}]),
        ],
        500: each(sampled, stop_regex=["("]),
    },
    "completions": {
        200: each(completion, n=[-1], logprobs=[-1], stop=[[""]]),
        400: each(
            completion,
            prompt=["", [], [[]], None, 5],
            max_tokens=[-1, HUGE],
            n=[0],
            temperature=["a", -1],
            top_p=[5],
            logit_bias=[{"999999": 1}, {"a": 1}],
            stop=[5],
            seed=[2**80],
            min_tokens=[-1],
            custom_params=[5],
            response_format=[{"type": "x"}],
        ),
    },
    "chat": {
        200: each(chat, stop=[[""]], stream_options=[{"x": 1}]),
        400: each(
            chat,
            messages=[[], None, "x", [{"role": "user"}]],
            max_tokens=[-1],
            n=[0],
            temperature=[-1],
            top_p=[-1],
            seed=[2**80],
            logit_bias=[{"999999": 1}],
            tools=[[{"x": 1}]],
            tool_choice=["x", "required"],
            response_format=[{"type": "json_schema"}],
            custom_params=[{"parse": {"x": 1}}],
            chat_template_kwargs=[5],
            regex=["("],
            min_tokens=[99],
        ),
    },
    "responses": {
        # SGLang leaves out custom_params there.
        200: each(response, input=[""], top_logprobs=[-1], custom_params=[{"parse": 5}]),
        400: each(
            response,
            input=[[], None],
            max_output_tokens=[-1, 0],
            temperature=[-1],
            top_p=[5],
            previous_response_id=["x"],
            tools=[[{"type": "x"}]],
            instructions=[5],
            truncation=["x"],
            reasoning=[{"effort": "x"}],
            store=[5],
            tool_choice=["x"],
            background=[5],
            stream=["x"],
            metadata=[5],
        ),
        404: each(response, model=["", "m"]),
    },
    "anthropic": {
        200: each(anthropic, system=[[]], stop_sequences=[[""]]),
        400: each(
            anthropic,
            messages=[[], None, [{"role": "x"}]],
            max_tokens=[-1, 0, None],
            temperature=[-1],
            top_p=[9],
            top_k=[0, 2**40],
            system=[5],
            stop_sequences=[5],
            tools=[[{"x": 1}]],
            tool_choice=[{"type": "x"}],
            thinking=[{"type": "x"}],
            metadata=[5],
            stream=["x"],
            model=[5],
        ),
    },
    "ollama": {
        200: [
            *each(ollama, prompt=[""], images=[["x"]]),
            ollama(options={"num_predict": 0}),
        ],
        400: each(
            ollama,
            prompt=[None, 5],
            suffix=[5],
            system=[5],
            template=[5],
            format=["x"],
            model=[None],
            options=[5],
        ),
        500: [  # SGLang's Ollama API answers bad values with one
            ollama(options={name: value})
            for name, value in (
                *(("num_predict", -5), ("num_predict", HUGE), ("temperature", "a")),
                *(("temperature", -1), ("top_k", 0), ("top_k", 2**40), ("top_p", 9), ("stop", 5)),
                ("seed", 2**80),
            )
        ],
    },
}
"""API -> status -> odd requests that get it. SGLang answers some of them."""


@pytest.fixture(scope="module")
def text_prompt(plain: Client) -> list[int]:
    return plain.generate(PROMPT, max_new_tokens=60, ignore_eos=True)["output_ids"]


@pytest.fixture
def unharmed(semantic: Client, text_prompt: list[int]) -> Iterator[Client]:
    """Runs a request in parallel and one afterwards: both get their usual output."""
    exact = {"parse": EXACT, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool, semantic.probe.fault("target-verify", "slow", seconds=0.02):
        beside = pool.submit(semantic.generate, PROMPT, max_new_tokens=60, **exact)
        wait_until(lambda: semantic.look()["running"], "the other request to run")
        yield semantic
        assert beside.result()["output_ids"] == text_prompt
    after = semantic.generate(PROMPT, max_new_tokens=12, **exact)
    assert after["output_ids"] == text_prompt[:12]
    semantic.assert_nothing_lost()


def send(client: Client, request: tuple[str, dict[str, Any]]) -> httpx.Response:
    path, body = request
    return HTTP.post(f"{client.url}{path}", json=body, timeout=60)


def test_unusable_inputs_are_a_400_with_the_reason(unharmed: Client):
    for text, request in REFUSED:
        answer = send(unharmed, request)
        # SGLang's native API starts streaming before the check; the event has the code.
        is_400 = answer.status_code == 400 or '"code":400' in answer.text
        assert (is_400, text in answer.text) == (True, True), (request, answer.text)


def test_streamed_chats_return_no_meta_info(semantic: Client):
    """As docs/response-metadata.md says; /generate streams it."""
    answer = send(semantic, chat(stream=True, return_meta_info=True))
    assert answer.status_code == 400
    assert "return_meta_info is not supported with streaming" in answer.text


@pytest.mark.parametrize("api", ODD)
def test_every_value_has_its_own_result(unharmed: Client, api: str):
    """A bad value that begins to be answered fails here, also one that SGLang begins to answer."""
    expected = [(code, request) for code, given in ODD[api].items() for request in given]
    assert len(expected) >= 20
    found = [(send(unharmed, request).status_code, request) for _, request in expected]
    assert found == expected
