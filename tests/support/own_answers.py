"""Prompts and answers made of the repository's own texts: what work copies, by its kind.

Tokens are words and marks, shorter than a real tokenizer's by little.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOKEN = re.compile(r" ?\w{1,6}|\s*\n\s*|[^\w\s]| ")


class Vocabulary:
    """Numbers words in the order in which they are seen."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self._ids.setdefault(word, len(self._ids)) for word in TOKEN.findall(text)]


def edited(text: str, rng: random.Random) -> str:
    """A word renamed everywhere, and some lines changed or left out."""
    words = sorted(set(re.findall(r"\b[a-z_]{5,}\b", text)))
    text = re.sub(rf"\b{rng.choice(words)}\b", "renamed", text)
    lines = [line for line in text.splitlines(keepends=True) if rng.random() > 0.04]
    return "".join(line[::-1] if rng.random() < 0.1 else line for line in lines)


def extracted(text: str, rng: random.Random) -> str:
    """Functions with the first line of what is said of them, as JSON."""
    found = re.findall(r"def (\w+)\(([^)]*)\)[^:]*:\n +\"\"\"([^\n\"]*)", text)
    rng.shuffle(found)
    return json.dumps([{"name": a, "arguments": b, "does": c} for a, b, c in found[:6]], indent=1)


def blocks(text: str, rng: random.Random) -> str:
    """An edit as a tool call: the lines that are replaced, then those that replace them."""
    lines = text.splitlines(keepends=True)
    start = rng.randrange(max(1, len(lines) - 12))
    old = "".join(lines[start : start + 12])
    return json.dumps({"tool": "edit_file", "old": old, "new": edited(old + " " * 9, rng)})


def summarized(text: str, rng: random.Random) -> str:
    """Parts of the first sentences of paragraphs, other words between them."""
    parts = [part.split(". ")[0].split() for part in text.split("\n\n") if len(part) > 80]
    starts = [rng.randrange(1 + len(part) // 2) for part in parts]
    return "\n".join(
        f"{rng.randrange(99)}. {' '.join(part[start : start + 8])}"
        for part, start in zip(parts, starts, strict=True)
    )


KINDS: dict[str, tuple[str, Callable[[str, random.Random], str]]] = {
    "edited": ("sglang_parse/core/*.py", edited),
    "extracted": ("sglang_parse/core/*.py", extracted),
    "blocks": ("sglang_parse/engine/*.py", blocks),
    "summarized": ("docs/*.md", summarized),
}


def own_answers(limit: int = 5) -> Iterator[dict[str, Any]]:
    """Yields answers as ``prompt_replay`` reads them; "unrelated" ones are about another text, and
    "noise" has no text at all."""
    rng, vocabulary = random.Random(4), Vocabulary()
    for kind, (files, answer_of) in KINDS.items():
        for path in sorted(ROOT.glob(files))[:limit]:
            text = path.read_text(encoding="utf-8")[:24_000]
            answer = vocabulary.encode(answer_of(text, rng))[:500]
            if len(answer) > 50:
                yield {"kind": kind, "prompt": vocabulary.encode(text), "answer": answer}
    pages = [vocabulary.encode(path.read_text()) for path in sorted(ROOT.glob("docs/*.md"))]
    for page, other in zip(pages[:limit], pages[1:], strict=False):
        yield {"kind": "unrelated", "prompt": page, "answer": other[:400]}
    for _ in range(limit):
        prompt, answer = ([rng.randrange(300) for _ in range(400)] for _ in range(2))
        yield {"kind": "noise", "prompt": prompt, "answer": answer}
