"""Blocks: forwards of a draft model that accept several tokens each, and propose the next ones by
mask tokens that the model was trained to fill, or by its EAGLE-3 head.

One forward of K tokens per block, behind ``starts`` tokens with KV, has these rows:

    real rows    the last accepted token, then K - 1 candidates that the forward before proposed
    mask rows    K - 1 mask tokens after a real row: each attends to the text up to that row and,
                 causally, to the masks before it; their positions follow it

    x     c1 c2 c3 | m1 m2 m3      K = 4, masks after the last real row: 2K - 1 rows
    x     c1 c2 c3 | m1 m2 m3 | m1 m2 m3 | m1 m2 m3 | m1 m2 m3      after every one: K * K rows
    x     c1 c2 c3      an EAGLE-3 head proposes, after the forward and in K - 1 steps of its own

The row of x predicts the next token, the row of c1 the one after c1, and so on, as the model does
one token at a time. Candidates are accepted while they equal these predictions, and so is the first
prediction that no candidate equals (``block_accept``). The masks after the last accepted candidate,
or the head, propose the next candidates.

In terms of ``layout.RequestLayout`` real rows are draft rows and the masks after one of them a
question. Masks after the last real row only are draft rows too: that forward is causal, as is one
without masks.

Sources: PARD (arXiv 2504.18583) for masks and positions, BiTA (arXiv 2401.12522) for masks after
every row. No tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sglang_parse.core.layout import RequestLayout

MAX_BLOCK = 16
"""Most tokens per block."""
USUAL_BLOCK = 8
"""Default tokens per block of a draft whose files name a mask token: PARD trains with 8."""
HEAD_BLOCK = 4
"""Default tokens per block of a draft with an EAGLE-3 head: SGLang's heads propose 3."""
NO_TOKEN = -1
"""Stands for a token that could not be computed because of NaN logits."""


class Masks(Enum):
    """Real rows of a forward that mask tokens follow."""

    NONE = "none"  # one token per forward
    LAST = "last"
    EVERY = "every"
    HEAD = "head"  # none: an EAGLE-3 head proposes


@dataclass(frozen=True, slots=True)
class BlockKind:
    """What one forward of the draft model brings to a draft.

    Attributes:
        size: K, the most tokens that one forward adds to a draft.
        masks: real rows that mask tokens follow.
    """

    size: int
    masks: Masks

    @property
    def lookahead_rows(self) -> int:
        """Rows of a forward, and of the head's steps, after the last accepted token, each with a KV
        slot."""
        size = self.size
        if self.masks is Masks.HEAD:  # to the head's last step behind a block that is accepted
            return max(size - 1, 2 * size - 3)
        return {Masks.NONE: 0, Masks.LAST: 2 * size - 2, Masks.EVERY: size * size - 1}[self.masks]

    def rows(self, prefix_len: int) -> RequestLayout:
        """Returns one request's rows of a forward behind ``prefix_len`` tokens with draft KV."""
        num_masks = self.size - 1
        if self.masks is Masks.HEAD:
            return RequestLayout(prefix_len, self.size)
        if self.masks is not Masks.EVERY:
            return RequestLayout(prefix_len, self.size + num_masks)
        return RequestLayout(
            prefix_len,
            self.size,
            visible_lens=tuple(range(1, self.size + 1)),
            question_lens=(num_masks,) * self.size,
        )

    def __str__(self) -> str:
        if self.size == 1:
            return "one token per forward"
        if self.masks is Masks.HEAD:
            return f"{self.size} tokens per forward, proposed by the EAGLE-3 head"
        where = {Masks.LAST: "the last row", Masks.EVERY: "every row"}[self.masks]
        return f"{self.size} tokens per forward, masks after {where}"


ONE_TOKEN = BlockKind(1, Masks.NONE)


def block_kinds(
    size: int, *, allow_one_token: bool, has_head: bool = False
) -> tuple[BlockKind, ...]:
    """Returns the candidates for blocks of ``size`` tokens; with a head, one token per
    forward is a block, too, which keeps the head's KV complete."""
    if has_head:
        return tuple(BlockKind(n, Masks.HEAD) for n in (size, 1)[: 1 + allow_one_token])
    if size == 1:
        return (ONE_TOKEN,)
    blocks = tuple(BlockKind(size, masks) for masks in (Masks.EVERY, Masks.LAST))
    return (*blocks, ONE_TOKEN) if allow_one_token else blocks
