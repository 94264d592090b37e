"""A verdict head and a question beside an EAGLE-3 head and adapters, on two ranks.

The question is asked about complete answers only.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sglang_parse.client.servers import awake
from support.client import EXACT, Client, assert_same, by_head, ids_of, parse_info
from support.demo_pair import DEMO, disturbed_draft, held_out
from support.heads import HeadShape, check_verdicts, rows_of, write_head
from support.models import load_tokenizer
from support.random_adapter import two_adapters
from support.reference_verdicts import reference_verdicts
from support.servers import (
    QUESTION,
    SEED,
    Start,
    parse_flags,
    two_ranks_environment,
)

pytestmark = pytest.mark.nightly("tests/e2e/test_heads.py")

EAGLE3 = ("--parse-eagle3-path", str(DEMO / "eagle3"))
TRACE = {"trace": True}
GRAMMAR = {"regex": "([a-z]: [0-9]{2}\n){4,9}"}
LOUD, QUIET = {"lora_path": "loud"}, {"lora_path": "quiet"}


@pytest.fixture(scope="module")
def demo_head(
    target_model: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, HeadShape]:
    shape = HeadShape("running-mean", (4, 10, 14), target_model.config.hidden_size, bias=0.5)
    text = "a: 15 + 27 = 42\nb: 42 - 30 = 12\nc: 12 + 70 = 82\n"
    ids = load_tokenizer(DEMO / "target").encode(text)
    scale = rows_of(target_model, ids[:5], ids[5:], shape.layers).scale
    pair = (DEMO / "target", DEMO / "draft")
    return write_head(tmp_path_factory.mktemp("heads") / "demo", pair, shape, scale), shape


@pytest.fixture(scope="module")
def both(
    start_server: Start, demo_head: tuple[Path, HeadShape], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    pair = DEMO / "target", disturbed_draft(tmp_path_factory.mktemp("disturbed"))
    judge = ("--parse-judge", str(demo_head[0]))
    lora = two_adapters(DEMO / "target", tmp_path_factory.mktemp("lora"))
    flags = parse_flags(pair, *judge, *QUESTION, *EAGLE3, *SEED, "--tp-size", "2", *lora)
    with two_ranks_environment():
        server = start_server("head-question-eagle3", *flags)
    with awake(server):
        yield Client.of(server)
    server.stop()


def test_the_question_is_about_complete_answers_only(
    both: Client,
    problems: list,
    target_model: Any,
    tokenizer: Any,
    demo_head: tuple[Path, HeadShape],
):
    prompts = [problem.prompt for problem in problems[:4]]
    answers = both.generate_all(prompts, 4, parse=TRACE, max_new_tokens=220)
    folder, shape = demo_head
    num_asked = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        context = tokenizer.encode(prompt, add_special_tokens=False)
        info = parse_info(answer)
        assert info["judge"] == "head+question"
        check_verdicts(target_model, folder, shape.layers, context, answer)
        for record in info["trace"]:
            questions = record["question_token_ids"]
            assert not any(questions[:-1])
            assert bool(questions[-1]) == record["finished"]
            if questions[-1]:
                num_asked += 1
                last = {**record, "question_token_ids": questions[-1:]}
                last["prefix_ends"] = record["prefix_ends"][-1:]
                asked = reference_verdicts(target_model, context, answer["output_ids"], last)
                assert record["verdicts"][-1] == pytest.approx(float(asked.verdicts[0]), abs=1e-3)
    assert num_asked > 0


def test_the_eagle3_head_still_reads_its_layers(both: Client, demo_plain: Client, problems: list):
    prompts = [problem.prompt for problem in problems[:3]]
    limit = {"max_new_tokens": 60}
    expected = ids_of(demo_plain.generate_all(prompts, 3, **limit))
    for parse in (EXACT, {"enabled": False}):
        answers = both.generate_all(prompts, 3, parse=parse, **limit)
        assert ids_of(answers) == expected
    infos = [parse_info(answer) for answer in answers]  # the draft model drafts for the others
    rounds, tokens = by_head(infos)
    assert tokens > 2 * rounds > 0
    both.assert_nothing_lost()


def test_adapters_beside_eagle3_on_two_ranks(both: Client):
    """The base model's requests decode with the head, an adapter's in the same batch without it."""
    free, constrained = (one.prompt for one in held_out(2))
    tops = ({}, LOUD, QUIET)
    jobs = [(free, top, {}) for top in tops] + [(constrained, top, GRAMMAR) for top in tops]

    def ask(job: tuple, **parse: Any) -> dict[str, Any]:
        prompt, top, more = job
        return both.generate(prompt, max_new_tokens=40, top=top, parse=parse, **more)

    with ThreadPoolExecutor(len(jobs)) as pool:
        plain = list(pool.map(partial(ask, enabled=False), jobs))
        answers = list(pool.map(partial(ask, **EXACT), jobs))
    for (_, top, _), answer, wanted in zip(jobs, answers, plain, strict=True):
        assert_same(answer, wanted)
        info = parse_info(answer)
        assert info["rounds"] > 0
        assert info["proposer"] == ("none" if top else "eagle3")
    both.assert_nothing_lost()
