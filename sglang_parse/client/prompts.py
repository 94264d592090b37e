"""Prompts for a running server: from a file, or built in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_parse.client.demo_pair import is_of_demo_pair, load_problems
from sglang_parse.client.records import BenchError, Item

_WANTED = 'fix: one text in quotes, or one object with "prompt", per line'
_EVERYDAY = (
    "What is 17 * 6 + 45? Work it out step by step.",
    "A train leaves at 14:35 and arrives at 17:10. How long does it take? Explain each step.",
    "Write a Python function that returns the n-th Fibonacci number, with a short explanation.",
    "Name the planets of the solar system in order, one per line, with one fact each.",
    "I buy 3 pens for 1.20 each and a book for 7.50. I pay with 20. What change do I get?",
    "Explain in four sentences why the sky is blue.",
    "Write an email to a landlord: the heating has been broken since Monday.",
    "Summarise the plot of Romeo and Juliet in five sentences.",
    "Write a Python function that checks whether a string is a palindrome, and two tests of it.",
    "A recipe for 4 people needs 300 g of rice. How much is needed for 10? Show the steps.",
    "What is the difference between a list and a tuple in Python? Give an example of each.",
    "Translate into French: The meeting was moved to Thursday, because the room is taken.",
    "List five things to check before a long trip by car, with a reason for each.",
    "Write an SQL query for the ten customers with the most orders in a year.",
    "How do I undo my last git commit without losing my changes?",
    "Give the capital and the population of five countries in Europe, as a JSON list of objects.",
    "Explain to a ten-year-old what a computer program is.",
    "A shirt costs 40 and is reduced by 15 %, then by 10 %. What does it cost now?",
    "Write a short description of a second-hand bicycle for an advertisement.",
    "What are the arguments for and against working from home? Three of each.",
)

_NOTICE = (
    "The reading room of the town library is closed from Monday 4 May to Friday 15 May while its "
    "floor is renewed. Books on loan are renewed until Monday 18 May without a fee. Books that "
    "were ordered can be collected at the desk in the entrance hall, on weekdays from 10:00 to "
    "16:00. The children's corner stays open, and story time on Wednesday at 15:30 takes place in "
    "the town hall, room 12. Questions: library@town.example or 555-0142."
)
_CODE = """def summarize(orders, currency="EUR"):
    total = 0
    by_customer = {}
    for order in orders:
        if order["currency"] != currency:
            continue
        total += order["amount"]
        name = order["customer"]
        by_customer[name] = by_customer.get(name, 0) + order["amount"]
    largest = sorted(by_customer.items(), key=lambda item: item[1], reverse=True)[:10]
    return {"total": total, "largest": largest, "customers": len(by_customer)}
"""
_ON_TEXTS = (
    ("Rename the variable total to revenue. Answer with the whole function.", _CODE),
    ("List all dates and times in this text, each with the sentence that has it.", _NOTICE),
    ("Add a docstring and type hints. Answer with the whole function.", _CODE),
    ("Correct nothing but the year: add 2026 to every date. Answer with the whole text.", _NOTICE),
    ("Let the caller choose how many of the largest are returned. Answer with the whole function.",
     _CODE),
    ("Quote the sentences that matter to somebody who has ordered a book.", _NOTICE),
    ("Explain this function line by line; quote each line.", _CODE),
    ("Summarise in two sentences, in the words of the text.", _NOTICE),
    ("Raise a ValueError that names the order where an amount is negative. Answer with the whole "
     "function.", _CODE),
    ("Return as a JSON object: closed_from, closed_to, fee_free_until, phone, email.", _NOTICE),
)  # fmt: skip
PROMPTS_HELP = (
    'lines of JSON, each a text or an object with "prompt" (default: problems of the demo pair for '
    "its target, a few questions for others)"
)
"""Of a flag whose file is for ``prompts_for``."""


def prompts_for(
    path: Path | None, model_path: str, count: int, *, with_text: bool = False
) -> list[Item]:
    """At most ``count`` prompts of a file; without one, problems of the demo pair if its target is
    served, else everyday questions, or tasks on a text that they give."""
    if path is not None:
        return read_prompts(path)[:count]
    if is_of_demo_pair(model_path):
        texts = [problem.text for problem in load_problems().held_out_problems(count, seed=1)]
    elif with_text:
        texts = [f"{task}\n\n{text}" for task, text in _ON_TEXTS[:count]]
    else:
        texts = list(_EVERYDAY[:count])
    return [Item(str(number), text, None) for number, text in enumerate(texts)]


def read_prompts(path: Path) -> list[Item]:
    """Reads lines of JSON, each a text or an object with "prompt".

    An object may have a grader's "reference", a "key" for messages, and more fields of its chat
    request as "request", such as "response_format".
    """
    items = []
    for number, found in read_lines(path, _WANTED):
        row = found if isinstance(found, dict) else {"prompt": found}
        text, request = row.get("prompt"), row.get("request", {})
        if not isinstance(text, str) or not text:
            raise BenchError(f"{path}:{number} has no prompt; {_WANTED}")
        if not isinstance(request, dict):
            raise BenchError(f"{path}:{number} has the request {request!r}; fix: use an object")
        key = str(row.get("key", number))
        items.append(Item(key, text, row.get("reference"), request=request))
    return items


def read_lines(path: Path, wanted: str) -> Iterator[tuple[int, Any]]:
    """Yields number and content of each line of JSON; errors end with what is wanted."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{str(path)!r} cannot be read: {error}; {wanted}") from error
    if not any(map(str.strip, lines)):
        raise BenchError(f"{path} is empty; {wanted}")
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise BenchError(f"{path}:{number} is not JSON ({error}); {wanted}") from error
