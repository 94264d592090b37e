"""Measure a demo pair on held-out problems with plain transformers: no server, no PARSE worker.

    python examples/demo_pair/evaluate.py --pair DIR

Reads DIR/target and DIR/draft as stored (bf16) and computes in fp32. Prints the figures and
writes them to DIR/evaluation.json: how many answers are right, how far stock speculation gets,
and what can be read from the target about the draft's answers, see `readers`.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from blocks import BLOCK, begun_text, make_texts
from data import FIRST, STYLES, encode, prompt_text
from documents import write_document
from json_answers import read_json
from models import load_lm, write_answers
from parallel_draft import score_blocks
from problems import (
    MAX_STEPS,
    MIN_STEPS,
    Problem,
    draw_problem,
    held_out_problems,
    is_answer_right,
    num_right_before_error,
    read_answer,
)
from readers import (
    TRAINING_FREE,
    Draft,
    Reading,
    ask,
    figures,
    fit_tokens,
    kept_by,
    num_right_lines,
    prefix_scores,
    read_draft,
    read_target,
)
from tokenizer import question_texts
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from sglang_parse.core.question import QuestionWording, render_question

GENERATION_BATCH = 250
NUM_BLOCK_TEXTS, NUM_ASKED, NUM_IN_JSON = 200, 300, 300
WINDOW = 7  # tokens that STANDALONE drafts for a verification
# Of documents with made mistakes: 4 in 10 are right, as the draft's own.
MADE_RATE, MADE_WEIGHTS = 0.1, (0.0, 0.7, 0.3)


def batched(items: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """`itertools.batched`, which Python 3.11 lacks."""
    iterator = iter(items)
    while batch := tuple(islice(iterator, size)):
        yield batch


def answer_all(
    lm: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    given: Sequence[str] = (),
) -> list[str]:
    """Greedy answers, in the problems' order, each what follows its `given` beginning, if any.

    Batches hold prompts of one length.
    """
    begun = zip(problems, given or [""] * len(problems), strict=True)
    prompts = encode(tokenizer, [begun_text(tokenizer, p, start) for p, start in begun])
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    answers: dict[int, str] = {}
    for indices in by_length.values():
        for group in batched(indices, GENERATION_BATCH):
            texts = write_answers(lm, tokenizer, torch.tensor([prompts[i] for i in group]))
            answers.update(zip(group, texts, strict=True))
    return [answers[index] for index in range(len(problems))]


def score_answers(
    tokenizer: Any, problems: Sequence[Problem], answers: Sequence[str]
) -> dict[str, float]:
    """Right final answers, and answers right in every token."""
    end = tokenizer.eos_token
    pairs = [(p, a.removesuffix(end)) for p, a in zip(problems, answers, strict=True)]
    right = [num_right_before_error(p, a, finished=True) is None for p, a in pairs]
    return {
        "exact": round(fmean(is_answer_right(p, a) for p, a in pairs), 4),
        "every_token_right": round(fmean(right), 4),
        "mean_answer_tokens": num_tokens(tokenizer, answers),
    }


def num_tokens(tokenizer: Any, answers: Sequence[str]) -> float:
    """Of an answer, on average."""
    return round(fmean(len(ids) for ids in encode(tokenizer, answers)), 1)


def score_json(
    lm: Qwen3ForCausalLM, tokenizer: Any, problems: Sequence[Problem]
) -> dict[str, float]:
    """Answers in JSON, begun with the bracket that a grammar asks for."""
    answers = answer_all(lm, tokenizer, problems, ["{"] * len(problems))
    plain = [read_json("{" + answer.removesuffix(tokenizer.eos_token))[0] for answer in answers]
    scores = score_answers(tokenizer, problems, plain)
    return scores | {"mean_answer_tokens": num_tokens(tokenizer, answers)}


def score_going_on(
    target: Qwen3ForCausalLM, tokenizer: Any, problems: Sequence[Problem], drafts: Sequence[str]
) -> float:
    """Share of answers right in every token that the target ends after right lines of a draft."""
    rng = random.Random("evaluate/going-on")
    begun = []
    for problem, draft in zip(problems, drafts, strict=True):
        lines = draft.splitlines(keepends=True)[: read_answer(problem, draft)[0]]
        begun.append("".join(lines[: rng.randint(1, max(1, len(lines)))]))
    ended = zip(begun, answer_all(target, tokenizer, problems, begun), strict=True)
    answers = [start + rest for start, rest in ended]
    return score_answers(tokenizer, problems, answers)["every_token_right"]


@torch.inference_mode()
def standalone_tokens(
    drafter: Qwen3ForCausalLM, tokenizer: Any, problems: Sequence[Problem], answers: Sequence[str]
) -> float:
    """Tokens per verification of stock STANDALONE: the draft goes along the target's answer."""
    num_tokens, num_passes = 0, 0
    for problem, answer in zip(problems, answers, strict=True):
        prompt, wanted = encode(tokenizer, [prompt_text(tokenizer, problem), answer])
        logits = drafter(input_ids=torch.tensor([prompt + wanted]), use_cache=False).logits
        drafted = logits[0, len(prompt) - 1 : -1].argmax(-1)
        hits, place = (drafted == torch.tensor(wanted)).tolist(), 0
        while place < len(hits):
            window = hits[place : place + WINDOW]
            place += (window.index(False) if False in window else len(window)) + 1
            num_passes += 1
        num_tokens += len(wanted)
    return round(num_tokens / num_passes, 3)


