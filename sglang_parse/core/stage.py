"""What the forwards of an iteration took."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from sglang_parse.core.block import ONE_TOKEN, BlockKind


class Stage(Enum):
    DRAFT_PREFILL = "draft_prefill"  # the draft model computes missing KV before it drafts
    DRAFT = "draft"  # draft tokens of one iteration
    VERIFY = "verify"  # target forward that verifies drafts
    DECODE = "decode"  # target forward without other drafts than an EAGLE-3 head's
    SCHEDULER = "scheduler"  # time between two iterations in which no forward runs


@dataclass(frozen=True, slots=True)
class StageTime:
    """Wall time of one stage in one iteration.

    16 requests that got 32 draft tokens each in 7 blocks of 8, 14 ms: DRAFT, size 16, num_tokens
    32, num_forwards 7. Of each draft 5 blocks were inside, and brought 24: continued (24, 5).

    Attributes:
        size: tokens of a draft prefill, rows of a verify pass, else requests.
        num_tokens: draft tokens per request of DRAFT, output tokens of DECODE.
        num_forwards, kind: of DRAFT: 0 stands for one forward per draft token; of DECODE: forwards
            of the EAGLE-3 head.
        continued: of DRAFT in blocks, per request: tokens of the blocks inside a draft, and their
            number. Its first block brings one token, whatever its kind, and its last one, which
            its length cuts, is no measure either. None: all tokens of all forwards.
        graphs: of VERIFY: rows of the CUDA graphs that its forwards replayed; 0 without one.
        share: of VERIFY: the part of its requests that have a draft in it.
        num_rows, head_ms: of a target forward: its rows, and the EAGLE-3 head's part of ``ms``.
    """

    stage: Stage
    size: int
    num_tokens: float
    ms: float
    num_forwards: int = 0
    kind: BlockKind = ONE_TOKEN
    graphs: tuple[int, ...] = ()
    continued: tuple[float, float] | None = None
    num_rows: int = 0
    head_ms: float = 0.0
    share: float = 0.0


def half_octave_of(size: float) -> int:
    """Sizes with one number cost about as much."""
    return round(2 * math.log2(max(1.0, size)))
