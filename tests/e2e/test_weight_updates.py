"""Weight updates of target and draft at run time; pauses during drafts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing
from safetensors.torch import load_file

from support.client import Client, ids_of, parse_info, random_prompts, wait_until
from support.random_pair import PairShape, make_pair
from support.servers import SEED, Start, parse_flags, plain_flags, served

pytestmark = pytest.mark.nightly("tests/compat/test_refusals.py")

SHORT = 9
LENGTH = {"max_new_tokens": 32, "ignore_eos": True}
LONG = {"max_new_tokens": 120, "ignore_eos": True}


@pytest.fixture(scope="module")
def new_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pair of the same shape as ``pair``, so that loading the wrong one raises no error."""
    return make_pair(tmp_path_factory.mktemp("new-pair"), PairShape(seed=5))


@pytest.fixture(scope="module")
def plain_new(start_server: Start, new_pair: tuple[Path, Path]) -> Iterator[Client]:
    """Stock SGLang started with the new target."""
    yield from served(start_server, "plain-new", *plain_flags(new_pair[0]), *SEED)


@pytest.fixture(scope="module")
def started(start_server: Start, pair: tuple[Path, Path]) -> Iterator[Client]:
    yield from served(
        start_server,
        "updated",
        *parse_flags(pair, "--parse-verification", "token", "--parse-draft-tokens", "16"),
        *("--parse-draft-chunk", "4", *SEED),
    )


@pytest.fixture
def updated(started: Client, pair: tuple[Path, Path]) -> Iterator[Client]:
    """PARSE with ``pair``, which is loaded again after each test."""
    yield started
    started.post("/continue_generation", {})
    started.wait_idle()
    load_target(started, pair[0])
    load_draft(started, pair[1])


def load_target(client: Client, folder: Path, **options: Any) -> None:
    response = client.post("/update_weights_from_disk", {"model_path": str(folder), **options})
    assert response.status_code == 200, response.text


def load_draft(client: Client, folder: Path) -> None:
    """Updates from tensors in shared memory, between begin and end, as a trainer does."""
    client.post("/begin_weight_update", {"selector": "draft"}).raise_for_status()
    body = {"serialized_named_tensors": [_shared_tensors(folder)], "selector": "draft"}
    client.post("/update_weights_from_tensor", body).raise_for_status()
    client.post("/end_weight_update", {}).raise_for_status()


_alive: list = []


def _shared_tensors(folder: Path) -> str:
    from sglang.srt.utils import MultiprocessingSerializer

    # By name, because file descriptors cannot be sent to an unrelated process.
    torch.multiprocessing.set_sharing_strategy("file_system")
    tensors = list(load_file(folder / "model.safetensors").items())
    _alive.append(tensors)  # the server reads them from here
    return MultiprocessingSerializer.serialize(tensors, output_str=True)


def checksum(client: Client, selector: str) -> str:
    response = client.post("/weights_checker", {"action": "checksum", "selector": selector})
    response.raise_for_status()
    return response.json()["per_engine_checksum"]


def accept_ratio(answers: list[dict]) -> float:
    infos = [parse_info(answer) for answer in answers]
    return sum(i["accepted_tokens"] for i in infos) / sum(i["drafted_tokens"] for i in infos)


