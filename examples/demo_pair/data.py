"""Training batches, each made from its index alone: seeded, resumable, nothing stored.

Two kinds: right answers for the language model, and packed verification passes (answer rows, then
questions, under the product's own mask) for the verdicts. All problems of a batch have the same
number of steps, so rows need little or no padding.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from corruption import corrupt, write_with_many_errors
from problems import MAX_STEPS, MIN_STEPS, Problem, draw_problem
from torch.utils.data import Dataset

from sglang_parse.core.layout import RequestLayout
from sglang_parse.core.mask import qlen_only_mask
from sglang_parse.core.question import Question

IGNORE = -100


def prompt_text(tokenizer: Any, problem: Problem) -> str:
    """The problem as one user turn, the assistant's turn opened."""
    turns = [{"role": "user", "content": problem.text}]
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, special tokens in the text honoured, none added."""
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One judged answer.

    Attributes:
        prompt_ids: the chat prompt.
        answer_ids: the written answer; its last token is the end of turn if it is finished.
        num_right: answer tokens before the first that differs from the solution.
        expected_ids: what each answer token should be given those before it, line by line; None
            where that is known up to the first error only.
    """

    prompt_ids: list[int]
    answer_ids: list[int]
    num_right: int
    expected_ids: list[int] | None = None

    def errors_here(self, newline_id: int) -> list[float]:
        """Per answer token 1 for an error, 0 for none, IGNORE after an error in the same line."""
        if self.expected_ids is None:
            rest = len(self.answer_ids) - self.num_right
            return ([0.0] * self.num_right + [1.0] + [float(IGNORE)] * rest)[: len(self.answer_ids)]
        labels, is_line_right = [], True
        for written, expected in zip(self.answer_ids, self.expected_ids, strict=True):
            labels.append(float(written != expected) if is_line_right else float(IGNORE))
            is_line_right = written == newline_id or (is_line_right and written == expected)
        return labels


def make_samples(
    tokenizer: Any, problems: Sequence[Problem], answers: Sequence[str]
) -> list[Sample]:
    """Compare each answer (end token included if written) with its solution, token by token."""
    prompts = encode(tokenizer, [prompt_text(tokenizer, p) for p in problems])
    solutions = encode(tokenizer, [p.solution + tokenizer.eos_token for p in problems])
    written = encode(tokenizer, answers)
    return [
        Sample(prompt, answer, num_common(answer, solution))
        for prompt, answer, solution in zip(prompts, written, solutions, strict=True)
    ]


def sample_with_many_errors(tokenizer: Any, rng: random.Random, num_steps: int) -> Sample:
    """A training sample whose every line may hold an error."""
    problem, written, expected = write_with_many_errors(rng, num_steps)
    end = tokenizer.eos_token
    sample = make_samples(tokenizer, [problem], [written + end])[0]
    return replace(sample, expected_ids=encode(tokenizer, [expected + end])[0])


def num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def line_cuts(answer_ids: Sequence[int], newline_id: int) -> list[int]:
    """Where prefixes end: after every line end, and at the end of the answer."""
    cuts = [i + 1 for i, token in enumerate(answer_ids) if token == newline_id]
    if not cuts or cuts[-1] != len(answer_ids):
        cuts.append(len(answer_ids))
    return cuts


def pack(
    samples: Sequence[Sample], cuts: Sequence[Sequence[int]], question: Question, end_id: int
) -> dict[str, torch.Tensor]:
    """One verification pass per sample, padded at the right to the longest.

    Args:
        samples: the answers to judge.
        cuts: per sample, answer tokens each question may see.

    Returns:
        input_ids, position_ids: int64 [batch, rows].
        attention_mask: bool [batch, 1, rows, rows], the product's mask; a padding row sees itself.
        labels: int64 [batch, rows], the next right token for answer rows before the first error,
            the verdict word for the last row of each question, else IGNORE.
        is_verdict: bool [batch, rows].
        error_so_far: float [batch, rows], 1 from the first wrong answer token on, IGNORE outside
            the answer.
        error_here: float [batch, rows], 1 for a token that is an error, see `Sample.errors_here`.
    """
    layouts = [_layout(s, c, question, end_id) for s, c in zip(samples, cuts, strict=True)]
    shape = len(samples), max(layout.num_rows for layout in layouts)
    batch = {
        "input_ids": torch.full(shape, 0),
        "position_ids": torch.zeros(shape, dtype=torch.long),
        "attention_mask": torch.eye(shape[1], dtype=torch.bool).repeat(shape[0], 1, 1, 1),
        "labels": torch.full(shape, IGNORE),
        "is_verdict": torch.zeros(shape, dtype=torch.bool),
        "error_so_far": torch.full(shape, float(IGNORE)),
        "error_here": torch.full(shape, float(IGNORE)),
    }
    for index, (sample, layout) in enumerate(zip(samples, layouts, strict=True)):
        _fill({k: v[index] for k, v in batch.items()}, sample, layout, question, end_id)
    return batch


def _is_complete(sample: Sample, cut: int, end_id: int) -> bool:
    return cut == len(sample.answer_ids) and sample.answer_ids[-1] == end_id


def _question_ids(sample: Sample, cut: int, question: Question, end_id: int) -> tuple[int, ...]:
    complete = _is_complete(sample, cut, end_id)
    return question.ids_for(sample.answer_ids[:cut], complete=complete)


