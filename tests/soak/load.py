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
PROMPTS = {"problem": 67, "chat": 15, "random text": 8, "other scripts": 8, "long chat": 2}
EXACT = {"greedy": 40, "stops": 13, "short": 9, "grammar": 10, "other scripts": 9, "fallback": 19}
FREE = {
    **{"greedy": 20, "sampled": 34, "stops": 12, "short": 5, "grammar": 5, "hostile grammar": 4},
    **{"other scripts": 6, "fallback": 10},
}
PERIOD = 16
SCHEDULED = {0: "hostile grammar", 1: "malformed"}
"""Places in each ``PERIOD`` of requests -> their kind of sampling, in turn all that there are."""
FATES = {
    **{"finish": 69, "stream": 7, "abort": 8, "abort stream": 4, "disconnect": 6},
    **{"hang up": 3, "half sent": 3},
}
TEXTS = {"none": 45, "right": 15, "wrong lines": 15, "another": 8, "other scripts": 10, "long": 7}
"""Kinds of ``custom_params["parse"]["draft"]``."""
STOPS = ("Answer", "\nc:", "= 4", "\nf: ", "7\n", "日", "é")
ALPHABET = "Start with 0123456789\nabcdefghijkl: +-=Answer"
SCRIPTS = "éßñЖשלוםالعددहिन्दी日本語한국어😀👩‍👧𝄞\u202e\ufeff\u0301 \n"
TURN_LIMITS = {"chat": (2, 3), "long chat": (6, 12)}

GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "(a: [0-9]{2}|b: [0-9]{2}){2,4}"},
    # Text that is forced, enough to be a draft.
    {"regex": "Answer: number of chains: [0-9]{2}, number of steps: [0-9]"},
)
HOSTILE_GRAMMARS: tuple[dict[str, Any], ...] = (
    # Half a character is forced; fixed text outside of ASCII; all is forced, and then the end.
    {"regex": "(é|ß|日|本|語|😀|𝄞){24}"},
    {"regex": "(oui|non), ça va très bien — 日本語で話しましょう"},
    {"json_schema": '{"enum": ["日本", "日記", "本日", "\\ud83d\\ude00", "\\ud83d\\ude80"]}'},
    {"regex": "[0-9]{40}"},
    # Forced text without an end, and with one that no answer reaches.
    {"ebnf": 'root ::= "a" root'},
    {"regex": "a{1000000}"},
    {"json_schema": '{"type": "string", "pattern": "^a{1000000}$"}'},
    {"json_schema": '{"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"}'},
)
# Reason for the fallback to plain decoding -> sampling parameters that cause it.
FALLBACKS: dict[str, tuple[dict[str, Any], ...]] = {
    "switched off": ({},),
}
OTHER_SCRIPTS: tuple[dict[str, Any], ...] = (
    # é, 日 and 😀 in the question pair's bytes, often in no order that is text.
    {"logit_bias": {str(token): 40.0 for token in (130, 105, 165, 248, 101, 175, 256, 249, 225)}},
    {"regex": "[а-яא-תぁ-ん一-龥]{3,30}"},
    {"json_schema": '{"type": "object", "properties": {"réponse": {"enum": ["да", "нет"]}}}'},
)
MALFORMED: tuple[dict[str, Any], ...] = (
    *({"custom_params": {"parse": options}} for options in (5, [], {"threshold": "high"})),
    *({"custom_params": {"parse": {name: []}}} for name in ("draft", "enabled", "drafting", "x")),
    {"custom_params": {"parse": {"draft": "a", "draft_token_ids": [5, 6]}}},
    {"custom_params": {"parse": {f"key {number}": number for number in range(1000)}}},
    *({"regex": "("}, {"json_schema": "{"}, {"ebnf": "root ::= other"}),
    *({"temperature": -1}, {"top_p": 2}, {"max_new_tokens": -1}, {"logit_bias": {"a": 1}}),
    {"min_new_tokens": 2, "stop_token_ids": [10**9]},
)
"""Sampling parameters that are a 400."""
CONSTRAINTS: dict[str, tuple[dict[str, Any], ...]] = {
    "grammar": GRAMMARS,
    "hostile grammar": HOSTILE_GRAMMARS,
    "other scripts": OTHER_SCRIPTS,
    "malformed": MALFORMED,
}
"""Kind of sampling -> its parameters."""
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
        kind: "<prompt>, <sampling>", of ``PROMPTS`` and of ``EXACT``, ``FREE`` or ``SCHEDULED``.
        prompt: rendered text.
        sampling: ``sampling_params`` of the native API, without ``custom_params`` unless malformed.
        parse: ``custom_params["parse"]``.
        body: other keys of the request.
        reason: expected reason for the fallback to plain decoding; "" when PARSE may draft.
        is_exact: the output must equal the plain server's.
        is_refused: the answer must be a 400.
        fate: one of ``FATES``.
        end_after_s: delay of an abort, or until the client hangs up.
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
    is_refused: bool = False
    fate: str = "finish"
    end_after_s: float = 0.0
    num_chunks: int = 0

    def content(self, *, with_parse: bool) -> dict[str, Any]:
        """Returns the body for ``/generate``, with PARSE's options or for a plain server."""
        sampling = {"custom_params": {"parse": self.parse}, **self.sampling}
        if not with_parse:
            del sampling["custom_params"]
        return {"text": self.prompt, "sampling_params": sampling, **self.body}


