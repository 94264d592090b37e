"""The soak's requests, the same for the same seed, and what is wrong with an answer. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

Message = dict[str, str]
Render = Callable[[Sequence[Message]], str]
"""A chat's messages to the prompt that opens the assistant's next turn."""

Key = TypeVar("Key", str, int)

ABOVE_ONE = 1.5
"""A threshold that accepts nothing: every question is asked, the answer is the plain target's."""
LIMITS = {4: 20, 12: 40, 24: 30, 64: 10}
"""max_new_tokens; an answer that ends by itself has 50 to 110."""
PROMPTS = {"problem": 75, "chat": 15, "random text": 8, "long chat": 2}
EXACT = {"greedy": 50, "stops": 15, "short": 10, "fallback": 25}
FREE = {"greedy": 30, "sampled": 40, "stops": 15, "short": 5, "fallback": 10}
FATES = {"finish": 80, "stream": 5, "abort": 10, "disconnect": 5}
STOPS = ("Answer", "\nc:", "= 4", "\nf: ", "7\n")
ALPHABET = "Start with 0123456789\nabcdefghijkl: +-=Answer"
TURN_LIMITS = {"chat": (2, 3), "long chat": (6, 12)}

# What PARSE serves plainly: the reason it gives -> what asks for it.
FALLBACKS: dict[str, tuple[dict[str, Any], ...]] = {
    "grammar": (
        {"regex": "(a: [0-9]{2}|b: [0-9]{2}){2,4}"},
        {"json_schema": '{"type": "object", "properties": {"n": {"enum": [1, 22]}}}'},
    ),
    "penalties": ({"frequency_penalty": 0.6}, {"repetition_penalty": 1.3}),
    "min_new_tokens": ({"min_new_tokens": 20},),
    "logit_bias": ({"logit_bias": {"20": 3.0}},),
    "log probabilities": ({},),
    "switched off": ({},),
}


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """One request of the load.

    Attributes:
        number: its place in the load.
        kind: "<prompt>, <sampling>", of ``PROMPTS`` and of ``EXACT`` or ``FREE``.
        prompt: rendered text.
        sampling: ``sampling_params`` of the native API, without PARSE's.
        parse: ``custom_params["parse"]``.
        body: other keys of the request.
        reason: why PARSE serves it plainly; "" when it drafts.
        is_exact: the output must be the plain server's.
        fate: one of ``FATES``.
        patience_s: an abort comes this long after the request.
        num_chunks: a disconnect comes after this many messages of the stream.
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
    patience_s: float = 0.0
    num_chunks: int = 0

    def content(self, *, with_parse: bool) -> dict[str, Any]:
        """The body for ``/generate``; ``with_parse``: for a PARSE server, else for a plain one."""
        sampling = dict(self.sampling)
        if with_parse:
            sampling["custom_params"] = {"parse": self.parse}
        return {"text": self.prompt, "sampling_params": sampling, **self.body}


def make_request(number: int, seed: int, problems: Sequence[Any], render: Render) -> SoakRequest:
    """Request ``number`` of the load with that seed. Every second one is exact.

    Args:
        problems: to draw from; each has ``text`` and ``solution``.
        render: see ``Render``.
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
        patience_s=rng.uniform(0.0, 4.0),
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
        # Few openings, so that chats share turns and find one another's in the radix cache.
        first = rng.randrange(max(1, len(problems) // 8))
        for turn in range(rng.randint(*TURN_LIMITS[kind]) - 1):
            earlier = problems[(first + turn) % len(problems)]
            chat.append({"role": "user", "content": earlier.text})
            chat.append({"role": "assistant", "content": earlier.solution})
    return render([*chat, {"role": "user", "content": rng.choice(problems).text}])


def _sampling(
    rng: random.Random, kind: str, is_exact: bool
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """(sampling_params, other keys of the body, reason for plain serving)."""
    sampling: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": _draw(rng, LIMITS)}
    body: dict[str, Any] = {}
    reason = ""
    if kind == "short":
        sampling["max_new_tokens"] = rng.randint(1, 9)
    elif kind == "stops":
        sampling["stop"] = rng.sample(STOPS, rng.randint(1, 2))
    elif kind == "fallback":
        reason = rng.choice(list(FALLBACKS))
        sampling |= rng.choice(FALLBACKS[reason]) | {"max_new_tokens": rng.randint(24, 48)}
        if reason == "log probabilities":
            body = {"return_logprob": True, "top_logprobs_num": 2}
    if kind == "sampled" or (not is_exact and rng.random() < 0.3):
        sampling["temperature"] = rng.choice([0.5, 0.8, 1.2])
        sampling |= rng.choice([{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
    return sampling, body, reason


def faults_of(
    request: SoakRequest, answer: dict[str, Any], expected: dict[str, Any] | None
) -> list[str]:
    """What is wrong with a finished, aborted or abandoned answer; empty when it is right.

    Args:
        answer: the server's last message: ``text``, ``output_ids`` and ``meta_info``.
        expected: the plain server's answer, for an exact request.
    """
    found = []
    reason = answer["meta_info"]["finish_reason"]
    cut_short = reason is None or reason["type"] == "abort"
    if cut_short and request.fate not in ("abort", "disconnect"):
        found.append(f"ended by itself with {reason}")
    if expected is not None:
        found += _differences(answer, expected, cut_short=cut_short)
    if cut_short:
        return found
    ids = answer["output_ids"]
    (info,) = answer["meta_info"]["parse"]
    served, wanted = (info["mode"], info.get("reason", "")), _service(request)
    if served != wanted:
        found.append(f"served as {served}, not {wanted}")
    if info["accepted_tokens"] + info["target_tokens"] != len(ids):
        found.append(f"{info} does not add up to {len(ids)} tokens")
    if len(ids) > request.sampling["max_new_tokens"]:
        found.append(f"{len(ids)} tokens are more than max_new_tokens")
    for stop in request.sampling.get("stop", ()):
        if stop in answer["text"]:
            found.append(f"stop string {stop!r} is in the text")
    return found


def _service(request: SoakRequest) -> tuple[str, str]:
    """(mode, reason) that ``meta_info["parse"]`` must have."""
    return ("plain" if request.reason else "parse", request.reason)


def _differences(answer: dict[str, Any], expected: dict[str, Any], *, cut_short: bool) -> list[str]:
    """Wrong bytes: tokens, text or the reason of the end are not the plain server's."""
    ours, theirs = answer["output_ids"], expected["output_ids"]
    if cut_short:
        theirs = theirs[: len(ours)]
    if ours != theirs:
        place = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
            min(len(ours), len(theirs)),
        )
        return [f"wrong bytes: token {place} of {len(theirs)} differs from the plain server's"]
    if cut_short:
        return []
    for key in ("finish_reason", "completion_tokens", "prompt_tokens"):
        left, right = answer["meta_info"][key], expected["meta_info"][key]
        if left != right:
            return [f"wrong bytes: {key} is {left!r}, the plain server's is {right!r}"]
    left, right = answer["text"], expected["text"]
    if not _same_text(left, right, answer["meta_info"]["finish_reason"]):
        return [f"wrong bytes: text is {left!r}, the plain server's is {right!r}"]
    return []


def _same_text(left: str, right: str, finish_reason: dict[str, Any]) -> bool:
    """Equal, but for how much of the stop string SGLang had sent before it knew of the stop.

    Also without streaming its scheduler hands text on every 50 tokens
    (``SGLANG_FORCE_STREAM_INTERVAL``), and what was handed on is not taken back.
    """
    short, long = sorted((left, right), key=len)
    matched = str(finish_reason.get("matched", ""))
    return long.startswith(short) and matched.startswith(long[len(short) :])