def some_drafts(
    drafter: Qwen3ForCausalLM, tokenizer: Any, count: int, *, made: bool, seed: str
) -> list[Draft]:
    """Drafts of training problems: the draft model's, or right texts with made mistakes."""
    rng = random.Random(seed)
    if made:
        texts = []
        for _ in range(count):
            lengths = [rng.randint(MIN_STEPS, MAX_STEPS) for _ in range(2)]
            problem, lines = write_document(
                rng, lengths, lambda _: rng.choices(STYLES, MADE_WEIGHTS)[0], MADE_RATE
            )
            texts.append((problem, "".join(line.text for line in lines) + tokenizer.eos_token))
    else:
        problems = [draw_problem(rng, held_out=False) for _ in range(count)]
        texts = list(zip(problems, first_drafts(drafter, tokenizer, problems), strict=True))
    return [read_draft(tokenizer, problem, text) for problem, text in texts]


def first_drafts(
    drafter: Qwen3ForCausalLM, tokenizer: Any, problems: Sequence[Problem]
) -> list[str]:
    """What the draft model writes as it is served: on from the target's first token."""
    written = answer_all(drafter, tokenizer, problems, [FIRST] * len(problems))
    return [FIRST + text for text in written]


def score_readers(
    target: Qwen3ForCausalLM,
    drafter: Qwen3ForCausalLM,
    tokenizer: Any,
    train: Sequence[Draft],
    test: Sequence[Draft],
) -> dict[str, Any]:
    """All readers on `test`; regressions are fitted on `train`."""
    top = target.config.num_hidden_layers - 2  # the topmost that SGLang captures
    layers = (top // 2, top * 3 // 4, top)
    known, new = (
        [read_target(target, drafter, draft, layers) for draft in drafts]
        for drafts in (train, test)
    )
    question = render_question(tokenizer, QuestionWording(**question_texts()))
    asked = [ask(target, question, d, tokenizer.eos_token_id) for d in test[:NUM_ASKED]]
    scores: dict[str, Any] = {
        f"question, untaught ({NUM_ASKED} drafts)": figures(test[:NUM_ASKED], asked)
    }
    readers = dict(TRAINING_FREE)
    for name, chosen, scalars in (
        *((f"layer {layer} + scalars", (i,), True) for i, layer in enumerate(layers)),
        (f"layers {layers} + scalars", (0, 1, 2), True),
        (f"layers {layers}", (0, 1, 2), False),
    ):
        readers[f"regression per token, {name}"] = fit_tokens(known, chosen, scalars=scalars)
    for name, reader in readers.items():
        scores[name] = figures(test, [prefix_scores(r, reader) for r in new])
    return {
        "train_drafts": len(train),
        "test_drafts": len(test),
        "right_drafts": round(fmean(d.is_right for d in test), 4),
        "kept_by_perfect_verdicts": kept_by(test, num_right_lines),
        "kept_by_exact_tokens": exact_tokens(new),
        "readers": scores,
    }


def exact_tokens(readings: Sequence[Reading]) -> float:
    """Share of draft tokens before the first that the target would not have written."""
    kept = sum(int(np.minimum.accumulate(r.is_greedy).sum()) for r in readings)
    return round(kept / sum(len(r.is_greedy) for r in readings), 4)


def evaluate(pair: Path, num_problems: int, num_train: int) -> dict[str, Any]:
    """All figures of the model card."""
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    target, drafter = load_lm(pair / "target"), load_lm(pair / "draft")
    problems = held_out_problems(num_problems)
    alone = answer_all(drafter, tokenizer, problems)
    drafted = first_drafts(drafter, tokenizer, problems)
    answers = answer_all(target, tokenizer, problems)
    own = [read_draft(tokenizer, p, text) for p, text in zip(problems, drafted, strict=True)]
    made = some_drafts(drafter, tokenizer, num_problems, made=True, seed="evaluate/made")
    results: dict[str, Any] = {
        "problems": num_problems,
        "draft_alone": score_answers(tokenizer, problems, alone),
        "first_drafts": score_answers(tokenizer, problems, drafted),
        "target": score_answers(tokenizer, problems, answers),
        "target_after_right_lines_of_drafts": score_going_on(target, tokenizer, problems, drafted),
        "target_in_json": score_json(target, tokenizer, problems[:NUM_IN_JSON]),
        "draft_in_json": score_json(drafter, tokenizer, problems[:NUM_IN_JSON]),
        "standalone_tokens_per_verification": standalone_tokens(
            drafter, tokenizer, problems, answers
        ),
    }
    if hasattr(drafter.config, "pard_token"):
        some = drafted[:NUM_BLOCK_TEXTS]
        written, begun = [text.removeprefix(FIRST) for text in some], [FIRST] * len(some)
        texts = make_texts(tokenizer, problems[: len(some)], written, begun)
        results["blocks"] = score_blocks(drafter, texts, BLOCK, drafter.config.pard_token)
    for name, test in (("drafts", own), ("made_mistakes", made)):
        train = some_drafts(
            drafter, tokenizer, num_train, made=test is made, seed=f"evaluate/train/{name}"
        )
        results[name] = score_readers(target, drafter, tokenizer, train, test)
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pair", type=Path, default=Path(__file__).resolve().parent)
    parser.add_argument("--problems", type=int, default=1000, help="held-out, to evaluate on")
    parser.add_argument("--train-drafts", type=int, default=2000, help="graded, for regressions")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    started = time.monotonic()
    results = evaluate(arguments.pair, arguments.problems, arguments.train_drafts)
    results["seconds"] = round(time.monotonic() - started)
    text = json.dumps(results, indent=2)
    (arguments.pair / "evaluation.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
