"""Requests of the question pair: ends, log probabilities in OpenAI's form, drafts in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from support.client import EXACT, Client, assert_same, chunks_of, flat, parse_info
from support.demo_pair import DEMO
from support.models import load_model

MORE = pytest.mark.nightly("tests/e2e/test_demo_requests.py::test_end_token")
WHOLE = {"threshold": 0.0, "trace": True}
"""Every draft is accepted."""
NEAR_TIE = 1e-4
"""Between logits: rows of one forward are rounded otherwise than rows of another."""


def test_end_token(demo_plain: Client, demo: Client, problems: list):
    """The demo pair ends its answers with EOS."""
    prompts = [problem.prompt for problem in problems[:6]]
    lefts = demo.generate_all(prompts, 6, max_new_tokens=200, parse=EXACT)
    rights = demo_plain.generate_all(prompts, 6, max_new_tokens=200)
    for left, right in zip(lefts, rights, strict=True):
        assert_same(left, right)
        assert left["meta_info"]["finish_reason"]["type"] == "stop"


@MORE
def test_ignore_eos_drafts_past_the_end_token(
    demo_plain: Client, demo: Client, problems: list, tokenizer: Any
):
    """From the answers' last lines on."""
    chosen = problems[:2]
    prompts = [one.prompt + one.problem.solution.rpartition("\n")[0] for one in chosen]
    params = {"max_new_tokens": 80, "ignore_eos": True}
    lefts = demo.generate_all(prompts, 2, parse=EXACT, **params)
    for left, right in zip(lefts, demo_plain.generate_all(prompts, 2, **params), strict=True):
        assert_same(left, right)
        assert left["meta_info"]["completion_tokens"] == 80
        assert tokenizer.eos_token_id in left["output_ids"][:24]


def chat_logprobs(chunks: Sequence[dict], part: str) -> tuple[str, list[dict]]:
    """Text and entries of a chat answer, whole or in chunks."""
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    text = "".join(choice[part].get("content") or "" for choice in choices)
    found = [c["logprobs"]["content"] for c in choices if c.get("logprobs")]
    return text, [entry for entries in found for entry in entries]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_log_probabilities_in_openais_form(
    demo: Client, demo_plain: Client, problems: list, is_stream: bool
):
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": problems[0].prompt}],
        "temperature": 0,
        "max_tokens": 80,
        "logprobs": True,
        "top_logprobs": 2,
    }
    found = []
    for client, options in ((demo, {"custom_params": {"parse": EXACT}}), (demo_plain, {})):
        if is_stream:
            chunks = [*chunks_of(client, "/v1/chat/completions", {**body, **options})]
            found.append(chat_logprobs(chunks, "delta"))
        else:
            answer = client.post("/v1/chat/completions", {**body, **options}).json()
            found.append(chat_logprobs([answer], "message"))
    (text, entries), (expected, plain_entries) = found
    assert text == expected
    assert [entry["token"] for entry in entries] == [entry["token"] for entry in plain_entries]
    ours, theirs = (
        flat([[e["logprob"], [top["logprob"] for top in e["top_logprobs"]]] for e in part])
        for part in (entries, plain_entries)
    )
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert len(ours) > 100


@pytest.fixture(scope="module")
def demo_draft_model() -> Any:
    return load_model(DEMO / "draft")


@pytest.mark.parametrize(("concurrency", "count"), [(8, 12), pytest.param(1, 4, marks=MORE)])
def test_the_demo_draft_writes_what_its_weights_say(
    demo: Client,
    demo_draft_model: Any,
    problems: list,
    tokenizer: Any,
    concurrency: int,
    count: int,
):
    """Each draft against one causal forward of plain transformers; stop tokens lie in blocks."""
    prompts = [
        tokenizer.encode(problem.prompt, add_special_tokens=False) for problem in problems[:count]
    ]
    answers = demo.generate_all(prompts, concurrency, parse=WHOLE, max_new_tokens=256)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"
        for record in parse_info(answer)["trace"]:
            before = [*prompt, *answer["output_ids"][: record["output_start"]]]
            assert_greedy(demo_draft_model, before, record["draft_token_ids"])
    infos = [parse_info(answer) for answer in answers]
    # At 1, few drafts may all fall to one token per forward, which costs as much at times:
    # test_blocks.py writes blocks at 1.
    if concurrency > 1:
        assert sum(i["drafted_tokens"] for i in infos) > sum(i["draft_forwards"] for i in infos)
    demo.assert_nothing_lost()


def assert_greedy(model: Any, before: list[int], draft: list[int]) -> None:
    """Every token is the model's likeliest after those before it, or nearly ties with it."""
    with torch.no_grad():
        logits = model(torch.tensor([[*before, *draft]])).logits[0, len(before) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(draft)[:, None])[:, 0]
    assert float((logits.amax(-1) - chosen).max()) < NEAR_TIE


@pytest.mark.parametrize("temperature", [0, 1])
def test_no_number_but_the_targets_own_is_accepted(
    demo: Client, problems: list, tokenizer: Any, temperature: float
):
    """At threshold 0, where every verdict accepts; under sampling, against the drawn token."""
    prompts, params = [problem.prompt for problem in problems[:6]], {"max_new_tokens": 100}
    params |= {"temperature": temperature, "ignore_eos": True}
    others = {}
    for strict in ("none", "numbers"):
        others[strict] = num_refused = 0
        for answer in demo.generate_all(prompts, 8, parse={**WHOLE, "strict": strict}, **params):
            info = parse_info(answer)
            for record in info["trace"]:
                accepted = record["draft_token_ids"][: record["accepted_len"]]
                pairs = zip(accepted, record["target_token_ids"], strict=False)
                wrong = [pair for pair in pairs if pair[0] != pair[1]]
                texts = [tokenizer.decode(pair) for pair in wrong]
                others[strict] += sum(any(map(str.isdigit, text)) for text in texts)
                if record["strict"]:
                    place = record["strict"]["place"]
                    assert record["accepted_len"] <= place
                    assert record["draft_token_ids"][place] != record["target_token_ids"][place]
            num_refused += info.get("strict_refusals", {}).get("numbers", 0)
        assert (num_refused > 0) == (strict == "numbers")
    assert others["none"] > others["numbers"] == 0
