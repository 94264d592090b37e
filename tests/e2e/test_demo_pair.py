"""The demo pair on a real server: accepted lengths (against the reference implementation),
exactness, accuracy."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.question import QuestionWording, render_question
from sglang_parse.core.segment import SegmentRule, prefix_ends
from sglang_parse.core.selection import select
from support.client import EXACT, Client, parse_info, recorded_iterations
from support.demo_pair import DEMO
from support.reference_verdicts import reference_verdicts

NOT_WORKING = "PARSE: the question does not work for this model"
MORE = pytest.mark.nightly("tests/e2e/test_demo_pair.py::test_exact_above_one")


def test_accepted_lengths_equal_the_references(
    demo: Client, problems: list, target_model, tokenizer
):
    """Prefixes one by one as ordinary prompts in plain transformers, from the trace's own ids."""
    question = render_question(tokenizer, QuestionWording.read(DEMO / "question.json"))
    num_cut = 0
    prompts = [problem.prompt for problem in problems[:8]]
    answers = demo.generate_all(prompts, 8, parse={"trace": True}, max_new_tokens=256)
    for prompt, answer in zip(prompts, answers, strict=True):
        context = tokenizer.encode(prompt, add_special_tokens=False)
        output = answer["output_ids"]
        for record in parse_info(answer)["trace"]:
            draft = record["draft_token_ids"]
            judged = reference_verdicts(target_model, context, output, record)
            verdicts = judged.verdicts.tolist()
            assert record["verdicts"] == pytest.approx(verdicts, abs=1e-3)
            cut = select(verdicts, record["prefix_ends"], 0.5, "first-reject")[0]
            assert record["accepted_len"] == cut
            if record["next_token_id"] is not None:
                places = (0, *record["prefix_ends"])
                assert record["next_token_id"] == int(judged.next_token_ids[places.index(cut)])
            end = record["output_start"] + cut + len(record["bonus_token_ids"])
            assert output[:end][record["output_start"] :] == draft[:cut] + record["bonus_token_ids"]
            num_cut += cut < record["prefix_ends"][-1]
            assert record["accept_token_id"] == question.accept_id
            _check_prefixes(draft, record["prefix_ends"], tokenizer)
    assert num_cut > 0, "no draft was cut: the test observe only whole drafts"


def _check_prefixes(draft: list[int], ends: list[int], tokenizer) -> None:
    pieces = [tokenizer.decode([token]) for token in draft]
    finished = draft[-1] == tokenizer.eos_token_id
    rule = SegmentRule.parse("line")
    assert ends == prefix_ends(pieces, rule, finished=finished, max_prefixes=16)


@pytest.fixture(scope="module")
def plain_answers(demo_plain: Client, problems: list) -> list[list[int]]:
    prompts = [problem.prompt for problem in problems[:8]]
    return [a["output_ids"] for a in demo_plain.generate_all(prompts, 8, max_new_tokens=90)]


@pytest.mark.parametrize(("concurrency", "count"), [(8, 8), pytest.param(1, 3, marks=MORE)])
def test_exact_above_one(
    demo: Client, plain_answers: list, problems: list, concurrency: int, count: int
):
    prompts = [problem.prompt for problem in problems[:count]]
    ours = demo.generate_all(prompts, concurrency, parse=EXACT, max_new_tokens=90)
    assert [answer["output_ids"] for answer in ours] == plain_answers[:count]
    counts = [parse_info(answer) for answer in ours]
    assert not any(info["accepted_tokens"] for info in counts)
    # The draft is often right, and what the target would have written as well is its own.
    assert all(info["matched_tokens"] > info["target_tokens"] / 2 for info in counts)


def test_most_of_the_answers_come_from_the_draft_and_are_right(demo: Client, problems: list):
    problems = problems[:24]
    answers = demo.generate_all([p.prompt for p in problems], 8, max_new_tokens=256)
    right = sum(p.is_right(a["text"]) for p, a in zip(problems, answers, strict=True))
    assert right / len(problems) >= 0.9
    infos = [parse_info(answer) for answer in answers]
    accepted = sum(info["accepted_tokens"] for info in infos)
    assert accepted > 0.5 * sum(len(answer["output_ids"]) for answer in answers)


def test_verdicts_that_contradict_the_target_are_counted(demo: Client, problems: list):
    """A threshold that no verdict reaches rejects what the target would have written itself. It is
    the client's, and says nothing about the question: the server warns nobody."""
    prompts = [problem.prompt for problem in problems[:12]]
    log = demo.probe.folder.with_suffix(".log")
    said = log.read_text().count(NOT_WORKING)
    answers = demo.generate_all(prompts, 8, parse={"threshold": 1.0}, max_new_tokens=128)
    infos = [parse_info(answer) for answer in answers]
    matched = sum(info["matched_prefixes"] for info in infos)
    rejected = sum(info["rejected_matched_prefixes"] for info in infos)
    assert matched >= 32
    assert 0.9 * matched <= rejected <= matched
    assert log.read_text().count(NOT_WORKING) == said


def test_held_kv_is_little_more_than_half_of_a_standing_reserve(demo: Client, problems: list):
    """STANDALONE reserves two windows of a draft for every request in every iteration. Requests
    that resume drafting at once are hardly ever without a draft: 135 slots of 258 were held."""
    with recorded_iterations(demo) as iterations:
        demo.generate_all([problem.prompt for problem in problems[:16]], 8, max_new_tokens=256)
        demo.wait_idle()
    held = [request["held"] for iteration in iterations for request in iteration]
    reserve = 2 * (ParseConfig().draft_tokens + 1)
    assert 0 < fmean(held) < 0.6 * reserve


def test_mass_is_on_the_verdict_tokens(target_model, tokenizer, problems: list):
    wording = QuestionWording.read(DEMO / "question.json")
    question = render_question(tokenizer, wording)
    ids = tokenizer.encode(problems[0].prompt, add_special_tokens=False)
    with torch.no_grad():
        logits = target_model(torch.tensor([[*ids, *question.partial_ids]])).logits[0, -1]
    probabilities = logits.softmax(-1)
    assert float(probabilities[[question.accept_id, question.reject_id]].sum()) > 0.9
