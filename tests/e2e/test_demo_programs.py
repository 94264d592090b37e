"""The frontend language's programs of examples/frontend on the demo pair's server."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sglang as sgl
from problems import Problem, is_answer_right, read_problem

from sglang_parse.core.setting import ConfigError
from sglang_parse.frontend import ParseEndpoint
from support.client import Client

PROGRAMS = Path(__file__).resolve().parents[2] / "examples" / "frontend"


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"frontend_{name}", PROGRAMS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def backend(wordings: Client) -> Iterator[sgl.RuntimeEndpoint]:
    yield sgl.RuntimeEndpoint(wordings.url, chat_template_name="chatml")
    wordings.assert_nothing_lost()


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Returns the server's answers, because the frontend hides the meta_info of some requests."""
    answers: list[dict[str, Any]] = []
    send = sgl.RuntimeEndpoint._generate_http_request

    def keep(self: Any, s: Any, data: dict[str, Any]) -> Any:
        answer = send(self, s, data)
        answers.extend(answer if isinstance(answer, list) else [answer])
        return answer

    monkeypatch.setattr(sgl.RuntimeEndpoint, "_generate_http_request", keep)
    return answers


def parse_of(state: Any, name: str) -> dict[str, Any]:
    (info,) = state.get_meta_info(name)["parse"]
    return info


def is_right(module: ModuleType, answer: str) -> bool:
    """Whether an answer to the program's problem ends in the right results, in whatever words."""
    return is_answer_right(problem_of(module), answer)


def problem_of(module: ModuleType) -> Problem:
    return read_problem(module.PROBLEM)


def run_main(module: ModuleType, url: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> str:
    monkeypatch.setattr(sys, "argv", ["program", url])
    module.main()
    return capsys.readouterr().out


def test_gen_is_drafted_and_streams(
    wordings: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    module = program("gen")
    printed = run_main(module, wordings.url, monkeypatch, capsys)
    answer, info = printed.rsplit("\n [", 1)
    assert is_right(module, answer)
    assert answer != problem_of(module).solution  # the draft's words, not the target's
    assert "'mode': 'parse'" in info
    assert int(re.findall(r"'accepted_tokens': (\d+)", info)[0]) > 0


def test_fork_drafts_every_branch_from_one_prompt(backend: sgl.RuntimeEndpoint):
    module = program("fork")
    state = module.vote.run(problem=module.PROBLEM, backend=backend)
    assert len(state["answers"]) == module.NUM_BRANCHES
    for info in state["infos"]:
        assert info["parse"][0]["mode"] == "parse"
        assert info["parse"][0]["accepted_tokens"] > 0
        assert info["cached_tokens"] >= info["prompt_tokens"] - 10  # but the reply's opening
    numbers = [re.findall(r"\d+", answer.splitlines()[-1]) for answer in state["answers"]]
    assert numbers.count([str(number) for number in problem_of(module).answer]) >= 3


def test_later_turns_start_from_the_kv_of_earlier_ones(backend: sgl.RuntimeEndpoint):
    module = program("multi_turn")
    chats = [{"problem": problem} for problem in module.PROBLEMS]
    states = module.talk.run_batch(chats, num_threads=len(chats), backend=backend)
    for state in states:
        first, later = (state.get_meta_info(name) for name in ("answer", "again"))
        assert parse_of(state, "answer")["accepted_tokens"] > 0
        assert parse_of(state, "again")["mode"] == "parse"
        # The last token of an answer has no KV.
        assert later["cached_tokens"] >= first["prompt_tokens"] + first["completion_tokens"] - 1


def test_select_is_the_plain_targets(backend: sgl.RuntimeEndpoint, answered: list):
    module = program("choose")
    state = module.check.run(problem=module.PROBLEM, backend=backend)
    assert parse_of(state, "first line")["mode"] == "parse"
    assert state["sum"] == module.SUMS[0]
    scored = [a["meta_info"] for a in answered if "input_token_logprobs" in a["meta_info"]]
    assert len(scored) == len(module.SUMS)
    for meta_info in scored:
        (info,) = meta_info["parse"]
        assert (info["mode"], info["reason"]) == (
            "parse",
            "the request ended before its first draft",
        )


def test_constrained_gen_is_drafted(wordings: Client):
    """The target's own text: the judge is no part of this."""
    module = program("constrained")
    backend = ParseEndpoint(wordings.url, chat_template_name="chatml", threshold=1.5)
    state = module.fill_in.run(problem=module.PROBLEM, backend=backend)
    served = {name: parse_of(state, name) for name in ("first line", "free", "number", "word")}
    assert {info["mode"] for info in served.values()} == {"parse"}
    assert served["first line"]["drafted_tokens"] > 0
    assert re.fullmatch(module.LINE, state["first line"])
    assert is_right(module, state["first line"] + state["free"])
    int(state["number"])
    assert json.loads(state["word"]) in ("yes", "no")


def test_a_programs_own_options(wordings: Client):
    """Each reaches the server: what it drafts, what it keeps, whether it tells."""
    module = program("options")
    backend = ParseEndpoint(wordings.url, chat_template_name="chatml", trace=True)
    answers, infos = {}, {}
    for title, options in module.WAYS.items():
        state = module.solve.run(problem=module.PROBLEM, backend=backend.with_options(**options))
        answers[title], infos[title] = state["answer"], parse_of(state, "answer")
    assert answers["exact"] == answers["switched off"] == problem_of(module).solution
    served, exact, off = infos.values()
    assert (served["mode"], exact["mode"], off["mode"]) == ("parse", "parse", "plain")
    assert served["accepted_tokens"] > 0 == exact["accepted_tokens"]
    assert {record["threshold"] for record in exact["trace"]} == {1.5}
    assert off["reason"] == "switched off"
    streamed = module.solve.run(
        problem=module.PROBLEM, stream=True, backend=backend.with_options(enabled=False)
    )
    assert "".join(streamed.text_iter("answer")) == answers["switched off"]
    assert parse_of(streamed, "answer")["mode"] == "plain"
    assert "trace" not in parse_of(
        module.solve.run(problem=module.PROBLEM, backend=backend.with_options(trace=False)),
        "answer",
    )


@pytest.mark.parametrize("options", [{"treshold": 0.5}, {"threshold": 7}, {"enabled": 1}])
def test_bad_options_are_refused_before_anything_is_sent(wordings: Client, options: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ParseEndpoint(wordings.url, chat_template_name="chatml", **options)
