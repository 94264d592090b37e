"""sglang-parse train-judge against real servers, and a server with the head that it trained."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.numpy import load_file

from sglang_parse import cli
from sglang_parse.client.program import ProgressLog
from sglang_parse.core.judge import WEIGHTS, JudgeFile, read_judge
from sglang_parse.tasks.collect import open_collector
from sglang_parse.train_judge.gather import HiddenStates, gather_later
from sglang_parse.train_judge.run import load_task
from sglang_parse.train_judge.settings import TrainJudgeSettings, add_arguments
from support.client import Client, parse_info
from support.demo_pair import DEMO, RenderedProblem, disturbed_draft
from support.heads import head_verdicts, rows_of
from support.models import load_tokenizer
from support.one_chain import write_task
from support.pages import documented_keys
from support.servers import ALWAYS, QUESTION, Start, parse_flags, served

pytestmark = pytest.mark.nightly("tests/unit/test_train_judge.py")

LAYERS = (8, 12)
REQUESTS = 80
TOLERANCE = 1e-3
"""Of verdicts, whose scores are of trained weights on states of size 10."""
FIGURES = {"auroc", "auroc_within_prompt", "kept_at_risk"}


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of its greedy drafts 64 of 80 are wrong, 19 in the first line; 16 of the first 24."""
    return DEMO / "target", disturbed_draft(tmp_path_factory.mktemp("disturbed"), noise=0.25)


@pytest.fixture(scope="module")
def states(start_server: Start, disturbed: tuple[Path, Path]) -> Iterator[Client]:
    """Sends hidden states, and asks the question after every line: ``auto`` drafts and asks as much
    as pays at the moment."""
    layers = ",".join(map(str, LAYERS))
    flags = ("--parse-hidden-layers", layers, "--parse-max-prefixes", "64", *ALWAYS)
    yield from served(start_server, "states", *parse_flags(disturbed, *QUESTION, *flags))


def train_judge(client: Client, folder: Path, *flags: str) -> int:
    own = ("--url", client.url, "--model-name", "default", "--output", str(folder))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cli, "end_on_sigterm", lambda: None)
        return cli.main(["train-judge", "--concurrency", "16", *own, *flags])


