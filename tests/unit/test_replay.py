"""The controller on replayed loads, against the best fixed settings and plain decoding."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

import pytest

from support.loads import (
    QUESTION_ROWS,
    Load,
    costs_of,
    doubtful_loads,
    loads,
    real_loads,
    recorded,
    scripts_of,
)
from support.replay import Fixed, Replay

pytestmark = pytest.mark.unit

LOADS = {load.name: load for load in loads()}
REAL = {load.name: load for load in real_loads()}


@pytest.mark.parametrize("real", recorded()["real"], ids=lambda real: f"{real['requests']}")
def test_the_simulator_predicts_real_servers(real: Mapping):
    """With settings other than those it was recorded with.

    A run of one request is short, and the plain server's steps stand in for those of a server that
    never drafts: both are predicted too fast.
    """
    fixed = Fixed(
        draft_tokens=real.get("draft_tokens", 128),
        max_prefixes=real.get("max_prefixes", 16),
        draft_chunk=real.get("draft_chunk", 16),
        drafts=real.get("drafting") != "never",
    )
    scripts = scripts_of("blocks", 0.5, max(24, 4 * real["requests"]))
    replay = Replay(
        *(scripts, real["requests"], costs_of("blocks"), fixed, QUESTION_ROWS),
    )
    error = 0.14 if real["requests"] == 1 else 0.01 if fixed.drafts else 0.08
    assert replay.run() == pytest.approx(real["tokens_per_s"], rel=error)


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_as_fast_as_the_best_of_the_grid(load: Load):
    """``record_loads`` finds the best of 61 fixed settings."""
    best = recorded()["best"][load.name]
    again = Fixed(best["draft_tokens"], best["max_prefixes"], best["draft_chunk"], best["drafts"])
    assert load.run(again) == pytest.approx(best["tokens_per_s"], rel=1e-3)
    rate = load.controlled()
    assert rate >= 0.9 * best["tokens_per_s"]
    assert rate >= 0.97 * load.run(Fixed(drafts=False))


@pytest.mark.parametrize("load", REAL.values(), ids=REAL)
def test_real_texts(load: Load):
    """Against fixed lengths, from a cold start of the controller."""
    fixed = [Fixed(length, 1, 128) for length in (4, 8, 16, 32, 64)]
    rate, best = load.controlled(), max(map(load.run, fixed))
    assert rate >= 0.85 * best
    assert rate >= 0.97 * load.run(Fixed(drafts=False))


def test_drafts_that_end_in_doubt():
    """Beside drafts whose length is right on average."""
    gains = {
        load.name: load.controlled() / load.controlled(allows_doubt=False)
        for load in doubtful_loads()
    }
    assert min(gains.values()) >= 0.97, gains
    assert fmean(gains.values()) >= 1.05
    exact = [gain for name, gain in gains.items() if name.startswith("1, ") and "differs" in name]
    assert fmean(exact) >= 1.08
    assert min(exact) >= 1.03


@pytest.mark.parametrize("load", REAL.values(), ids=REAL)
def test_doubt_costs_no_load_more_than_it_may(load: Load):
    assert load.controlled() >= 0.97 * load.controlled(allows_doubt=False)


@pytest.mark.parametrize("name", ["4, middle", "16, high"])
def test_a_bound_on_itl_costs_little(name: str):
    load = LOADS[name]
    free, load.max_itl_ratio = load.controlled(), 2.5
    try:
        assert load.controlled() >= 0.95 * free
    finally:
        load.max_itl_ratio = 0.0
