"""The programs' pages in a real browser: complete, alone, and not cut at two widths."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sglang_parse.calibrate.report import sections as calibration_sections
from sglang_parse.client.page import render_report
from sglang_parse.compare.report import sections
from support import calibration
from support.comparison import FACTS, six_servers
from support.open_page import assert_fits, look_at

MORE = pytest.mark.nightly("tests/e2e/test_compare_page.py::test_page")
WIDTHS = (1280, pytest.param(400, marks=MORE))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_report("PARSE", sections(six_servers(), FACTS)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def calibration_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "calibration.html"
    found = calibration_sections(*calibration.calibration(), calibration.CONDITIONS)
    path.write_text(render_report("Calibration", found), encoding="utf-8")
    return path


def looks_right(page: Path, width: int) -> dict:
    """Returns the browser's report on a page that it shows whole."""
    found = look_at(page, width)
    assert_fits(found, page, width)
    return found


@MORE
@pytest.mark.parametrize("width", WIDTHS)
def test_a_calibrations_page(calibration_page: Path, width: int):
    found = looks_right(calibration_page, width)
    (marks,) = found["marks_per_plot"]
    assert marks > 10
    for text in ("is certified (alpha 5 %, delta 5 %)", "With confidence 0.95", "first-reject"):
        assert text in found["text"]


@MORE
@pytest.mark.parametrize("width", WIDTHS)
def test_a_calibrations_certified_column_is_seen_without_scrolling(
    calibration_page: Path, width: int
):
    """Also on a phone; on a laptop the whole tables are."""
    right = "[...document.querySelectorAll('th')].filter(th => th.textContent == 'certified')"
    right += ".map(th => th.getBoundingClientRect().right)"
    boxes = "[...document.querySelectorAll('.wide')].map(box => box.scrollWidth - box.clientWidth)"
    found = look_at(calibration_page, width, [{"js": f"JSON.stringify([{right}, {boxes}])"}])
    columns, hidden = json.loads(found["steps"][0])
    assert len(columns) == 2
    assert max(columns) <= width
    assert width < 1000 or hidden == [0, 0, 0]


@pytest.mark.parametrize("width", WIDTHS)
def test_page(page: Path, width: int):
    found = looks_right(page, width)
    marks = found["marks_per_plot"]
    assert len(marks) == 2
    assert min(marks) > 5
    for text in ("PARSE+EAGLE3", "matched", "McNemar", "python -m sglang.bench_serving"):
        assert text in found["text"]


def test_the_browser_notices_what_is_wrong(page: Path):
    """The checks above can fail."""
    wrong = page.with_name("wrong.html")
    text = page.read_text(encoding="utf-8").replace(
        "</main>",
        '<div style="width: 3000px">too wide</div>'
        '<div style="width: 20px; overflow: hidden; white-space: nowrap">a text cut short</div>'
        '<script src="missing.js"></script><script>console.error("oh")</script></main>',
    )
    wrong.write_text(re.sub(r'"l": ?56', '"l":0', text), encoding="utf-8")
    found = look_at(wrong, 1280)
    assert found["page_width"] > 1280
    assert any("too wide" in html for html in found["outside"])
    assert any("cut short" in html for html in found["cut"])
    assert any("missing.js" in url for url in found["requests"])
    assert any("oh" in message for message in found["console"])
