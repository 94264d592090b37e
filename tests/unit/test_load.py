"""``sglang-parse load``: its closed loop, and the figures of what came while it was whole."""

from __future__ import annotations

import asyncio

import pytest

from sglang_parse.cli import main
from sglang_parse.client.loop import closed_loop
from sglang_parse.client.records import BenchError
from sglang_parse.core.simulation import ENV_VAR
from sglang_parse.load.figures import Run, Span, figures_of
from sglang_parse.load.names import title_of
from sglang_parse.load.run import WARM_UP, _Loads
from sglang_parse.load.settings import SERVERS, LoadSettings
from sglang_parse.load.stream import Streamed

pytestmark = pytest.mark.unit


def test_a_new_one_as_soon_as_one_has_ended_and_results_in_order():
    ends: dict[int, asyncio.Future[str]] = {}
    done: list[int] = []

    async def send(number: int) -> str:
        ends[number] = asyncio.get_running_loop().create_future()
        return await ends[number]

    async def scenario() -> list[str]:
        loop = asyncio.create_task(closed_loop(range(5), send, 2, lambda: done.append(1)))
        for ended, under_way in ((1, [0, 1]), (2, [0, 2]), (3, [0, 3]), (0, [0, 4]), (4, [4])):
            for _ in range(5):
                await asyncio.sleep(0)
            assert [number for number, end in ends.items() if not end.done()] == under_way
            ends[ended].set_result(f"answer {ended}")
        return await loop

    assert asyncio.run(scenario()) == [f"answer {number}" for number in range(5)]
    assert len(done) == 5


def test_the_first_failure_ends_the_loop():
    async def send(number: int) -> int:
        if number == 2:
            raise BenchError("no")
        await asyncio.sleep(60)
        return number

    with pytest.raises(BenchError):
        asyncio.run(closed_loop(range(4), send, 4))


def stream(sent: float, *chunks: tuple[float, int], is_off: bool = False) -> Streamed:
    """``chunks``: when each came, and how many tokens there were then."""
    arrivals, tokens = zip(*chunks, strict=True)
    return Streamed(is_off, sent, arrivals, tokens)


def test_what_counts_lies_between_all_places_taken_and_the_last_sent():
    """Two at a time: from 1 s, when the second is sent, to 7 s, when the last is."""
    streams = [
        stream(0.0, (0.5, 1), (3.0, 4), (5.0, 10)),
        stream(1.0, (2.0, 2), (7.0, 12)),
        stream(5.0, (5.5, 1), (9.0, 8)),
        stream(7.0, (8.0, 5)),
    ]
    run = Run("plain", 2, 0.0, streams)
    assert run.span == Span(1.0, 7.0)
    (line,) = figures_of([run], [run])
    # 9 tokens of the first (the one at 0.5 s came too early), 12, 1 and none.
    assert line.tokens_per_s == pytest.approx(22 / 6, abs=0.05)
    assert line.answers == 2
    assert (line.ttft_p50_ms, line.ttft_p99_ms) == (1000.0, pytest.approx(1000, abs=20))
    # Silences that ended in time: 2.5, 2 and 5 s.
    assert (line.gap_p50_ms, line.gap_p99_ms) == (2500.0, pytest.approx(5000, abs=60))
    assert line.longest_p50_ms == 3750.0
    assert line.e2e_p50_ms == 5500.0
    assert (line.requests_are, line.title) == ("all", "plain target")


def test_a_mixed_load_has_a_line_for_either_kind_and_runs_are_put_together():
    first = [
        stream(0.0, (1.0, 1), (2.0, 2)),
        stream(0.0, (1.0, 1), (5.0, 9), is_off=True),
        stream(10.0, (11.0, 1)),
    ]
    second = [
        stream(0.0, (1.0, 1), (4.0, 21)),
        stream(0.0, (1.0, 1), (6.0, 2), is_off=True),
        stream(10.0, (11.0, 1)),
    ]
    runs = [Run("parse", 2, 0.5, part) for part in (first, second)]
    drafting, off = figures_of(runs, runs)
    assert (drafting.title, off.title) == ("PARSE: drafting", "PARSE: switched off")
    assert (drafting.gap_p50_ms, off.gap_p50_ms) == (2000.0, 4500.0)
    assert drafting.tokens_per_s == pytest.approx((2 + 21) / 2 / 10, abs=0.06)
    assert (drafting.answers, off.answers) == (2, 2)
    assert drafting.draft_share is None


