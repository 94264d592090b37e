"""Replays the policy of drafts from the prompt on answers, by counts: no server runs.

    python tests/support/prompt_replay.py ANSWERS.json

ANSWERS.json: [{"kind": "...", "prompt": [token ids], "answer": [token ids]}, ...] (or a pickle of
it, .pkl). Verification is exact, and costs are in decode steps: the figures of two servers.
"""

from __future__ import annotations

import json
import math
import pickle
import random
import sys
import timeit
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sglang_parse.core.arming import Arming
from sglang_parse.core.copies import CopyLength, CopyStats
from sglang_parse.core.loss import Budget
from sglang_parse.core.policy.constants import DEFAULTS
from sglang_parse.core.prompt_match import PromptMatch
from sglang_parse.core.request_text import RequestText
from support.rounds import round_of

COSTS: Mapping[str, Callable[[int], float]] = {
    "gpu": lambda rows: 1.1 + 0.004 * rows,
    "cpu": lambda rows: 1.0 + 0.1 * rows,
}
"""Of a verify pass, by its rows. What it has above a decode step beyond the rows: overlap."""
SYNC = 1.1
"""Of a decode step that is planned behind the last one's token."""


class FailingMatch(PromptMatch):
    """Every copy is wrong, at its first token."""

    def rest(self, limit: int) -> Sequence[int]:
        return [-1] * len(super().rest(limit))

    def follow(self, token_ids: Sequence[int]) -> None:
        super().follow(token_ids)
        self._place = None


@dataclass
class Replayed:
    """One answer's.

    Attributes:
        cost: in decode steps; ``num_tokens``: without the first, which the prefill brings.
        drafts: (drafted, accepted) of each.
        num_dropped: decode steps that a draft dropped in flight.
    """

    num_tokens: int
    cost: float
    drafts: list[tuple[int, int]]
    num_dropped: int = 0

    @property
    def speedup(self) -> float:
        return self.num_tokens / self.cost


class Replay:
    """One server's answers, one after the other.

    Args:
        overlap: "off": a step is never in flight; "armed", or "dropped": as before arming.
        match: FailingMatch makes every copy fail.
    """

    def __init__(
        self,
        cost: Callable[[int], float],
        *,
        overlap: str = "off",
        match: type[PromptMatch] = PromptMatch,
    ) -> None:
        self.cost, self.overlap, self.match, self.stats = cost, overlap, match, CopyStats()

    def run(self, prompt: Sequence[int], answer: Sequence[int]) -> Replayed:
        budget = Budget(DEFAULTS.text_loss, DEFAULTS.text_loss_rate, DEFAULTS.text_gain)
        match, length = self.match(prompt), CopyLength(self.stats, budget)
        text, arming, seen = RequestText(match, length), Arming(), 1
        found, num_inflight = Replayed(len(answer) - 1, 0.0, []), 0
        while seen < len(answer):
            text.follow(answer[:seen])
            rest = match.rest(256) if match.follows or length.left(seen) > 0 else ()
            gap = SYNC - 1 if self.overlap == "armed" and not arming.stays else 0.0
            extra = partial(self._extra, gap=gap)
            count = length.choose(match.match_len, len(rest), seen, extra) if rest else 0
            if self.overlap == "armed" and not arming.may_start(num_inflight if count else 0):
                length.lose(SYNC - 1)
                count = 0
            if not count:
                # What is in flight was planned before; what is now, waits or does not.
                waited = self.overlap != "off" and not num_inflight
                found.cost += SYNC if waited else 1.0
                length.lose((SYNC - 1) * (waited and arming.stays))
                num_inflight = int(self.overlap != "off" and not arming.waits)
                seen += 1
                arming.observe(0, 1)
                continue
            found.num_dropped += num_inflight
            right = 0
            while (
                right < count and rest[right : right + 1] == answer[seen + right : seen + right + 1]
            ):
                right += 1
            length.observe(match.match_len, round_of(count, count, right), extra(count))
            text.is_verified = True
            arming.observe(right, right + 1)
            found.cost += self.cost(1 + count) + num_inflight
            num_inflight = 0
            found.drafts.append((count, right))
            seen += right + 1
        return found

    def _extra(self, num_tokens: int, gap: float) -> float:
        """Of a draft: its pass, and that the step behind it waits where it would not else."""
        return self.cost(1 + num_tokens) - 1 + gap


def by_kind(
    answers: Sequence[Mapping[str, Any]], replay: Replay, seed: int = 1
) -> dict[str, list[Replayed]]:
    """All answers in a random order: the server's statistics are shared by all kinds."""
    found: dict[str, list[Replayed]] = defaultdict(list)
    for one in random.Random(seed).sample(answers, len(answers)):
        found[one["kind"]].append(replay.run(one["prompt"], one["answer"]))
    return dict(found)


def speedup(replayed: Sequence[Replayed]) -> float:
    return sum(one.num_tokens for one in replayed) / sum(one.cost for one in replayed)


def dropped_per_draft(found: Mapping[str, Sequence[Replayed]]) -> float:
    all_of = [one for each in found.values() for one in each]
    return sum(one.num_dropped for one in all_of) / max(1, sum(len(one.drafts) for one in all_of))


def print_times(answers: Sequence[Mapping[str, Any]], num_tokens: int = 100_000) -> None:
    """Of a prompt of so many tokens, and of look-ups in it: the fastest of 15 each."""

    def fastest_us(call: Callable[[], Any]) -> float:
        return 1e6 * min(timeit.repeat(call, number=1, repeat=15))

    texts = [token for one in answers for token in (*one["prompt"], *one["answer"])]
    prompt, times = array("q", texts[:num_tokens]), list[float]()
    match = PromptMatch(prompt)
    for token in answers[-1]["answer"]:
        match.follow([token])
        if not match.follows:
            times.append(fastest_us(match._look_up))
    times.sort()
    print(
        f"{len(prompt)} tokens: built in {fastest_us(lambda: PromptMatch(prompt)):.0f} us", end=", "
    )
    print(f"look-ups {sum(times) / len(times):.0f} us in the mean, {times[-1]:.0f} at most")


def main(path: Path) -> None:
    raw = path.read_bytes()
    answers = pickle.loads(raw) if path.suffix == ".pkl" else json.loads(raw)
    kinds = sorted({one["kind"] for one in answers})
    print_times(answers)
    print(f"{'':22s}", " ".join(f"{kind[:7]:>7s}" for kind in kinds), " mean  worst 1 %, worst")
    for name, match in (("", PromptMatch), (" failing", FailingMatch)):
        for device, cost in COSTS.items():
            for overlap in ("off", "armed", "dropped"):
                found = by_kind(answers, Replay(cost, overlap=overlap, match=match))
                each = [speedup(found[kind]) for kind in kinds]
                mean = math.exp(sum(map(math.log, each)) / len(each))
                worst = sorted(one.speedup for kind in kinds for one in found[kind])
                row = " ".join(f"{one:7.3f}" for one in each)
                print(f"{device + name + ' ' + overlap:22s} {row} {mean:.3f}", end="  ")
                print(f"{worst[len(worst) // 100]:.3f} {worst[0]:.3f}", end="  ")
                print(f"{dropped_per_draft(found):.2f} dropped a draft", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
