"""Blocks: several tokens a forward from a draft model that was taught to fill mask tokens.

K tokens a block, c candidates (at most K - 1) that an earlier forward proposed. One forward is

    real rows    the last kept token (and whatever has no KV before it), then the c candidates
    mask rows    up to K - 1 mask tokens behind a real row: they see the text up to it, and each
                 other, causally; their positions follow it

    x     c1 c2 c3 | m1 m2 m3      K = 4, masks behind the last row: 2K - 2 rows behind x
    x0    x1 x2 x3 | m1 m2 m3 | m1 m2 m3 | m1 m2 m3 | m1 m2 m3      behind every: K * K - 1

The row of x says which token follows for certain, the row of c1 which follows c1, and so on: what
the model writes one token at a time. So candidates are kept while they equal it, and the first
token that no candidate equals is kept too. Masks behind the last row that was kept propose the
next candidates. Without any (masks behind the last only, and a candidate failed) the next forward
keeps one token, and proposes again.

In ``layout.RequestLayout``'s words real rows are draft rows and the masks behind one a question;
masks behind the last row only are draft rows too: all of that forward is plainly causal.
Sources: PARD (arXiv 2504.18583) for masks and positions, BiTA (arXiv 2401.12522) for masks behind
every row. No tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from sglang_parse.core.layout import RequestLayout
from sglang_parse.core.selection import matching_tokens

MAX_BLOCK = 16
"""Most tokens a forward."""
USUAL_BLOCK = 8
"""Tokens a forward of a draft whose files name a mask token, unless a number is given: what PARD's
drafts are trained with."""
NO_TOKEN = -1
"""In the place of a token that could not be computed."""


class Masks(Enum):
    """Behind which real rows a forward has masks."""

    NONE = "none"  # one token a forward
    LAST = "last"
    EVERY = "every"


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """How a burst's forwards are laid out.

    Attributes:
        size: K, tokens a forward keeps at most.
        masks: where the masks are.
    """

    size: int
    masks: Masks

    @property
    def rows_behind(self) -> int:
        """Rows of a forward behind the last kept token, at most: slots it needs there."""
        return rows_behind(self.size, self.masks)

    def __str__(self) -> str:
        if self.masks is Masks.NONE:
            return "one token a forward"
        where = {Masks.LAST: "behind the last row", Masks.EVERY: "behind every row"}
        return f"{self.size} tokens a forward, masks {where[self.masks]}"


ONE_TOKEN = DraftLayout(1, Masks.NONE)


def rows_behind(size: int, masks: Masks) -> int:
    """See ``DraftLayout.rows_behind``."""
    return {Masks.NONE: 0, Masks.LAST: 2 * size - 2, Masks.EVERY: size * size - 1}[masks]


@dataclass(frozen=True, slots=True)
class Block:
    """One request's part of a forward.

    Attributes:
        layout: its rows.
        num_pending: rows of known tokens without KV; the last of them is the last kept token.
        candidates: [c] the tokens of the rows behind them.
        masks: (real row, counted from the last kept token's; mask rows behind it), in order.
    """

    layout: RequestLayout
    num_pending: int
    candidates: tuple[int, ...]
    masks: tuple[tuple[int, int], ...]

    @property
    def logits_rows(self) -> tuple[int, ...]:
        """Rows that say a token: the last kept token's, the candidates', the masks'."""
        return tuple(range(self.num_pending - 1, self.layout.num_rows))

    @property
    def num_real(self) -> int:
        """How many of ``logits_rows`` are real rows; they come first."""
        return 1 + len(self.candidates)

    def token_ids(self, pending: Sequence[int], mask_id: int) -> list[int]:
        """[layout.num_rows] input ids. ``pending``: [num_pending] the known tokens."""
        num_masks = sum(count for _, count in self.masks)
        return [*pending, *self.candidates, *[mask_id] * num_masks]


def block_of(
    plan: DraftLayout, *, written: int, known: int, candidates: Sequence[int], room: int
) -> Block:
    """The next forward of a request.

    Args:
        plan: how it is laid out.
        written: tokens of the sequence whose KV is written, fewer than ``known``.
        known: tokens of the sequence.
        candidates: what may follow them.
        room: tokens that may still follow, at least 1: no row stands for one behind them.
    """
    tried = tuple(candidates[: min(plan.size, room) - 1])
    rows = range(len(tried) + 1) if plan.masks is Masks.EVERY else (len(tried),)
    counted = ((row, min(plan.size, room - row) - 1) for row in rows)
    masks = tuple((row, count) for row, count in counted if count > 0)
    num_pending = known - written
    num_real = num_pending + len(tried)
    if plan.masks is Masks.EVERY:
        layout = RequestLayout(
            prefix_len=written,
            num_draft_rows=num_real,
            visible_lens=tuple(num_pending + row for row, _ in masks),
            question_lens=tuple(count for _, count in masks),
        )
    else:
        layout = RequestLayout(written, num_real + sum(count for _, count in masks))
    return Block(layout, num_pending, tried, masks)


def wide_rows(plan: DraftLayout, block: Block) -> tuple[int, ...]:
    """Which of ``block.logits_rows`` stands for each row of a block with as many candidates and
    masks as there can be; for those it lacks its first one, whose choice then decides nothing."""
    real, num_masks = [*range(block.num_real)], plan.size - 1
    masks = iter(range(block.num_real, len(block.logits_rows)))
    if plan.masks is Masks.LAST:
        rows = [*real, *masks]
        return (*rows, *[0] * (2 * plan.size - 1 - len(rows)))
    rows = [*real, *[0] * (plan.size - len(real))]
    counts = dict(block.masks)
    for row in range(plan.size):
        found = [*islice(masks, counts.get(row, 0))]
        rows += [*found, *[0] * (num_masks - len(found))]
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a block brought.

    Attributes:
        token_ids: the tokens to keep, at least one unless ``is_faulty``.
        candidates: what may follow them.
        is_faulty: a token could not be computed.
    """

    token_ids: tuple[int, ...]
    candidates: tuple[int, ...]
    is_faulty: bool = False


def keep(block: Block, choices: Sequence[int]) -> Kept:
    """What stays of a block: candidates while they equal what the model chose, and the first
    choice that no candidate equals.

    Args:
        block: the request's part of the forward.
        choices: [len(block.logits_rows)] the model's, or ``NO_TOKEN``. Real rows chose by the
            model's one-token distribution, so that what is kept is distributed as its own text;
            how mask rows chose decides only how much is kept.
    """
    if NO_TOKEN in choices:
        return Kept((), (), is_faulty=True)
    matched = matching_tokens(block.candidates, choices)
    values = iter(choices[block.num_real :])
    proposed = {row: tuple(islice(values, count)) for row, count in block.masks}
    return Kept(tuple(choices[: matched + 1]), proposed.get(matched, ()))
