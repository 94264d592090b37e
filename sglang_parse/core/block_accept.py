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


class ChainState(NamedTuple):
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

    def pick(self, index: torch.Tensor | slice) -> ChainState:
        """Those of some of the requests."""
        return ChainState(*(part[index] for part in self))


def accept_blocks(
    masks: Masks, ahead: ChainState, choices: torch.Tensor, mask_id: int
) -> tuple[ChainState, torch.Tensor]:
    """What stays of one block of each request, as ``block.keep`` has it.

    Args:
        masks: where the masks are, ``LAST`` or ``EVERY``.
        ahead: where the blocks stand.
        choices: int64 [n, rows] what each row chose, or ``NO_TOKEN``: K real rows; behind them
            K - 1 masks (``LAST``) or K times K - 1 (``EVERY``).
        mask_id: the mask token.

    Returns:
        where the next blocks stand, and int64 [n, 2 * K + 1] for ``accepted_block``. A request whose
        tokens could not be computed stays where it is.
    """
    num_masks = ahead.candidates.shape[1]
    size, place = num_masks + 1, torch.arange(num_masks, device=choices.device)
    is_real = place < ahead.num_candidates[:, None]
    holds = (choices[:, :num_masks] == ahead.candidates) & is_real
    matched = holds.cumprod(1).sum(1)
    if masks is Masks.EVERY:
        first, proposes = size + matched * num_masks, torch.ones_like(holds[:, 0])
    else:
        first, proposes = matched + 1, matched == ahead.num_candidates
    proposed = choices.gather(1, first[:, None] + place)
    proposed = torch.where(proposes[:, None], proposed, mask_id)
    is_sound = (choices != NO_TOKEN).all(1)
    num_kept, num_proposed = is_sound * (matched + 1), proposes * num_masks
    last = choices.gather(1, matched[:, None])[:, 0]
    behind = ChainState(
        ahead.starts + num_kept,
        torch.where(is_sound, last, ahead.last),
        torch.where(is_sound[:, None], proposed, ahead.candidates),
        torch.where(is_sound, num_proposed, ahead.num_candidates),
    )
    record = [num_kept[:, None], num_proposed[:, None], choices[:, :size], proposed]
    return behind, torch.cat(record, 1)


def accepted_block(record: Sequence[int]) -> Kept:
    """What a row of ``accept_blocks``' record says."""
    num_kept, num_proposed, *rest = record
    if not num_kept:
        return Kept((), (), is_faulty=True)
    size = len(rest) // 2 + 1
    return Kept(tuple(rest[:num_kept]), tuple(rest[size : size + num_proposed]))
