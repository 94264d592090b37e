"""Requests of the speed benchmark: random tokens in, a fixed number of tokens out."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import httpx

from sglang_parse.client.ask import timed
from sglang_parse.client.records import Answer, BenchError, BenchRun, Variant, has_parse
from sglang_parse.client.servers import Endpoint, ServerSpec
from sglang_parse.core.policy.constants import DEFAULTS
from sglang_parse.core.simulation import ENV_VAR as SIMULATE
from sglang_parse.limit.settings import LimitSettings

WARM_UP = -1
"""The run that is not timed: a server's first requests are its slowest."""
REQUEST_LIMIT_S = 1800.0
MIN_REQUESTS = 2
WAVES = 3
"""Requests per slot of the concurrency, one after another, where starts are staggered."""
ADAPTIVE_WARM_UP = 1 + DEFAULTS.window
"""Requests: the adaptive policy decides after a window of drafts."""


class Sender:
    """Sends loads to one server; the prompts differ from request to request."""

    def __init__(self, endpoint: Endpoint, spec: ServerSpec, settings: LimitSettings) -> None:
        self.endpoint, self.settings = endpoint, settings
        self._is_simulated = SIMULATE in dict(spec.environment)
        self._rng = random.Random(0)
        self._answer_s = 0.0  # of the previous run

    def send(self, run: int, concurrency: int) -> BenchRun:
        """Sends one wave of requests at once, or several waves with staggered starts.

        Raises:
            BenchError: a request failed, or PARSE did not serve it as asked.
        """
        is_warm_up = run == WARM_UP
        is_adaptive = self.settings.drafting == "auto" and has_parse(self.endpoint.name)
        warm_up = ADAPTIVE_WARM_UP if is_adaptive else 1
        least = warm_up if is_warm_up else MIN_REQUESTS
        is_staggered = self.settings.staggered and not is_warm_up
        count = max(least, concurrency * (WAVES if is_staggered else 1))
        prompts = [self._tokens(self.settings.input_len) for _ in range(count)]
        apart_s = self._answer_s / concurrency if is_staggered else 0.0
        with self._client() as client:
            calls = [
                partial(self._ask, client, i, prompt, apart_s * i if i < concurrency else 0.0)
                for i, prompt in enumerate(prompts)
            ]
            found = timed(calls, Variant(self.endpoint.name), run, concurrency)
        self._answer_s = median(answer.wall_ms for answer in found.answers) / 1e3
        return found

    def _ask(
        self, client: httpx.Client, index: int, prompt: Sequence[int], wait_s: float
    ) -> Answer:
        time.sleep(wait_s)
        started = time.perf_counter()
        meta = self._generate(client, prompt, self.settings.max_new_tokens)
        wall_ms = 1e3 * (time.perf_counter() - started)
        if meta["completion_tokens"] != self.settings.max_new_tokens:
            raise BenchError(f"{self.endpoint.name} generated {meta['completion_tokens']} tokens")
        answer = Answer(index, "", meta["completion_tokens"], wall_ms, meta)
        if self._is_simulated and not (
            answer.parse["mode"] == "parse" and "simulated" in answer.parse
        ):
            raise BenchError(
                f"{self.endpoint.name} should serve with PARSE and simulate acceptance, its "
                f"meta_info['parse'] is {answer.parse!r}"
            )
        return answer

    def _generate(
        self, client: httpx.Client, prompt: Sequence[int], max_new_tokens: int
    ) -> dict[str, Any]:
        """Returns ``meta_info``. Raises: BenchError."""
        params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": params}
        try:
            response = client.post(f"{self.endpoint.url}/generate", json=body)
            response.raise_for_status()
        except httpx.HTTPError as error:
            self.endpoint.check_alive()  # a dead server raises with its log
            raise BenchError(f"a request to {self.endpoint.name} failed: {error!r}") from error
        return response.json()["meta_info"]

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(3, self.settings.target.vocab), k=count)

    def _client(self) -> httpx.Client:
        return httpx.Client(timeout=REQUEST_LIMIT_S, limits=httpx.Limits(max_connections=None))
