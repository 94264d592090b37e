"""MT-Bench: two turns of open questions, graded 1 to 10 by a judge that is another server.

Without a judge the answers are timed only, and the page says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_parse.tasks.base import Grader, Item, Options, Task, TaskError, read_rows

PROMPTS_SOURCE = "judge_prompts.jsonl of FastChat's fastchat/llm_judge/data"
RATING = re.compile(r"\[\[(\d+(?:\.\d+)?)\]\]")
WITH_REFERENCE = ("math", "reasoning", "coding", "arena-hard-200")
JUDGE_LIMIT_S, JUDGE_TOKENS = 600, 2048


def dialogue_item(row: Mapping[str, Any], number: int) -> Item:
    """``turns`` are the user's; the reference is (category, reference answers or ())."""
    first, *later = row["turns"]
    reference = (row["category"], tuple(row.get("reference", ())))
    return Item(str(row.get("question_id", number)), first, reference, tuple(later))


def make_grader(options: Options) -> Grader:
    """The mean of the judge's ratings of both turns, over 10; None each without a judge.

    The prompts are FastChat's single-answer grading, read from its own file.

    Raises:
        TaskError: a judge without its prompts.
    """
    if options.judge_url is None:
        return lambda item, texts: None  # noqa: ARG005
    if options.judge_prompts is None or not options.judge_prompts.is_file():
        raise TaskError(f"--judge-url needs --judge-prompts: {PROMPTS_SOURCE}")
    prompts = {row["name"]: row for row in read_rows(options.judge_prompts)}

    def grade(item: Item, texts: Sequence[str]) -> float:
        category, references = item.reference
        kind = "math-v1" if category in WITH_REFERENCE and references else "v1"
        values = {"question": item.text, "answer": texts[0]}
        values |= {"question_1": item.text, "answer_1": texts[0]}
        values |= {f"ref_answer_{n}": text for n, text in enumerate(references, 1)}
        ratings = [_rate(options, prompts[f"single-{kind}"], values)]
        if item.follow_ups:
            values |= {"question_2": item.follow_ups[0], "answer_2": texts[1]}
            ratings.append(_rate(options, prompts[f"single-{kind}-multi-turn"], values))
        return sum(ratings) / len(ratings) / 10

    return grade


def _rate(options: Options, prompt: Mapping[str, Any], values: Mapping[str, str]) -> float:
    """The judge's rating, 1 to 10. Raises: TaskError, when it gives none."""
    import openai

    client = openai.OpenAI(
        base_url=f"{options.judge_url}/v1", api_key="none", timeout=JUDGE_LIMIT_S
    )
    with client:
        response = client.chat.completions.create(
            model=options.judge_model,
            messages=[
                {"role": "system", "content": prompt["system_prompt"]},
                {"role": "user", "content": prompt["prompt_template"].format(**values)},
            ],
            temperature=0,
            max_tokens=JUDGE_TOKENS,
        )
    text = response.choices[0].message.content or ""
    found = RATING.findall(text)
    if not found:
        raise TaskError(f"the judge gave no [[rating]]: {text[-200:]!r}")
    return float(found[-1])


TASKS = (
    Task(
        "mt-bench",
        "MT-Bench",
        "question.jsonl of FastChat's fastchat/llm_judge/data/mt_bench (80 rows with turns, "
        "category)",
        dialogue_item,
        make_grader,
        note="rated by a judge over both turns; speed is measured on the first turn",
    ),
)
