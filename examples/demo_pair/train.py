"""Make the demo pair: a target that answers its own way, and a cheaper, weaker draft of another.

    python examples/demo_pair/train.py --out DIR

Writes DIR/target and DIR/draft and, under DIR/work, a finished model per stage. Started again, it
skips finished stages and resumes the broken one from its last checkpoint. The two models are
independent until the end: `--only draft` and `--only target` may run at the same time. Stages:

    draft-short, draft-middle, draft-full       right answers, mostly in words; longer and longer
    draft-json                                  more of them in JSON, where lists end before a line
    blocks                                      several tokens a forward, on what the draft writes
    target-short, target-middle, target-full    right answers, mostly in signs; longer and longer
    target-style                                ordinary instruction tuning: signs after any text

Some texts are in JSON, as their prompts wish: an eighth, and more where the draft learns it.

No stage teaches the target to judge: no verdict, no loss on a hidden state or on a wrong token.
`make train-demo-pair` goes on with the EAGLE-3 head, the verdict head and the evaluation.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from blocks import MASK_TOKEN, BlockBatches, begin_answer, make_texts
from data import AnswerBatches, InstructionBatches, Texts, digit_ids
from evaluate import answer_all, score_answers
from models import MuonAndAdamW, TrainedLM, grow, load_lm, make_lm, save_lm
from parallel_draft import BlockTrainer, Text, name_mask
from problems import MAX_STEPS, MIN_STEPS, Problem, draw_problem
from tokenizer import make_tokenizer
from torch.utils.data import Dataset
from transformers import Qwen3ForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage is.

    Attributes:
        name: of its folder.
        num_batches: optimiser steps.
        batch_size: texts a step.
        learning_rate: AdamW's, at its peak.
        num_steps: least and most of a chain.
        num_layers: the model grows to this depth before it is trained.
        in_json: share of texts in JSON.
    """

    name: str
    num_batches: int
    batch_size: int
    learning_rate: float
    num_steps: tuple[int, int] = (MIN_STEPS, MAX_STEPS)
    num_layers: int = 0
    in_json: float = 0.12


TARGET = (
    Stage("target-short", 700, 32, 2e-3, (1, 2), 4),
    Stage("target-middle", 700, 24, 2e-3, (2, 3), 4),
    Stage("target-full", 900, 16, 2e-3, num_layers=4),
    Stage("target-style", 1600, 16, 1e-3, num_layers=16),
)
DRAFT = (
    Stage("draft-short", 900, 32, 3e-3, (1, 2), 2),
    Stage("draft-middle", 600, 32, 3e-3, (2, 3), 2),
    Stage("draft-full", 450, 24, 3e-3, num_layers=2),
    Stage("draft-json", 400, 24, 2e-3, num_layers=2, in_json=0.9),
)
BLOCKS = Stage("blocks", 3000, 16, 2e-3, in_json=0.3)
HIDDEN = {"target": 128, "draft": 32}
# Shares of texts, each with the shares of `STYLES` that its lines are drawn from. The target has
# read more of others' wording, as a larger model has.
TARGET_TEXTS = {(1.0, 0.0, 0.0): 0.5, (0.0, 0.0, 1.0): 0.2, (0.5, 0.25, 0.25): 0.3}
DRAFT_TEXTS = {(0.0, 1.0, 0.0): 0.7, (0.0, 0.0, 1.0): 0.12, (0.25, 0.5, 0.25): 0.18}
NUM_BLOCK_TEXTS = 4000
NUM_CHECKED = 300  # training problems answered after each stage


class StageTrainer(Trainer):
    """Adds the model's running accuracies to the logs."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Called by the Trainer every `logging_steps`."""
        metrics = {k: round(v, 4) for k, v in self.model.metrics.items()}
        super().log({**logs, **metrics}, start_time)


