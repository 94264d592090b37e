"""The off switch: its prices, its decisions, and what they are worth on recorded stage times."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from sglang_parse.core.payoff import (
    MAX_THRESHOLDS,
    MIN_ROUNDS,
    PRICE_EVERY,
    RETRY_SHARE,
    OffSwitch,
    Stage,
    StageCost,
    Timed,
)

pytestmark = pytest.mark.unit

HALF, LOW = 0.5, 0.25


# -- prices ------------------------------------------------------------------------


def cost_of(*seen: tuple[float, float]) -> StageCost:
    cost = StageCost()
    for size, ms in seen:
        cost.add(size, ms)
    return cost


def test_a_stages_cost_is_a_line():
    assert StageCost().at(3) is None
    assert cost_of((4, 20.0)).at(4) == cost_of((4, 20.0)).at(8) == 20.0
    line = cost_of(*((n, 5 + 2 * n) for n in (1, 2, 4, 8)))
    assert line.at(16) == pytest.approx(37)


def test_noise_turns_no_line_round():
    """More work takes no less time, and none takes none."""
    falling = cost_of((1, 10.0), (2, 8.0), (1, 10.0), (2, 8.0))
    assert falling.at(8) == falling.at(1)
    steep = cost_of((4, 4.0), (8, 12.0), (4, 4.0), (8, 12.0))
    assert steep.at(0) == pytest.approx(0)


def test_what_was_is_forgotten_and_an_outlier_counts_little():
    cost = cost_of(*[(1, 10.0)] * 50)
    cost.add(1, 10_000.0)
    assert cost.at(1) < 12
    for _ in range(100):
        cost.add(1, 20.0)
    assert cost.at(1) == pytest.approx(20, rel=0.02)


# -- decisions ---------------------------------------------------------------------


def priced(burst_step: float = 1.0, one_pass: float = 20.0, step: float = 8.0) -> OffSwitch:
    """A switch that knows what its stages take, whatever their size."""
    switch = OffSwitch()
    for size in (1, 2, 8):
        switch.saw(
            [
                Timed(Stage.BURST, size, 16, 16 * burst_step),
                Timed(Stage.PASS, 200 * size, 0, one_pass),
                Timed(Stage.STEP, size, size, step),
            ]
        )
    return switch


def play(switch: OffSwitch, emitted: int, threshold: float = HALF, rounds: int = 10) -> None:
    for _ in range(rounds):
        switch.saw_round(threshold, drafted=128, emitted=emitted, rows=200)


def test_forced_either_way():
    for mode in ("always", "never"):
        switch = OffSwitch(mode)
        play(switch, 1 if mode == "always" else 129)
        assert switch.should_draft(HALF) == switch.should_draft(1.5) == (mode == "always")


def test_nothing_of_a_draft_can_pass_a_threshold_above_one():
    assert not OffSwitch().should_draft(1.5)
    assert OffSwitch().should_draft(1.0)


def test_a_threshold_is_judged_after_some_rounds():
    switch = priced()
    play(switch, 1, rounds=MIN_ROUNDS - 1)
    assert switch.should_draft(HALF)
    play(switch, 1, rounds=1)
    assert not switch.should_draft(HALF)


@pytest.mark.parametrize(("emitted", "pays"), [(129, True), (25, True), (12, False), (1, False)])
def test_it_pays_where_a_round_is_faster_than_its_tokens_plainly(emitted: int, pays: bool):
    """A round takes 128 * 1 + 20 ms; the target writes a token in 8 ms."""
    switch = priced()
    play(switch, emitted)
    assert switch.should_draft(HALF) is pays
    assert switch.speedup == pytest.approx(emitted * 8 / 148)


def test_load_counts():
    """The draft model takes as long for each request more, the target not."""
    switch = OffSwitch()
    for count in (1, 2, 4, 8):
        switch.saw(
            [Timed(Stage.BURST, count, 16, 16.0 * count), Timed(Stage.STEP, count, count, 8.0)]
        )
        switch.saw([Timed(Stage.PASS, 200 * count, 0, 20.0 * count)])
    play(switch, 60)
    answers = []
    for count in (1, 16, 1):
        switch.num_running = count
        answers.append(switch.should_draft(HALF))
    assert answers == [True, False, True]


def test_a_head_that_makes_the_target_faster_counts():
    switch = priced()
    play(switch, 30)
    assert switch.should_draft(HALF)
    for _ in range(100):
        switch.saw([Timed(Stage.STEP, 1, 3, 8.0)])
    assert not switch.should_draft(HALF)


def test_each_threshold_has_its_own_account():
    switch = priced()
    play(switch, 1, HALF)
    play(switch, 129, LOW)
    assert not switch.should_draft(HALF)
    assert switch.should_draft(LOW)


def test_no_more_accounts_than_there_should_be():
    switch = priced()
    play(switch, 1, HALF)
    for i in range(MAX_THRESHOLDS - 1):
        switch.should_draft(i / 1000)
        assert not switch.should_draft(HALF)  # used lately, so kept
    for i in range(MAX_THRESHOLDS):
        switch.should_draft(0.6 + i / 1000)
    assert switch.should_draft(HALF)  # forgotten


def test_trials_are_single_and_lose_a_bounded_share():
    switch = priced()
    play(switch, 1)
    steps = trials = 0
    while trials < 5:
        steps += 1
        switch.saw([Timed(Stage.STEP, 4, 4, 8.0)])
        asked = [switch.should_draft(HALF) for _ in range(4)]
        assert sum(asked) <= 1
        if any(asked):
            trials += 1
            play(switch, 1, rounds=1)
    lost = trials * (148 - 8)
    assert lost == pytest.approx(RETRY_SHARE * steps * 8, rel=0.1)


def test_it_comes_back_when_trials_go_well():
    switch = priced()
    play(switch, 1)
    trials = 0
    for _ in range(5000):
        switch.saw([Timed(Stage.STEP, 1, 1, 8.0)])
        if switch.should_draft(HALF):
            trials += 1
            play(switch, 129, rounds=1)
        if trials == 3:
            break
    assert all(switch.should_draft(HALF) for _ in range(5))


def test_the_plain_targets_price_is_taken_anew():
    switch = OffSwitch()
    play(switch, 129)
    assert not switch.should_draft(HALF)  # not known yet
    switch.saw([Timed(Stage.STEP, 1, 1, 8.0)])
    asked = [switch.should_draft(HALF) for _ in range(PRICE_EVERY + 1)]
    assert asked == [True] * PRICE_EVERY + [False]


# -- on recorded stage times -------------------------------------------------------

BURST, SEGMENT, TOKENS = 16, 12, 300
RECORD = Path(__file__).with_name("stage_times.json")


@cache
def runs() -> list[dict]:
    return json.loads(RECORD.read_text())["runs"]


@cache
def recorded(kind: str) -> dict[int, list[tuple[int, float]]]:
    """A stage's (amount, ms) in all runs, by its size."""
    by_size: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for run in runs():
        for line in run["seen"]:
            if line[0] == kind:
                by_size[line[1]].append((line[2], line[3]))
    return by_size


