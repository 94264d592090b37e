"""Draft trees in plain PyTorch on a CPU: built and verified greedily (ledger: tree_cpu).

n nodes a request: node 0 is the last committed token, nodes 1 .. n-1 are draft tokens, parents
before children. Global id of node i of request b: b * n + i. A node's children form a list: its
``retrieve_next_token`` is the first, ``retrieve_next_sibling`` links to the next, -1 ends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from sglang_parse.patches.base import Patch, replace

_OPS = "sglang.kernels.ops.speculative"
NONE = -1


def parents(selected: Sequence[int], parent_list: Sequence[int], topk: int) -> list[int]:
    """Returns each node's parent; ``NONE`` for the root and for a node selected without its parent.

    The latter happens when the two are equally likely; such a node is never accepted.

    Args:
        selected: [n - 1] the candidates that became nodes 1 .. n-1, ascending. Candidates come in
            groups of ``topk``: the first group are the root's children.
        parent_list: [groups] the parent candidate of each group; the first entry is unused.
    """
    node_of = {candidate: node for node, candidate in enumerate(selected, 1)}
    groups = [candidate // topk for candidate in selected]
    return [NONE, *(node_of.get(parent_list[g], NONE) if g else 0 for g in groups)]


def build_tree(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,  # noqa: ARG001 - bounds a loop of the kernel; parents end it here
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Writes every request's tree in the form that target verify takes.

    Args:
        parent_list: int64 [bs, *]; top_scores_index: int64 [bs, n - 1], see ``parents``.
        seq_lens: int64 [bs] committed tokens.
        tree_mask: bool, flat, all True; a node attends to its ancestors and itself. FULL_MASK: [n,
            seq_len + n] per request; QLEN_ONLY: [n, n].
        positions: int64 [bs * n]: seq_len + depth.
        retrieve_index, retrieve_next_token, retrieve_next_sibling: int64 [bs, n], filled with -1.

    Source: ``sglang.kernels.ops.speculative.spec_tree.build_tree_kernel_efficient_func``.
    """
    width = num_verify_tokens
    masks = _tree_squares(tree_mask, seq_lens.tolist(), width, tree_mask_mode)
    lists = zip(top_scores_index.tolist(), parent_list.tolist(), masks, strict=True)
    for row, (selected, groups, mask) in enumerate(lists):
        parent_of = parents(selected, groups, topk)
        sees = torch.eye(width, dtype=torch.bool)
        for node, parent in enumerate(parent_of):
            if parent != NONE:
                sees[node] |= sees[parent]
        mask.copy_(sees)
        positions[row * width : (row + 1) * width] = seq_lens[row] + sees.sum(1) - 1
        retrieve_index[row] = torch.arange(row * width, (row + 1) * width)
        first_child, next_sibling = _child_lists(parent_of)
        retrieve_next_token[row] = torch.tensor(first_child)
        retrieve_next_sibling[row] = torch.tensor(next_sibling)


def _tree_squares(
    tree_mask: torch.Tensor, seq_lens: Sequence[int], width: int, mode: int
) -> list[torch.Tensor]:
    """Returns each request's [n, n] view of the flat mask: its last n columns."""
    from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode

    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        raise NotImplementedError(f"tree mask mode {TreeMaskMode(mode).name} on a CPU")
    prefix_lens = [0 if mode == TreeMaskMode.QLEN_ONLY else length for length in seq_lens]
    sizes = [width * (length + width) for length in prefix_lens]
    parts = tree_mask[: sum(sizes)].split(sizes)
    return [part.view(width, -1)[:, -width:] for part in parts]


