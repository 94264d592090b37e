"""Training of a head that drafts from the demo target's hidden states.

The head learns the target's next-token distribution from the target's real hidden states, over
several steps on its own hidden states (EAGLE-3's training-time test), so that its second and third
draft token hold up too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from data import IGNORE, AnswerBatches, encode, prompt_text
from evaluate import answer_all
from models import MuonAndAdamW, load_lm
from problems import MAX_STEPS, MIN_STEPS, held_out_problems
from torch import nn
from torch.nn import functional
from train import Stage, train_stage
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
    set_seed,
)

NUM_STEPS = 3  # as many as are served
STEP_DECAY = 0.8  # weight of each step's loss against the one before
OWN = {(1.0, 0.0, 0.0): 1.0}  # the target's style alone


class Head(Protocol):
    """What drafts, in plain PyTorch; see `eagle3_head` for the notation."""

    def target_states(
        self, target: Qwen3ForCausalLM, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What it reads, the target's embeddings and logits, of ``ids`` [batch, T]."""

    def unroll(
        self, features: torch.Tensor, embeds: torch.Tensor, num_steps: int
    ) -> list[torch.Tensor]:
        """Its logits, step by step."""


@dataclass(frozen=True, slots=True)
class HeadKind:
    """One kind of head.

    Attributes:
        name: of its folder beside target/.
        start: makes an untrained one for a target.
        save: writes the folder that SGLang serves.
        load: reads such a folder, for its target.
    """

    name: str
    start: Callable[[Qwen3ForCausalLM], Any]
    save: Callable[[Any, Path], None]
    load: Callable[[Path, Qwen3ForCausalLM], Any]

    @property
    def stage(self) -> Stage:
        """Its only stage of training."""
        return Stage(self.name, 600, 16, 2e-3)


class TrainedHead(nn.Module):
    """A head, its frozen target, and their loss."""

    def __init__(self, target: Qwen3ForCausalLM, head: nn.Module) -> None:
        super().__init__()
        self.target, self.head = target.requires_grad_(False), head
        self.metrics: dict[str, float] = {}  # share of right tokens by step

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss of one batch of `data.AnswerBatches`, on answer tokens only."""
        with torch.no_grad():
            features, embeds, wanted = self.head.target_states(self.target, input_ids)
        losses = []
        for step, logits in enumerate(self.head.unroll(features, embeds, NUM_STEPS)):
            span = slice(1 + step, 1 + step + logits.shape[1])
            is_answer = labels[:, span] != IGNORE
            said, target = logits[is_answer], wanted[:, span][is_answer]
            losses.append(STEP_DECAY**step * functional.cross_entropy(said, target.softmax(-1)))
            hits = said.argmax(-1) == target.argmax(-1)
            self.metrics[f"step_{step}"] = hits.float().mean().item()
        return {"loss": torch.stack(losses).sum()}


def train(
    kind: HeadKind,
    target: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    checkpoints: Path,
    seed: int,
) -> Head:
    """A trained head; resumes from the last of `checkpoints`."""
    set_seed(seed)
    model, stage = TrainedHead(target, kind.start(target)), kind.stage
    num_steps = MIN_STEPS, MAX_STEPS
    name, rate = f"{seed}/{stage.name}", stage.learning_rate
    train_stage(
        model,
        AnswerBatches(
            tokenizer, stage.num_batches, stage.batch_size, name, num_steps, OWN, stage.in_json
        ),
        stage,
        checkpoints,
        seed,
        optimizer=MuonAndAdamW(model, rate),
    )
    return model.head


@torch.inference_mode()
def accept_length(head: Head, target: Qwen3ForCausalLM, tokenizer: Any, num_problems: int) -> float:
    """Tokens per verification pass with a greedy chain of `NUM_STEPS`, held-out problems.

    The answers are the target's; as long as a draft is accepted, what the head reads is the same
    whether it or the target wrote it.
    """
    num_tokens, num_passes = 0, 0
    problems = held_out_problems(num_problems)
    for problem, written in zip(problems, answer_all(target, tokenizer, problems), strict=True):
        prompt, answer = encode(tokenizer, [prompt_text(tokenizer, problem), written])
        ids = torch.tensor([prompt + answer])
        # The last rows also predict past the end; what stands there is never read.
        padded = functional.pad(ids, (0, NUM_STEPS))
        features, embeds, _ = head.target_states(target, padded)
        steps = head.unroll(features, embeds, NUM_STEPS)
        drafts = torch.stack([logits[0].argmax(-1) for logits in steps], dim=1).tolist()
        row, end = len(prompt) - 1, ids.shape[1]
        while row + 2 < end:
            wanted = padded[0, row + 2 : min(row + 2 + NUM_STEPS, end)].tolist()
            num_right = next(
                (i for i, (a, b) in enumerate(zip(drafts[row], wanted, strict=False)) if a != b),
                len(wanted),
            )
            emitted = min(num_right + 1, end - row - 2)
            num_tokens, num_passes, row = num_tokens + emitted, num_passes + 1, row + emitted
    return num_tokens / num_passes


def make_head(kind: HeadKind, description: str) -> None:
    """The command line that trains a head, unless it is there, and evaluates it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--pair", type=Path, required=True, help="folder with target/")
    parser.add_argument("--problems", type=int, default=200, help="held-out, to evaluate on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.pair / "target")
    target, out = load_lm(arguments.pair / "target"), arguments.pair / kind.name
    if not (out / "model.safetensors").exists():
        checkpoints = arguments.pair / "work" / kind.name / "checkpoints"
        kind.save(train(kind, target, tokenizer, checkpoints, arguments.seed), out)
    head = kind.load(out, target)
    figures = {
        "held_out_problems": arguments.problems,
        "steps": NUM_STEPS,
        "accept_length": round(accept_length(head, target, tokenizer, arguments.problems), 3),
    }
    text = json.dumps(figures, indent=2)
    (out / "evaluation.json").write_text(text + "\n")
    print(text)
