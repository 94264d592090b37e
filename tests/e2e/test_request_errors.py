"""An exception in what is done for one request ends that request, and nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from support.client import EXACT, Client, ids_of, parse_info, random_prompts

PROMPTS = random_prompts(5, 63)
LIMIT = {"max_new_tokens": 24, "ignore_eos": True}
GRAMMAR = {"regex": "[a-z ]{30,60}", "max_new_tokens": 24}
VICTIM = {
    "ask": (LIMIT, {}),
    "commit": (LIMIT, {}),
    "sources": (LIMIT, {}),
    "observe": (LIMIT, {}),
    "options": (LIMIT, {}),
    "texts": (LIMIT, {}),
    "traces": (LIMIT, {"trace": True}),
    "walk": (GRAMMAR, {}),
    "matcher": (GRAMMAR, {}),
}
"""By seam (see ``parse_probe.SEAMS``), a request that passes it: parameters and options."""
BROKEN_TEXTS = ("take", "keep")
MORE = pytest.mark.nightly(
    "tests/e2e/test_request_errors.py::test_one_requests_error_is_that_requests"
)


def send(client: Client, prompt: list[int], params: dict, options: dict) -> httpx.Response:
    return client.send(prompt, parse={**EXACT, **options}, **params)


@pytest.fixture(scope="module")
def expected(plain: Client) -> list[list[int]]:
    return ids_of(plain.generate_all(PROMPTS, 5, **LIMIT))


@pytest.mark.parametrize("server", ["overlap", pytest.param("semantic", marks=MORE)])
@pytest.mark.parametrize("seam", VICTIM)
def test_one_requests_error_is_that_requests(
    request: pytest.FixtureRequest, expected: list[list[int]], server: str, seam: str
):
    """Five requests run together; the first that passes the seam fails, the others are exact."""
    client: Client = request.getfixturevalue(server)
    params, options = VICTIM[seam]
    jobs = [(PROMPTS[0], params, options), *((prompt, LIMIT, {}) for prompt in PROMPTS[1:])]
    skip = 0 if seam in ("options", "texts", "walk") else 2
    if seam in ("sources", "observe", "traces"):
        skip = 1
    with client.probe.fault(seam, "raise", skip=skip, times=1) as fault:
        with ThreadPoolExecutor(len(jobs)) as pool:
            responses = [*pool.map(lambda job: send(client, *job), jobs)]
        assert fault.num_fired() == 1
    failed = [response for response in responses if response.status_code != 200]
    (error,) = failed
    assert error.status_code == (400 if seam == "options" else 500)
    assert "PARSE: " in error.text
    assert "InjectedError" in error.text
    assert "the client's words" not in error.text
    for response, ids in zip(responses[1:], expected[1:], strict=True):
        assert response is error or response.json()["output_ids"] == ids
    client.assert_nothing_lost()
    again = client.generate_all(PROMPTS, 5, parse=EXACT, **LIMIT)
    assert ids_of(again) == expected
    assert {parse_info(answer)["mode"] for answer in again} == {"parse"}
    client.assert_nothing_lost()


@pytest.mark.parametrize("seam", BROKEN_TEXTS)
def test_an_error_with_a_text_costs_its_drafts_alone(
    semantic: Client, expected: list[list[int]], seam: str
):
    options = {"draft": "a prediction"}
    with semantic.probe.fault(seam, "raise", times=1) as fault:
        response = send(semantic, PROMPTS[0], LIMIT, options)
        assert fault.num_fired() == 1
    assert response.json()["output_ids"] == expected[0]
    assert ids_of(semantic.generate_all(PROMPTS, 5, parse=EXACT, **LIMIT)) == expected
    semantic.assert_nothing_lost()


def test_a_request_with_a_grammar_writes_nothing_of_it_into_the_log(semantic: Client):
    """The failed matcher's error would have its tokens and its schema."""
    word = "zqxj"
    with semantic.probe.fault("matcher", "raise", skip=2, times=1):
        response = send(semantic, PROMPTS[0], {"regex": f"{word}[a-z]{{30}}"}, {})
    assert response.status_code == 500
    log: Path = semantic.probe.folder.with_suffix(".log")
    lines = [line for line in log.read_text().splitlines() if "PARSE: " in line]
    assert any("its grammar failed" in line for line in lines)
    assert not any(word in line for line in lines)
