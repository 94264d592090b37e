"""Real HTTP requests to a server under test, and problems to send."""

from __future__ import annotations

import contextlib
import json
import random
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from support.starts import probe_folder

HTTP = httpx.Client(
    timeout=300, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
)
"""One for all servers, because each new one reads the system's certificates, 50 ms of CPU. It keeps
no connection: servers are suspended between tests."""
DRAFTS = {"drafting": "always"}
"""Request options: drafts, whether it pays or not."""
EXACT = {"threshold": 1.5, **DRAFTS}
"""The same, and every question is asked, nothing is accepted, the answer is the target's."""


@dataclass(frozen=True)
class Fault:
    """An active disturbance; the probe records each use in ``fired``."""

    fired: Path

    def num_fired(self) -> int:
        return len(self.fired.read_text().split()) if self.fired.exists() else 0

    def wait_fired(self) -> None:
        wait_until(self.num_fired, "the fault to fire")


@dataclass(frozen=True)
class Probe:
    """The test's side of ``plugins/probe``: disturbs one server's scheduler through files."""

    folder: Path

    @contextlib.contextmanager
    def fault(
        self, place: str, kind: str, *, seconds: float = 0.0, skip: int = 0, times: int = -1
    ) -> Iterator[Fault]:
        """Disturb forwards at ``place``: let ``skip`` pass, then ``times`` of them (-1: all).

        Args:
            place: see ``parse_probe.PLACES``.
            kind: "slow" (by ``seconds``), "raise", "attention" (its backend raises), "nan".
        """
        name = f"fault-{uuid.uuid4().hex}"
        content = {"id": name, "place": place, "kind": kind, "seconds": seconds}
        fresh = self.folder / "fault.fresh"
        fresh.write_text(json.dumps(content | {"skip": skip, "times": times}))
        fresh.replace(self.folder / "fault.json")  # in one step: nobody reads half a file
        try:
            yield Fault(self.folder / name)
        finally:
            (self.folder / "fault.json").unlink()


@dataclass(frozen=True)
class Client:
    """One server's native API.

    Attributes:
        options: of requests that PARSE serves, unless they say otherwise. Servers draft while it
            pays, as users run them; a random pair's drafts do not, and tests want them.
    """

    url: str
    probe: Probe | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, server: Any) -> Client:
        """A client that can also disturb the server (started by the ``start_server`` fixture)."""
        options = DRAFTS if " PARSE " in f" {server.flags} " else {}
        return cls(server.url, Probe(probe_folder(server.log)), options)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return HTTP.post(f"{self.url}{path}", json=body)

    def generate(
        self,
        prompt: Sequence[int] | str,
        *,
        parse: dict[str, Any] | None = None,
        top: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> dict[str, Any]:
        """One greedy answer unless ``sampling`` says otherwise. Raises on an HTTP error."""
        response = self.send(prompt, parse=parse, top=top, **sampling)
        response.raise_for_status()
        return response.json()

    def send(
        self,
        prompt: Sequence[int] | str,
        *,
        parse: dict[str, Any] | None = None,
        top: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> httpx.Response:
        """As ``generate``, whatever the server answers."""
        params: dict[str, Any] = {"temperature": 0, **sampling}
        custom = params.get("custom_params")
        given = (custom or {}).get("parse") if parse is None else parse
        if options := self.options_of(given):
            params["custom_params"] = {**(custom or {}), "parse": options}
        body: dict[str, Any] = {"sampling_params": params, **(top or {})}
        body["text" if isinstance(prompt, str) else "input_ids"] = prompt
        return self.post("/generate", body)

    def options_of(self, given: dict[str, Any] | None) -> dict[str, Any]:
        """Options of a request with ``given`` ones."""
        is_drafted = (given or {}).get("enabled", True)
        return {**(self.options if is_drafted else {}), **(given or {})}

    def generate_all(
        self, prompts: Sequence[Sequence[int] | str], concurrency: int, **kwargs: Any
    ) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **kwargs), prompts))

    def flush(self) -> None:
        """Empty the radix cache; SGLang's idle check fails the server on a lost slot.

        An answer is sent while its last batch still counts as running (stock SGLang's overlap
        too), and without a time to wait SGLang refuses the flush that follows at once.
        """
        response = HTTP.post(f"{self.url}/flush_cache", params={"timeout": 20}, timeout=60)
        assert response.status_code == 200, response.text

    def state(self) -> dict[str, Any]:
        info = HTTP.get(f"{self.url}/server_info", timeout=60).json()
        return info["internal_states"][0]

    def page_size(self) -> int:
        """Slots per KV page."""
        return HTTP.get(f"{self.url}/server_info", timeout=60).json()["page_size"]

    def free_slots(self) -> int:
        """KV slots that are free right now."""
        return self.state()["memory_usage"]["token_capacity"] - self.used_slots()

    def look(self) -> dict[str, Any]:
        """The scheduler's state by the probe: tree, running, waiting, free_slots."""
        return self.state()["probe"]

    def abort(self, rid: str) -> None:
        self.post("/abort_request", {"rid": rid}).raise_for_status()

    def abort_all(self) -> None:
        self.post("/abort_request", {"abort_all": True}).raise_for_status()

    def wait_idle(self) -> None:
        def is_idle() -> bool:
            seen = self.look()
            return not seen["running"] and not seen["waiting"]

        wait_until(is_idle, "every request to end")

    def num_async_chunks(self, prompt: Sequence[int] | str, **kwargs: Any) -> int:
        """Draft chunks of an answer that were launched before the last one's tokens had come.

        The request is alone: beside others that begin at other times there may be none.
        """
        before = self.look()["overlap"]["async_chunks"]
        self.generate(prompt, **kwargs)
        return self.look()["overlap"]["async_chunks"] - before

    def assert_nothing_lost(self) -> None:
        """No request runs, the cache can be emptied, and then every KV slot is free."""
        self.wait_idle()
        self.flush()
        state = self.state()
        free, capacity = state["probe"], state["memory_usage"]
        assert free["free_slots"] == capacity["token_capacity"]
        assert free["free_window_slots"] in (None, capacity["token_capacity_swa"])
        assert self.used_slots() == 0

    def used_slots(self) -> int:
        loads = HTTP.get(f"{self.url}/v1/loads", timeout=60).json()["loads"]
        return sum(load["num_used_tokens"] for load in loads)


