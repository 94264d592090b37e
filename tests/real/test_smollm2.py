"""PARSE with SmolLM2-135M-Instruct: the machinery is exact, and calibrate says what its judging is.

The draft is the same model with 3 % noise: whatever it writes, it writes at the target's own price.
This is about correctness; nothing here is about speed.
"""

from __future__ import annotations

import html
import json
import random
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_parse import cli
from sglang_parse.calibrate.run import NO_SEPARATION
from support.client import HTTP, Client, parse_info
from support.heads import head_verdicts, rows_of
from support.reference_verdicts import reference_verdicts
from support.refused_drafts import assert_the_cause_is_named
from support.servers import Start, parse_flags, served

TASKS = (
    "Name the capital of {} in one sentence.",
    "Write two short sentences about {}.",
    "Give three facts about {}, one per line.",
    "Explain to a child what people eat in {}.",
)
PLACES = ("France", "Japan", "Brazil", "Egypt", "Canada", "India")
QUESTIONS = [task.format(place) for task in TASKS for place in PLACES]
LENGTH = 32
GRADED = 40
SUMS = 240
GRADER = shlex.join([sys.executable, str(Path(__file__).with_name("grade_sums.py"))])


def rendered(tokenizer: Any, *turns: str) -> str:
    """A conversation, the user's turn first, that the assistant is to go on with."""
    roles = ("user", "assistant")
    chat = [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[str]:
    assert len(QUESTIONS) == 24
    return [rendered(tokenizer, question) for question in QUESTIONS]


def outputs(client: Client, prompts: Sequence[str], at_once: int) -> list[list[int]]:
    answers = client.generate_all(prompts, at_once, max_new_tokens=LENGTH)
    return [answer["output_ids"] for answer in answers]


@pytest.fixture(scope="module")
def expected(plain: Client, prompts: list[str]) -> list[list[int]]:
    return outputs(plain, prompts, 8)


@pytest.mark.parametrize("at_once", [1, 8])
def test_token_mode_is_the_plain_targets(
    token: Client, prompts: list[str], expected: list[list[int]], at_once: int
):
    assert outputs(token, prompts, at_once) == expected


def test_drafts_are_accepted_in_token_mode(token: Client, prompts: list[str]):
    """Or the test above would show nothing."""
    infos = [
        parse_info(answer) for answer in token.generate_all(prompts[:4], 4, max_new_tokens=LENGTH)
    ]
    assert sum(info["accepted_tokens"] for info in infos) > LENGTH / 2


def test_multi_turn(plain: Client, token: Client, prompts: list[str], tokenizer: Any):
    """The second turn begins with the first one's KV, target's and draft's, and is exact."""
    first = token.generate(prompts[0], max_new_tokens=LENGTH)
    chat = rendered(tokenizer, QUESTIONS[0], first["text"], "And of Spain?")
    second = token.generate(chat, max_new_tokens=32)
    assert second["meta_info"]["cached_tokens"] > len(tokenizer.encode(prompts[0]))
    assert second["output_ids"] == plain.generate(chat, max_new_tokens=32)["output_ids"]


def test_streaming(token: Client, prompts: list[str]):
    whole = token.generate(prompts[6], max_new_tokens=LENGTH)
    params = {"temperature": 0, "max_new_tokens": LENGTH}
    body = {"text": prompts[6], "stream": True, "sampling_params": params}
    with HTTP.stream("POST", f"{token.url}/generate", json=body, timeout=300) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    messages = [json.loads(line) for line in lines]
    assert len(messages) > 2
    texts = [message["text"] for message in messages]
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))
    assert texts[-1] == whole["text"]


def test_the_question_finds_itself(semantic: Client):
    log = Path(semantic.probe.folder).with_suffix(".log").read_text(errors="replace")
    assert "PARSE: built-in question 'chatml': the chat template has '<|im_start|>'" in log


def test_verdicts_are_plain_transformers(
    semantic: Client, prompts: list[str], target_model: Any, tokenizer: Any
):
    verdicts, worst = [], 0.0
    for prompt in prompts[6:18:2]:
        answer = semantic.generate(prompt, parse={"trace": True}, max_new_tokens=LENGTH)
        context = tokenizer.encode(prompt, add_special_tokens=False)
        for record in parse_info(answer)["trace"]:
            again = reference_verdicts(target_model, context, answer["output_ids"], record)
            pairs = zip(record["verdicts"], again.verdicts.tolist(), strict=True)
            worst = max([worst, *(abs(ours - theirs) for ours, theirs in pairs)])
            verdicts += record["verdicts"]
    assert len(verdicts) > 10
    assert worst < 1e-4
    print(
        f"{len(verdicts)} verdicts, {min(verdicts):.3f} to {max(verdicts):.3f}, off by {worst:.1e}"
    )


