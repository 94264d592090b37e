"""Labels of drafts, by what the grader says about them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sglang_parse.client.records import Assignment, Item
from sglang_parse.core.judge import QUESTION
from sglang_parse.train_judge.drafts import LabeledDraft, labels_up_to
from sglang_parse.train_judge.gather import HiddenStates, SeenDraft


def labeled(
    seen: Sequence[SeenDraft], task: Assignment, states: HiddenStates, *, is_located: bool
) -> list[LabeledDraft]:
    """Labels drafts; leaves out those about which nothing is known."""
    prompts = prompt_numbers(task.items)
    found = (label(one, prompts[one.draft.problem], states, is_located=is_located) for one in seen)
    return [one for one in found if one is not None]


def label(
    seen: SeenDraft, prompt: int, states: HiddenStates, *, is_located: bool
) -> LabeledDraft | None:
    """Labels a draft's prefixes; None where nothing is known about any. Where errors are not
    located only complete drafts have a label."""
    draft, count = seen.draft, len(seen.draft.prefix_ends)
    right: list[bool | None] = [*[None] * (count - 1), draft.is_answer_right]
    if is_located:
        right = labels_up_to(draft.first_wrong, count)
    if all(known is None for known in right):
        return None
    return LabeledDraft(
        prompt=prompt,
        prefix_ends=draft.prefix_ends,
        right=right,
        wrong_token=draft.first_wrong_token if is_located else None,
        logprobs=seen.logprobs,
        entropies=seen.entropies,
        load=partial(states.load, draft),
        asked=draft.verdicts if states.judge == QUESTION else (),
    )


def prompt_numbers(items: Sequence[Item]) -> list[int]:
    """The first item with the same prompt, by item."""
    first: dict[str, int] = {}
    prompts = (repr(item.messages or item.text) for item in items)
    return [first.setdefault(prompt, number) for number, prompt in enumerate(prompts)]
