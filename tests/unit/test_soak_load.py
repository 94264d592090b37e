"""The soak's load and its checks of answers."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from soak.drive import Outcome
from soak.faults import faults_of
from soak.load import (
    CONSTRAINTS,
    EXACT,
    FALLBACKS,
    FATES,
    FREE,
    PROMPTS,
    SCHEDULED,
    SoakRequest,
    make_request,
)
from soak.run import summarise

pytestmark = pytest.mark.unit
PROBLEMS = [SimpleNamespace(text=f"problem {n}", solution=f"solution {n}") for n in range(40)]
EXACT_REQUEST = SoakRequest(0, "problem, greedy", "p", {"max_new_tokens": 9}, {}, is_exact=True)


def _render(messages) -> str:
    return "|".join(message["content"] for message in messages)


def _load(count: int, seed: int = 0) -> list[SoakRequest]:
    return [make_request(number, seed, PROBLEMS, _render) for number in range(count)]


def _answer(**changes) -> dict:
    parse = {"mode": "parse", "accepted_tokens": 2, "target_tokens": 1, "drafted_tokens": 4}
    meta = {
        "finish_reason": {"type": "stop"},
        "completion_tokens": 3,
        "prompt_tokens": 4,
        "parse": [parse | changes.pop("parse", {})],
    }
    meta |= changes.pop("meta", {})
    return {"text": "abc", "output_ids": [1, 2, 3], "meta_info": meta} | changes


def test_same_seed_same_load():
    assert _load(50) == _load(50)
    assert _load(50) != _load(50, seed=1)
    assert _load(50)[:20] == _load(20)


def test_three_hundred_requests_hold_everything():
    load = _load(300)
    assert sum(request.is_exact for request in load) == 150
    for is_exact, drawn in ((True, EXACT), (False, FREE)):
        kinds = {*drawn, SCHEDULED[0 if is_exact else 1]}
        chosen = [request for request in load if request.is_exact == is_exact]
        assert {request.kind.split(", ")[1] for request in chosen} == kinds
        assert {request.kind.split(", ")[0] for request in chosen} == set(PROMPTS)
        assert {request.fate for request in chosen} == set(FATES)
        assert {request.reason for request in chosen} == {"", *FALLBACKS}
        assert 30 < sum("draft" in request.parse for request in chosen) < 120
        assert {request.is_refused for request in chosen} == {False, not is_exact}
    for constraints in CONSTRAINTS.values():
        for one in constraints:
            assert any(request.sampling | one == request.sampling for request in load)


def test_exact_requests_are_greedy_and_accept_nothing():
    for request in _load(300):
        if request.is_exact:
            assert request.sampling["temperature"] == 0
            assert request.parse["threshold"] > 1


def test_a_plain_server_sees_no_parse_option():
    request = _load(1)[0]
    assert "custom_params" not in request.content(with_parse=False)["sampling_params"]
    assert request.content(with_parse=True)["sampling_params"]["custom_params"]["parse"]


def test_a_right_answer_has_no_fault():
    assert faults_of(EXACT_REQUEST, _answer(), _answer()) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"output_ids": [1, 2, 4]}, "wrong bytes: token 2"),
        ({"output_ids": [1, 2]}, "wrong bytes: token 2"),
        ({"text": "abd"}, "wrong bytes: text"),
        ({"meta": {"finish_reason": {"type": "length"}}}, "wrong bytes: finish_reason"),
        ({"meta": {"finish_reason": {"type": "abort"}}}, "ended by itself"),
        ({"parse": {"mode": "plain", "reason": "penalties"}}, "served as ('plain', 'penalties')"),
        ({"parse": {"drafted_tokens": 0}}, "served as ('parse', '') with 0 draft tokens"),
        ({"parse": {"reason": "it did not fit"}}, "with 4 draft tokens"),
        ({"parse": {"accepted_tokens": 5}}, "does not add up"),
    ],
)
def test_a_wrong_answer_is_noticed(changes: dict, text: str):
    answer = _answer(**copy.deepcopy(changes))
    assert any(text in fault for fault in faults_of(EXACT_REQUEST, answer, _answer()))


def test_an_aborted_answer_is_a_prefix():
    request = SoakRequest(0, "", "", {"max_new_tokens": 9}, {}, is_exact=True, fate="abort")
    aborted = {"finish_reason": {"type": "abort"}}
    assert faults_of(request, _answer(output_ids=[1, 2], meta=aborted), _answer()) == []
    wrong = faults_of(request, _answer(output_ids=[1, 9], meta=aborted), _answer())
    assert "wrong bytes: token 1" in wrong[0]
    dummy = aborted | {"prompt_tokens": 1}  # SGLang's prompt while the grammar compiled
    assert faults_of(request, _answer(output_ids=[9], meta=dummy), _answer()) == []


def test_a_stop_string_may_have_begun_in_the_text():
    stopped = {"finish_reason": {"type": "stop", "matched": "\nf: "}}
    left, right = _answer(meta=stopped), _answer(text="abc\n", meta=stopped)
    assert faults_of(EXACT_REQUEST, left, right) == faults_of(EXACT_REQUEST, right, left) == []
    assert faults_of(EXACT_REQUEST, left, _answer(text="abcf", meta=stopped))


def test_a_stop_string_in_the_text_is_noticed():
    request = SoakRequest(1, "", "", {"max_new_tokens": 9, "stop": ["b"]}, {})
    assert "stop string 'b'" in faults_of(request, _answer(), None)[0]


def test_summary_counts_and_is_clean_only_without_any():
    load = _load(4)
    good = [Outcome(n, 1.0 + n, "finished", (), "parse", 10, {"model": n}) for n in range(4)]
    clean = summarise(load, good, [], 2.0)
    assert (clean.is_clean, clean.p50_s, clean.tokens_per_s) == (True, 2.5, 20.0)
    assert clean.drafted == {"model": 6}
    assert not summarise(load, good, ["3 KV slots are still in use"], 2.0).is_clean
    wrong = Outcome(0, 1.0, "finished", ("wrong bytes: token 0",))
    failed = Outcome(1, 1.0, "failed", ("error: x",))
    report = summarise(load, [wrong, failed], [], 2.0)
    assert (report.wrong_bytes, report.errors, report.is_clean) == (1, 1, False)
    assert load[0].kind in report.first_faults[0]
