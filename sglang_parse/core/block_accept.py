"""A block on the device: its rows, which candidates the draft model confirms, and which come next.

It runs on the device, so that the next block can be launched before the host has seen this one.
All blocks of a layout have the same rows. Text without draft KV runs through a block as
candidates that are known to be right. A request with fewer than K - 1 candidates has mask tokens in
the unused places. With masks after the last row those are the first masks after its last
candidate, so that K - 1 masks follow that candidate however many there are. With masks after every
row the choices of unused places are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_parse.core.block import NO_TOKEN, Masks
from sglang_parse.core.doubt import level_of
from sglang_parse.core.simulation import block_tokens

HeadForward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""A forward of an EAGLE-3 head: (ids int64 [n, w] of the tokens after those at the positions starts
int64 [n] and on, starts, hidden states [n, w, width] at these positions) -> (its choices int64
[n, w] of the tokens after ``ids``, its own hidden states [n, w, its width])."""
UNIT, GOLDEN = 1 << 16, 40503
"""A fixed-point 1, and what spreads squares of places evenly over it."""


class ChainState(NamedTuple):
    """State from which the requests' next blocks start: int64 tensors on the device.

    After "a b c" with KV for "a b", of which masks propose "d e": starts 2, last c, candidates
    [d, e], num_candidates 2. The next block's row of c chooses d, that of d chooses x: d and x are
    accepted, and the block behind them starts at 4, with x last.

    Attributes:
        starts: [n] position of the first accepted token without KV, usually the last accepted one.
        last: [n] that token.
        candidates: [n, K - 1] tokens that may follow it, then mask tokens.
        num_candidates: [n] number of candidates.
        num_known: [n] leading candidates that are accepted already.
    """

    starts: torch.Tensor
    last: torch.Tensor
    candidates: torch.Tensor
    num_candidates: torch.Tensor
    num_known: torch.Tensor

    def pick(self, index: torch.Tensor | slice) -> ChainState:
        return ChainState(*(part[index] for part in self))


@dataclass(frozen=True, slots=True)
class BlockRows:
    """The rows of a layout's blocks, wherever they start.

    Attributes:
        offsets: int64 [width] positions behind the block's start.
        columns: int64 [width] slots behind the block's start.
        last_position: the last position of the model's context.
    """

    offsets: torch.Tensor
    columns: torch.Tensor
    mask_id: int
    last_position: int

    def ids(self, state: ChainState) -> torch.Tensor:
        """int64 [n, width]: the last token, candidates, masks."""
        real = torch.cat((state.last[:, None], state.candidates), 1)
        num_masks = len(self.columns) - real.shape[1]
        return torch.nn.functional.pad(real, (0, num_masks), value=self.mask_id)

    def positions(self, state: ChainState) -> torch.Tensor:
        """int64 [n, width], within the model's context."""
        return (state.starts[:, None] + self.offsets).clamp_(max=self.last_position)

    def slots(self, state: ChainState, table: torch.Tensor, pools: torch.Tensor) -> torch.Tensor:
        """int64 [n, width]; ``pools`` int64 [n] are the requests' rows of ``req_to_token``."""
        columns = state.starts[:, None] + self.columns
        return table[pools[:, None], columns].to(torch.int64)


def matched_candidates(state: ChainState, choices: torch.Tensor) -> torch.Tensor:
    """int64 [n] leading candidates that are accepted; ``choices`` [n, K or more] as for
    ``accept_blocks``."""
    num_masks = state.candidates.shape[1]
    if (simulated := block_tokens()) is not None:
        return _simulated_matches(state, simulated)
    place = torch.arange(num_masks, device=choices.device)
    is_known = place < state.num_known[:, None]
    is_candidate = place < state.num_candidates[:, None]
    is_equal = (choices[:, :num_masks] == state.candidates) & is_candidate
    return (is_equal | is_known).cumprod(1).sum(1)


