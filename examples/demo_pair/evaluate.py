"""Measure a demo pair on held-out problems with plain transformers: no server, no PARSE worker.

    python examples/demo_pair/evaluate.py --pair DIR

Reads DIR/target and DIR/draft as stored (bf16) and computes in fp32. Prints the figures and
writes them to DIR/evaluation.json.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
from blocks import BLOCK, make_texts
from corruption import corrupt
from data import Sample, encode, line_cuts, make_samples, pack, prompt_text
from models import load_lm, write_answers
from parallel_draft import score_blocks
from problems import Problem, held_out_problems, is_answer_right
from tokenizer import question_texts
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from sglang_parse.core.question import Question, QuestionWording, render_question

GENERATION_BATCH, VERIFY_BATCH = 250, 25
NUM_BLOCK_TEXTS = 200


def batched(items: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """`itertools.batched`, which Python 3.11 lacks."""
    iterator = iter(items)
    while batch := tuple(islice(iterator, size)):
        yield batch


@dataclass(frozen=True, slots=True)
class Verdict:
    """One judged prefix.

    Attributes:
        answer: index of the answer it belongs to.
        is_right: whether the prefix is a prefix of the solution.
        is_complete: whether it is the finished answer.
        is_first_wrong: whether the line before it holds the first error.
        accept: p(accept) / (p(accept) + p(reject)).
        mass: p(accept) + p(reject).
    """

    answer: int
    is_right: bool
    is_complete: bool
    is_first_wrong: bool
    accept: float
    mass: float

    @property
    def is_hit(self) -> bool:
        return (self.accept > 0.5) == self.is_right


def answer_all(
    lm: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]
) -> list[str]:
    """Greedy answers, in the problems' order; batches hold prompts of one length."""
    texts: dict[str, str] = {}
    for _, same in groupby(sorted(problems, key=_num_steps), key=_num_steps):
        for group in batched(same, GENERATION_BATCH):
            prompts = encode(tokenizer, [prompt_text(tokenizer, p) for p in group])
            answers = write_answers(lm, tokenizer, torch.tensor(prompts))
            texts.update({p.text: a for p, a in zip(group, answers, strict=True)})
    return [texts[p.text] for p in problems]


def _num_steps(problem: Problem) -> int:
    return len(problem.steps)


def score_answers(
    tokenizer: Any, problems: Sequence[Problem], answers: Sequence[str]
) -> dict[str, float]:
    """Exact final answers, and answers right in every token."""
    end = tokenizer.eos_token
    pairs = list(zip(problems, answers, strict=True))
    return {
        "exact": _mean(is_answer_right(p, a.removesuffix(end)) for p, a in pairs),
        "every_token_right": _mean(a == p.solution + end for p, a in pairs),
        "mean_answer_tokens": _mean(len(ids) for ids in encode(tokenizer, answers)),
    }


@torch.inference_mode()
def judge(
    lm: Qwen3ForCausalLM, tokenizer: Any, question: Question, samples: Sequence[Sample]
) -> list[Verdict]:
    """Every line-end prefix of every answer, one packed pass per answer."""
    newline, end = encode(tokenizer, ["\n"])[0][0], tokenizer.eos_token_id
    verdicts: list[Verdict] = []
    for numbered in batched(enumerate(samples), VERIFY_BATCH):
        group = [sample for _, sample in numbered]
        cuts = [line_cuts(sample.answer_ids, newline) for sample in group]
        batch = pack(group, cuts, question, end)
        hidden = lm.model(
            input_ids=batch["input_ids"],
            position_ids=batch["position_ids"],
            attention_mask=batch["attention_mask"],
            use_cache=False,
        ).last_hidden_state
        probabilities = lm.lm_head(hidden[batch["is_verdict"]]).softmax(-1)
        rows = iter(probabilities[:, [question.accept_id, question.reject_id]].tolist())
        for (index, sample), sample_cuts in zip(numbered, cuts, strict=True):
            verdicts += _verdicts(index, sample, sample_cuts, rows, end)
    return verdicts


