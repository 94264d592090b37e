"""The radix cache holds prompts and answers with their own KV, never a question's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from support.client import Client, parse_info, random_prompts

LIMIT = {"max_new_tokens": 40, "ignore_eos": True}
OPTIONS = (
    {"trace": True},
    {"trace": True, "threshold": 0.0},
    {"trace": True, "threshold": 1.5},
    {"enabled": False},
)
"""Answers that end with a draft, with a bonus token, or without any draft."""
TARGET, DRAFT = 0, 1
TOLERANCE = 1e-3
"""Tolerance of a KV fingerprint; a test checks that different tokens differ by far more."""


@pytest.mark.parametrize("server", ["semantic", "token", "blocks"])
def test_only_prompts_and_answers_are_reachable(request: pytest.FixtureRequest, server: str):
    client: Client = request.getfixturevalue(server)
    client.flush()
    prompts = random_prompts(8, 71)
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(client.generate, prompt, parse=options, **LIMIT)
            for prompt, options in zip(prompts, OPTIONS * 2, strict=True)
        ]
        answers = [job.result() for job in jobs]
    rounds = [record for a in answers for record in parse_info(a).get("trace", ())]
    num_questions = sum(len(record["question_token_ids"]) for record in rounds)
    assert num_questions > 20 or server == "token"
    assert any(record["accepted_len"] < len(record["draft_token_ids"]) for record in rounds)

    tree = client.look()["tree"]
    texts = [prompt + answer["output_ids"] for prompt, answer in zip(prompts, answers, strict=True)]
    # The last output token has no KV, and the tree holds whole pages. Everything else of every
    # answer is cached, and nothing more.
    page = client.page_size()
    kept = sorted(text[: (len(text) - 1) // page * page] for text in texts)
    assert sorted(path["written"][TARGET] for path in tree) == kept
    marked = [sum(path["marked"]) for path in tree]
    for path, count in zip(tree, marked, strict=True):
        # Draft KV from the start; none where it never drafted.
        assert path["marked"] == [True] * count + [False] * (len(path["slots"]) - count)
        assert path["written"][DRAFT][:count] == path["written"][TARGET][:count]
    never_drafted, drafted = sorted(marked)[:2], sorted(marked)[2:]
    assert never_drafted == [0, 0]
    assert min(drafted) >= min(map(len, prompts))
    _assert_kv_of_a_prefill(client, tree)


def test_a_single_draft_chunk_marks_its_slots(blocks: Client):
    """Under overlap the chunk begins before SGLang has cached the prompt; its first block prefills
    a short prompt."""
    blocks.flush()
    (prompt,) = random_prompts(1, 75, longest=31)
    answer = blocks.generate(prompt, ignore_eos=True, max_new_tokens=2)
    assert parse_info(answer)["rounds"] == 1
    (path,) = blocks.look()["tree"]
    assert len(path["slots"]) >= 16
    assert all(path["marked"])


def _assert_kv_of_a_prefill(client: Client, tree: list[dict]) -> None:
    """Cached KV equals the KV of one prefill of the same tokens."""
    client.flush()
    texts = [path["written"][TARGET] for path in tree]
    client.generate_all(texts, 8, ignore_eos=True, max_new_tokens=4)
    fresh = client.look()["tree"]
    for path, tokens in zip(tree, texts, strict=True):
        (again,) = (p for p in fresh if p["written"][TARGET][: len(tokens)] == tokens)
        assert all(again["marked"][: len(tokens)])
        for model, count in ((TARGET, len(tokens)), (DRAFT, sum(path["marked"]))):
            values = path["fingerprints"][model][:count]
            assert values == pytest.approx(again["fingerprints"][model][:count], abs=TOLERANCE)
            assert not values or max(values) - min(values) > 1000 * TOLERANCE
