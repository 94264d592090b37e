"""Compares explain's page, as a browser shows it, with its traces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_parse.client.traced import ExplainedAnswer
from sglang_parse.core.selection import select
from support.open_page import look_at

THRESHOLDS = (0.0, 0.3, 0.5, 0.95, 0.9990, 0.9995, 1.5)
ROWS = """(() => JSON.stringify([...document.querySelectorAll('.round')].map(round => ({
  title: round.querySelector('h3').textContent,
  rows: [...round.querySelectorAll('.prefix')].map(row => [
    row.querySelector('.status').textContent,
    row.querySelector('.text').textContent,
    row.querySelector('.verdict')?.textContent ?? '',
    row.querySelector('.ask pre')?.textContent ?? '',
  ]),
  rejections: round.querySelectorAll('.rejection').length,
}))))()"""
TYPE = """(() => { const exact = document.getElementById('exact'); exact.value = '%s';
  exact.dispatchEvent(new Event('input'));
  return document.getElementById('sum').textContent; })()"""


def shown(page: Path, width: int, steps: Sequence[dict[str, str]] = (), **how: bool) -> dict:
    """Returns the browser's report; after ``steps``, the rounds and the sums at every threshold."""
    asked = [{"js": ROWS}, *({"js": TYPE % threshold} for threshold in THRESHOLDS)]
    found = look_at(page, width, [*steps, *asked], **how)
    values = found["steps"][len(steps) :]
    return found | {"rounds": json.loads(values[0]), "sums": values[1:]}


def assert_says(found: dict[str, Any], answers: Sequence[ExplainedAnswer]) -> None:
    """Checks the page's rounds, segments, verdicts and accepted lengths by threshold.

    Args:
        found: of ``shown``.
    """
    rounds = [one for made in answers for one in made.rounds]
    assert len(found["rounds"]) == len(rounds)
    for shown_round, one in zip(found["rounds"], rounds, strict=True):
        record = one.record
        drafted = len(record["draft_token_ids"])
        assert (
            f"{drafted} draft tokens after output token {record['output_start']}"
            in shown_round["title"]
        )
        assert shown_round["title"].endswith(f"accepted length {record['accepted_len']}")
        drafts = [row for row in shown_round["rows"] if row[0][0] != "T"]
        assert [row[0][1:] for row in drafts] == [segment.status for segment in one.segments]
        assert [row[1].strip("↵ ") for row in drafts] == [s.text.strip() for s in one.segments]
        verdicts = [row[2] for row in drafts if row[2]]
        assert verdicts == [f"{verdict:.4f}" for verdict in record["verdicts"]]
        assert [row[3] for row in drafts if row[2]] == [s.question for s in one.segments if s.mass]
        target = [row[1].strip("↵ ") for row in shown_round["rows"] if row[0][0] == "T"]
        assert target == ([one.target_text.strip()] if one.target_text else [])
        assert shown_round["rejections"] == int(record["accepted_len"] < drafted)
    verified = [one.record for one in rounds if one.accepted_at]
    for threshold, text in zip(THRESHOLDS, found["sums"], strict=True):
        accepted = sum(
            select(
                *(record["verdicts"], record["prefix_ends"], threshold, record["selection"]),
                is_finished=record["finished"],
            )[0]
            for record in verified
        )
        drafted = sum(len(record["draft_token_ids"]) for record in verified)
        assert f": {accepted} of {drafted} draft tokens accepted" in text
