"""Train an EAGLE-3 head for the demo target.

    python examples/demo_pair/train_eagle3.py --pair DIR

Reads DIR/target, writes DIR/eagle3; started again, it resumes from its last checkpoint.

The head learns the target's next-token distribution from the target's real hidden states, over
several steps on its own hidden states (EAGLE-3's training-time test), so that its second and third
draft token hold up too. Ends with the accept length on held-out problems.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from data import IGNORE, AnswerBatches, encode, prompt_text
from eagle3_head import (
    EagleHead,
    aux_layer_ids,
    head_config,
    load_head,
    save_head,
    target_states,
)
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
STAGE = Stage("eagle3", 600, 16, 2e-3)
OWN = {(1.0, 0.0, 0.0): 1.0}  # the target's style alone


class TrainedHead(nn.Module):
    """A head, its frozen target, and their loss."""

    def __init__(self, target: Qwen3ForCausalLM) -> None:
        super().__init__()
        self.target = target.requires_grad_(False)
        config = target.config
        self.head = EagleHead(head_config(config, aux_layer_ids(config.num_hidden_layers)))
        # A good start: the topmost state it reads goes the target's own way to words.
        self.head.fc.weight.data.zero_()[:, -config.hidden_size :].fill_diagonal_(1.0)
        self.head.lm_head.load_state_dict(target.lm_head.state_dict())
        self.head.norm.load_state_dict(target.model.norm.state_dict())
        self.metrics: dict[str, float] = {}  # share of right tokens by step

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Loss of one batch of `data.AnswerBatches`, on answer tokens only."""
        with torch.no_grad():
            features, embeds, wanted = target_states(self.target, input_ids, self.head.layer_ids)
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
    target: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, checkpoints: Path, seed: int
) -> EagleHead:
    """A trained head; resumes from the last of `checkpoints`."""
    set_seed(seed)
    model = TrainedHead(target)
    num_steps = MIN_STEPS, MAX_STEPS
    name, rate = f"{seed}/{STAGE.name}", STAGE.learning_rate
    train_stage(
        model,
        AnswerBatches(
            tokenizer, STAGE.num_batches, STAGE.batch_size, name, num_steps, OWN, STAGE.in_json
        ),
        STAGE,
        checkpoints,
        seed,
        optimizer=MuonAndAdamW(model, rate),
    )
    return model.head


@torch.inference_mode()
def accept_length(
    head: EagleHead, target: Qwen3ForCausalLM, tokenizer: Any, num_problems: int
) -> float:
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
        features, embeds, _ = target_states(target, padded, head.layer_ids)
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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pair", type=Path, required=True, help="folder with target/")
    parser.add_argument("--problems", type=int, default=200, help="held-out, to evaluate on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.pair / "target")
    target, out = load_lm(arguments.pair / "target"), arguments.pair / "eagle3"
    if not (out / "model.safetensors").exists():
        checkpoints = arguments.pair / "work" / STAGE.name / "checkpoints"
        save_head(train(target, tokenizer, checkpoints, arguments.seed), out)
    figures = {
        "held_out_problems": arguments.problems,
        "steps": NUM_STEPS,
        "accept_length": round(
            accept_length(load_head(out), target, tokenizer, arguments.problems), 3
        ),
    }
    text = json.dumps(figures, indent=2)
    (out / "evaluation.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