def wait_until(happens: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
    """Raises TimeoutError with the missing condition."""
    deadline = time.monotonic() + limit_s
    while not happens():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {limit_s:.0f} s for {what}")
        time.sleep(0.02)


def parse_info(answer: dict[str, Any]) -> dict[str, Any]:
    """``meta_info["parse"]`` of a finished answer."""
    (info,) = answer["meta_info"]["parse"]
    return info


def by_head(infos: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """(rounds of an EAGLE-3 head's drafts, tokens that they output but for answers' ends)."""
    found = [info["sources"].get("eagle3") for info in infos]
    rounds = sum(one["rounds"] for one in found if one)
    names = ("accepted_tokens", "matched_tokens")
    return rounds, rounds + sum(one[name] for one in found if one for name in names)


def drafts_of(answers: Sequence[dict[str, Any]]) -> list[list[list[int]]]:
    """The drafts of traced answers, round by round."""
    return [[r["draft_token_ids"] for r in parse_info(a)["trace"]] for a in answers]


def draft_forwards(client: Client) -> dict[str, float]:
    """Forwards of the draft model, by where their masks were."""
    lines = HTTP.get(f"{client.url}/metrics").text.splitlines()
    found = (line for line in lines if line.startswith("sglang:parse_draft_forward_passes_total{"))
    return {line.split('masks="')[1].split('"')[0]: float(line.split()[-1]) for line in found}


def assert_adds_up(answer: dict[str, Any]) -> None:
    """Every output token is the draft's or the target's."""
    info = parse_info(answer)
    assert info["accepted_tokens"] + info["target_tokens"] == len(answer["output_ids"])


def assert_all_kinds_of_drafts(answers: Sequence[dict[str, Any]]) -> None:
    """Of traced answers: some drafts were kept whole, some in part, some not at all."""
    records = [record for answer in answers for record in parse_info(answer)["trace"]]
    whole = [record["accepted_len"] == len(record["draft_token_ids"]) for record in records]
    kept = [bool(record["accepted_len"]) for record in records]
    found = {*zip(kept, whole, strict=True)}
    assert found >= {(True, True), (True, False), (False, False)}, "whole, in part, not at all"


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Asserts that PARSE's answer equals a plain server's, its finish reason included."""
    assert ours["output_ids"] == theirs["output_ids"]
    assert ours["text"] == theirs["text"]
    for name in ("finish_reason", "completion_tokens"):
        assert ours["meta_info"][name] == theirs["meta_info"][name]
    assert_adds_up(ours)


def ids_of(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The output tokens of finished answers."""
    return [answer["output_ids"] for answer in answers]


def greedy_ids(plain: Client, seeds: Sequence[int]) -> dict[int, list[list[int]]]:
    """Seed -> a plain server's answers to six random prompts, 48 tokens each."""
    limit = {"max_new_tokens": 48, "ignore_eos": True}
    return {seed: ids_of(plain.generate_all(random_prompts(6, seed), 6, **limit)) for seed in seeds}


def random_prompts(
    count: int, seed: int, longest: int = 60, vocab: range = range(3, 300)
) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.choice(vocab) for _ in range(rng.randrange(5, longest))] for _ in range(count)]


def flat(nested: Any) -> list[float]:
    """All numbers of nested lists, in order."""
    if isinstance(nested, (list, tuple)):
        return [number for item in nested for number in flat(item)]
    return [float(nested)] if isinstance(nested, (int, float)) else []


def chunks_of(client: Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer."""
    with HTTP.stream("POST", f"{client.url}{path}", json={**body, "stream": True}) as response:
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data and data != "[DONE]" and not line.startswith("event: "):
                yield json.loads(data)


@contextlib.contextmanager
def recorded_iterations(client: Client) -> Iterator[list[list[dict[str, Any]]]]:
    """The probe's records of decode iterations in this block; filled at its end."""
    assert client.probe
    iterations: list[list[dict[str, Any]]] = []
    record = client.probe.folder / "record"
    found = client.probe.folder / "iterations.jsonl"
    found.unlink(missing_ok=True)
    record.touch()
    try:
        yield iterations
    finally:
        record.unlink()
    iterations += map(json.loads, found.read_text().splitlines())


@contextlib.contextmanager
def retractions(client: Client, are_forced: bool = True) -> Iterator[None]:
    """SGLang retracts requests every few iterations in this block, as its SGLANG_TEST_RETRACT."""
    assert client.probe
    switch = client.probe.folder / "retract"
    if are_forced:
        switch.touch()
    try:
        yield
    finally:
        switch.unlink(missing_ok=True)
