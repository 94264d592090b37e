"""Sampling in target verify, in plain PyTorch on a CPU (ledger: verify_sampling_cpu)."""

from __future__ import annotations

import torch

from sglang_parse.patches.base import Patch, Value
from sglang_parse.patches.cpu.tree_cpu import DraftTree, read_trees

_UTILS = "sglang.srt.speculative.eagle_utils"


def top_k_renorm_prob(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """Restricts each row to its ``top_ks`` most likely tokens, renormalised.

    Args:
        probs: float [rows, vocab]; top_ks: int [rows], at least 1, larger than the vocabulary for
            "all". Of equally likely tokens the smaller id comes first, as in argmax.

    Source: ``sglang.srt.speculative.eagle_utils.top_k_renorm_prob``.
    """
    ordered, token_ids = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    return _renormalised(ordered.masked_fill(rank >= top_ks[:, None], 0.0), token_ids)


def top_p_renorm_prob(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Restricts each row to the fewest most likely tokens whose sum reaches ``top_ps``.

    Args:
        probs: float [rows, vocab]; top_ps: float [rows].

    Source: ``sglang.srt.speculative.eagle_utils.top_p_renorm_prob``.
    """
    ordered, token_ids = probs.sort(dim=-1, descending=True, stable=True)
    sum_before = ordered.cumsum(-1) - ordered
    return _renormalised(ordered.masked_fill(sum_before > top_ps[:, None], 0.0), token_ids)


def _renormalised(ordered: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    probs = torch.zeros_like(ordered).scatter_(-1, token_ids, ordered)
    return probs / probs.sum(-1, keepdim=True)


def verify_sampled(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,  # noqa: ARG001 - the kernel's scratch space
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,  # noqa: ARG001 - chooses a kernel upstream
) -> None:
    """Accepts a path of each tree; every output token is a sample of the target's distribution.

    At a node with target distribution p and children c1, c2, ...: one uniform number picks child
    c with probability p(c), or none with the rest; the token is then drawn from p without the
    children's tokens. Thresholds below 1 accept more, as SGLang's flags of that name do.

    Args:
        predicts, accept_index, accept_token_num: written, see ``tree_cpu.DraftTree.write``.
        candidates, retrive_*: see ``tree_cpu.read_trees`` (spelled as SGLang spells them here).
        uniform_samples: float [bs, n] in [0, 1), one for each node's choice of a child.
        uniform_samples_for_final_sampling: float [bs], one for the token after the path.
        target_probs: float [bs, n, vocab]: the target's distribution after each node.

    Source: ``sglang.srt.speculative.eagle_utils.tree_speculative_sampling_target_only``.
    """
    trees = read_trees(candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    coins, last_coins = uniform_samples.tolist(), uniform_samples_for_final_sampling.tolist()
    for row, tree in enumerate(trees):
        probs, path, rejected = target_probs[row], [0], list[int]()
        while len(path) < accept_index.shape[1]:
            node = path[-1]
            child, rejected = _pick_child(
                tree, node, probs[node], coins[row][node], threshold_single, threshold_acc
            )
            if child is None:
                break
            path.append(child)
        bonus = _draw(probs[path[-1]], rejected, last_coins[row])
        tree.write(row, path, bonus, predicts, accept_index, accept_token_num)


def _pick_child(
    tree: DraftTree,
    node: int,
    probs: torch.Tensor,
    coin: float,
    threshold_single: float,
    threshold_acc: float,
) -> tuple[int | None, list[int]]:
    """Returns the accepted child, or None and the tokens of all children."""
    reached, rejected = 0.0, list[int]()
    for child in tree.children(node):
        token = tree.token_ids[child]
        probability = float(probs[token])
        reached += probability
        if coin < reached / max(threshold_acc, 1e-9) or probability >= threshold_single:
            return child, []
        rejected.append(token)
    return None, rejected


def _draw(probs: torch.Tensor, rejected: list[int], coin: float) -> int:
    """Draws a token from ``probs`` [vocab] without ``rejected`` by a uniform number in [0, 1)."""
    rest = probs.double()
    rest[rejected] = 0.0
    if not rest.sum() > 0:  # only by rounding
        rest = probs.double()
    steps = rest.cumsum(0)
    # Past the last token only if coin * total rounds up to the total.
    index = int(torch.searchsorted(steps, coin * steps[-1], right=True))
    return min(index, int(rest.nonzero()[-1]))


PATCH = Patch(
    "verify_sampling_cpu",
    {
        f"{_UTILS}.top_k_renorm_prob": Value(top_k_renorm_prob),
        f"{_UTILS}.top_p_renorm_prob": Value(top_p_renorm_prob),
        f"{_UTILS}.tree_speculative_sampling_target_only": Value(verify_sampled),
    },
    why="these are None on a CPU, and a request with temperature above 0 would crash the "
    "server. (With SGLang's compiled CPU kernels such a request is silently served greedily.)",
    how="sets them to plain PyTorch functions. Not by SGLang's hooks: they replace by "
    "identity, and the value is None. Only on machines without an accelerator.",
    removed_when="SGLang samples under speculation on a CPU.",
)
