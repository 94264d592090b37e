"""Rounds of requests that start together, drawn token by token: what their answers take, and what
each loss in a round costs.

The host's times are fitted to runs on an H200 (docs/gpus.md): Triton, blocks of 8, one wave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

from sglang_parse.core.block import Masks
from sglang_parse.roofline.forwards import BLOCKS, Workload

REQUEST_MS, TOKEN_MS = 0.9, 0.002
"""The host's time in a round for each further request, and for a draft token."""
JUDGE_MS, ROW_MS = 0.7, 0.0022
"""Of a pass beyond its forward, LM head and judge: and for each row."""
BLOCK_MS, MASKS_MS = 0.09, 0.14
"""Of a block beyond what its forward computes: for each request, and with masks after every row."""
LENGTHS = (12, 16, 24, 32, 48, 128)
ANSWERS = 48
"""Drawn for each figure."""


@dataclass(frozen=True, slots=True)
class Build:
    """What rounds lose in a build; the defaults are this one's.

    Attributes:
        kinds: masks of the blocks that it may take.
        counts_first: whether a chunk counts a draft's first block as one token.
        max_rows: of a pass as one graph; ``widths``: rows of a request there, () where graphs have
            rows of any request.
        between_ms: from a draft's end to its pass; ``behind_ms``: from a pass to the next draft.
        appended: proposals of a draft's last block that its pass verifies, too.
        block_scale: ms of a block by today's.
        in_pieces: whether the target's prefill of a prompt is.
    """

    kinds: tuple[Masks, ...] = (Masks.EVERY, Masks.LAST)
    counts_first: bool = True
    max_rows: int = 1024
    widths: tuple[int, ...] = ()
    between_ms: float = 2.7
    behind_ms: float = 2.6
    request_ms: float = REQUEST_MS
    appended: int = 0
    block_scale: float = 1.0
    in_pieces: bool = False


THIS = Build()
MEASURED = Build((Masks.LAST,), False, 512, (9, 17, 33, 65, 129), in_pieces=True)
"""The build that docs/gpus.md measured on 27 and 28 November."""
LOSSES = {
    "the pass waits for the draft's ids": replace(THIS, between_ms=0.3),
    "the last block's proposals are dropped": replace(THIS, appended=7),
    "a block is some 450 kernels, not 300": replace(THIS, block_scale=0.8),
    "the host behind a pass": replace(THIS, behind_ms=1.3),
    "the host for each request": replace(THIS, request_ms=REQUEST_MS / 2),
}
"""A loss -> the build without it."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Answers with a refusal every ``every`` tokens (0: none) and drafts of ``draft_len``."""

    load: Workload
    build: Build
    every: float
    draft_len: int
    masks: Masks

    def answers_ms(self, seed: int) -> float:
        """ms until all answers are complete."""
        drawn, settings, build = Random(seed), self.load.settings, self.build
        left = [settings.output_len - 1] * self.load.num_reqs
        target = replace(self.load.prefill(settings.target), host_ms=0.0)
        first = self.load.prefill(settings.target) if build.in_pieces else target
        ms = first.ms + self.load.forward(settings.draft, settings.input_len, 1).ms
        while left := [count for count in left if count > 0]:
            load = replace(self.load, num_reqs=len(left))
            lens = [min(self.draft_len, count) for count in left]
            ms += self._draft_ms(load, lens, drawn)
            added = build.appended if self.masks is Masks.EVERY else 0
            more = [min(added, count - n) for count, n in zip(left, lens, strict=True)]
            ms += self._pass_ms(load, [1 + a + b for a, b in zip(lens, more, strict=True)])
            ms += build.between_ms + build.behind_ms
            ms += build.request_ms * (len(left) - 1) + TOKEN_MS * sum(lens)
            left = [
                count - 1 - self._accepted(drawn, *sizes)
                for count, *sizes in zip(left, lens, more, strict=True)
            ]
        return ms

    def _accepted(self, drawn: Random, num_drafted: int, num_appended: int) -> int:
        """Tokens up to the first refused one; appended ones must also be the draft model's own."""

        def clean(chance: float) -> float:
            return math.log(1 - drawn.random()) / math.log(chance) if chance < 1 else math.inf

        chance = 1 - (1 / self.every if self.every else 0)
        if (before := clean(chance)) < num_drafted:
            return int(before)
        appended = clean(chance * self.load.settings.block_acceptance) if num_appended else 0
        return num_drafted + int(min(num_appended, appended))

    def _draft_ms(self, load: Workload, lens: list[int], drawn: Random) -> float:
        (kind,) = (one for one in BLOCKS if one.masks is self.masks)
        is_every, n = self.masks is Masks.EVERY, load.num_reqs
        block_ms = load.draft_forward(kind).ms + BLOCK_MS * (n - 1) + MASKS_MS * is_every
        block_ms, tokens = block_ms * self.build.block_scale, load.tokens_per_forward(BLOCKS[0])
        usual = tokens if is_every else (tokens + 1) / 2
        drafted, has_candidates, ms, is_first = [0] * n, [False] * n, 0.0, True
        while any(have < want for have, want in zip(drafted, lens, strict=True)):
            wanted = max(want - have for have, want in zip(drafted, lens, strict=True))
            is_counted = is_first and self.build.counts_first
            num_blocks = max(1, is_counted + math.ceil((wanted - is_counted) / usual))
            ms += num_blocks * block_ms + (0.0 if is_first else self.build.behind_ms)
            for _ in range(num_blocks):
                for i in range(n):
                    brought = int(tokens) + (drawn.random() < tokens % 1)
                    drafted[i] += brought if has_candidates[i] else 1
                    has_candidates[i] = is_every or not has_candidates[i]
            is_first = False
        return ms

    def _pass_ms(self, load: Workload, rows: list[int]) -> float:
        width = next((width for width in self.build.widths if width >= max(rows)), 0)
        num_rows = width * len(rows) if self.build.widths else sum(rows)
        model = load.settings.target
        is_graph = num_rows <= self.build.max_rows and (width or not self.build.widths)
        is_graph = is_graph and not (model.mixer.is_latent or model.mixer.state_bytes)
        num_rows = num_rows if is_graph else sum(rows)
        one = replace(load.forward(model, 1), rows=num_rows, num_logits=sum(rows))
        one = replace(one, host_ms=0.0 if is_graph else load.verify_in_pieces(1).host_ms)
        return one.ms + JUDGE_MS + ROW_MS * sum(rows)


def best_rate(
    load: Workload, build: Build, every: float, lengths: Sequence[int] = LENGTHS
) -> tuple[float, int]:
    """Tokens/s of all requests at the best of some draft lengths and masks; and that length."""
    seeds = range(-(-ANSWERS // load.num_reqs) if every else 2)
    ms, length = min(
        (fmean(Rounds(load, build, every, length, masks).answers_ms(n) for n in seeds), length)
        for masks in build.kinds
        for length in (lengths if every else lengths[-1:])
    )
    return 1e3 * load.num_reqs * load.settings.output_len / ms, length
