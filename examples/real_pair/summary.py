"""What the settings of answers.py give: right answers, paired, and speed by counts of rounds.

    python examples/real_pair/summary.py build/real_pair/answers.jsonl --baseline exact \
        --json examples/real_pair/results.json --note 'bf16, drafts of 16'

Speed is in decode steps of the target, because a machine without a GPU runs so small a target at
the draft's speed: a draft token costs R steps, a verify pass of n rows 1.1 + 0.004 n (a 14B target
on an H100), and a decode step 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from answers import read_lines
from rich.console import Console

from sglang_parse.client.conditions import of_now
from sglang_parse.client.program import write_json
from sglang_parse.client.statistics import paired_difference, paired_test
from sglang_parse.client.tables import make_table

PASS, ROW = 1.1, 0.004
"""Decode steps that a verify pass costs, and each of its rows."""
SPEEDS = {"small draft": 0.14, "blocks": 0.035}
"""Decode steps that a draft token costs: 0.6B beside 14B, one token a forward or a block."""
HEADINGS = (
    *("task", "setting", "right", "better", "worse", "p", "95 % interval"),
    *("kept", "tokens a round", "decode steps", *SPEEDS),
)
Row = dict[str, Any]


def summarise(rows: Sequence[Row], baseline: Sequence[Row]) -> dict[str, Any]:
    """One setting's figures on the problems that the baseline answered, too.

    Args:
        rows, baseline: of the same problems in the same order.
    """
    right, before = ([row["right"] for row in side] for side in (rows, baseline))
    test = paired_test(right, before)
    assert test is not None
    _, low, high = paired_difference(test.better, test.worse, test.problems)
    pairs = zip(rows, baseline, strict=True)
    found = {
        **{"problems": len(rows), "right": int(sum(right))},
        **{"better": test.better, "worse": test.worse, "p_value": test.p_value},
        **{"difference_low": low, "difference_high": high},
        "same_text": sum(row["token_ids"] == other["token_ids"] for row, other in pairs),
        "output_tokens": sum(row["output_tokens"] for row in rows),
    }
    return found | (by_counts(rows) if rows[0]["parse"] else {})


def by_counts(rows: Sequence[Row]) -> dict[str, Any]:
    """What rounds brought, and what they would cost; None where a short answer had no round."""
    tokens = sum(row["output_tokens"] for row in rows)
    rounds, drafted, accepted, matched, target = (
        sum(row["parse"][name] for row in rows)
        for name in (
            "rounds",
            "drafted_tokens",
            "accepted_tokens",
            "matched_tokens",
            "target_tokens",
        )
    )
    # A round outputs a token of the target's, too, unless its draft ends the answer.
    decode_steps = max(0, target - matched - rounds)
    steps = decode_steps + PASS * rounds + ROW * (drafted + rounds)
    return {
        **{"rounds": rounds, "drafted_tokens": drafted, "decode_steps": decode_steps},
        "kept": (accepted + matched) / drafted if drafted else None,
        "tokens_per_round": tokens / rounds if rounds else None,
        "speedup": {name: tokens / (steps + cost * drafted) for name, cost in SPEEDS.items()},
    }


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def cells(result: dict[str, Any]) -> list[str]:
    """A line of the table."""
    shown = [
        *(result["task"], result["setting"], f"{result['right']} of {result['problems']}"),
        *(str(result["better"]), str(result["worse"]), f"{result['p_value']:.2f}"),
        f"{result['difference_low']:+.0%} to {result['difference_high']:+.0%}",
    ]
    if "rounds" not in result:
        return shown
    tokens = result["tokens_per_round"]
    counts = [percent(result["kept"]), "–" if tokens is None else f"{tokens:.1f}"]
    speeds = [f"{speedup:.1f}x" for speedup in result["speedup"].values()]
    return [*shown, *counts, str(result["decode_steps"]), *speeds]


def results_of(rows: Sequence[Row], baseline: str) -> list[dict[str, Any]]:
    """All settings' figures, by task."""
    found = {(row["task"], row["setting"], row["key"]): row for row in rows}
    results = []
    for task, setting in sorted({(task, setting) for task, setting, _ in found}):
        keys = [row["key"] for row in rows if (row["task"], row["setting"]) == (task, setting)]
        keys = [key for key in keys if (task, baseline, key) in found]
        if keys:
            sides = ([found[task, side, key] for key in keys] for side in (setting, baseline))
            results.append({"task": task, "setting": setting, **summarise(*sides)})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("answers", type=Path)
    parser.add_argument("--baseline", default="exact", help="the setting to compare others with")
    parser.add_argument("--json", type=Path, help="write the figures here, without texts")
    parser.add_argument("--note", default="", help="how they were made, for the file")
    given = parser.parse_args()
    rows = read_lines(given.answers)
    results = results_of(rows, given.baseline)
    table = make_table("the real pair", HEADINGS)
    for result in results:
        table.add_row(*cells(result))
    Console().print(table)
    if given.json:
        found = {"conditions": of_now() | {"note": given.note}, "baseline": given.baseline}
        found |= {"results": results}
        write_json(given.json, found)


if __name__ == "__main__":
    main()
