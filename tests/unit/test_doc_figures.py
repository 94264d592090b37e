"""Tables of measurements in the documents, from results of comparisons."""

import json
from collections.abc import Callable
from pathlib import Path

import figures
import pytest

from sglang_parse.compare.report import results
from support import comparison

pytestmark = pytest.mark.unit


@pytest.fixture
def taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A comparison of six servers as the figures of all three commands."""
    facts = {
        **comparison.FACTS,
        "date": "2026-11-25 03:58 UTC",
        "minutes": 12.0,
        "machine": {"processor": "P", "cpus": 2, "system": "Linux x86_64", "memory_gib": 8},
        "versions": {"sglang": "1.2.3"},
        "requests_per_run": {"1": 8},
        "settings": {"runs": 3},
    }
    content = results(comparison.six_servers(), comparison.six_measured(), facts)
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    monkeypatch.setattr(figures, "commit_of", lambda *_: "0123456789")
    for name in ("demo", "load", "compare"):
        folder = tmp_path / "build" / name
        folder.mkdir(parents=True)
        (folder / "results.json").write_text(json.dumps(content))
        assert figures.take_over(folder) == tmp_path / f"{name}.json"
    return tmp_path


def test_figures_are_those_of_the_results(taken_over: Path):
    expected = json.loads((taken_over / "build" / "load" / "results.json").read_text())
    own = expected["variants"]
    found = json.loads((taken_over / "load.json").read_text())
    assert found["conditions"]["commit"] == "0123456789"
    assert [one["server"] for one in found["variants"]] == [one["server"] for one in own]
    for kept, whole in zip(found["variants"], own, strict=True):
        for speed, first in zip(kept["speeds"], whole["speeds"], strict=True):
            assert speed["tokens_per_s"] == first["tokens_per_s"]["median"]
            assert speed["over"] == {n: one["median"] for n, one in first["over"].items()}
            assert speed["latency_ms"]["e2e"][1] == first["latency_ms"]["e2e"]["p99"]


@pytest.mark.usefixtures("taken_over")
@pytest.mark.parametrize("name", figures.PARTS)
def test_every_part_can_be_made(name: str):
    text = figures.PARTS[name]()
    assert text
    widths = {line.count("|") for line in text.splitlines()}
    assert len(widths) == 1
    assert "None" not in text


@pytest.mark.usefixtures("taken_over")
def test_the_conditions_name_the_build():
    assert figures.conditions("load") == (
        "Commit `0123456789`, 25 November 2026, SGLang 1.2.3; 2 CPUs (P, Linux x86_64), "
        "medians of 3 runs, 12 minutes in all."
    )


@pytest.mark.parametrize(
    ("value", "kind", "mark", "show", "expected"),
    [
        (1.6, "at least", 1.5, figures.times, "1.60x (goal: at least 1.50x)"),
        (1.2, "at least", 1.5, figures.times, "1.20x (goal: at least 1.50x, **missed by 20.0 %**)"),
        (1.4, "at most", 1.3, figures.times, "1.40x (goal: at most 1.30x, **missed by 7.7 %**)"),
        (
            0.8,
            "at least",
            0.9,
            figures.percent,
            "80.0 % (goal: at least 90.0 %, **missed by 11.1 %**)",
        ),
        (-0.01, "at most", 0.01, figures.points, "-1.0 points (goal: at most 1.0 points)"),
        (1.4, "at most", None, figures.times, "1.40x"),
    ],
)
def test_a_missed_goal_is_reported(
    value: float, kind: str, mark: float | None, show: Callable[[float], str], expected: str
):
    assert figures.graded(value, kind, mark, show) == expected
