"""What stays of blocks whose numbers nobody has read: ``block.keep`` on the device.

A forward of a fixed width follows another without a look at what that kept. Where a request has
fewer than K - 1 candidates, mask tokens stand in the places of the others. The row of a place that
no candidate filled decides nothing; with masks behind the last row it is one of the masks behind
the last candidate, so that the K - 1 masks behind that one are there whatever their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_parse.core.block import NO_TOKEN, Kept, Masks


class Ahead(NamedTuple):
    """Where some requests' next blocks stand; int64, on the device.

    Attributes:
        starts: [n] tokens before the last kept one, which has no KV yet.
        last: [n] that token.
        candidates: [n, K - 1] what may follow it, mask tokens behind them.
        num_candidates: [n] how many they are.
    """

    starts: torch.Tensor
    last: torch.Tensor
    candidates: torch.Tensor
    num_candidates: torch.Tensor

    def pick(self, index: torch.Tensor | slice) -> Ahead:
        """Those of some of the requests."""
        return Ahead(*(part[index] for part in self))


def keep_blocks(
    masks: Masks, ahead: Ahead, choices: torch.Tensor, limits: torch.Tensor, mask_id: int
) -> tuple[Ahead, torch.Tensor]:
    """What stays of one block of each request, as ``block.keep`` has it.

    Args:
        masks: where the masks are, ``LAST`` or ``EVERY``.
        ahead: where the blocks stand.
        choices: int64 [n, rows] what each row chose, or ``NO_TOKEN``: K real rows; behind them
            K - 1 masks (``LAST``) or K times K - 1 (``EVERY``).
        limits: int64 [n] where the last block a request has slots for may stand. Who would stand
            behind it, and whose tokens could not be computed, stays where it is: its next block is
            this one again.
        mask_id: the mask token.

    Returns:
        where the next blocks stand, and int64 [n, 2 * K + 1] for ``kept_of``.
    """
    num_masks = ahead.candidates.shape[1]
    size, place = num_masks + 1, torch.arange(num_masks, device=choices.device)
    is_real = place < ahead.num_candidates[:, None]
    holds = (choices[:, :num_masks] == ahead.candidates) & is_real
    matched = holds.cumprod(1).sum(1)
    if masks is Masks.EVERY:
        first, proposes = size + matched * num_masks, torch.ones_like(matched)
    else:
        first, proposes = matched + 1, (matched == ahead.num_candidates).to(torch.int64)
    proposed = choices.gather(1, first[:, None] + place)
    proposed = torch.where(proposes[:, None] > 0, proposed, mask_id)
    is_sound = (choices != NO_TOKEN).all(1)
    num_kept, num_proposed = is_sound * (matched + 1), is_sound * proposes * num_masks
    record = [num_kept[:, None], num_proposed[:, None], choices[:, :size], proposed]
    starts = ahead.starts + num_kept
    goes_on = is_sound & (starts <= limits)
    behind = Ahead(starts, choices.gather(1, matched[:, None])[:, 0], proposed, num_proposed)
    return _where(goes_on, behind, ahead), torch.cat(record, 1)


def _where(condition: torch.Tensor, one: Ahead, other: Ahead) -> Ahead:
    return Ahead(
        *(
            torch.where(condition if left.dim() == 1 else condition[:, None], left, right)
            for left, right in zip(one, other, strict=True)
        )
    )


def kept_of(record: Sequence[int]) -> Kept:
    """What a row of ``keep_blocks``' record says."""
    num_kept, num_proposed, *rest = record
    size = len(rest) // 2 + 1
    proposed = rest[size : size + num_proposed]
    return Kept(tuple(rest[:num_kept]), tuple(proposed), is_faulty=not num_kept)