def test_calibrate_says_what_its_judging_is_worth(
    semantic: Client, pair: tuple[Path, Path], tmp_path: Path, capsys: Any, monkeypatch: Any
):
    """Sums, which so small a model gets wrong half of the time and accepts all the same."""
    monkeypatch.setattr(cli, "end_on_sigterm", lambda: None)
    numbers, problems = random.Random(1), tmp_path / "sums.jsonl"
    rows = []
    for _ in range(GRADED + 10):
        a, b = numbers.randint(10, 99), numbers.randint(100, 999)
        text = f"What is {a} + {b}? Answer with one short sentence."
        rows.append({"prompt": text, "reference": str(a + b)})
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--url", semantic.url, "--tokenizer", str(pair[0])]
    flags += ["--task-file", str(problems), "--grader", GRADER, "--loss", "answer"]
    flags += ["--requests", str(GRADED), "--pilot", "10", "--served", "0", "--max-tokens", "48"]
    flags += ["--alpha", "0.1", "--concurrency", "8", "--output", str(tmp_path / "out")]
    assert cli.main(["calibrate", *flags]) in (0, NO_SEPARATION)
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "calibration.json").read_text())
    print(printed)
    assert found["results"]["separation"]["wrong"] > 0
    if found["threshold"] is None:
        assert "No threshold qualifies" in printed
    else:
        assert found["errors"] <= found["results"]["errors_allowed"]


def small_sums(count: int, seed: int) -> list[dict[str, str]]:
    numbers = random.Random(seed)
    sums = [(numbers.randint(2, 99), numbers.randint(2, 99)) for _ in range(count)]
    return [
        {"prompt": f"What is {a} + {b}? Answer with one short sentence.", "reference": str(a + b)}
        for a, b in sums
    ]


@pytest.fixture(scope="module")
def trained(
    states: Client, pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A head from graded sums; docs/train-a-judge.md has the figures of 400."""
    folder = tmp_path_factory.mktemp("judge")
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in small_sums(SUMS, seed=5)))
    flags = ["--url", states.url, "--target", str(pair[0]), "--draft", str(pair[1])]
    flags += ["--task-file", str(path), "--grader", GRADER, "--max-tokens", "48"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cli, "end_on_sigterm", lambda: None)
        sizes = ["--requests", str(SUMS), "--concurrency", "8"]
        assert cli.main(["train-judge", *flags, *sizes, "--output", str(folder)]) == 0
    return folder


def test_a_head_knows_what_the_question_does_not(trained: Path):
    found = json.loads((trained / "judge.json").read_text())
    print({key: found[key]["auroc"] for key in ("question", "logprob")})
    print("head", found["auroc"], found["pooling"], found["layers"])
    assert found["question"]["auroc"]["low"] < 0.5
    assert found["auroc"]["low"] > 0.5
    assert found["auroc_gain"]["question"]["low"] > 0


def test_the_heads_verdicts_are_plain_transformers(
    start_server: Start,
    pair: tuple[Path, Path],
    trained: Path,
    target_model: Any,
    tokenizer: Any,
):
    layers = json.loads((trained / "judge.json").read_text())["layers"]
    flags = parse_flags(pair, "--parse-judge", str(trained), "--parse-segment", "sentence")
    verdicts = []
    for client in served(start_server, "head", *flags):
        for row in small_sums(12, seed=6):
            prompt = rendered(tokenizer, row["prompt"])
            answer = client.generate(prompt, parse={"trace": True}, max_new_tokens=LENGTH)
            context = tokenizer.encode(prompt, add_special_tokens=False)
            for record in parse_info(answer)["trace"]:
                before = [*context, *answer["output_ids"][: record["output_start"]]]
                draft = record["draft_token_ids"][: record["prefix_ends"][-1]]
                rows = rows_of(target_model, before, draft, layers)
                expected = head_verdicts(trained, rows, record["prefix_ends"])
                assert record["verdicts"] == pytest.approx(expected, abs=1e-3)
                verdicts += expected
    assert len(verdicts) > 10
    assert max(verdicts) - min(verdicts) > 0.1
    print(f"{len(verdicts)} verdicts of the head, {min(verdicts):.3f} to {max(verdicts):.3f}")


def test_explain_shows_an_answer(
    semantic: Client, tokenizer: Any, tmp_path: Path, capsys: Any, monkeypatch: Any
):
    monkeypatch.setattr(cli, "end_on_sigterm", lambda: None)
    flags = ["--url", semantic.url, "--prompt", QUESTIONS[6], "--max-tokens", str(LENGTH)]
    assert cli.main(["explain", *flags, "--output", str(tmp_path)]) == 0
    assert "draft tokens accepted" in capsys.readouterr().out
    (answer,) = json.loads((tmp_path / "answers.json").read_text())
    page = (tmp_path / "explain.html").read_text()
    for text in (answer["prompt"], *tokenizer.decode(answer["output_ids"]).split()[:5]):
        assert html.escape(text) in page


def test_three_commands_name_a_question_that_does_not_work(
    contradicted: Client, tmp_path: Path, capsys: Any
):
    """Nothing is kept of a draft that is nearly the target's own text: the figure of issue 29."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS[6:10]))
    prompts = ("--prompts", str(path), "--requests", "4", "--max-tokens", "32")
    assert_the_cause_is_named(contradicted, tmp_path, capsys, *prompts)