def _verdicts(
    index: int, sample: Sample, cuts: Sequence[int], rows: Iterator[list[float]], end: int
) -> Iterator[Verdict]:
    before = 0
    for cut in cuts:
        accept, reject = next(rows)
        yield Verdict(
            answer=index,
            is_right=cut <= sample.num_right,
            is_complete=cut == len(sample.answer_ids) and sample.answer_ids[-1] == end,
            is_first_wrong=before <= sample.num_right < cut,
            accept=accept / (accept + reject),
            mass=accept + reject,
        )
        before = cut


def score_verdicts(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Rates at threshold 0.5. `balanced_accuracy` weighs right and wrong prefixes equally."""
    right = [v for v in verdicts if v.is_right]
    wrong = [v for v in verdicts if not v.is_right]
    first = [v for v in verdicts if v.is_first_wrong]
    complete = [v for v in verdicts if v.is_complete]
    false_reject, false_accept = (
        _mean(not v.is_hit for v in right),
        _mean(not v.is_hit for v in wrong),
    )
    return {
        "right_prefixes": len(right),
        "wrong_prefixes": len(wrong),
        "accuracy": _mean(v.is_hit for v in verdicts),
        "balanced_accuracy": 1 - (false_reject + false_accept) / 2,
        "false_reject": false_reject,
        "false_accept": false_accept,
        "false_accept_where_the_first_error_is": _mean(not v.is_hit for v in first),
        "false_reject_at_0.9": _mean(v.accept <= 0.9 for v in right),
        "false_accept_at_0.9": _mean(v.accept > 0.9 for v in wrong),
        "false_reject_complete": _mean(not v.is_hit for v in complete if v.is_right),
        "false_accept_complete": _mean(not v.is_hit for v in complete if not v.is_right),
        "answers_with_every_verdict_right": _answers_all_hit(verdicts),
        "mean_mass": _mean(v.mass for v in verdicts),
        "min_mass": min(v.mass for v in verdicts),
    }


def _answers_all_hit(verdicts: Sequence[Verdict]) -> float:
    hits: dict[int, bool] = {}
    for verdict in verdicts:
        hits[verdict.answer] = hits.get(verdict.answer, True) and verdict.is_hit
    return _mean(hits.values())


def _mean(values: Any) -> float:
    values = [float(v) for v in values]
    return round(sum(values) / len(values), 5) if values else float("nan")


def balanced_answers(
    tokenizer: Any, problems: Sequence[Problem], seed: int = 0
) -> list[tuple[Problem, str]]:
    """A right and a corrupted answer of each problem, all finished."""
    rng = random.Random(f"evaluate/{seed}")
    end = tokenizer.eos_token
    return [(p, t + end) for p in problems for t in (p.solution, corrupt(p, rng))]


def evaluate(pair: Path, num_problems: int) -> dict[str, Any]:
    """All figures of the model card."""
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    question = render_question(tokenizer, QuestionWording(**question_texts()))
    target, draft = load_lm(pair / "target"), load_lm(pair / "draft")
    problems = held_out_problems(num_problems)
    drafted = answer_all(draft, tokenizer, problems)
    made = balanced_answers(tokenizer, problems)
    return {
        "problems": num_problems,
        "draft": score_answers(tokenizer, problems, drafted),
        "blocks": score_blocks(
            draft,
            make_texts(tokenizer, problems, drafted)[:NUM_BLOCK_TEXTS],
            BLOCK,
            draft.config.pard_token,
        ),
        "target": score_answers(tokenizer, problems, answer_all(target, tokenizer, problems)),
        "verdicts_on_right_and_corrupted_answers": score_verdicts(
            judge(target, tokenizer, question, make_samples(tokenizer, *zip(*made, strict=True)))
        ),
        "verdicts_on_draft_answers": score_verdicts(
            judge(target, tokenizer, question, make_samples(tokenizer, problems, drafted))
        ),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pair", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    started = time.monotonic()
    figures = evaluate(arguments.pair, arguments.problems)
    figures["seconds"] = round(time.monotonic() - started)
    text = json.dumps(figures, indent=2)
    (arguments.pair / "evaluation.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
