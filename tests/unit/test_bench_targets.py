"""Server specs: the flags of every kind of server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_parse.client.demo_pair import DEMO_PAIR
from sglang_parse.client.records import BenchError
from sglang_parse.client.targets import Models, command_of, server_specs
from support.pair_models import demo_models

pytestmark = pytest.mark.unit

COMMON, MORE = ("--device", "cpu"), ("--more", "1")
MODELS = Models("big", "small", "head", "q.json", COMMON, MORE, 5, 3, "judge")
DRAFTED = "--speculative-algorithm {} --speculative-draft-model-path {}"
CHAIN = "--speculative-num-steps {} --speculative-eagle-topk 1 --speculative-num-draft-tokens {}"
PARSE = f"--model-path big {DRAFTED.format('PARSE', 'small')} --parse-question q.json --more 1"
EXPECTED = {
    "plain": "--model-path big",
    "draft": "--model-path small",
    "standalone": f"--model-path big {DRAFTED.format('STANDALONE', 'small')} {CHAIN.format(5, 6)}",
    "eagle3": f"--model-path big {DRAFTED.format('EAGLE3', 'head')} {CHAIN.format(3, 4)}",
    "parse": PARSE,
    "parse-one": f"{PARSE} --parse-draft-parallel-tokens 1",
    "parse-head": PARSE.replace("question q.json", "judge judge"),
    "parse-likelihood": PARSE.replace("question q.json", "judge likelihood"),
    "parse-eagle3": f"{PARSE} --parse-decode-accelerator eagle3 --parse-eagle3-path head "
    f"{CHAIN.format(3, 4)}",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_flags(name: str):
    (spec,) = server_specs(MODELS, (name,))
    launched = "python -m sglang.launch_server --device cpu "
    assert (spec.name, command_of(spec)) == (name, launched + EXPECTED[name])


def test_the_built_in_question_is_asked_without_a_file():
    (spec,) = server_specs(replace(MODELS, question=None, parse_flags=()), ("parse",))
    asked = [flag for flag in spec.flags if flag.startswith("--parse")]
    assert asked == ["--parse-judge"]
    assert spec.flags[spec.flags.index("--parse-judge") + 1] == "question"


def test_the_demo_pair_has_segments_of_lines_and_its_own_question():
    (spec,) = server_specs(demo_models(DEMO_PAIR), ("parse",))
    question = str(DEMO_PAIR / "question.json")
    assert spec.flags[-4:] == ("--parse-question", question, "--parse-segment", "line")


def test_what_cannot_be_started_is_refused():
    with pytest.raises(BenchError, match="--servers names 'vllm'; known: plain"):
        server_specs(MODELS, ("vllm",))
    with pytest.raises(BenchError, match="give --eagle3 its folder"):
        server_specs(replace(MODELS, eagle3=None), ("parse-eagle3",))
    with pytest.raises(BenchError, match="give --judge its folder"):
        server_specs(replace(MODELS, judge=None), ("parse-head",))
