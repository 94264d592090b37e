"""Make the demo pair: a target that answers and judges, and a cheaper, weaker draft.

    python examples/demo_pair/train.py --out DIR

Writes DIR/target, DIR/draft and, under DIR/work, a finished model per stage. Started again, it
skips finished stages and resumes the broken one from its last checkpoint. Stages:

    draft           the small model, right answers only, until it is right often enough
    blocks          the draft, several tokens a forward, on what it writes itself
    draft-answers   what the draft really writes on training problems
    answers         a shallow target, right answers only
    deeper          the same with new layers between its layers
    verdicts        grown on top; packed verification passes, the lower layers kept
    drafts          the same with the draft's own answers, smaller learning rate
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from blocks import MASK_TOKEN, BlockBatches, make_texts
from data import (
    AnswerBatches,
    VerdictBatches,
    VerdictMix,
    encode,
    prompt_text,
    sample_with_many_errors,
)
from evaluate import answer_all, score_answers
from models import TrainedLM, grow, load_lm, make_lm, save_lm, start_as_comparison, write_answers
from parallel_draft import BlockTrainer, Text, name_mask
from problems import MAX_STEPS, MIN_STEPS, Problem, Step, draw_problem
from tokenizer import make_tokenizer, question_texts
from torch.utils.data import Dataset
from transformers import (
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from sglang_parse.core.question import Question, QuestionWording, render_question


@dataclass(frozen=True, slots=True)
class Stage:
    """Optimiser steps, samples per step, peak learning rate, warm-up.

    `enough` ends the stage early, at the first check where this share of answers is exact.
    """

    name: str
    num_batches: int
    batch_size: int
    learning_rate: float
    warmup: int = 100
    enough: float | None = None


# Stopped before it is good: a draft must be wrong now and then.
DRAFT = Stage("draft", 2000, 32, 3e-3, enough=0.75)
BLOCKS = Stage("blocks", 2500, 16, 2e-3)
ANSWERS = Stage("answers", 1600, 16, 2e-3)
DEEPER = Stage("deeper", 300, 16, 8e-4, warmup=40)
VERDICTS = Stage("verdicts", 1400, 12, 1.5e-3, warmup=40)
DRAFTS = Stage("drafts", 500, 12, 3e-4, warmup=40)
# First made-up errors only, few questions; then more questions, and real drafts.
VERDICTS_MIX = VerdictMix(right=0.15, written=0.0, many_errors=0.5, questions_per_sample=2)
DRAFTS_MIX = VerdictMix(right=0.1, written=0.4, many_errors=0.1, questions_per_sample=4)
ANSWERS_PER_KIND, TEXTS_PER_KIND = 300, 900
NUM_LAYERS = {"draft": 2, "answers": 4, "deeper": 8, "verdicts": 16}


class StopWhenExact(TrainerCallback):
    """Ends a stage once the model answers enough problems, never held-out ones."""

    FIRST_STEP, EVERY, NUM_PROBLEMS = 1000, 25, 300

    def __init__(self, lm: Qwen3ForCausalLM, tokenizer: Any, enough: float, seed: str) -> None:
        self.lm, self.tokenizer, self.enough = lm, tokenizer, enough
        rng = random.Random(f"{seed}/enough")
        self.problems = [
            draw_problem(rng, held_out=False, num_steps=n)
            for n in _step_counts()
            for _ in range(self.NUM_PROBLEMS // len(_step_counts()))
        ]
        self.stopped = False

    def on_step_end(
        self, _: Any, state: TrainerState, control: TrainerControl, **__: Any
    ) -> TrainerControl:
        """Called by the Trainer after every step."""
        if state.global_step >= self.FIRST_STEP and state.global_step % self.EVERY == 0:
            exact = self.exact_share()
            print(f"step {state.global_step}: {exact:.1%} of answers exact", flush=True)
            self.stopped = exact >= self.enough
            control.should_training_stop = control.should_training_stop or self.stopped
        return control

    def exact_share(self) -> float:
        """Share of the problems whose greedy answer ends in the right number."""
        is_training = self.lm.training
        self.lm.eval()
        answers = answer_all(self.lm, self.tokenizer, self.problems)
        self.lm.train(is_training)
        return score_answers(self.tokenizer, self.problems, answers)["exact"]


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
    stop: StopWhenExact | None = None,
    trainer_class: type[Trainer] = StageTrainer,
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
        warmup_steps=stage.warmup,
        lr_scheduler_type="cosine",
        adam_beta2=0.98,
        weight_decay=0.01,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        logging_steps=25,
        save_steps=100,
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
        callbacks=[stop] if stop else [],
    )
    last = get_last_checkpoint(str(folder)) if folder.exists() else None
    trainer.train(resume_from_checkpoint=last)
    # A StopIteration that escapes a batch ends the Trainer's loop without an error.
    is_done = stop.stopped if stop else trainer.state.global_step == stage.num_batches
    if not is_done:
        raise RuntimeError(
            f"stage {stage.name} ended at step {trainer.state.global_step} of {stage.num_batches}"
        )


class Recipe:
    """The stages in order, each skipped if its result is on disk."""

    def __init__(self, out: Path, seed: int) -> None:
        self.out, self.work, self.seed = out, out / "work", seed
        self.tokenizer = make_tokenizer()
        self.question: Question = render_question(
            self.tokenizer, QuestionWording(**question_texts())
        )

    def run(self, only: str | None = None) -> None:
        """Run all stages, or the named one."""
        stages: dict[str, Callable[[], Any]] = {
            "draft": self.draft,
            "blocks": self.blocks,
            "draft-answers": self.draft_answers,
            "answers": self.answers,
            "deeper": self.deeper,
            "verdicts": self.verdicts,
            "drafts": self.drafts,
        }
        for name, stage in stages.items():
            if only in (None, name):
                stage()

    def draft(self) -> Qwen3ForCausalLM:
        """The draft model."""
        return self._stage(
            DRAFT, self._fresh("draft", 64, 128), self._answer_batches(DRAFT), "draft"
        )

    def blocks(self) -> None:
        """The draft, with a mask token that stands for text to come."""
        folder = self.work / BLOCKS.name
        final = folder / "final"
        if not final.exists():
            set_seed(self.seed)
            lm, mask_id = self._done("draft"), self.tokenizer.convert_tokens_to_ids(MASK_TOKEN)
            batches = BlockBatches(
                self.block_texts(),
                mask_id,
                BLOCKS.num_batches,
                BLOCKS.batch_size,
                f"{self.seed}/{BLOCKS.name}",
            )
            train_stage(
                lm, batches, BLOCKS, folder / "checkpoints", self.seed, trainer_class=BlockTrainer
            )
            name_mask(lm, mask_id)
            save_lm(lm, self.tokenizer, final)
        save_lm(load_lm(final), self.tokenizer, self.out / "draft")

    def block_texts(self) -> dict[int, list[Text]]:
        """The draft's greedy answers on training problems, by number of steps."""
        path = self.work / "block_texts.json"
        if not path.exists():
            lm = load_lm(self.work / "draft" / "final")
            path.write_text(json.dumps({n: self._write_texts(lm, n) for n in _step_counts()}))
        stored = json.loads(path.read_text())
        return {int(n): [Text(**text) for text in texts] for n, texts in stored.items()}

    def _write_texts(self, lm: Qwen3ForCausalLM, steps: int) -> list[dict[str, Any]]:
        rng = random.Random(f"{self.seed}/block-texts/{steps}")
        problems = [
            draw_problem(rng, held_out=False, num_steps=steps) for _ in range(TEXTS_PER_KIND)
        ]
        answers = answer_all(lm, self.tokenizer, problems)
        return [asdict(text) for text in make_texts(self.tokenizer, problems, answers)]

    def answers(self) -> Qwen3ForCausalLM:
        """A shallow target that answers."""
        return self._stage(
            ANSWERS, self._fresh("answers", 128, 256), self._answer_batches(ANSWERS), "target"
        )

    def deeper(self) -> Qwen3ForCausalLM:
        """The answering target with twice the layers, all of them trained."""
        return self._stage(
            DEEPER,
            lambda: grow(self._done("answers"), NUM_LAYERS["deeper"]),
            self._answer_batches(DEEPER),
            "target",
        )

    def verdicts(self) -> Qwen3ForCausalLM:
        """A still deeper target that also judges."""
        return self._stage(
            VERDICTS,
            self._with_comparison,
            self._verdict_batches(VERDICTS, VERDICTS_MIX),
            "target",
        )

    def drafts(self) -> Qwen3ForCausalLM:
        """The target, having seen what the draft really writes."""
        return self._stage(
            DRAFTS,
            lambda: self._keep_lower(self._done("verdicts")),
            self._verdict_batches(DRAFTS, DRAFTS_MIX),
            "target",
            probes_of="verdicts",
        )

    def draft_answers(self) -> dict[int, list[tuple[Problem, str]]]:
        """The draft's own answers on training problems, greedy and sampled, by number of steps."""
        path = self.work / "draft_answers.json"
        if not path.exists():
            lm = load_lm(self.work / "draft" / "final")
            set_seed(self.seed)
            path.write_text(json.dumps([self._write(lm, n) for n in _step_counts()]))
        return {
            steps: [(_problem(start, parts), text) for start, parts, text in records]
            for steps, records in zip(_step_counts(), json.loads(path.read_text()), strict=True)
        }

    def _write(self, lm: Qwen3ForCausalLM, steps: int) -> list[tuple[Any, ...]]:
        records = []
        for temperature in (0.0, 1.0):
            rng = random.Random(f"{self.seed}/draft-answers/{steps}/{temperature}")
            problems = [
                draw_problem(rng, held_out=False, num_steps=steps) for _ in range(ANSWERS_PER_KIND)
            ]
            prompts = encode(self.tokenizer, [prompt_text(self.tokenizer, p) for p in problems])
            texts = write_answers(
                lm, self.tokenizer, torch.tensor(prompts), temperature=temperature
            )
            records += [
                (p.start, [(s.sign, s.operand) for s in p.steps], text)
                for p, text in zip(problems, texts, strict=True)
            ]
        return records

    def _fresh(self, name: str, hidden: int, intermediate: int) -> Callable[[], Qwen3ForCausalLM]:
        return lambda: make_lm(
            self.tokenizer, num_layers=NUM_LAYERS[name], hidden=hidden, intermediate=intermediate
        )

    def _done(self, stage: str) -> Qwen3ForCausalLM:
        return load_lm(self.work / stage / "final")

    def _with_comparison(self) -> Qwen3ForCausalLM:
        """The answering model with new layers on top; only these are trained in this stage."""
        lm = grow(self._done("deeper"), NUM_LAYERS["verdicts"], on_top=True)
        rng = random.Random(f"{self.seed}/comparison")
        samples = [sample_with_many_errors(self.tokenizer, rng, MAX_STEPS) for _ in range(60)]
        texts = torch.tensor([s.prompt_ids + s.answer_ids for s in samples])
        start_as_comparison(lm, NUM_LAYERS["deeper"], texts)
        return self._keep_lower(lm)

    @staticmethod
    def _keep_lower(lm: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
        """Exclude the layers that answer from training: large steps there undo the verdicts."""
        lm.model.embed_tokens.requires_grad_(False)
        lm.model.layers[: NUM_LAYERS["deeper"]].requires_grad_(False)
        return lm

    def _answer_batches(self, stage: Stage) -> Callable[[], Dataset]:
        seed = f"{self.seed}/{stage.name}"
        return lambda: AnswerBatches(self.tokenizer, stage.num_batches, stage.batch_size, seed)

    def _verdict_batches(self, stage: Stage, mix: VerdictMix) -> Callable[[], Dataset]:
        return lambda: VerdictBatches(
            self.tokenizer,
            self.question,
            self.draft_answers() if mix.written else {},
            stage.num_batches,
            stage.batch_size,
            f"{self.seed}/{stage.name}",
            mix,
        )

    def _stage(
        self,
        stage: Stage,
        make: Callable[[], Qwen3ForCausalLM],
        batches: Callable[[], Dataset],
        served_as: str,
        probes_of: str | None = None,
    ) -> Qwen3ForCausalLM:
        """Train unless done; the served folder gets the model of the last stage run.

        `probes_of` names an earlier stage whose probes go on: fresh ones would first push the
        layers below them about.
        """
        folder = self.work / stage.name
        final = folder / "final"
        if not final.exists():
            set_seed(self.seed)
            model = TrainedLM(make())
            if probes_of is not None:
                model.probes.load_state_dict(torch.load(self._probes(probes_of)))
            train_stage(
                model, batches(), stage, folder / "checkpoints", self.seed, self._stop(model, stage)
            )
            torch.save(model.probes.state_dict(), self._probes(stage.name))
            save_lm(model.lm, self.tokenizer, final)
        lm = load_lm(final)
        save_lm(lm, self.tokenizer, self.out / served_as)
        return lm

    def _probes(self, stage: str) -> Path:
        return self.work / stage / "probes.pt"

    def _stop(self, model: TrainedLM, stage: Stage) -> StopWhenExact | None:
        if stage.enough is None:
            return None
        return StopWhenExact(model.lm, self.tokenizer, stage.enough, f"{self.seed}/{stage.name}")


def _step_counts() -> range:
    return range(MIN_STEPS, MAX_STEPS + 1)


def _problem(start: int, parts: list[tuple[str, int]]) -> Problem:
    return Problem(start, tuple(Step(sign, operand) for sign, operand in parts))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for target/ and draft/")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", help="run one stage, its predecessors being done")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    Recipe(arguments.out, arguments.seed).run(arguments.only)


if __name__ == "__main__":
    main()
