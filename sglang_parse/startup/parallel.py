"""Parallel drafting: what the settings and the draft model's files allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_parse.core.block import HEAD_BLOCK, USUAL_BLOCK, BlockKind, block_kinds
from sglang_parse.core.config import ParseConfig, flag
from sglang_parse.startup.families import usual_drafts
from sglang_parse.startup.models import DRAFT, refuse, require

MASK_TOKEN_KEYS = ("pard_token", "ptd_token_id")
"""Keys of the mask token in a draft's config.json: PARD's, and vLLM's other name."""


@dataclass(frozen=True, slots=True)
class ParallelDraft:
    """The parallel drafting of a server's draft model.

    Attributes:
        size: maximum tokens per forward.
        mask_id: the mask token; 0 if ``size`` is 1.
        allow_one_token: whether one token per forward is used when it is faster.
        has_head: an EAGLE-3 head proposes, instead of mask tokens.
    """

    size: int = 1
    mask_id: int = 0
    allow_one_token: bool = False
    has_head: bool = False

    @property
    def kinds(self) -> tuple[BlockKind, ...]:
        """The kinds of a forward that compete."""
        return block_kinds(self.size, allow_one_token=self.allow_one_token, has_head=self.has_head)

    def __str__(self) -> str:
        if self.size == 1:
            return "one token"
        source = "its EAGLE-3 head" if self.has_head else f"mask token {self.mask_id}"
        return f"up to {self.size} tokens, by {source}"


def parallel_draft(config: ParseConfig, draft: Any, target: Any = None) -> ParallelDraft:
    """Returns the parallel drafting that the settings and the draft's ``ModelConfig`` allow.

    Args:
        draft: None without a draft model.
        target: its ``ModelConfig``, to name what could draft for it.

    Raises:
        AdmissionError: it is set, and the draft's files name no valid mask token.
    """
    size, setting = config.block_size, flag("draft_parallel_tokens")
    head, path = flag("draft_eagle3_path"), config.draft_eagle3_path
    if draft is None:
        fix = f"leave it out, or give the draft model of this head with {DRAFT}"
        require(not path, head, path, fix, why="a head of a draft model, and there is none")
        usual = f" ({usual_drafts(target)})" if target else ""
        fix = f"leave it out, or give a draft model with {DRAFT}{usual}"
        require(size in (None, 1), setting, size, fix)
        return ParallelDraft()
    named = {key: getattr(draft.hf_config, key, None) for key in MASK_TOKEN_KEYS}
    key, mask_id = next(((k, v) for k, v in named.items() if v is not None), ("", None))
    if path:
        fix = f"leave it out, or use a draft model without {key}"
        why = f"the draft model fills mask tokens (its config.json has {key})"
        require(mask_id is None, head, path, fix, why=why)
        fix = f"use 2 or more, or leave {head} out"
        require(size != 1, setting, size, fix, why="a block in which the head proposes nothing")
        return ParallelDraft(size or HEAD_BLOCK, allow_one_token=size is None, has_head=True)
    if size == 1 or (size is None and mask_id is None):
        return ParallelDraft()
    if mask_id is None:
        keys = " or ".join(MASK_TOKEN_KEYS)
        fix = f"use 1, or a draft trained to fill mask tokens: its config.json has {keys}"
        refuse(setting, config.draft_parallel_tokens, fix)
    num_tokens = min(model.vocab_size for model in (draft, target) if model is not None)
    fix = f"give the id of one of its {num_tokens} tokens, or use {setting} 1"
    is_token = type(mask_id) is int and mask_id in range(num_tokens)
    require(is_token, f"{key} in the draft's config.json", mask_id, fix)
    return ParallelDraft(size or USUAL_BLOCK, mask_id, allow_one_token=size is None)