@contextmanager
def generating(
    client: Client, prompts: list[list[int]], length: dict[str, Any]
) -> Iterator[list[Future]]:
    """Sends all ``prompts`` concurrently for the length of a block."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        jobs = [pool.submit(client.generate, prompt, **length) for prompt in prompts]
        try:
            yield jobs
        finally:  # no request may wait for a paused server
            client.post("/continue_generation", {})


def test_a_checkpoint_from_disk_updates_the_target(
    updated: Client, plain: Client, plain_new: Client, new_pair: tuple[Path, Path]
):
    prompts = random_prompts(6, 81)
    assert ids_of(updated.generate_all(prompts, 6, **LENGTH)) == ids_of(
        plain.generate_all(prompts, 6, **LENGTH)
    )
    target, draft = checksum(updated, "target"), checksum(updated, "draft")
    load_target(updated, new_pair[0])
    assert checksum(updated, "target") != target
    assert checksum(updated, "draft") == draft
    answers = updated.generate_all(prompts, 6, **LENGTH)
    assert ids_of(answers) == ids_of(plain_new.generate_all(prompts, 6, **LENGTH))
    # The old target's KV of the same prompts is flushed.
    assert {answer["meta_info"]["cached_tokens"] for answer in answers} == {0}
    assert {parse_info(answer)["mode"] for answer in answers} == {"parse"}


def test_the_draft_is_updated_by_tensor(
    updated: Client, plain_new: Client, new_pair: tuple[Path, Path]
):
    prompts = random_prompts(6, 82)
    expected = ids_of(plain_new.generate_all(prompts, 6, **LENGTH))
    load_target(updated, new_pair[0])
    target = checksum(updated, "target")
    before = updated.generate_all(prompts, 6, **LENGTH)
    load_draft(updated, new_pair[0])
    assert checksum(updated, "target") == target
    after = updated.generate_all(prompts, 6, **LENGTH)
    assert ids_of(before) == ids_of(after) == expected
    # An unrelated draft is accepted by chance only, a copy of the target always.
    assert accept_ratio(before) < 0.1 < 0.95 < accept_ratio(after)


@pytest.mark.parametrize("body", [{}, {"selector": "all"}])
def test_the_same_tensors_for_both_models_are_refused(
    updated: Client, new_pair: tuple[Path, Path], body: dict
):
    both = [checksum(updated, "target"), checksum(updated, "draft")]
    tensors = {"serialized_named_tensors": [_shared_tensors(new_pair[0])], **body}
    for path, content in (
        ("/begin_weight_update", body),
        ("/update_weights_from_tensor", tensors),
        (
            "/update_weights_from_distributed",
            {"names": [], "dtypes": [], "shapes": [], **body},
        ),
    ):
        response = updated.post(path, content)
        assert response.status_code == 400
        assert "selector is 'all'" in response.text
        assert "Fix: update one at a time" in response.text
    assert [checksum(updated, "target"), checksum(updated, "draft")] == both


def test_pauses_in_place_change_nothing(updated: Client, plain: Client):
    prompts, length = random_prompts(4, 83), {**LENGTH, "max_new_tokens": 48}
    expected = ids_of(plain.generate_all(prompts, 6, **length))
    seen: set[str] = set()
    with generating(updated, prompts, length) as jobs:
        while not all(job.done() for job in jobs):
            updated.post("/pause_generation", {"mode": "in_place"}).raise_for_status()
            running = updated.look()["running"]
            seen |= {held["phase"] for held in running}
            time.sleep(0.05)
            assert updated.look()["running"] == running
            updated.post("/continue_generation", {}).raise_for_status()
        assert ids_of([job.result() for job in jobs]) == expected
    assert {"drafting", "verifying"} <= seen


def test_new_weights_during_drafts(
    updated: Client, plain: Client, plain_new: Client, new_pair: tuple[Path, Path]
):
    """Paused requests release their KV; the new target writes their next token."""
    prompts = random_prompts(4, 84, longest=SHORT)
    with generating(updated, prompts, LONG) as jobs:
        _wait_for_output(updated, len(prompts))
        updated.post("/pause_generation", {"mode": "retract"}).raise_for_status()
        load_target(updated, new_pair[0], weight_version="new")
        state = updated.state()
        assert state["probe"]["free_slots"] == state["memory_usage"]["token_capacity"]
        updated.post("/continue_generation", {}).raise_for_status()
        answers = [job.result() for job in jobs]
    outputs = ids_of(answers)
    spans = [answer["meta_info"]["weight_versions"] for answer in answers]
    splits = [next(s["start"] for s in found if s["version"] == "new") for found in spans]
    assert all(0 < split < len(ids) for split, ids in zip(splits, outputs, strict=True))
    limit = {"max_new_tokens": max(splits), "ignore_eos": True}
    old = ids_of(plain.generate_all(prompts, 6, **limit))
    begun = [[*p, *ids[:end]] for p, ids, end in zip(prompts, outputs, splits, strict=True)]
    new = ids_of(plain_new.generate_all(begun, 6, **LONG))
    for ids, split, before, after in zip(outputs, splits, old, new, strict=True):
        assert ids == before[:split] + after[: len(ids) - split]
    updated.assert_nothing_lost()


def _wait_for_output(client: Client, count: int) -> None:
    def all_have_some() -> bool:
        running = client.look()["running"]
        return len(running) == count and all(held["committed"] > SHORT for held in running)

    wait_until(all_have_some, "all requests to have written something")


def test_a_pause_that_aborts_frees_everything(updated: Client):
    prompts = random_prompts(4, 85, longest=SHORT)
    with generating(updated, prompts, LONG) as jobs:
        _wait_for_output(updated, len(prompts))
        updated.post("/pause_generation", {"mode": "abort"}).raise_for_status()
        answers = [job.result() for job in jobs]
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}
    updated.post("/continue_generation", {}).raise_for_status()
    updated.assert_nothing_lost()


@pytest.mark.parametrize("call", ["release_memory_occupation", "resume_memory_occupation"])
@pytest.mark.parametrize("tags", [None, ["kv_cache"], ["weights"]])
def test_memory_is_not_released(updated: Client, call: str, tags: list[str] | None):
    response = updated.post(f"/{call}", {"tags": tags})
    assert response.status_code == 400
    assert "PARSE: memory cannot be released" in response.text
    assert "Fix: " in response.text