def test_stage_shares_are_medians_of_the_runs_that_know_them():
    answers = [stream(0.0, (1.0, 1), (2.0, 2)), stream(3.0, (4.0, 1))]
    known = ({"draft": 0.1}, {"draft": 0.3, "verify": 0.2}, {})
    runs = [Run("parse", 1, 0.0, answers, stages) for stages in known]
    (line,) = figures_of(runs, runs)
    assert (line.draft_share, line.verify_share, line.prefill_share) == (0.2, 0.2, None)


def test_speeds_are_compared_run_by_run():
    """A machine that is at half its speed for a run is so for all servers."""

    def runs(server: str, *seconds: float) -> list[Run]:
        return [
            Run(server, 1, 0.0, [stream(0.0, (1.0, 1), (s, 12)), stream(s, (s + 1, 1))])
            for s in seconds
        ]

    first, other = runs("plain", 4.0, 8.0, 40.0), runs("parse", 2.0, 4.0, 20.0)
    assert [line.over_first for line in figures_of(other, first)] == [2.0]
    assert [line.over_first for line in figures_of(first, first)] == [1.0]


def read(*words: str) -> LoadSettings:
    import argparse

    parser = argparse.ArgumentParser()
    LoadSettings.add_arguments(parser)
    return LoadSettings.read(parser.parse_args(words))


def test_settings():
    settings = read()
    assert settings.names == SERVERS
    assert [settings.num_requests(c) for c in settings.concurrencies] == [16, 16, 64]
    more = read("--requests", "50")
    assert [more.num_requests(c) for c in more.concurrencies] == [50, 50, 64]
    assert settings.shares("plain") == (0.0,)
    assert settings.shares("parse") == (0.0, 0.5, 1.0)
    assert settings.order(1) == SERVERS[::-1]
    remote = read("--url", "parse=http://127.0.0.1:1/v1")
    assert remote.names == ("parse",)
    assert remote.remotes["parse"].url == "http://127.0.0.1:1"
    simulated = read("--servers", "plain,parse", "--acceptance", "0.3,1")
    assert simulated.names == ("plain", "parse@0.3", "parse@1")
    assert simulated.shares("parse@1") == simulated.off_shares
    kept = [dict(spec.environment).get(ENV_VAR) for spec in simulated.specs]
    assert kept == [None, "0.3", "1"]
    assert title_of("parse@0.3") == "PARSE, 30% kept"
    with pytest.raises(BenchError, match="--url is 'x'; use NAME=http"):
        read("--url", "x")


def test_loads_share_no_problem_and_half_is_every_second_one():
    settings = read("--runs", "2", "--concurrency", "1,4", "--off", "0,0.5")
    loads = _Loads(settings)
    seen = [item.key for item in loads.warm_up().items]
    for run in range(2):
        for concurrency in (1, 4):
            for share in (0.0, 0.5):
                load = loads.load(run, concurrency, share)
                seen += [item.key for item in load.items]
                assert sum(load.is_off) == share * len(load.items)
                assert load.is_off[:4] == [False, share > 0, False, share > 0]
    assert len(seen) == len(set(seen)) == WARM_UP + 2 * 2 * 32


def test_where_wrong_drafts_are_kept_answers_are_as_short_as_right_ones():
    free, simulated = _Loads(read()), _Loads(read("--acceptance", "0.3"))
    load = simulated.load(0, 1, 0.0)
    assert free.load(0, 1, 0.0).max_tokens == [256] * 16
    # A token is a digit or a few characters.
    for item, most in zip(load.items, load.max_tokens, strict=True):
        assert 30 < most <= len(item.reference.solution) + 1 < 256
    assert len(set(load.max_tokens)) > 3
    short = _Loads(read("--acceptance", "0.3", "--max-tokens", "20"))
    assert set(short.load(0, 1, 0.0).max_tokens) == {20}


def test_the_command_is_there(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as end:
        main(["load", "--help"])
    assert end.value.code == 0
    assert "--off" in capsys.readouterr().out