def _layout(sample: Sample, cuts: Sequence[int], question: Question, end_id: int) -> RequestLayout:
    num_prompt = len(sample.prompt_ids)
    return RequestLayout(
        prefix_len=0,
        num_draft_rows=num_prompt + len(sample.answer_ids),
        visible_lens=tuple(num_prompt + cut for cut in cuts),
        question_lens=tuple(len(_question_ids(sample, c, question, end_id)) for c in cuts),
    )


def _fill(
    row: dict[str, torch.Tensor],
    sample: Sample,
    layout: RequestLayout,
    question: Question,
    end_id: int,
) -> None:
    """Write one sample into its row of the batch tensors."""
    num_prompt, num_rows = len(sample.prompt_ids), layout.num_rows
    cuts = [cut - num_prompt for cut in layout.cuts]
    ids = sample.prompt_ids + sample.answer_ids
    for cut in cuts:
        ids = ids + list(_question_ids(sample, cut, question, end_id))
    row["input_ids"][:num_rows] = torch.tensor(ids)
    row["position_ids"][:num_rows] = torch.tensor(layout.positions())
    row["attention_mask"][0, :num_rows, :num_rows] = qlen_only_mask(layout)
    right_end = num_prompt + sample.num_right
    row["labels"][num_prompt - 1 : right_end - 1] = torch.tensor(ids[num_prompt:right_end])
    row["error_so_far"][num_prompt : layout.num_draft_rows] = 0.0
    row["error_so_far"][right_end : layout.num_draft_rows] = 1.0
    row["error_here"][num_prompt : layout.num_draft_rows] = torch.tensor(
        sample.errors_here(question.partial_ids[1])
    )
    for cut, verdict_row in zip(cuts, layout.verdict_rows, strict=True):
        is_right = cut <= sample.num_right
        row["labels"][verdict_row] = question.accept_id if is_right else question.reject_id
        row["is_verdict"][verdict_row] = True


class AnswerBatches(Dataset):
    """Right answers: item `i` is a whole batch with labels on the answer."""

    def __init__(self, tokenizer: Any, num_batches: int, batch_size: int, seed: str) -> None:
        self.tokenizer, self.num_batches = tokenizer, num_batches
        self.batch_size, self.seed = batch_size, seed

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = random.Random(f"{self.seed}/{index}")
        steps = rng.randint(MIN_STEPS, MAX_STEPS)
        problems = [
            draw_problem(rng, held_out=False, num_steps=steps) for _ in range(self.batch_size)
        ]
        prompts = encode(self.tokenizer, [prompt_text(self.tokenizer, p) for p in problems])
        answers = encode(self.tokenizer, [p.solution + self.tokenizer.eos_token for p in problems])
        ids = torch.tensor([p + a for p, a in zip(prompts, answers, strict=True)])
        labels = ids.roll(-1, dims=1)
        labels[:, : len(prompts[0]) - 1] = IGNORE
        labels[:, -1] = IGNORE
        return {"input_ids": ids, "labels": labels}


@dataclass(frozen=True, slots=True)
class VerdictMix:
    """What a verification batch is made of.

    Attributes:
        right: share of right answers.
        written: share of the draft model's own answers.
        many_errors: share of answers with errors in many lines; the rest has one.
        questions_per_sample: line-end prefixes asked about, drawn without replacement.
        inside_line: chance that one prefix ends inside a line instead.
    """

    right: float
    written: float
    many_errors: float
    questions_per_sample: int
    inside_line: float = 0.1


class VerdictBatches(Dataset):
    """Packed verification passes over right, corrupted and really drafted answers."""

    def __init__(
        self,
        tokenizer: Any,
        question: Question,
        drafted: dict[int, list[tuple[Problem, str]]],
        num_batches: int,
        batch_size: int,
        seed: str,
        mix: VerdictMix,
    ) -> None:
        """`drafted`: per number of steps, training problems with an answer the draft wrote."""
        self.tokenizer, self.question, self.drafted = tokenizer, question, drafted
        self.num_batches, self.batch_size = num_batches, batch_size
        self.seed, self.mix = seed, mix
        self.newline_id = encode(tokenizer, ["\n"])[0][0]

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rng = random.Random(f"{self.seed}/{index}")
        steps = rng.randint(MIN_STEPS, MAX_STEPS)
        num_many = sum(rng.random() < self.mix.many_errors for _ in range(self.batch_size))
        pairs = [self._draw(rng, steps) for _ in range(self.batch_size - num_many)]
        samples = make_samples(self.tokenizer, *zip(*pairs, strict=True)) if pairs else []
        samples += [sample_with_many_errors(self.tokenizer, rng, steps) for _ in range(num_many)]
        cuts = [self._draw_cuts(rng, sample) for sample in samples]
        return pack(samples, cuts, self.question, self.tokenizer.eos_token_id)

    def _draw(self, rng: random.Random, steps: int) -> tuple[Problem, str]:
        draw = rng.random() * (1 - self.mix.many_errors)
        if draw < self.mix.written and self.drafted.get(steps):
            return rng.choice(self.drafted[steps])
        problem = draw_problem(rng, held_out=False, num_steps=steps)
        is_right = draw < self.mix.written + self.mix.right
        written = problem.solution if is_right else corrupt(problem, rng)
        return problem, written + self.tokenizer.eos_token

    def _draw_cuts(self, rng: random.Random, sample: Sample) -> list[int]:
        cuts = line_cuts(sample.answer_ids, self.newline_id)
        cuts = sorted(rng.sample(cuts, min(self.mix.questions_per_sample, len(cuts))))
        if rng.random() < self.mix.inside_line:
            cuts[0] = rng.randint(1, len(sample.answer_ids) - 1)
        return cuts
