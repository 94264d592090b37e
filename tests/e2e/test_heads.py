"""Verdict heads on real servers: verdicts of plain transformers and NumPy, in a causal pass.

A head with random weights on the random pair rejects drafts anywhere; under overlap, with drafts in
blocks. ``test_head_and_question`` has one that reads several layers.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from sglang_parse import cli
from sglang_parse.core.config import ParseConfig
from sglang_parse.startup.certificates import judge_digest
from support.client import EXACT, Client, ids_of, parse_info, random_prompts, wait_until
from support.heads import (
    HeadShape,
    check_verdicts,
    decode_hidden_states,
    rows_of,
    write_head,
)
from support.models import load_model
from support.random_adapter import make_adapter
from support.servers import (
    AHEAD,
    BLOCKS,
    OVERLAP,
    SEED,
    SMALL_CHUNKS,
    Start,
    parse_flags,
    served,
)

PROMPTS = random_prompts(6, seed=51)
LIMIT = {"max_new_tokens": 48, "ignore_eos": True}
LONG = {"max_new_tokens": 80, "ignore_eos": True}
TRACE = {"trace": True}
SHAPE = HeadShape("worst-token", (0,), 64, bias=2.5)
MORE = pytest.mark.nightly("tests/e2e/test_heads.py::test_verdicts_equal_numpys")


@pytest.fixture(scope="session")
def model(pair: tuple[Path, Path]) -> Any:
    """The random target in plain transformers."""
    return load_model(pair[0])


@pytest.fixture(scope="module")
def folder(
    model: Any, block_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    scale = rows_of(model, PROMPTS[0], PROMPTS[1], SHAPE.layers).scale
    return write_head(tmp_path_factory.mktemp("heads") / "a head", block_pair, SHAPE, scale)


@pytest.fixture(scope="module")
def head(
    start_server: Start,
    block_pair: tuple[Path, Path],
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Client]:
    adapter_folder = tmp_path_factory.mktemp("lora") / "loud"
    adapter = make_adapter(adapter_folder, block_pair[0], scale=0.3, seed=5)
    flags = (
        *("--enable-lora", "--lora-paths", f"loud={adapter}", "--lora-backend", "torch_native"),
        *("--parse-judge", str(folder), "--parse-segment", "tokens:3"),
        *("--parse-draft-tokens", "20", "--parse-draft-chunk", "6", "--page-size", "16"),
        *(*BLOCKS, *OVERLAP, *SMALL_CHUNKS, *SEED, "--enable-metrics"),
    )
    yield from served(start_server, "head", *parse_flags(block_pair, *flags), **AHEAD)


@pytest.mark.parametrize(
    ("concurrency", "prompts"), [(6, PROMPTS), pytest.param(1, PROMPTS, marks=MORE)]
)
def test_verdicts_equal_numpys(
    head: Client, model: Any, folder: Path, concurrency: int, prompts: list
):
    """Alone or packed with others, in rounds after the first, and after a radix-cache hit."""
    head.flush()
    verdicts: list[float] = []
    for _ in range(2):
        answers = head.generate_all(prompts, concurrency, parse=TRACE, **LONG)
        for prompt, answer in zip(prompts, answers, strict=True):
            verdicts += check_verdicts(model, folder, SHAPE.layers, prompt, answer)
            assert parse_info(answer)["judge"] == "head"
    assert answers[-1]["meta_info"]["cached_tokens"] > 0
    assert len(parse_info(answers[0])["trace"]) > 3
    # Not vacuous: verdicts of all kinds, some accept and some reject.
    assert min(verdicts) < 0.2 < 0.8 < max(verdicts)
    accepted = sum(parse_info(answer)["accepted_tokens"] for answer in answers)
    assert 0 < accepted < sum(parse_info(answer)["drafted_tokens"] for answer in answers)
    head.assert_nothing_lost()


def test_verdicts_beside_requests_with_an_adapter(head: Client, model: Any, folder: Path):
    """The head reads the base model's states; drafts of an adapter are compared token by token."""
    jobs = [(prompt, top) for prompt in PROMPTS[:4] for top in ({}, {"lora_path": "loud"})]
    with ThreadPoolExecutor(len(jobs)) as pool:
        running = [pool.submit(head.generate, p, parse=TRACE, top=t, **LIMIT) for p, t in jobs]
        answers = [job.result() for job in running]
    verdicts: list[float] = []
    for (prompt, top), answer in zip(jobs, answers, strict=True):
        if top:
            assert "judge" not in parse_info(answer)
        else:
            verdicts += check_verdicts(model, folder, SHAPE.layers, prompt, answer)
    assert len(verdicts) > 20
    assert ids_of(answers[::2]) != ids_of(answers[1::2])
    head.assert_nothing_lost()


