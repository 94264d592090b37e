"""The soak's requests: the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

Message = dict[str, str]
Render = Callable[[Sequence[Message]], str]
"""Renders a chat's messages as a prompt for the next assistant turn."""

Key = TypeVar("Key", str, int)

ABOVE_ONE = 1.5
"""A threshold that accepts no prefix: questions are asked, the target writes the whole answer."""
LIMITS = {4: 20, 12: 40, 24: 30, 64: 10}
"""max_new_tokens; an answer that ends by itself has 50 to 110."""
PROMPTS = {"problem": 75, "chat": 15, "random text": 8, "long chat": 2}
EXACT = {"greedy": 45, "stops": 15, "short": 10, "grammar": 10, "fallback": 20}
FREE = {"greedy": 25, "sampled": 40, "stops": 15, "short": 5, "grammar": 5, "fallback": 10}
FATES = {"finish": 80, "stream": 5, "abort": 10, "disconnect": 5}
STOPS = ("Answer", "\nc:", "= 4", "\nf: ", "7\n")
ALPHABET = "Start with 0123456789\nabcdefghijkl: +-=Answer"
TURN_LIMITS = {"chat": (2, 3), "long chat": (6, 12)}

GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "(a: [0-9]{2}|b: [0-9]{2}){2,4}"},
    {"json_schema": '{"type": "object", "properties": {"n": {"enum": [1, 22]}}}'},
)
# Reason for the fallback to plain decoding -> sampling parameters that cause it.
FALLBACKS: dict[str, tuple[dict[str, Any], ...]] = {
    "switched off": ({},),
}
ADJUSTMENTS: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 0.6},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": min(LIMITS)},
    {"logit_bias": {"20": 3.0}},
)


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """One request of the load.

    Attributes:
        number: index in the load.
        kind: "<prompt>, <sampling>", of ``PROMPTS`` and of ``EXACT`` or ``FREE``.
        prompt: rendered text.
        sampling: ``sampling_params`` of the native API, without ``custom_params``.
        parse: ``custom_params["parse"]``.
        body: other keys of the request.
        reason: expected reason for the fallback to plain decoding; "" when PARSE drafts.
        is_exact: the output must equal the plain server's.
        fate: one of ``FATES``.
        abort_after_s: delay of an abort.
        num_chunks: messages of the stream before a disconnect.
    """

    number: int
    kind: str
    prompt: str
    sampling: dict[str, Any]
    parse: dict[str, Any]
    body: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    is_exact: bool = False
    fate: str = "finish"
    abort_after_s: float = 0.0
    num_chunks: int = 0

    def content(self, *, with_parse: bool) -> dict[str, Any]:
        """Returns the body for ``/generate``, with PARSE's options or for a plain server."""
        sampling = dict(self.sampling)
        if with_parse:
            sampling["custom_params"] = {"parse": self.parse}
        return {"text": self.prompt, "sampling_params": sampling, **self.body}


def make_request(number: int, seed: int, problems: Sequence[Any], render: Render) -> SoakRequest:
    """Makes request ``number`` of a load; even numbers are exact.

    Args:
        problems: pool of objects with ``text`` and ``solution``.
    """
    rng = random.Random(f"soak/{seed}/{number}")
    is_exact = number % 2 == 0
    prompt_kind = _draw(rng, PROMPTS)
    sampling_kind = _draw(rng, EXACT if is_exact else FREE)
    sampling, body, reason = _sampling(rng, sampling_kind, is_exact)
    parse: dict[str, Any] = {"threshold": ABOVE_ONE if is_exact else rng.choice([0.0, 0.3, 0.5])}
    if reason == "switched off":
        parse["enabled"] = False
    return SoakRequest(
        number=number,
        kind=f"{prompt_kind}, {sampling_kind}",
        prompt=_prompt(rng, prompt_kind, problems, render),
        sampling=sampling,
        parse=parse,
        body=body,
        reason=reason,
        is_exact=is_exact,
        fate=_draw(rng, FATES),
        abort_after_s=rng.uniform(0.0, 4.0),
        num_chunks=rng.randrange(1, 8),
    )


def _draw(rng: random.Random, weights: dict[Key, int]) -> Key:
    return rng.choices(list(weights), list(weights.values()))[0]


def _prompt(rng: random.Random, kind: str, problems: Sequence[Any], render: Render) -> str:
    if kind == "random text":
        text = "".join(rng.choices(ALPHABET, k=rng.randrange(1, 150)))
        return render([{"role": "user", "content": text}])
    chat: list[Message] = []
    if kind in TURN_LIMITS:
        # Few openings: chats share turns, which the radix cache finds again.
        first = rng.randrange(max(1, len(problems) // 8))
        for turn in range(rng.randint(*TURN_LIMITS[kind]) - 1):
            earlier = problems[(first + turn) % len(problems)]
            chat.append({"role": "user", "content": earlier.text})
            chat.append({"role": "assistant", "content": earlier.solution})
    return render([*chat, {"role": "user", "content": rng.choice(problems).text}])


def _sampling(
    rng: random.Random, kind: str, is_exact: bool
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Returns sampling_params, other keys of the body, and the reason for plain decoding."""
    sampling: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": _draw(rng, LIMITS)}
    body: dict[str, Any] = {}
    reason = ""
    if kind == "short":
        sampling["max_new_tokens"] = rng.randint(1, 9)
    elif kind == "stops":
        sampling["stop"] = rng.sample(STOPS, rng.randint(1, 2))
    elif kind == "grammar":
        sampling |= rng.choice(GRAMMARS)
    elif kind == "fallback":
        reason = rng.choice(list(FALLBACKS))
        sampling |= rng.choice(FALLBACKS[reason]) | {"max_new_tokens": rng.randint(24, 48)}
    if kind == "greedy" and rng.random() < 0.3:
        sampling |= rng.choice(ADJUSTMENTS)
    if rng.random() < 0.1:
        body = {"return_logprob": True, "top_logprobs_num": 2}
    if kind == "sampled" or (not is_exact and rng.random() < 0.3):
        sampling["temperature"] = rng.choice([0.5, 0.8, 1.2])
        sampling |= rng.choice([{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
    return sampling, body, reason
