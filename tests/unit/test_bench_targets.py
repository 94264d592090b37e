"""Server specs: the flags of every kind of server."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import fmean

import pytest

from sglang_parse.client.records import BenchError
from sglang_parse.client.targets import Models, command_of, server_specs, simulated_lens
from support.demo_pair import DEMO
from support.pair_models import pair_models

pytestmark = pytest.mark.unit

COMMON, MORE = ("--device", "cpu"), ("--more", "1")
MODELS = Models("big", "small", "head", "q.json", COMMON, MORE, 5, 3, mtp="layer")
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
    "parse-token": PARSE.replace("question q.json", "verification token"),
    "parse-question": PARSE,
    "parse-likelihood": PARSE.replace("question q.json", "judge likelihood"),
    "parse-eagle3": f"{PARSE} --parse-eagle3-path head",
    "nextn": f"--model-path big {DRAFTED.format('NEXTN', 'layer')} {CHAIN.format(3, 4)}",
    "parse-mtp": f"{PARSE.replace('question q.json', 'judge likelihood')} --parse-mtp layer",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_flags(name: str):
    (spec,) = server_specs(MODELS, (name,))
    launched = "python -m sglang.launch_server --device cpu "
    assert (spec.name, command_of(spec)) == (name, launched + EXPECTED[name])


@pytest.mark.parametrize("name", EXPECTED)
def test_a_verdict_head_takes_the_questions_place(name: str):
    """Of all servers that have no judge of their own in their name."""
    (spec,) = server_specs(replace(MODELS, judge="j"), (name,))
    wanted = EXPECTED[name]
    if name != "parse-question":
        wanted = wanted.replace("question q.json", "judge j")
    if name == "parse-mtp":
        wanted = wanted.replace("judge likelihood", "judge j")
    assert command_of(spec).endswith(wanted)
    (one, other) = server_specs(replace(MODELS, judge="j"), ("parse", "parse-head"))
    assert one.flags == other.flags


def test_a_targets_own_mtp_layer():
    stock, ours = server_specs(replace(MODELS, mtp="own"), ("nextn", "parse-mtp"))
    assert "--speculative-draft-model-path" not in stock.flags
    assert "--parse-mtp own" in " ".join(ours.flags)


def test_the_built_in_question_is_asked_without_a_file():
    (spec,) = server_specs(replace(MODELS, question=None, parse_flags=()), ("parse",))
    asked = [flag for flag in spec.flags if flag.startswith("--parse")]
    assert asked == ["--parse-judge"]
    assert spec.flags[spec.flags.index("--parse-judge") + 1] == "question"


def test_the_question_pair_has_segments_of_lines_and_its_own_question():
    (spec,) = server_specs(pair_models(DEMO), ("parse",))
    question = str(DEMO / "question.json")
    assert spec.flags[-4:] == ("--parse-question", question, "--parse-segment", "line")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("vllm", "use plain"),
        ("plain@1", "use plain, .* take no @VALUE"),
        ("eagle3@5", "use an accept length of 1 to 4"),
        ("nextn@5", "use an accept length of 1 to 4"),
        ("dflash@17", "use an accept length of 1 to 16"),
        ("ngram@2", "ngram take no @VALUE"),
        ("dflash@5", "whose kernels run on GPUs only; leave it out with --servers, or use a GPU"),
        ("ngram", "whose kernels run on GPUs only"),
        ("parse@75%", "'75%'; use a number from 0"),
        ("parse-token@0.5", "guarantees the plain target's output"),
    ],
)
def test_names_of_no_server_are_refused(name: str, why: str):
    with pytest.raises(BenchError, match=f"--servers names '{name}'.*{why}"):
        server_specs(MODELS, (name,))


def test_servers_that_need_a_gpu():
    on_gpu = replace(MODELS, flags=("--device", "cuda"), dflash="blocks")
    specs = server_specs(on_gpu, ("dflash@5", "ngram"))
    flags = [" ".join(spec.flags) for spec in specs]
    drafted = DRAFTED.format("DFLASH", "blocks")
    assert flags == [
        f"--model-path big {drafted}",
        "--model-path big --speculative-algorithm NGRAM",
    ]
    with pytest.raises(BenchError, match="give --dflash its folder"):
        server_specs(replace(on_gpu, dflash=""), ("dflash",))


@pytest.mark.parametrize(("mean", "longest"), [(3.0, 4), (2.5, 4), (1.4, 4), (5.0, 16)])
def test_accept_lengths_spread_around_their_mean(mean: float, longest: int):
    """As SGLang draws them: a normal deviation of 1, rounded and cut."""
    environment = simulated_lens(mean, longest)
    assert environment["SGLANG_SIMULATE_ACC_METHOD"] == "multinomial"
    drawn, given = Random(1), float(environment["SGLANG_SIMULATE_ACC_LEN"])
    lens = [round(min(max(drawn.gauss(given, 1), 1), longest)) for _ in range(20_000)]
    assert fmean(lens) == pytest.approx(mean, abs=0.03)
    assert len({*lens}) > 2
    for fixed in (1, longest):
        assert simulated_lens(fixed, longest)["SGLANG_SIMULATE_ACC_METHOD"] == "match-expected"


def test_what_cannot_be_started_is_refused():
    with pytest.raises(BenchError, match="give --eagle3 its folder"):
        server_specs(replace(MODELS, eagle3=None), ("parse-eagle3",))
    with pytest.raises(BenchError, match="give --judge its folder"):
        server_specs(replace(MODELS, judge=None), ("parse-head",))