@cache
def nearest(kind: str, size: int) -> int:
    return min(recorded(kind), key=lambda known: abs(known - size))


@dataclass
class Machine:
    """Stages take what they took on a real server when they were about that large."""

    rng: random.Random
    slower_draft: float = 1.0

    def time(self, kind: str, size: int) -> tuple[int, float]:
        """(amount, ms) of one like it."""
        return self.rng.choice(recorded(kind)[nearest(kind, size)])

    def burst(self, count: int, steps: int) -> Timed:
        amount, ms = self.time("burst", count)
        return Timed(Stage.BURST, count, steps, self.slower_draft * ms / amount * steps)

    def one_pass(self, num_rows: int) -> Timed:
        _, ms = self.time("pass", num_rows)
        return Timed(Stage.PASS, num_rows, 0, ms * num_rows / nearest("pass", num_rows))

    def step(self, count: int) -> Timed:
        return Timed(Stage.STEP, count, count, self.time("step", count)[1])


@dataclass
class Writer:
    """One request: what it does next, as rounds.py has it."""

    switch: OffSwitch
    threshold: float
    rounds: list[list]
    rng: random.Random
    left: int = TOKENS
    drafting: int = 0
    judged: tuple[int, int, int] | None = None
    segment: int = 0
    drafts: int = field(default=0)

    def ask(self) -> None:
        if self.switch.should_draft(self.threshold):
            self.judged = tuple(self.rng.choice(self.rounds)[2:])
            self.drafting = self.judged[0]
            self.drafts += 1
        else:
            self.segment = SEGMENT

    def judge(self) -> None:
        drafted, emitted, rows = self.judged
        self.judged = None
        self.left -= emitted
        self.switch.saw_round(self.threshold, drafted, emitted, rows)
        if emitted < drafted:
            self.segment = SEGMENT
        else:
            self.ask()

    def write(self) -> None:
        self.left -= 1
        self.segment -= 1
        if self.segment <= 0:
            self.ask()