@pytest.fixture(scope="module")
def trained(states: Client, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    task = write_task(folder, REQUESTS)
    assert train_judge(states, folder, *task, "--requests", str(REQUESTS)) == 0
    return folder


def test_the_files_have_the_head_and_how_good_it_is(trained: Path):
    found = json.loads((trained / "judge.json").read_text())
    head = JudgeFile.model_validate(found)
    assert {*head.layers} <= {*LAYERS}
    assert load_file(trained / WEIGHTS)["weights"].shape == (
        head.num_weights,
        len(head.layers) * head.hidden_size,
    )
    assert (found["num_drafts"], found["num_prompts"]) == (REQUESTS, REQUESTS)
    assert 5 <= found["num_wrong_drafts"] <= REQUESTS - 5
    assert found["auroc"]["low"] > 0.7
    for key in ("question", "logprob"):
        assert {*found[key]} == FIGURES <= {*found}
    assert [point["num_drafts"] for point in found["learning_curve"]] == [8, 16, 32, 64][
        -len(found["learning_curve"]) :
    ]
    assert head.fingerprint.judge == "question"
    assert {*found} == documented_keys("train-judge keys")
    page = (trained / "report.html").read_text(encoding="utf-8")
    assert "the likelihood" in page


def test_it_resumes_without_new_drafts(states: Client, trained: Path):
    (drafts,) = trained.glob("drafts-*.json")
    written, then = drafts.stat().st_mtime_ns, json.loads((trained / "judge.json").read_text())
    task = write_task(trained, REQUESTS)
    assert train_judge(states, trained, *task, "--requests", str(REQUESTS)) == 0
    assert drafts.stat().st_mtime_ns == written
    now = json.loads((trained / "judge.json").read_text())
    assert now["auroc"] == then["auroc"]
    assert now["first_verdicts"] == then["first_verdicts"]


def test_labeled_drafts_of_a_file(
    states: Client, problems: list[RenderedProblem], tmp_path: Path, capsys: Any
):
    """The file's drafts are verified, not the draft model's."""
    rows = []
    for problem in problems[:24]:
        solution = problem.problem.solution
        place = solution.rindex("=") + 2
        wrong = solution[:place] + ("1" if solution[place] != "1" else "2") + solution[place + 1 :]
        for text in (solution, wrong):
            is_right = text is solution
            row = {"messages": [{"role": "user", "content": problem.problem.text}], "draft": text}
            rows.append(row | {"score": int(is_right), "right_chars": None if is_right else place})
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert train_judge(states, tmp_path / "out", "--data", str(path)) == 0
    found = json.loads((tmp_path / "out" / "judge.json").read_text())
    assert (found["num_drafts"], found["num_prompts"]) == (48, 24)
    assert found["num_wrong_drafts"] == found["num_wrong_units"] == 24
    assert found["auroc_within_prompt"]["value"] is not None
    assert "serve with it" in capsys.readouterr().out


def test_a_server_without_hidden_states_is_refused(semantic: Client, tmp_path: Path, capsys: Any):
    assert train_judge(semantic, tmp_path, "--requests", "10") == 1
    printed = " ".join("".join(capsys.readouterr()).split())
    assert "sends no hidden states" in printed
    assert "--parse-hidden-layers 8,12,14" in printed


# -- a server with the head --------------------------------------------------------------------


@pytest.fixture(scope="module")
def head(start_server: Start, disturbed: tuple[Path, Path], trained: Path) -> Iterator[Client]:
    layers = ("--parse-hidden-layers", ",".join(map(str, LAYERS)))
    flags = parse_flags(disturbed, "--parse-judge", str(trained), *layers, *ALWAYS)
    yield from served(start_server, "trained-head", *flags)


def test_the_server_reads_what_was_trained(
    head: Client, target_model: Any, trained: Path, problems: list[RenderedProblem]
):
    """Verdicts are those of the file in plain transformers, high before errors and low at them."""
    layers = json.loads((trained / "judge.json").read_text())["layers"]
    tokenizer, right, wrong = load_tokenizer(DEMO / "target"), [], []
    answers = head.generate_all(
        [problem.prompt for problem in problems[:24]],
        8,
        parse={"threshold": 0.0, "trace": True},
        max_new_tokens=160,
    )
    for problem, answer in zip(problems, answers, strict=False):
        record = parse_info(answer)["trace"][0]
        prompt = tokenizer.encode(problem.prompt, add_special_tokens=False)
        ends = record["prefix_ends"]
        draft = [record["anchor_token_id"], *record["draft_token_ids"]]
        rows = rows_of(target_model, [*prompt, draft[0]], draft[1 : ends[-1] + 1], layers)
        expected = head_verdicts(trained, rows, ends)
        assert record["verdicts"] == pytest.approx(expected, abs=TOLERANCE)
        if problem.is_right(answer["text"]):
            right.append(min(record["verdicts"]))
        else:
            wrong.append(min(record["verdicts"]))
    assert right
    assert wrong
    assert sum(right) / len(right) > 0.2 + sum(wrong) / len(wrong)


def test_drafts_behind_the_first_ones_have_labels_and_states(
    head: Client, trained: Path, tmp_path: Path
):
    """Of whole answers at the head's own threshold, each up to the first draft with an error."""
    parser = ArgumentParser()
    add_arguments(parser)
    flags = ("--url", head.url, "--target", str(DEMO / "target"), "--output", str(tmp_path))
    count = ("--requests", str(REQUESTS))
    settings = TrainJudgeSettings.read(
        parser.parse_args([*flags, *count, *write_task(tmp_path, REQUESTS)])
    )
    console = Console()
    with open_collector(settings, load_task(settings), console, ProgressLog(console)) as collector:
        assert collector.served[1] == pytest.approx(read_judge(str(trained)).threshold)
        states = HiddenStates.of(collector, None)
        drafts = gather_later(collector, range(REQUESTS), states, "line")
    assert len(drafts) >= 10
    assert {draft.wrong_token is None for draft in drafts} == {True, False}
    for draft in drafts:
        assert draft.load().shape == (1 + draft.num_tokens, len(LAYERS) * 128)