def test_the_pass_is_causal(head: Client, semantic: Client):
    """No question rows and no custom mask, as the passes of questions have."""
    answers = head.generate_all(PROMPTS, 6, parse=TRACE, **LIMIT)
    for record in (r for a in answers for r in parse_info(a)["trace"]):
        assert not any(record["question_token_ids"])
        assert len(record["prefix_ends"]) == -(-record["prefix_ends"][-1] // 3)
    semantic.generate(PROMPTS[0], **LIMIT)
    place = "target-verify"
    assert head.look()["forwards"][f"{place} eager"] > 10
    assert head.look()["custom_masks"][place] == 0 < semantic.look()["custom_masks"][place]


def test_exact_above_one(head: Client, plain: Client):
    expected = ids_of(plain.generate_all(PROMPTS, 6, **LIMIT))
    for concurrency, count in ((1, 1), (6, 6)):
        answers = head.generate_all(PROMPTS[:count], concurrency, parse=EXACT, **LIMIT)
        assert ids_of(answers) == expected[:count]
        assert all(parse_info(answer)["rounds"] > 3 for answer in answers)


def test_beside_all_kinds_of_requests(head: Client, plain: Client):
    prompts = PROMPTS[:3]
    expected = ids_of(plain.generate_all(prompts, 3, **LIMIT))
    alone = ids_of(head.generate_all(prompts, 1, **LIMIT))
    kinds = [EXACT, {"enabled": False}, {}]
    with ThreadPoolExecutor(9) as pool:
        jobs = [
            pool.submit(head.generate, prompt, parse=kind, **LIMIT)
            for prompt in prompts
            for kind in kinds
        ]
        answers = ids_of([job.result() for job in jobs])
    assert answers[0::3] == answers[1::3] == expected
    assert answers[2::3] == alone
    head.assert_nothing_lost()


def test_the_next_turn(head: Client, model: Any, folder: Path):
    first = head.generate_all(PROMPTS[:3], 3, **LIMIT)
    turns = [p + a["output_ids"] + PROMPTS[5] for p, a in zip(PROMPTS, first, strict=False)]
    for prompt, answer in zip(
        turns, head.generate_all(turns, 3, parse=TRACE, **LIMIT), strict=True
    ):
        assert answer["meta_info"]["cached_tokens"] > len(PROMPTS[0]) // 16 * 16
        assert check_verdicts(model, folder, SHAPE.layers, prompt, answer)


def test_aborted_requests_return_their_slots(head: Client):
    with head.probe.fault("target-verify", "slow", seconds=0.3), ThreadPoolExecutor(4) as pool:
        rids = [f"gone-{i}" for i in range(4)]
        jobs = [
            pool.submit(head.generate, p, top={"rid": rid}, max_new_tokens=200, ignore_eos=True)
            for p, rid in zip(PROMPTS, rids, strict=False)
        ]
        wait_until(lambda: head.look()["running"], "the requests to run")
        head.abort_all()
        reasons = {job.result()["meta_info"]["finish_reason"]["type"] for job in jobs}
    assert reasons == {"abort"}
    head.assert_nothing_lost()


def test_nan_ends_the_request(head: Client):
    fault = head.probe.fault("target-verify", "nan", times=1)
    with fault, pytest.raises(httpx.HTTPStatusError) as failed:
        head.generate(PROMPTS[0], **LIMIT)
    assert "NaN" in failed.value.response.text
    assert head.generate(PROMPTS[0], **LIMIT)["output_ids"]
    head.assert_nothing_lost()


def test_hidden_states_of_a_given_draft(head: Client, model: Any, folder: Path):
    """What train-judge reads: the target's rows of any draft, from the serving engine."""
    draft = PROMPTS[1][:18]
    options = {"trace": True, "hidden_states": True, "threshold": 0, "draft_token_ids": draft}
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(head.generate, PROMPTS[0], parse=options, max_new_tokens=17)
            for _ in range(4)
        ]
        answers = [job.result() for job in jobs]
    for answer in answers:
        assert answer["output_ids"] == draft[:17]
        record = parse_info(answer)["trace"][0]
        assert record["anchor_token_id"] == draft[0]
        assert record["draft_token_ids"] == draft[1:]
        end = record["prefix_ends"][-1]
        rows = rows_of(model, [*PROMPTS[0], draft[0]], draft[1 : end + 1], SHAPE.layers)
        assert record["hidden_states"]["layers"] == [*SHAPE.layers]
        found = decode_hidden_states(record["hidden_states"])
        np.testing.assert_allclose(found, rows.hidden, atol=1e-3 * rows.scale)
        assert record["draft_logprobs"] == pytest.approx(rows.logprobs, abs=1e-3)
        assert record["draft_entropies"] == pytest.approx(rows.entropies, abs=1e-3)
        assert check_verdicts(model, folder, SHAPE.layers, PROMPTS[0], answer)


