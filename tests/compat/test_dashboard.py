"""The Grafana dashboard: metrics and labels that exist, and queries that fit their kind."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Iterator

import pytest

from sglang_parse.telemetry.metrics import METRICS, PREFIX
from support.dashboard import DASHBOARD, Selector, selectors

pytestmark = pytest.mark.compat
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EACH = pytest.mark.parametrize("selector", [*selectors()], ids=lambda found: found.series)
LABELS = {"model_name", "priority"}
"""Labels of every metric; the second with priority scheduling."""


def sglangs_metrics() -> Iterator[tuple[str, str, set[str]]]:
    """Yields name, kind and own labels of what SGLang's collectors create."""
    from sglang.srt.observability import metrics_collector

    for node in ast.walk(ast.parse(inspect.getsource(metrics_collector))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            given = {word.arg: word.value for word in node.keywords}
            name = getattr(given.get("name"), "value", "")
            if str(name).startswith("sglang:"):
                words = ast.walk(given["labelnames"]) if "labelnames" in given else ()
                own = {word.value for word in words if isinstance(word, ast.Constant)}
                yield name, node.func.id.lower(), own


@pytest.fixture(scope="module")
def known() -> dict[str, tuple[str, set[str]]]:
    """Metric -> kind, labels."""
    found = {name: (kind, own | LABELS) for name, kind, own in sglangs_metrics()}
    assert len(found) > 50
    for metric in METRICS:
        kind = "histogram" if metric.buckets else "gauge" if metric.is_gauge else "counter"
        found[PREFIX + metric.name] = kind, LABELS | ({metric.label} - {""})
    return found


@EACH
def test_metrics_and_their_labels_exist(selector: Selector, known: dict):
    kind, labels = known[selector.metric]
    assert selector.labels <= labels
    assert selector.series.endswith("_bucket") == (kind == "histogram")


@EACH
def test_queries_fit_the_kind_of_metric(selector: Selector, known: dict):
    """Counters as growth, quantiles of the growth of buckets, gauges as they are."""
    kind, _ = known[selector.metric]
    expr, panel = selector.target["expr"], selector.panel["type"]
    if kind == "gauge":
        assert (selector.range, selector.function) in {
            (None, f) for f in ("sum", "min", "max", "avg", None)
        }
        return
    if panel == "bargauge":  # totals since the start
        assert (kind, selector.function, selector.range) == ("counter", None, None)
        assert " by (" in expr
        return
    assert selector.function in {"rate", "increase"}
    assert selector.range in {"$__rate_interval", "$__range"}
    if kind == "histogram":
        assert "sum by (le) (" in expr
        is_heatmap = panel == "heatmap" and selector.target["format"] == "heatmap"
        assert is_heatmap or expr.startswith("histogram_quantile(")


@EACH
def test_queries_follow_the_choice_of_models_and_servers(selector: Selector):
    names = [variable["name"] for variable in DASHBOARD["templating"]["list"]]
    assert names == ["datasource", "model", "instance"]
    assert selector.matchers.startswith('model_name=~"$model", instance=~"$instance"')
    sources = (selector.panel["datasource"], selector.target["datasource"])
    assert sources == ({"type": "prometheus", "uid": "${datasource}"},) * 2


@EACH
def test_a_counter_without_a_zero_does_not_empty_a_quotient(selector: Selector):
    """Its series are absent until something is counted."""
    expr = selector.target["expr"]
    unseen = {PREFIX + metric.name for metric in METRICS if not metric.label_values}
    if selector.series in unseen and " / " in expr:
        growth = f"rate({selector.series}{{{selector.matchers}}}[{selector.range}])"
        assert expr.count(growth) == expr.count(f"(sum({growth}) or vector(0))")


def test_an_operators_questions_have_a_panel():
    shown = {selector.metric.removeprefix(PREFIX) for selector in selectors()}
    assert shown >= {
        *("drafted_tokens_total", "drafting_speedup", "skipped_drafts_total"),
        *("accepted_tokens_total", "verified_tokens_total", "accept_ratio", "verdict"),
        *("strict_refusals_total", "rejected_matched_prefixes_total", "stage_seconds_total"),
        *("plain_requests_total", "faults_total", "source_faults_total", "decode_itl_seconds"),
        *("kv_truncated_drafts_total", "verdict_drift", "drifted_windows_total"),
        *("certificate_mismatch", "judge"),
    }


def test_panels_do_not_overlap():
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells = [
        cell
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for cell in itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        )
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert all(panel["description"] or len(panel["targets"]) == 1 for panel in PANELS)