def make_request(number: int, seed: int, problems: Sequence[Any], render: Render) -> SoakRequest:
    """Makes request ``number`` of a load; even numbers are exact.

    Args:
        problems: pool of objects with ``text`` and ``solution``.
    """
    rng = random.Random(f"soak/{seed}/{number}")
    is_exact = number % 2 == 0
    prompt_kind = _draw(rng, PROMPTS)
    turn, place = divmod(number, PERIOD)
    sampling_kind = SCHEDULED.get(place) or _draw(rng, EXACT if is_exact else FREE)
    sampling, body, reason = _sampling(rng, sampling_kind, turn, is_exact)
    is_refused = sampling_kind == "malformed"
    prompt, solution = _prompt(rng, prompt_kind, problems, render)
    return SoakRequest(
        number=number,
        kind=f"{prompt_kind}, {sampling_kind}",
        prompt=prompt,
        sampling=sampling,
        parse=_options(rng, is_exact, reason, _text(rng, solution, problems)),
        body=body,
        reason=reason,
        is_exact=is_exact,
        is_refused=is_refused,
        fate="finish" if is_refused else _draw(rng, FATES),
        end_after_s=rng.uniform(0.0, 4.0),
        num_chunks=rng.randrange(1, 8),
    )


def _draw(rng: random.Random, weights: dict[Key, int]) -> Key:
    return rng.choices(list(weights), list(weights.values()))[0]


def _options(rng: random.Random, is_exact: bool, reason: str, text: str) -> dict[str, Any]:
    """Half of the exact requests ask for drafts: the server begins none that it cannot accept."""
    parse: dict[str, Any] = {"threshold": ABOVE_ONE if is_exact else rng.choice([0.0, 0.3, 0.5])}
    if is_exact and rng.random() < 0.5:
        parse["drafting"] = "always"
    if text:
        parse["draft"] = text
    return parse | ({"enabled": False} if reason == "switched off" else {})


def _text(rng: random.Random, solution: str, problems: Sequence[Any]) -> str:
    """A draft for an answer that should be ``solution``."""
    kind = _draw(rng, TEXTS)
    if kind == "wrong lines":
        lines = solution.split("\n")
        place = rng.randrange(len(lines))
        lines[place] = lines[place][::-1]
        return "\n".join(lines)
    another = rng.choice(problems).solution
    return {
        "none": "",
        "right": solution,
        "another": another,
        "other scripts": _noise(rng, SCRIPTS) + solution,
        "long": f"{another}\n" * 200,
    }[kind]


def _noise(rng: random.Random, alphabet: str) -> str:
    return "".join(rng.choices(alphabet, k=rng.randrange(1, 150)))


def _prompt(
    rng: random.Random, kind: str, problems: Sequence[Any], render: Render
) -> tuple[str, str]:
    """Returns a prompt and the right answer to its last message."""
    chosen = rng.choice(problems)
    if kind in ("random text", "other scripts"):
        text = _noise(rng, ALPHABET if kind == "random text" else SCRIPTS)
        return render([{"role": "user", "content": text}]), chosen.solution
    chat: list[Message] = []
    if kind in TURN_LIMITS:
        # Few openings: chats share turns, which the radix cache finds again.
        first = rng.randrange(max(1, len(problems) // 8))
        for turn in range(rng.randint(*TURN_LIMITS[kind]) - 1):
            earlier = problems[(first + turn) % len(problems)]
            chat.append({"role": "user", "content": earlier.text})
            chat.append({"role": "assistant", "content": earlier.solution})
    return render([*chat, {"role": "user", "content": chosen.text}]), chosen.solution


def _sampling(
    rng: random.Random, kind: str, turn: int, is_exact: bool
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Returns sampling_params, other keys of the body, and the reason for plain decoding."""
    sampling: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": _draw(rng, LIMITS)}
    body: dict[str, Any] = {}
    reason = ""
    if kind == "short":
        sampling["max_new_tokens"] = rng.randint(1, 9)
    elif kind == "stops":
        sampling["stop"] = rng.sample(STOPS, rng.randint(1, 2))
    elif kind in CONSTRAINTS:
        sampling |= CONSTRAINTS[kind][turn % len(CONSTRAINTS[kind])]
    elif kind == "fallback":
        reason = rng.choice(list(FALLBACKS))
        sampling |= rng.choice(FALLBACKS[reason]) | {"max_new_tokens": rng.randint(24, 48)}
    if kind == "greedy" and rng.random() < 0.3:
        sampling |= rng.choice(ADJUSTMENTS)
    if rng.random() < 0.1:
        body = {"return_logprob": True, "top_logprobs_num": 2}
    if kind == "sampled" or (not is_exact and kind != "malformed" and rng.random() < 0.3):
        sampling["temperature"] = rng.choice([0.5, 0.8, 1.2, 3.0])
        sampling |= rng.choice([{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
    return sampling, body, reason
