"""Requests of the speed benchmark: random tokens in, a fixed number of tokens out."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial

import httpx

from sglang_parse.client.ask import LONG_LIMIT_S, timed
from sglang_parse.client.records import Answer, BenchError, BenchRun, Variant, has_parse
from sglang_parse.client.servers import Endpoint, ServerSpec
from sglang_parse.core.policy.constants import DEFAULTS
from sglang_parse.core.simulation import ENV_VAR as SIMULATE
from sglang_parse.limit.settings import LimitSettings

WARM_UP = -1
"""The run that is not timed: a server's first requests are its slowest."""
MIN_REQUESTS = 2
ADAPTIVE_WARM_UP = 1 + DEFAULTS.window
"""Requests: the adaptive policy decides after a window of drafts."""


class Sender:
    """Sends loads to one server; the prompts differ from request to request."""

    def __init__(self, endpoint: Endpoint, spec: ServerSpec, settings: LimitSettings) -> None:
        self.endpoint, self.settings = endpoint, settings
        self._is_simulated = SIMULATE in dict(spec.environment)
        self._rng = random.Random(0)

    def send(self, run: int, concurrency: int) -> BenchRun:
        """Sends so many requests at once; at a warm-up more, one after another."""
        settings, words = self.settings, range(3, self.settings.target.vocab_size)
        least = MIN_REQUESTS
        if run == WARM_UP:
            is_adaptive = settings.drafting == "auto" and has_parse(self.endpoint.name)
            least = ADAPTIVE_WARM_UP if is_adaptive else 1
        prompts = [
            self._rng.choices(words, k=settings.input_len) for _ in range(max(least, concurrency))
        ]
        limits = httpx.Limits(max_connections=None)
        with httpx.Client(timeout=LONG_LIMIT_S, limits=limits) as client:
            calls = [partial(self._ask, client, i, prompt) for i, prompt in enumerate(prompts)]
            return timed(calls, Variant(self.endpoint.name), run, concurrency)

    def _ask(self, client: httpx.Client, index: int, prompt: Sequence[int]) -> Answer:
        name, wanted = self.endpoint.name, self.settings.max_new_tokens
        params = {"temperature": 0, "max_new_tokens": wanted, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params}
        started = time.perf_counter()
        try:
            response = client.post(f"{self.endpoint.url}/generate", json=body).raise_for_status()
        except httpx.HTTPError as error:
            self.endpoint.check_alive()  # a dead server raises with its log
            raise BenchError(f"a request to {name} failed: {error!r}") from error
        wall_ms = 1e3 * (time.perf_counter() - started)
        meta = response.json()["meta_info"]
        if meta["completion_tokens"] != wanted:
            raise BenchError(f"{name} generated {meta['completion_tokens']} tokens")
        answer = Answer(index, "", wanted, wall_ms, meta)
        if self._is_simulated and not (
            answer.parse["mode"] == "parse" and "simulated" in answer.parse
        ):
            raise BenchError(
                f"{name} should serve with PARSE and simulate acceptance, its meta_info['parse'] "
                f"is {answer.parse!r}"
            )
        return answer
