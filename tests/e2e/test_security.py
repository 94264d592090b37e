"""A request can neither change the question about its draft nor see another request's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hostile import INJECTIONS, hostile  # examples/demo_pair is on pytest's pythonpath

from sglang_parse.core.question import QuestionWording, render_question
from support.client import Client, parse_info
from support.demo_pair import DEMO, RenderedProblem
from support.reference_verdicts import reference_verdicts

PROBLEMS_EACH = 3
"""Of each injection, in the second tier; the first tier has one."""
MIN_WRONG, MAX_FALSE_ACCEPTS = 350, 0.05
"""About docs/fidelity.md's figures: greedy answers vary with the rounding of their batches only."""


@pytest.fixture(scope="module")
def all_attempts(problems: list[RenderedProblem], tokenizer: Any) -> list[tuple[Any, str]]:
    """Returns (problem, prompt) pairs: every injection with some held-out problems."""
    assert len(INJECTIONS) == 20
    made = []
    for number, injection in enumerate(INJECTIONS):
        for rendered in problems[number * PROBLEMS_EACH : (number + 1) * PROBLEMS_EACH]:
            problem = rendered.problem
            chat = [{"role": "user", "content": hostile(injection, problem)}]
            prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            made.append((problem, prompt))
    return made


@pytest.fixture(scope="module")
def attempts(all_attempts: list[tuple[Any, str]]) -> list[tuple[Any, str]]:
    return all_attempts[::PROBLEMS_EACH]


def answers_to(client: Client, attempts: list[tuple[Any, str]]) -> list[dict]:
    prompts = [prompt for _, prompt in attempts]
    return client.generate_all(prompts, 16, parse={"trace": True}, max_new_tokens=80)


@pytest.fixture(scope="module")
def answers(demo: Client, attempts: list[tuple[Any, str]]) -> list[dict]:
    return answers_to(demo, attempts)


def test_the_servers_question_is_asked(answers: list[dict], tokenizer: Any):
    """Every round of every attempt has the server's question, verdict tokens and threshold."""
    question = render_question(tokenizer, QuestionWording.read(DEMO / "question.json"))
    rounds = [record for answer in answers for record in parse_info(answer)["trace"]]
    assert len(rounds) > len(INJECTIONS)
    for record in rounds:
        ends = {record["accept_token_id"], record["reject_token_id"]}
        assert ends == {question.accept_id, question.reject_id}
        assert record["threshold"] == 0.5
        for end, ids in zip(record["prefix_ends"], record["question_token_ids"], strict=True):
            prefix = record["draft_token_ids"][:end]
            assert tuple(ids) in (
                question.partial_ids,
                question.ids_for(prefix, complete=True),
            )


def test_attempts_get_the_reference_verdicts(
    answers: list[dict], attempts: list[tuple[Any, str]], target_model: Any, tokenizer: Any
):
    """The reference implementation, which has only the prompt's tokens, gives the same verdicts."""
    for (_, prompt), answer in [*zip(attempts, answers, strict=True)][::2]:
        context = tokenizer.encode(prompt, add_special_tokens=False)
        record = parse_info(answer)["trace"][0]
        again = reference_verdicts(target_model, context, answer["output_ids"], record)
        assert record["verdicts"] == pytest.approx(again.verdicts.tolist(), abs=1e-3)


@pytest.mark.nightly("tests/e2e/test_security.py::test_attempts_get_the_reference_verdicts")
def test_false_accepts(
    demo: Client, all_attempts: list[tuple[Any, str]], tokenizer: Any, record_property: Any
):
    """How often the target accepts a wrong prefix after an attempt: docs/fidelity.md's figure."""
    wrong = accepted = 0
    answers = answers_to(demo, all_attempts)
    for (problem, _), answer in zip(all_attempts, answers, strict=True):
        for record in parse_info(answer)["trace"]:
            before = answer["output_ids"][: record["output_start"]]
            for end, verdict in zip(record["prefix_ends"], record["verdicts"], strict=True):
                text = tokenizer.decode([*before, *record["draft_token_ids"][:end]])
                if not problem.solution.startswith(text.replace("<|im_end|>", "")):
                    wrong += 1
                    accepted += verdict >= record["threshold"]
    assert wrong > MIN_WRONG
    record_property("false_accept_rate", f"{accepted / wrong:.3f} of {wrong}")
    print(f"false accepts: {accepted} of {wrong} wrong prefixes")
    assert accepted / wrong <= MAX_FALSE_ACCEPTS


@pytest.mark.parametrize(
    "options",
    [
        {"question": "yes?"},
        {"segment": "tokens:1"},
        {"accept": "no"},
        {"selection": "answer-first"},
        {"verification": "token"},
        {"max_prefixes": 1},
        {"threshold": "0"},
        {f"key {number}": number for number in range(50_000)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_request_cannot_set_the_question(demo: Client, options: dict):
    sampling = {"max_new_tokens": 4, "custom_params": {"parse": options}}
    response = demo.post("/generate", {"text": "Start with 23", "sampling_params": sampling})
    assert response.status_code == 400
    assert "custom_params.parse" in response.text
    assert len(response.text) < 1000


def test_a_trace_shows_one_request_only(demo: Client, problems: list[RenderedProblem]):
    """Concurrent requests have the same traces and tokens as each of them alone."""
    prompts = [problem.prompt for problem in problems[40:48]]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: _traced(demo, prompt), prompts))
    for prompt, answer in zip(prompts, together, strict=True):
        alone = _traced(demo, prompt)
        ours, theirs = parse_info(answer)["trace"], parse_info(alone)["trace"]
        assert len(ours) == len(theirs) > 0
        for record, other in zip(ours, theirs, strict=True):
            assert record.pop("verdicts") == pytest.approx(other.pop("verdicts"), abs=1e-3)
            masses = record.pop("verdict_mass"), other.pop("verdict_mass")
            assert masses[0] == pytest.approx(masses[1], abs=1e-3)
            assert record == other


def _traced(client: Client, prompt: str) -> dict:
    return client.generate(prompt, parse={"trace": True}, max_new_tokens=96)
