"""What the radix cache can reach: prompts and answers, with their own KV. Never a question's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import compress

import pytest

from support.client import Client, parse_info, random_prompts

LIMIT = {"max_new_tokens": 40, "ignore_eos": True}
OPTIONS = (
    {"trace": True},
    {"trace": True, "threshold": 0.0},
    {"trace": True, "threshold": 1.5},
    {"enabled": False},
)
"""Answers that end with a draft, with the target's own token, or were never drafted at all."""
TARGET, DRAFT = 0, 1
TOLERANCE = 1e-3
"""Of a KV fingerprint; those of different tokens differ by far more, which is checked."""


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
    assert any(record["cut"] < len(record["draft_token_ids"]) for record in rounds)

    tree = client.look()["tree"]
    texts = [prompt + answer["output_ids"] for prompt, answer in zip(prompts, answers, strict=True)]
    # The last output token has no KV, and the tree keeps whole pages. Everything else of every
    # answer is there, and nothing more.
    page = client.page_size()
    kept = sorted(text[: (len(text) - 1) // page * page] for text in texts)
    assert sorted(path["written"][TARGET] for path in tree) == kept
    _assert_marks(tree, at_once=min(map(len, prompts)), overlap=server == "blocks")
    _assert_own_kv(client, tree)


def _assert_marks(tree: list[dict], *, at_once: int, overlap: bool) -> None:
    """What the draft model has read is marked: from the start, and at least ``at_once`` tokens;
    where it never drafted, nothing.

    Under overlap a draft may begin before SGLang has settled which slots a prompt has. What such a
    draft's own burst read of it stays without marks, unless another draft of the answer follows.
    """
    counts = []
    for path in tree:
        written, marked = path["written"], path["marked"]
        for target, draft, is_marked in zip(*written, marked, strict=True):
            assert draft == target or not is_marked
        counts.append(count := sum(marked))
        assert overlap or marked == [True] * count + [False] * (len(marked) - count)
    never_drafted, drafted = sorted(counts)[:2], sorted(counts)[2:]
    assert never_drafted == [0, 0]
    assert min(drafted) >= at_once or overlap


def _assert_own_kv(client: Client, tree: list[dict]) -> None:
    """The KV in the tree's slots is what others write for the same tokens in one piece: the
    target's everywhere, the draft's where it is marked."""
    client.flush()
    texts = [path["written"][TARGET] for path in tree]
    client.generate_all(texts, 8, ignore_eos=True, max_new_tokens=4)
    fresh = client.look()["tree"]
    for path, tokens in zip(tree, texts, strict=True):
        (again,) = (p for p in fresh if p["written"][TARGET][: len(tokens)] == tokens)
        assert all(again["marked"][: len(tokens)])
        for model, is_there in ((TARGET, [True] * len(tokens)), (DRAFT, path["marked"])):
            ours, theirs = (
                list(compress(p["fingerprints"][model], is_there)) for p in (path, again)
            )
            assert ours == pytest.approx(theirs, abs=TOLERANCE)
            assert len(ours) < 10 or max(ours) - min(ours) > 1000 * TOLERANCE
