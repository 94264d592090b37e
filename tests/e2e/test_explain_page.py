"""explain's page in a real browser: its content at two widths, dark and light, and the keyboard.

test_demo_programs.py checks the page of a real server's answers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang_parse.explain.page import render
from support.explained import assert_says, shown
from support.open_page import assert_fits
from support.traces import three_answers

MORE = pytest.mark.nightly("tests/e2e/test_explain_page.py::test_page")
FACTS = {"date": "2026-11-22 18:00 UTC", "source": "http://127.0.0.1:30000"}
SUM = {"js": "document.getElementById('sum').textContent"}
FOCUS = {"js": "document.activeElement.id || document.activeElement.tagName"}
OPEN = {"js": "[...document.querySelectorAll('.ask')].filter(ask => ask.open).length"}
WOULD = {"js": "[...document.querySelectorAll('.would')].map(node => node.textContent).join('|')"}
KEYBOARD = (
    *({"key": "Tab"}, FOCUS, SUM),
    *({"key": "Home"}, SUM, WOULD),
    *({"key": "End"}, SUM),
    *({"key": "Left"}, SUM),
    *({"key": "Tab"}, FOCUS, {"key": "Tab"}, FOCUS, {"key": "Space"}, SUM),
    # The prompt, the finished answer, then the first prefix's question.
    *({"key": "Tab"}, {"key": "Tab"}, {"key": "Tab"}, FOCUS, {"key": "Return"}, OPEN),
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "explain.html"
    path.write_text(render(three_answers(), FACTS), encoding="utf-8")
    return path


@pytest.mark.parametrize(("width", "dark"), [(400, True), pytest.param(1280, False, marks=MORE)])
def test_page(page: Path, width: int, dark: bool):
    colours = {"js": "getComputedStyle(document.body).backgroundColor"}
    found = shown(page, width, [colours], dark=dark)
    assert_fits(found, page, width)
    assert_says(found, three_answers())
    assert found["steps"][0] == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    for text in (
        "prefill 44.1 ms, 6 %",
        "sampling mask",
        "b: - 72 <b>&amp;</b>",
        "✂ rejection point",
    ):
        assert text in found["text"]


def test_keyboard(page: Path):
    values = [value for value in shown(page, 1280, KEYBOARD)["steps"] if value is not None]
    drafted = sum(len(o.record["draft_token_ids"]) for m in three_answers() for o in m.rounds)
    accepted = sum(one.record["accepted_len"] for made in three_answers() for one in made.rounds)
    served = f"As served: {accepted} of {drafted} draft tokens accepted"
    first, start, none, would, above, below, *rest = values
    assert (first, start) == ("line", served)
    assert re.match(rf"At 0: \d+ of {drafted} draft tokens accepted, {accepted} as served", none)
    assert "✓ would be accepted" in would
    assert above == f"At above 1: 0 of {drafted} draft tokens accepted, {accepted} as served"
    assert below.startswith("At 0.999")
    exact, back, again, question, opened = rest[:5]
    assert (exact, back, again) == ("exact", "back", served)
    assert (question, opened) == ("SUMMARY", 1)


def test_a_page_without_verdicts_has_no_slider(tmp_path: Path):
    path = tmp_path / "plain.html"
    path.write_text(render(three_answers()[1:], FACTS), encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "Served by plain decoding: sampling mask" in text
