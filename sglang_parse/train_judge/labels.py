"""Labels of first drafts: the grader's, or the target's own answers.

The target's: a prefix is right if the target, going on from it, ends its answer as it ends the one
that it writes by itself. Endings are compared by the last number in the last line, or, where that
has none, by the words of the line. This knows nothing of what the target gets wrong by itself, and
it calls texts wrong that end in other words.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from sglang_parse.client.records import Answer, Assignment, Item
from sglang_parse.core.judge import QUESTION
from sglang_parse.tasks.collect import Collector
from sglang_parse.train_judge.drafts import LabeledDraft, labels_up_to
from sglang_parse.train_judge.gather import HiddenStates, SeenDraft

SAMPLING_TEMPERATURE = 1.0
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


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


# -- the target's own answers ----------------------------------------------------------------


def ending(text: str) -> float | str:
    """What two answers must share to end alike."""
    lines = text.strip().splitlines() or [""]
    if numbers := _NUMBER.findall(lines[-1]):
        return float(numbers[-1].replace(",", ""))
    return " ".join(lines[-1].casefold().split())


def label_by_target(
    collector: Collector, seen: Sequence[SeenDraft], samples: int
) -> list[SeenDraft]:
    """Finds each draft's first wrong prefix by bisection: what follows a wrong one is wrong, too.
    Leaves out those whose target's own answer does not end within the length limit.

    Args:
        samples: answers per prefix; half of them must end as the target's own. 1: greedy.
    """
    own = collector.collect(
        "target answers", [one.draft.problem for one in seen], None, _ended_text
    )
    lows, highs = [0] * len(seen), [len(one.draft.prefix_ends) for one in seen]
    for number in itertools.count(1):
        tested = {
            place: (lows[place] + highs[place]) // 2
            for place, text in enumerate(own)
            if text is not None and lows[place] < highs[place]
        }
        if not tested:
            break
        name = f"answers after prefixes, {samples} samples, round {number}"
        texts = _continued(collector, name, [(seen[i], k) for i, k in tested.items()], samples)
        for (place, prefix), found in zip(tested.items(), texts, strict=True):
            wanted = ending(own[place])
            num_alike = sum(text is not None and ending(text) == wanted for text in found)
            if 2 * num_alike >= len(found):
                lows[place] = prefix + 1
            else:
                highs[place] = prefix
    results = []
    for one, text, num_right in zip(seen, own, lows, strict=True):
        if text is not None:
            first_wrong = num_right if num_right < len(one.draft.prefix_ends) else None
            draft = replace(one.draft, first_wrong=first_wrong, first_wrong_token=None)
            results.append(replace(one, draft=draft))
    return results


def _continued(
    collector: Collector, name: str, prefixes: Sequence[tuple[SeenDraft, int]], samples: int
) -> list[list[str | None]]:
    """Texts that begin with prefixes of drafts; None where one does not end within the limit."""
    # Numbered by problem, so that another run with more problems resumes from the same file.
    items = [item for item in collector.task.items for _ in range(samples)]
    texts, numbers = [], []
    for one, place in prefixes:
        draft, end = one.draft, one.draft.prefix_ends[place]
        text, first = collector.decode(one.token_ids[: end + 1]), one.draft.problem * samples
        is_complete = draft.finished and end == draft.num_drafted
        texts.append(text)
        numbers.append([] if is_complete else range(first, first + samples))
        for number in numbers[-1]:
            item = items[number]
            messages = item.messages or ({"role": "user", "content": item.text},)
            prefix = {"role": "assistant", "content": text}
            items[number] = replace(item, messages=(*messages, prefix))
    asked, heat = [*itertools.chain(*numbers)], 0.0 if samples == 1 else SAMPLING_TEMPERATURE
    found = collector.collect(name, asked, None, _ended_text, items=items, temperature=heat)
    rests = iter(found)
    ends = [[next(rests) for _ in own] or [""] for own in numbers]
    return [
        [None if rest is None else text + rest for rest in own]
        for text, own in zip(texts, ends, strict=True)
    ]


def _ended_text(answer: Answer) -> str | None:
    """The answer, unless the length limit cut it off."""
    return None if answer.meta["finish_reason"]["type"] == "length" else answer.text