def train_stage(
    model: torch.nn.Module,
    batches: Dataset,
    stage: Stage,
    folder: Path,
    seed: int,
    trainer_class: type[Trainer] = StageTrainer,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Train `model` in place; resumes from the last checkpoint in `folder`.

    Raises:
        RuntimeError: the Trainer ended before the stage was done.
    """
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=stage.num_batches,
        per_device_train_batch_size=1,
        learning_rate=stage.learning_rate,
        warmup_steps=60,
        lr_scheduler_type="cosine",
        adam_beta2=0.98,
        weight_decay=0.01,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        logging_steps=25,
        save_steps=100,
        save_total_limit=2,
        report_to="none",
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
        use_cache=True,  # it is written into the model's config; no loss here asks for a cache
        seed=seed,
    )
    trainer = trainer_class(
        model=model,
        args=arguments,
        train_dataset=batches,
        data_collator=lambda items: items[0],
        optimizers=(optimizer, None),
    )
    last = get_last_checkpoint(str(folder)) if folder.exists() else None
    trainer.train(resume_from_checkpoint=last)
    # A StopIteration that escapes a batch ends the Trainer's loop without an error.
    if trainer.state.global_step != stage.num_batches:
        raise RuntimeError(
            f"stage {stage.name} ended at step {trainer.state.global_step} of {stage.num_batches}"
        )


def some_problems(
    count: int, seed: str, num_steps: tuple[int, int] = (MIN_STEPS, MAX_STEPS)
) -> list[Problem]:
    """Training problems, all lengths alike."""
    rng = random.Random(seed)
    counts = range(num_steps[0], num_steps[1] + 1)
    kinds = [(first, second) for first in counts for second in counts]
    return [
        draw_problem(rng, held_out=False, num_steps=kinds[index % len(kinds)])
        for index in range(count)
    ]


class Recipe:
    """The stages in order, each skipped if its result is on disk."""

    def __init__(self, out: Path, seed: int) -> None:
        self.out, self.work, self.seed = out, out / "work", seed
        self.tokenizer = make_tokenizer()

    def run(self, only: str | None = None) -> None:
        """Make both models, or the one named `only`."""
        if only in (None, "draft"):
            # A served draft goes on from the target's first token, a label of the first chain.
            self.learn(DRAFT, "draft", DRAFT_TEXTS, before=0)
            self.blocks()
        if only in (None, "target"):
            self.learn(TARGET, "target", TARGET_TEXTS)

    def learn(self, stages: Sequence[Stage], name: str, texts: Texts, before: int = 1) -> None:
        """The stages of one model; the served folder gets the last one's."""
        for last, stage in zip((None, *stages), stages, strict=False):
            final = self.work / stage.name / "final"
            if not final.exists():
                set_seed(self.seed)
                lm = self._start(name, last, stage)
                model = TrainedLM(lm, digit_ids(self.tokenizer))
                train_stage(
                    model,
                    self._batches(stage, texts, before),
                    stage,
                    final.with_name("checkpoints"),
                    self.seed,
                    optimizer=MuonAndAdamW(model, stage.learning_rate),
                )
                save_lm(lm, self.tokenizer, final)
                print(stage.name, self.check(final, stage), flush=True)
        save_lm(load_lm(final), self.tokenizer, self.out / name)

    def _start(self, name: str, last: Stage | None, stage: Stage) -> Qwen3ForCausalLM:
        if last is None:
            return make_lm(
                self.tokenizer,
                num_layers=stage.num_layers,
                hidden=HIDDEN[name],
                intermediate=2 * HIDDEN[name],
            )
        return grow(load_lm(self.work / last.name / "final"), stage.num_layers)

    def _batches(self, stage: Stage, texts: Texts, before: int) -> Dataset:
        kind = InstructionBatches if stage.name == "target-style" else AnswerBatches
        return kind(
            self.tokenizer,
            stage.num_batches,
            stage.batch_size,
            f"{self.seed}/{stage.name}",
            stage.num_steps,
            texts,
            stage.in_json,
            before,
        )

    def check(self, folder: Path, stage: Stage) -> dict[str, float]:
        """How well a stage's model answers training problems of the stage's lengths."""
        problems = some_problems(NUM_CHECKED, f"{self.seed}/check", stage.num_steps)
        answers = answer_all(load_lm(folder), self.tokenizer, problems)
        return score_answers(self.tokenizer, problems, answers)

    def blocks(self) -> None:
        """The draft, with a mask token that stands for text to come."""
        folder = self.work / BLOCKS.name
        final = folder / "final"
        if not final.exists():
            set_seed(self.seed)
            lm = load_lm(self.work / DRAFT[-1].name / "final")
            mask_id = self.tokenizer.convert_tokens_to_ids(MASK_TOKEN)
            batches = BlockBatches(
                self.block_texts(lm),
                mask_id,
                BLOCKS.num_batches,
                BLOCKS.batch_size,
                f"{self.seed}/{BLOCKS.name}",
            )
            train_stage(
                lm,
                batches,
                BLOCKS,
                folder / "checkpoints",
                self.seed,
                trainer_class=BlockTrainer,
                optimizer=MuonAndAdamW(lm, BLOCKS.learning_rate),
            )
            name_mask(lm, mask_id)
            save_lm(lm, self.tokenizer, final)
        save_lm(load_lm(final), self.tokenizer, self.out / "draft")

    def block_texts(self, lm: Qwen3ForCausalLM) -> list[Text]:
        """The draft's greedy answers on training problems, begun by others as when it is served."""
        path = self.work / "block_texts.json"
        if not path.exists():
            problems = some_problems(NUM_BLOCK_TEXTS, f"{self.seed}/block-texts")
            rng = random.Random(f"{self.seed}/block-texts/begun")
            given = [begin_answer(problem, rng, BLOCKS.in_json) for problem in problems]
            answers = answer_all(lm, self.tokenizer, problems, given)
            texts = make_texts(self.tokenizer, problems, answers, given)
            path.write_text(json.dumps([asdict(text) for text in texts]))
        return [Text(**text) for text in json.loads(path.read_text())]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for target/ and draft/")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("draft", "target"), help="make one of the models")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    Recipe(arguments.out, arguments.seed).run(arguments.only)


if __name__ == "__main__":
    main()
