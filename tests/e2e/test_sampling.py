"""Temperature > 0: target tokens are samples of the target, drafts samples of the draft model.

Both use the request's temperature, top-p, top-k and min-p; seeds reproduce runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from scipy import stats

from sglang_parse.client.servers import awake
from support.client import EXACT, Client, parse_info, random_prompts
from support.distribution import ACCEPTABLE_P, Places, Rule
from support.models import load_model
from support.servers import ALWAYS, SEED, Start, parse_flags

PROMPT = random_prompts(1, 51)[0]
NUM_SAMPLES = 160
NUM_TOKENS = 3
SEEDED = pytest.mark.nightly(
    "tests/e2e/test_sampling.py::test_seeded_samples_equal_the_plain_servers"
)
MORE = pytest.mark.nightly("tests/e2e/test_sampling.py::test_drafts_obey_the_parameters")


RULES = {
    "top_k": Rule(top_k=5),
    "top_p": Rule(top_p=0.6),
    "min_p": Rule(min_p=0.2),
    "all": Rule(temperature=1.3, top_k=12, top_p=0.8, min_p=0.05),
}


@pytest.fixture(scope="module")
def target_model(pair: tuple[Path, Path]):
    return load_model(pair[0])


@pytest.fixture(scope="module")
def draft_model(pair: tuple[Path, Path]):
    return load_model(pair[1])


def _uniform_values(model, answers: list[list[int]], temperature: float) -> list[float]:
    """Of all but the first token of each answer, which prefill samples."""
    places = Places(model, Rule(temperature))
    for answer in answers:
        places.add((*PROMPT, answer[0]), answer[1:])
    return places.values


@pytest.mark.parametrize(
    ("path", "kwargs"),
    [
        pytest.param("plain", {"parse": {"enabled": False}}, marks=MORE),
        ("adjusted", {"logit_bias": {"5": 0.0001}}),
        ("token", {}),
    ],
)
def test_distribution(token: Client, target_model, path: str, kwargs: dict):
    params = {"temperature": 0.8, "max_new_tokens": NUM_TOKENS, "ignore_eos": True, **kwargs}
    answers = token.generate_all([PROMPT] * NUM_SAMPLES, 16, **params)
    assert {parse_info(answer)["mode"] for answer in answers} == {
        "plain" if path == "plain" else "parse"
    }
    values = _uniform_values(target_model, [a["output_ids"] for a in answers], 0.8)
    assert stats.kstest(values, "uniform").pvalue > ACCEPTABLE_P
    # Not vacuous: the same samples do not fit another temperature.
    wrong = _uniform_values(target_model, [a["output_ids"] for a in answers], 0.2)
    assert stats.kstest(wrong, "uniform").pvalue < ACCEPTABLE_P


def test_threshold_above_one_samples_the_target(semantic: Client, target_model):
    params = {"temperature": 0.8, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    answers = semantic.generate_all([PROMPT] * NUM_SAMPLES, 16, parse=EXACT, **params)
    values = _uniform_values(target_model, [a["output_ids"] for a in answers], 0.8)
    assert stats.kstest(values, "uniform").pvalue > ACCEPTABLE_P


def _params(rule: Rule) -> dict:
    return {
        "temperature": rule.temperature,
        "top_k": rule.top_k,
        "top_p": rule.top_p,
        "min_p": rule.min_p,
        "ignore_eos": True,
    }


@pytest.mark.nightly("tests/e2e/test_sampling.py::test_distribution")
@pytest.mark.parametrize("name", RULES)
def test_target_written_tokens_obey_the_parameters(token: Client, target_model, name: str):
    rule = RULES[name]
    answers = token.generate_all(
        [PROMPT] * NUM_SAMPLES, 16, max_new_tokens=NUM_TOKENS, **_params(rule)
    )
    places = Places(target_model, rule)
    for answer in answers:
        places.add((*PROMPT, answer["output_ids"][0]), answer["output_ids"][1:])
    assert places.pvalue() > ACCEPTABLE_P
    # Not vacuous: without the parameters the same samples do not fit.
    free = Places(target_model, Rule(rule.temperature))
    for answer in answers:
        free.add((*PROMPT, answer["output_ids"][0]), answer["output_ids"][1:])
    assert free.pvalue() < ACCEPTABLE_P


@pytest.mark.parametrize(
    ("server", "name"),
    [
        ("blocks", "all"),
        *(pytest.param("semantic", name, marks=MORE) for name in RULES),
    ],
)
def test_drafts_obey_the_parameters(
    request: pytest.FixtureRequest, draft_model, server: str, name: str
):
    """Drafts are samples of the draft model, given the committed tokens."""
    rule = RULES[name]
    client: Client = request.getfixturevalue(server)
    answers = client.generate_all(
        [PROMPT] * 16, 16, parse={"trace": True}, max_new_tokens=24, **_params(rule)
    )
    places, wrong = Places(draft_model, rule), Places(draft_model, Rule(rule.temperature))
    for answer in answers:
        for record in parse_info(answer)["trace"]:
            before = [*PROMPT, *answer["output_ids"][: record["output_start"]]]
            places.add(before, record["draft_token_ids"])
            wrong.add(before, record["draft_token_ids"])
    assert len(places.values) > 500
    assert places.pvalue() > ACCEPTABLE_P
    assert wrong.pvalue() < ACCEPTABLE_P


@pytest.mark.parametrize("server", ["token", pytest.param("semantic", marks=SEEDED)])
def test_seeded_samples_equal_the_plain_servers(
    request: pytest.FixtureRequest, plain: Client, server: str
):
    """With a seed, noise depends on seed and position only: exact modes sample the plain server's
    tokens, whatever was drafted."""
    client: Client = request.getfixturevalue(server)
    options = {"threshold": 1.5} if server == "semantic" else {}
    params = {"temperature": 1.1, "top_p": 0.95, "top_k": 50, "max_new_tokens": 32}
    prompts = random_prompts(6, 53)
    runs = {}
    for seed in (5, 6):
        kwargs = params | {"sampling_seed": seed, "ignore_eos": True}
        expected = plain.generate_all(prompts, 6, **kwargs)
        answers = client.generate_all(prompts, 6, parse=options, **kwargs)
        runs[seed] = [answer["output_ids"] for answer in answers]
        assert runs[seed] == [answer["output_ids"] for answer in expected]
        if server == "token":
            assert sum(parse_info(answer)["accepted_tokens"] for answer in answers) > 0
    assert runs[5] != runs[6]


def test_several_samples_of_one_request(token: Client, plain: Client, target_model):
    params = {"max_new_tokens": 24, "ignore_eos": True}
    alone = plain.generate(PROMPT, **params)["output_ids"]
    answers = token.generate(PROMPT, n=3, **params)
    assert [answer["output_ids"] for answer in answers] == [alone] * 3
    assert {parse_info(answer)["mode"] for answer in answers} == {"parse"}
    rule = Rule()
    answers = token.generate(PROMPT, n=64, max_new_tokens=4, **_params(rule))
    places = Places(target_model, rule)
    for answer in answers:
        places.add((*PROMPT, answer["output_ids"][0]), answer["output_ids"][1:])
    assert places.pvalue() > ACCEPTABLE_P
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 32
    token.assert_nothing_lost()


@SEEDED
def test_the_same_server_seed_gives_the_same_samples(start_server: Start, pair):
    """One request at a time, because SGLang has one generator per server, and drafts that have the
    same length whatever they cost."""
    runs = []
    for name in ("seeded-1", "seeded-2"):
        flags = ("--parse-verification", "token", *ALWAYS, *SEED)
        server = start_server(name, *parse_flags(pair, *flags))
        with awake(server):
            client = Client.of(server)
            params = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "max_new_tokens": 20}
            runs.append([client.generate(p, **params)["output_ids"] for p in random_prompts(3, 52)])
    assert runs[0] == runs[1]
    assert len({tuple(ids) for ids in runs[0]}) == 3