def test_bad_drafts_are_refused(head: Client):
    options = {"trace": True, "hidden_states": True, "threshold": 0}
    for wrong, words in (
        ({"draft_token_ids": [5]}, "has 1 tokens; it needs 2 to 21"),
        ({"draft_token_ids": [5, 6], "threshold": 0.5}, "threshold 0"),
        ({"draft_token_ids": [5, 10**6]}, "has 1000000 at place 1; this model's token ids are"),
        ({"trace": False}, "it needs trace true"),
    ):
        with pytest.raises(httpx.HTTPStatusError) as failed:
            head.generate(PROMPTS[0], parse={**options, **wrong}, **LIMIT)
        assert words in failed.value.response.text
    head.assert_nothing_lost()


ALL_RIGHT = """
import sys
for line in sys.stdin:
    print('{"score": 1, "right_chars": null}', flush=True)
"""


@pytest.mark.usefixtures("programs")
def test_calibrate_certifies_a_threshold_of_this_head(head: Client, folder: Path, tmp_path: Path):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out"
    rows = (json.dumps({"prompt": f"What is {n} + {n * n}?"}) for n in range(48))
    prompts.write_text("\n".join(rows))
    grader = shlex.join([sys.executable, "-c", ALL_RIGHT])
    task = ("--task-file", str(prompts), "--grader", grader, "--max-tokens", "24")
    sizes = ("--requests", "40", "--pilot", "8", "--served", "0", "--alpha", "0.1")
    server = ("--url", head.url, "--model-name", "default", "--output", str(output))
    assert cli.main(["calibrate", *task, *sizes, *server]) == 0
    found = json.loads((output / "calibration.json").read_text())
    certified = ParseConfig(judge=str(folder), threshold=str(output / "calibration.json"))
    assert found["fingerprint"]["judge"] == judge_digest(certified)
    assert found["fingerprint"]["question"] == {}
    # Without an error the loosest threshold passes, below verdicts of these very drafts.
    assert 0 < found["threshold"] == certified.accept_threshold < max(found["first_verdicts"])


@pytest.mark.usefixtures("programs")
def test_explain_shows_verdicts_without_a_question(head: Client, tmp_path: Path):
    words = ("--url", head.url, "--requests", "1", "--output", str(tmp_path))
    assert cli.main(["explain", *words]) == 0
    text = (tmp_path / "explain.html").read_text(encoding="utf-8")
    assert "Judge: head, threshold 0.5" in text
    assert 'class="verdict"' in text
    assert ", mass" not in text