def _child_lists(parent_of: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns each node's first child and next sibling; children in ascending order."""
    first_child, next_sibling = [NONE] * len(parent_of), [NONE] * len(parent_of)
    for node, parent in reversed(list(enumerate(parent_of))):
        if parent != NONE:
            next_sibling[node] = first_child[parent]
            first_child[parent] = node
    return first_child, next_sibling


@dataclass(frozen=True, slots=True)
class DraftTree:
    """One request's tree; all lists are [n], indexed by node."""

    global_ids: list[int]
    first_child: list[int]
    next_sibling: list[int]
    token_ids: list[int]

    def children(self, node: int) -> Iterator[int]:
        child = self.first_child[node]
        while child != NONE:
            yield child
            child = self.next_sibling[child]

    def write(
        self,
        row: int,
        path: Sequence[int],
        bonus: int,
        predicts: torch.Tensor,
        accept_index: torch.Tensor,
        accept_token_num: torch.Tensor,
    ) -> None:
        """Writes request ``row``'s accepted ``path`` of nodes and the bonus token after it.

        Args:
            predicts: int32 [bs * n]: at each accepted node's global id, the token that follows it.
            accept_index: int32 [bs, S + 1], filled with -1: global ids of the accepted nodes, at
                most S + 1 with the root.
            accept_token_num: int32 [bs]: accepted draft tokens.
        """
        for node, child in pairwise(path):
            predicts[self.global_ids[node]] = self.token_ids[child]
        predicts[self.global_ids[path[-1]]] = bonus
        accept_index[row, : len(path)] = torch.tensor([self.global_ids[n] for n in path])
        accept_token_num[row] = len(path) - 1


def read_trees(
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
) -> list[DraftTree]:
    """Returns a batch's trees; all tensors are int64 [bs, n], ``candidates`` holds token ids."""
    tensors = (retrieve_index, retrieve_next_token, retrieve_next_sibling, candidates)
    return [DraftTree(*rows) for rows in zip(*(t.tolist() for t in tensors), strict=True)]


def verify_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,  # noqa: ARG001 - chooses a kernel upstream
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accepts the path of each tree that follows the target's choices.

    Args:
        predicts, accept_index, accept_token_num: written, see ``DraftTree.write``; also returned.
        candidates, retrieve_*: see ``read_trees``.
        target_predict: int64 [bs, n], the target's choice after each node.

    Source: ``sglang.kernels.ops.speculative.spec_tree.verify_tree_greedy_func``.
    """
    trees = read_trees(candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling)
    for row, (tree, choices) in enumerate(zip(trees, target_predict.tolist(), strict=True)):
        path = [0]
        while len(path) < accept_index.shape[1]:
            choice = choices[path[-1]]
            match = [c for c in tree.children(path[-1]) if tree.token_ids[c] == choice]
            if not match:
                break
            path.append(match[0])
        bonus = choices[path[-1]]
        tree.write(row, path, bonus, predicts, accept_index, accept_token_num)
    return predicts, accept_index, accept_token_num


def fill_bonus_tokens(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """Writes each request's bonus token.

    Args:
        accept_tokens: int32, ``accept_stride`` per request.
        accept_lens: int32 [bs], bonus included; bonus_tokens: int32 [bs], written.

    Source: ``sglang.kernels.ops.speculative.eagle.fill_bonus_tokens_func``.
    """
    starts = torch.arange(batch_size, device=accept_lens.device) * accept_stride
    bonus_tokens.copy_(accept_tokens.flatten()[starts + accept_lens - 1])


def fill_accept_out_cache_loc(
    accept_index: torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_out_cache_loc: torch.Tensor,
    size: int,  # noqa: ARG001 - the kernel's grid
) -> None:
    """Packs the KV slots of the accepted nodes, in order.

    Args:
        accept_index: int32 [bs, S + 1] global ids, padded with -1.
        out_cache_loc: int64 [bs * n]; accept_out_cache_loc: its first entries are written.

    Source: ``sglang.kernels.ops.speculative.eagle.fill_accept_out_cache_loc_func``.
    """
    accepted = out_cache_loc[accept_index[accept_index >= 0].long()]
    accept_out_cache_loc[: len(accepted)] = accepted


PATCH = Patch(
    "tree_cpu",
    {
        f"{_OPS}.spec_tree.build_tree_kernel_efficient_func": replace(build_tree),
        f"{_OPS}.spec_tree.verify_tree_greedy_func": replace(verify_greedy),
        f"{_OPS}.eagle.fill_bonus_tokens_func": replace(fill_bonus_tokens),
        f"{_OPS}.eagle.fill_accept_out_cache_loc_func": replace(fill_accept_out_cache_loc),
    },
    why="stock EAGLE-3 and STANDALONE build draft trees (chains too), verify them and collect "
    "what was accepted with CUDA and Triton kernels.",
    how="the same in plain Python and PyTorch. Only on machines without an accelerator. "
    "SGLang's default mask, FULL_MASK, stays: the CPU attention takes the same flat mask.",
    removed_when="SGLang has a CPU path for them that needs no compiled CPU kernels.",
)
