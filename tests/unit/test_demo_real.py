"""``make demo-real``: its requests, and its table from answers that are known."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import real_model
from measure import COLUMNS, Trio, bare, sections
from real_requests import AGAIN, FIRST, all_requests

from sglang_parse.client.records import Answer, BenchError, Item

pytestmark = pytest.mark.unit

REQUESTS = all_requests()


def test_sixty_requests_of_ten_kinds():
    assert [*Counter(item.key for item in REQUESTS).values()] == [6] * 10
    assert len({item.text for item in REQUESTS}) == 60


@pytest.mark.parametrize("item", REQUESTS, ids=lambda item: item.key)
def test_a_request_has_a_text_or_a_scope_of_earlier_answers(item: Item):
    if item.key in (FIRST, AGAIN):
        assert item.request == {"cache_salt": "team"}
        return
    text = item.request["prediction"]["content"]
    assert text in item.text
    if "code" in item.text.partition("\n")[0]:
        ast.parse(text)


@pytest.mark.parametrize("item", REQUESTS, ids=lambda item: item.key)
def test_nothing_is_sent_along(item: Item):
    left = bare(item).request
    assert "prediction" not in left
    assert [bare(other).request["cache_salt"] for other in REQUESTS].count(left["cache_salt"]) == 1
    assert left.get("response_format") == item.request.get("response_format")


def trio(kind: str, plain_ms: float, bare_ms: float, sent_ms: float, accepted: int) -> Trio:
    plain = Answer(0, "a", 20, plain_ms, {}, token_ids=(1, 2))
    meta = {"parse": [{"accepted_tokens": accepted}]}
    ways = (replace(plain, wall_ms=ms, meta=meta) for ms in (bare_ms, sent_ms))
    return Trio(Item(kind, kind, None), plain, *ways)


def test_the_table():
    """Sums of times, not means of ratios: a long answer counts for more."""
    trios = [
        trio("rename", 3000, 2000, 1000, 18),
        trio("rename", 1000, 2000, 1000, 0),
        trio("test", 800, 800, 1000, 5),
    ]
    trios[2] = replace(trios[2], bare=replace(trios[2].bare, token_ids=(1, 3)))
    found = sections(trios, {})
    (grid,) = found["Over plain SGLang"]
    assert grid.headings == [*COLUMNS]
    assert [*map(list, grid.rows)] == [
        ["rename", "2", "40", "4.0", "4.0", "2.0", "1.00x, 45%", "2.00x, 45%", "2 of 2"],
        ["test", "1", "20", "0.8", "0.8", "1.0", "1.00x, 25%", "0.80x, 25%", "0 of 1"],
        ["edits", "2", "40", "4.0", "4.0", "2.0", "1.00x, 45%", "2.00x, 45%", "2 of 2"],
        ["all", "3", "60", "4.8", "4.8", "3.0", "1.00x, 38%", "1.60x, 38%", "2 of 3"],
    ]
    (each,) = found["Each request"]
    assert [row[7] for row in each.rows] == ["3.00x, 90%", "1.00x, 0%", "0.80x, 25%"]


def refuse(*_: Any, **__: Any) -> None:
    raise OSError("no route to host")


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_model, "snapshot_download", refuse)
    monkeypatch.setattr(real_model.HfApi, "model_info", refuse)


@pytest.mark.usefixtures("no_hub")
def test_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    failed = SimpleNamespace(returncode=1)
    monkeypatch.setattr(real_model.subprocess, "run", lambda *_: failed)
    lines: list[str] = []
    with pytest.raises(BenchError, match="give --model FOLDER"):
        real_model.find_model(tmp_path, lines.append)
    assert "OSError" in lines[0]
    assert "480 MB" in lines[1]


@pytest.mark.usefixtures("no_hub")
def test_a_model_that_was_made_is_found(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    assert real_model.find_model(tmp_path, print) == str(tmp_path / "model")