def accept_blocks(
    masks: Masks,
    state: ChainState,
    choices: torch.Tensor,
    surprisals: torch.Tensor,
    mask_id: int,
    proposed: torch.Tensor | None = None,
) -> tuple[ChainState, torch.Tensor]:
    """Accepts one block of each request.

    A candidate is accepted while it is known or equals the choice of the row before it; the choice
    after the last accepted candidate is accepted too. Real rows choose by the model's one-token
    distribution, so accepted text has that distribution. How mask rows choose affects only how much
    is accepted.

    Args:
        masks: real rows that masks follow, ``LAST`` or ``EVERY``; or ``HEAD``.
        choices: int64 [n, rows] each row's choice or ``NO_TOKEN``: K real rows, then K - 1 masks
            (``LAST``) or K times K - 1 (``EVERY``).
        surprisals: int64 [n, K] of real rows' choices (``core.doubt``).
        proposed: int64 [n, K - 1] what a head proposed (``propose``).

    Returns:
        The state after the blocks, and int64 [n, 3 * K + 1] records for ``accepted_block``. A
        request with a ``NO_TOKEN`` keeps its state.
    """
    num_masks = state.candidates.shape[1]
    size, place = num_masks + 1, torch.arange(num_masks, device=choices.device)
    matched = matched_candidates(state, choices)
    if masks is Masks.LAST:
        first, proposes = matched + 1, matched == state.num_candidates
    else:
        first, proposes = size + matched * num_masks, torch.ones_like(matched, dtype=torch.bool)
    if proposed is None:
        proposed = choices.gather(1, first[:, None] + place)
    proposed = torch.where(proposes[:, None], proposed, mask_id)
    is_sound = (choices != NO_TOKEN).all(1)
    num_accepted, num_proposed = is_sound * (matched + 1), proposes * num_masks
    last = choices.gather(1, matched[:, None])[:, 0]
    after = ChainState(
        state.starts + num_accepted,
        torch.where(is_sound, last, state.last),
        torch.where(is_sound[:, None], proposed, state.candidates),
        torch.where(is_sound, num_proposed, state.num_candidates),
        torch.where(is_sound, 0, state.num_known),
    )
    at = state.num_known[:, None] + torch.arange(size, device=choices.device)
    new = choices.gather(1, at.clamp(max=choices.shape[1] - 1))
    surprisals = surprisals.gather(1, at.clamp(max=num_masks))
    num_new = is_sound * (matched + 1 - state.num_known)
    return after, torch.cat((num_new[:, None], num_proposed[:, None], new, surprisals, proposed), 1)


def chain_ids(records: torch.Tensor, rooms: torch.Tensor) -> torch.Tensor:
    """int64 [n, blocks * K + K - 1] the tokens that consecutive blocks add to each draft, up to the
    block that fills it, or the last one, and that one's candidates behind them; then zeros.

    Args:
        records: int64 [n, blocks, 3 * K + 1] as of ``accept_blocks``.
        rooms: int64 [n] tokens that the drafts have room for, 1 at least.
    """
    num_blocks, size = records.shape[1], records.shape[2] // 3
    ends = records[..., 0].cumsum(1)
    starts = ends - records[..., 0]
    last = (starts < rooms[:, None]).sum(1, keepdim=True) - 1
    num_tokens, final = ends.gather(1, last), last[..., None].expand(-1, -1, 3 * size + 1)
    num_proposed, proposed = records.gather(1, final)[:, 0, 1:].split((1, 3 * size - 1), 1)
    place = torch.arange(size, device=records.device)
    width = num_blocks * size + size - 1  # what is not there goes to a column behind these
    is_new = (place < records[..., :1]) & (starts < rooms[:, None])[..., None]
    at = torch.where(is_new, starts[..., None] + place, width).flatten(1)
    behind = torch.where(place[1:] <= num_proposed, num_tokens + place[:-1], width)
    ids = records.new_zeros(len(records), width + 1)
    ids.scatter_(1, at, records[..., 2 : 2 + size].flatten(1))
    ids.scatter_(1, behind, proposed[:, 2 * size :])
    return ids[:, :-1].clamp(min=0)


def propose(
    forward: HeadForward, state: ChainState, choices: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """int64 [n, K - 1] what an EAGLE-3 head proposes after the tokens that a block accepts.

    Its first forward writes its KV of the block's rows, where a row's next token is the candidate
    that is accepted there, or the choice after the last one. Each further one is a step behind it.

    Args:
        choices: int64 [n, K] as for ``accept_blocks``.
        hidden: [n, K, width] the draft model's hidden states.
    """
    size, matched = choices.shape[1], matched_candidates(state, choices)
    at, following = matched[:, None], torch.nn.functional.pad(state.candidates, (0, 1))
    ids = following.scatter(1, at, choices.gather(1, at).clamp(min=0))
    tokens, hidden = forward(ids, state.starts, hidden)
    proposed = [tokens.gather(1, at)]
    hidden = hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[2]))
    for step in range(1, size - 1):
        tokens, hidden = forward(proposed[-1], state.starts + matched + step, hidden)
        proposed.append(tokens)
    return torch.cat(proposed, 1)[:, : size - 1]


def _simulated_matches(state: ChainState, num_tokens: float) -> torch.Tensor:
    """int64 [n] candidates to accept, so that blocks add ``num_tokens`` on average: the fraction is
    drawn by where a block starts, without a value from the host."""
    whole = int(num_tokens)
    drawn = state.starts**2 * GOLDEN % UNIT < (num_tokens - whole) * UNIT
    return torch.minimum(state.num_known + whole - 1 + drawn, state.num_candidates)


def accepted_block(record: Sequence[int]) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Splits one of ``accept_blocks``' records, on the host.

    Returns:
        The newly accepted tokens, none if the block could not be computed, their levels
        (``core.doubt``), and the next candidates.
    """
    num_new, num_proposed, *rest = record
    size = (len(rest) + 1) // 3
    tokens, surprisals, candidates = rest[:size], rest[size : 2 * size], rest[2 * size :]
    levels = [*map(level_of, surprisals[:num_new])]
    return tokens[:num_new], levels, candidates[:num_proposed]