@dataclass
class Scenario:
    """``kept``: at which recorded threshold drafts are cut, for the first and second half."""

    requests: int
    kept: tuple[float, float]
    slower_draft: float = 1.0
    answers: int = 12

    def play(self, mode: str) -> float:
        """Time for all answers; each writer begins another when it has finished one."""
        rng = random.Random(1)
        machine = Machine(rng, self.slower_draft)
        switch = OffSwitch(mode, num_running=self.requests)
        total, started, running = 0.0, 0, []
        while running or started < self.answers * self.requests:
            while len(running) < self.requests and started < self.answers * self.requests:
                kept = self.kept[2 * started // (self.answers * self.requests)]
                running.append(Writer(switch, HALF, rounds_at(kept), rng))
                running[-1].ask()
                started += 1
            timed = iteration(machine, running)
            switch.saw(timed)
            total += sum(part.ms for part in timed)
            running = [writer for writer in running if writer.left > 0]
        return total


@cache
def rounds_at(threshold: float) -> list[list]:
    return [
        line
        for run in runs()
        if run["threshold"] == threshold
        for line in run["seen"]
        if line[0] == "round"
    ]


def iteration(machine: Machine, running: list[Writer]) -> list[Timed]:
    """As worker.py: drafters burst, the others share one forward."""
    drafting = [writer for writer in running if writer.drafting]
    judging = [writer for writer in running if writer.judged and not writer.drafting]
    writing = [writer for writer in running if not writer.judged]
    timed = []
    if drafting:
        steps = min(BURST, max(writer.drafting for writer in drafting))
        timed.append(machine.burst(len(drafting), steps))
        for writer in drafting:
            writer.drafting = max(0, writer.drafting - BURST)
    if judging:
        timed.append(machine.one_pass(sum(writer.judged[2] for writer in judging) + len(writing)))
    elif writing:
        timed.append(machine.step(len(writing)))
    act: list[tuple[Callable[[Writer], None], Writer]] = [
        *((Writer.judge, writer) for writer in judging),
        *((Writer.write, writer) for writer in writing),
    ]
    for what, writer in act:
        what(writer)
    return timed


MOST, NONE = 0.5, 1.0


@pytest.mark.parametrize("requests", [1, 2, 8])
@pytest.mark.parametrize("slower_draft", [1.0, 8.0])
@pytest.mark.parametrize("kept", [MOST, NONE])
def test_nearly_as_fast_as_the_better_of_both(requests: int, slower_draft: float, kept: float):
    """Drafts that are kept or not, a draft model that is cheap or not."""
    scenario = Scenario(requests, (kept, kept), slower_draft)
    always, never, auto = map(scenario.play, ("always", "never", "auto"))
    assert auto < 1.1 * min(always, never)


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("kept", [(MOST, NONE), (NONE, MOST)])
def test_faster_than_both_when_acceptance_changes(requests: int, kept: tuple[float, float]):
    scenario = Scenario(requests, kept, answers=40)
    always, never, auto = map(scenario.play, ("always", "never", "auto"))
    assert auto < 0.95 * min(always, never)


def test_the_scenarios_are_no_walkovers():
    """Neither drafting nor resting is always right on this machine."""
    good, bad = Scenario(1, (MOST, MOST)), Scenario(1, (NONE, NONE))
    assert good.play("always") < 0.6 * good.play("never")
    assert bad.play("always") > 1.2 * bad.play("never")
