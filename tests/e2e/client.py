"""Real HTTP requests to a server under test, and problems to send."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Client:
    """One server's native API."""

    url: str

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=300)

    def generate(
        self,
        prompt: Sequence[int] | str,
        *,
        parse: dict[str, Any] | None = None,
        top: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> dict[str, Any]:
        """One greedy answer unless ``sampling`` says otherwise. Raises on an HTTP error."""
        params: dict[str, Any] = {"temperature": 0, **sampling}
        if parse is not None:
            params["custom_params"] = {"parse": parse}
        body: dict[str, Any] = {"sampling_params": params, **(top or {})}
        body["text" if isinstance(prompt, str) else "input_ids"] = prompt
        response = self.post("/generate", body)
        response.raise_for_status()
        return response.json()

    def generate_all(
        self, prompts: Sequence[Sequence[int] | str], concurrency: int, **kwargs: Any
    ) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda prompt: self.generate(prompt, **kwargs), prompts))

    def flush(self) -> None:
        """Empty the radix cache; SGLang's idle check fails the server on a lost slot."""
        response = httpx.post(f"{self.url}/flush_cache", timeout=60)
        assert response.status_code == 200, response.text

    def free_slots(self) -> int:
        """KV slots that are free right now."""
        info = httpx.get(f"{self.url}/server_info", timeout=60).json()
        state = info["internal_states"][0]
        return state["memory_usage"]["token_capacity"] - self.used_slots()

    def used_slots(self) -> int:
        loads = httpx.get(f"{self.url}/v1/loads", timeout=60).json()["loads"]
        return sum(load["num_used_tokens"] for load in loads)


def parse_info(answer: dict[str, Any]) -> dict[str, Any]:
    """``meta_info["parse"]`` of a finished answer."""
    (info,) = answer["meta_info"]["parse"]
    return info


def random_prompts(
    count: int, seed: int, longest: int = 60, vocab: range = range(3, 300)
) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.choice(vocab) for _ in range(rng.randrange(5, longest))] for _ in range(count)]
