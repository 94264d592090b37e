"""What can be read from the target about a draft, and how much of a draft it lets keep at a risk.

A reader scores tokens; a prefix is as good as its worst token so far, and a draft is kept up to
the first prefix below the threshold. Plain transformers and PyTorch, so that figures do not
rest on the engine that they are about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from data import encode, prompt_text
from problems import Problem, num_right_before_error
from scipy.stats import rankdata
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from sglang_parse.core.layout import RequestLayout
from sglang_parse.core.mask import qlen_only_mask
from sglang_parse.core.question import Question

RISKS = (0.01, 0.02, 0.05)


@dataclass(frozen=True, slots=True)
class Draft:
    """A text to judge.

    Attributes:
        prompt_ids: the chat prompt and the target's first token.
        ids: the draft that goes on from there; its last token is the end of turn if it is finished.
        num_right: tokens before the first wrong one, all of them if none is.
        ends: where prefixes end: after every line, and at the end.
    """

    prompt_ids: list[int]
    ids: list[int]
    num_right: int
    ends: list[int]

    @property
    def is_right(self) -> bool:
        return self.num_right == len(self.ids)


def read_draft(tokenizer: Any, problem: Problem, written: str) -> Draft:
    """Grades a text to the token; `written` holds the end of turn if it is finished."""
    prompt, (first, *ids) = encode(tokenizer, [prompt_text(tokenizer, problem), written])
    prompt.append(first)
    end = tokenizer.eos_token
    right = num_right_before_error(
        problem, written.removesuffix(end), finished=written.endswith(end)
    )
    num_right, length = len(ids), len(tokenizer.convert_ids_to_tokens(first))
    if right is not None:
        for index, piece in enumerate(tokenizer.convert_ids_to_tokens(ids)):
            length += len(piece)  # task texts are ASCII
            if length > right:
                num_right = index
                break
    newline = encode(tokenizer, ["\n"])[0][0]
    ends = [i + 1 for i, token in enumerate(ids) if token == newline]
    return Draft(prompt, ids, num_right, [*ends, *([len(ids)] if len(ids) not in ends else [])])


@dataclass(frozen=True, slots=True)
class Reading:
    """What the target's one pass over a draft of n tokens holds.

    Attributes:
        draft: the draft.
        states: float32 [n + 1, layers, hidden], from the row before the draft on.
        logprobs, entropies: float32 [n], of each token and of what the target expected there.
        divergences: float32 [n], KL(draft model, target) there, in nats.
        is_greedy: bool [n], whether the target would have written the token.
    """

    draft: Draft
    states: np.ndarray
    logprobs: np.ndarray
    entropies: np.ndarray
    divergences: np.ndarray
    is_greedy: np.ndarray


@torch.inference_mode()
def read_target(
    target: Qwen3ForCausalLM, drafter: Qwen3ForCausalLM, draft: Draft, layers: Sequence[int]
) -> Reading:
    """One causal pass of each model; layer i is the output of decoder layer i."""
    ids = torch.tensor([draft.prompt_ids + draft.ids])
    first = len(draft.prompt_ids) - 1
    out = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    said = target.lm_head(out.last_hidden_state[0, first:-1]).log_softmax(-1)
    drafted = drafter(input_ids=ids, use_cache=False).logits[0, first:-1].log_softmax(-1)
    wanted = torch.tensor(draft.ids)
    return Reading(
        draft,
        torch.stack([out.hidden_states[i + 1][0, first:] for i in layers], dim=1).numpy(),
        said.gather(1, wanted[:, None]).squeeze(1).numpy(),
        -(said.exp() * said).sum(-1).numpy(),
        (drafted.exp() * (drafted - said)).sum(-1).numpy(),
        (said.argmax(-1) == wanted).numpy(),
    )


@torch.inference_mode()
def ask(target: Qwen3ForCausalLM, question: Question, draft: Draft, end_id: int) -> np.ndarray:
    """p(accept) / (p(accept) + p(reject)) of every prefix, [prefixes], in one packed pass."""
    is_finished = draft.ids[-1] == end_id
    questions = [
        question.ids_for(draft.ids[:end], complete=is_finished and end == len(draft.ids))
        for end in draft.ends
    ]
    num_prompt = len(draft.prompt_ids)
    layout = RequestLayout(
        prefix_len=0,
        num_draft_rows=num_prompt + len(draft.ids),
        visible_lens=tuple(num_prompt + end for end in draft.ends),
        question_lens=tuple(map(len, questions)),
    )
    ids = draft.prompt_ids + draft.ids + [token for asked in questions for token in asked]
    hidden = target.model(
        input_ids=torch.tensor([ids]),
        position_ids=torch.tensor([layout.positions()]),
        attention_mask=qlen_only_mask(layout)[None, None],
        use_cache=False,
    ).last_hidden_state[0, list(layout.verdict_rows)]
    accept, reject = target.lm_head(hidden)[:, [question.accept_id, question.reject_id]].T
    return (accept - reject).sigmoid().numpy()


TokenScores = Callable[[Reading], np.ndarray]
# Readers that nobody trains: scores of tokens, high is good.
TRAINING_FREE: Mapping[str, TokenScores] = {
    "smallest log-probability": lambda r: r.logprobs,
    "log-probability + entropy": lambda r: r.logprobs + r.entropies,
    "KL(draft, target)": lambda r: -r.divergences,
}


def token_features(reading: Reading, layers: Sequence[int], *, scalars: bool = True) -> np.ndarray:
    """Of each token: states before and at it, its log-probability and entropy, [n, features]."""
    states = reading.states[:, list(layers)].reshape(len(reading.states), -1)
    parts = [states[:-1], states[1:]]
    if scalars:
        parts += [reading.logprobs[:, None], reading.entropies[:, None]]
    return np.concatenate(parts, axis=1)


def fit_tokens(
    readings: Sequence[Reading], layers: Sequence[int], *, scalars: bool = True, seed: int = 0
) -> TokenScores:
    """Logistic regression: tokens before the first wrong one against the first wrong one.

    Of the right ones, a third is drawn: they are alike, and a hundred times as many.
    """
    rng = np.random.default_rng(seed)
    features, labels = [], []
    for reading in readings:
        right = reading.draft.num_right
        rows = np.flatnonzero(rng.random(right) < 1 / 3)
        if not reading.draft.is_right:
            rows = np.append(rows, right)
        features.append(token_features(reading, layers, scalars=scalars)[rows])
        labels.append(rows < right)
    weights, bias = logistic_regression(np.concatenate(features), np.concatenate(labels))
    return lambda r: token_features(r, layers, scalars=scalars) @ weights + bias


def logistic_regression(
    features: np.ndarray, labels: np.ndarray, penalty: float = 15.0
) -> tuple[np.ndarray, float]:
    """Weights and bias for raw features; the L2 `penalty` is on those of standardised ones."""
    mean, scale = features.mean(0), features.std(0) + 1e-6
    x = torch.from_numpy((features - mean) / scale).float()
    y = torch.from_numpy(labels).float()
    weights = torch.zeros(x.shape[1] + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        scores = x @ weights[:-1] + weights[-1]
        total = functional.binary_cross_entropy_with_logits(scores, y, reduction="sum")
        total = (total + penalty * weights[:-1].square().sum()) / len(y)
        total.backward()
        return total

    optimizer.step(loss)
    raw = weights.detach().numpy()[:-1] / scale
    return raw, float(weights.detach()[-1]) - float(raw @ mean)


def auroc(labels: Sequence[bool], scores: Sequence[float]) -> float:
    """Chance that a right prefix scores above a wrong one."""
    is_right = np.array(labels)
    num_right = is_right.sum()
    above = rankdata(scores)[is_right].sum() - num_right * (num_right + 1) / 2
    return round(float(above / (num_right * (len(is_right) - num_right))), 4)


def prefix_scores(reading: Reading, score: TokenScores) -> np.ndarray:
    """A prefix is as good as its worst token, [prefixes]."""
    worst = np.minimum.accumulate(score(reading))
    return worst[np.array(reading.draft.ends) - 1]


def figures(drafts: Sequence[Draft], scores: Sequence[np.ndarray]) -> dict[str, Any]:
    """AUROC, and the share of draft tokens kept where few drafts keep a wrong one.

    AUROC is over prefixes up to the first wrong one, which is wrong; thresholds are chosen on
    these drafts, for every reader alike.
    """
    labels, values, worst_wrong = [], [], []
    lowest = [np.minimum.accumulate(s) for s in scores]
    for draft, score in zip(drafts, lowest, strict=True):
        is_right = np.array(draft.ends) <= draft.num_right
        count = int(is_right.sum())
        labels += list(is_right[: count + 1])
        values += list(score[: count + 1])
        worst_wrong.append(-np.inf if draft.is_right else score[count])
    total = sum(len(draft.ids) for draft in drafts)
    kept = {}
    for risk in RISKS:
        threshold = np.sort(worst_wrong)[::-1][int(risk * len(drafts))]
        tokens = [
            max([end for end, s in zip(d.ends, score, strict=True) if s > threshold], default=0)
            for d, score in zip(drafts, lowest, strict=True)
        ]
        kept[f"{risk:.0%}"] = round(sum(tokens) / total, 4)
    return {"auroc": auroc(labels, values), "kept_at_risk": kept}


def kept_by(drafts: Sequence[Draft], num_kept: Callable[[Draft], int]) -> float:
    """Share of draft tokens, of a rule that needs no threshold."""
    return round(sum(map(num_kept, drafts)) / sum(len(d.ids) for d in drafts), 4)


def num_right_lines(draft: Draft) -> int:
    """Tokens of the right prefixes: what perfect verdicts keep."""
    return max((end for end in draft.ends if end <= draft.num_right), default=0)
