"""Edits a file with a model, and sends the file along as the prediction of the answer.

    python examples/edit_a_file.py FILE "Rename the variable n to count" [--url http://localhost:30000]

Prints what changed as a diff, and how much of the answer came from the prediction. Most of an
edited file equals the file, so the server verifies it instead of writing it (docs/drafts.md).
"""

from __future__ import annotations

import argparse
import difflib
import sys
import time
from pathlib import Path

import openai

RULE = "Answer with the whole file and nothing else."


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("instruction")
    parser.add_argument("--url", default="http://localhost:30000", help="a PARSE server")
    parser.add_argument("--model", default="default")
    parser.add_argument("--max-tokens", type=int, default=4096)
    parser.add_argument("--write", action="store_true", help="write the answer to the file")
    arguments = parser.parse_args()
    before = arguments.file.read_text(encoding="utf-8")
    client = openai.OpenAI(base_url=f"{arguments.url.rstrip('/')}/v1", api_key="none")
    started = time.perf_counter()
    reply = client.chat.completions.create(
        model=arguments.model,
        messages=[{"role": "user", "content": f"{arguments.instruction}. {RULE}\n\n{before}"}],
        prediction={"type": "content", "content": before},
        temperature=0,
        max_tokens=arguments.max_tokens,
    )
    seconds = time.perf_counter() - started
    after = reply.choices[0].message.content or ""
    lines = (text.splitlines(keepends=True) for text in (before, after))
    sys.stdout.writelines(difflib.unified_diff(*lines, "before", "after"))
    details, count = reply.usage.completion_tokens_details, reply.usage.completion_tokens
    accepted = details.accepted_prediction_tokens if details else 0
    print(f"\n{count} tokens in {seconds:.2f} s; {accepted} of them are the prediction's")
    if arguments.write:
        arguments.file.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
