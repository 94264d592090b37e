"""Made-up labeled drafts whose hidden states are known to tell right from wrong, or not to."""

from __future__ import annotations

from functools import partial

import numpy as np

from sglang_parse.train_judge.drafts import LabeledDraft, TrainingSet

HIDDEN, LAYERS = 8, (3, 5)


def make_drafts(
    count: int,
    *,
    signal: float = 4.0,
    per_prompt: int = 1,
    locates: bool = True,
    likely: bool = False,
) -> tuple[TrainingSet, np.ndarray]:
    """Drafts with lines of four tokens; half of them have an error.

    Args:
        signal: size of the planted direction in layer 5 at and after a wrong token.
        locates: else only complete drafts have labels.
        likely: wrong tokens have a low log-probability, too.

    Returns:
        The drafts, and the planted direction, [HIDDEN].
    """
    numbers = np.random.default_rng(7)
    direction = numbers.normal(size=HIDDEN)
    direction /= np.linalg.norm(direction)
    drafts = []
    for number in range(count):
        num_lines = int(numbers.integers(2, 6))
        ends = [4 * (line + 1) for line in range(num_lines)]
        wrong = int(numbers.integers(1, ends[-1] + 1)) if number % 2 else None
        rows = numbers.normal(size=(1 + ends[-1], 2 * HIDDEN)).astype(np.float32)
        logprobs = -numbers.exponential(0.2, ends[-1])
        right: list[bool | None] = [True] * num_lines
        if wrong:
            rows[wrong:, HIDDEN:] -= signal * direction
            logprobs[wrong - 1] -= 8.0 * likely
            first = (wrong - 1) // 4
            right[first:] = [False] + [None] * (num_lines - first - 1)
        if not locates:
            right = [None] * (num_lines - 1) + [wrong is None]
        drafts.append(
            LabeledDraft(
                prompt=number // per_prompt,
                prefix_ends=ends,
                right=right,
                wrong_token=wrong if locates else None,
                logprobs=logprobs.tolist(),
                entropies=numbers.exponential(0.2, ends[-1]).tolist(),
                load=partial(np.copy, rows),
                asked=numbers.uniform(size=num_lines).tolist(),
            )
        )
    return TrainingSet(drafts, LAYERS, HIDDEN, locates), direction
