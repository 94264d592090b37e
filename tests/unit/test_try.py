"""``sglang-parse try`` without a server: counts of rounds, readings, advice, settings, the page."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from sglang_parse import cli
from sglang_parse.client.prompts import _EVERYDAY, _ON_TEXTS
from sglang_parse.client.records import Answer, BenchError, BenchRun, Variant
from sglang_parse.core.judge import LIKELIHOOD_BIAS
from sglang_parse.trial import run as program
from sglang_parse.trial.answered import Answered
from sglang_parse.trial.forecast import (
    LENGTHS,
    Forecast,
    PerRound,
    Trial,
    TrialCosts,
    advised,
    fit_pass,
    refused,
    through,
)
from sglang_parse.trial.report import content, said, sections
from sglang_parse.trial.settings import CPU_FLAGS, TrialSettings, add_arguments

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[2]
DRAFTS = json.loads((ROOT / "tests/data/real_drafts.json").read_text())
H100 = {ratio: TrialCosts(1.0, ratio, 1.1, 0.004) for ratio in (0.14, 0.035)}
"""In decode steps: a draft token, a verify pass and its rows (docs/choosing.md)."""


# -- counts of rounds -----------------------------------------------------------------------


def marked(tokens: int, places: Iterable[int]) -> list[bool]:
    return [place in {*places} for place in range(tokens)]


def every(tokens: int, count: int = 10) -> list[bool]:
    """A refusal every so many tokens."""
    return marked(tokens * count, range(tokens - 1, tokens * count, tokens))


def recorded(text: str, judge: str) -> list[list[bool]]:
    """First drafts of the real pair; "differs": by the exact token check, "refused": at 0.5."""
    return [marked(one["tokens"], one[judge]) for one in DRAFTS[text]]


def test_a_refusal_every_twelve_tokens():
    """Drafts of 8: 8 kept and one more of the target, then 2 kept and the target's."""
    assert through([every(12)], 8) == PerRound(6, 8 - 5 / 20)  # of the last one 3 are left
    assert through([every(12)], 12).tokens == 12
    # Longer drafts bring nothing more: their ends are thrown away.
    assert through([every(12)], 64).tokens == 12
    assert through([every(12)], 4) == PerRound(4, pytest.approx(4, abs=0.1))


def test_without_a_refusal_a_round_is_a_draft_and_the_target_s_token():
    assert through([[False] * 170], 16) == PerRound(17, 16)
    assert through([[False] * 5], 16) == PerRound(5, 5)


@pytest.mark.parametrize(
    ("text", "judge", "ratio", "best", "speedup"),
    [
        ("prose", "differs", 0.14, 8, 2.8),
        ("prose", "differs", 0.035, 16, 5.1),
        ("prose", "refused", 0.14, 16, 3.8),
        ("prose", "refused", 0.035, 32, 8.5),
        ("code", "differs", 0.035, 64, 10.2),
    ],
)
def test_the_real_pair_by_counts(text: str, judge: str, ratio: float, best: int, speedup: float):
    """docs/choosing.md: the likelihood at 0.5, and the exact token check."""
    found = Forecast.of(None, recorded(text, judge), H100[ratio])
    assert (found.best, round(found.speedups[best], 1)) == (best, speedup)


def test_refusals_of_the_real_pair():
    for judge, tokens in (("differs", 12.4), ("refused", 32)):
        found = Forecast.of(None, recorded("prose", judge), H100[0.14])
        assert found.tokens / found.refusals == pytest.approx(tokens, abs=0.5)


@pytest.mark.parametrize("text", ["prose", "code"])
@pytest.mark.parametrize("judge", ["differs", "refused"])
def test_the_real_pair_s_server_measured_what_first_drafts_predict(text: str, judge: str):
    """Other problems of GSM8K and HumanEval, whole answers, drafts of 16 tokens."""
    setting = {"differs": "exact", "refused": "likelihood-0.5"}[judge]
    task = {"prose": "gsm8k", "code": "humaneval"}[text]
    rows = json.loads((ROOT / "examples/real_pair/results.json").read_text())["results"]
    (row,) = (one for one in rows if (one["task"], one["setting"]) == (task, setting))
    predicted = through(recorded(text, judge), 16).tokens
    assert predicted == pytest.approx(row["tokens_per_round"], rel=0.1)


def test_costs_of_a_pass():
    passes = [(rows, 12.65 + 0.046 * rows) for rows in (1.0, 9.0, 17.0, 120.0)]
    assert fit_pass(passes) == pytest.approx((12.65, 0.046))
    ms, per_row = fit_pass([(1.0, 10.0), (17.0, 9.0), (65.0, 8.0)])  # a busy machine
    assert (per_row, 8 < ms < 10) == (0, True)


def test_an_exact_judge_is_advised_unless_another_is_clearly_faster():
    def judge(tokens: int, threshold: float | None) -> Forecast:
        return Forecast.of(threshold, [every(tokens)], H100[0.035])

    exact, slightly, clearly, lower = (
        judge(30, None),
        judge(32, 0.5),
        judge(60, 0.5),
        judge(99, 0.2),
    )
    assert advised([exact, slightly]) is exact
    # What 0.2 costs in right answers has to be counted first.
    assert advised([exact, clearly, lower]) is clearly
    costly = TrialCosts(1.0, 1.0, 1.1, 0.004)  # a draft model as slow as its target
    assert advised([Forecast.of(None, [every(12)], costly)]) is None


# -- what the target reads in a draft -------------------------------------------------------

ONE, TWO, A, THE = 1, 2, 3, 4
TEXTS = {ONE: " 1", TWO: " 2", A: " a", THE: " the"}


def record(
    draft: Sequence[int],
    choices: Sequence[int],
    verdicts: Sequence[float],
    *,
    start: int = 1,
    accepted: int | None = None,
    judge: str | None = "likelihood",
    length: int = 16,
) -> dict[str, Any]:
    """A round whose tokens have these likelihoods, each alone."""
    logits = [math.log(one / (1 - one)) - LIKELIHOOD_BIAS for one in verdicts]
    return {
        "output_start": start,
        "draft_token_ids": [*draft],
        "in_doubt": False,
        "target_token_ids": [*choices, A],
        "judge": judge,
        "threshold": 0.5,
        "accepted_len": len(draft) if accepted is None else accepted,
        "bonus_token_ids": [THE],
        "plan": {"draft_tokens": length},
        "draft_logprobs": [one - 1.0 for one in logits],
        "draft_entropies": [1.0] * len(logits),
    }


def answer(*records: dict[str, Any], wall_ms: float = 100.0, tokens: int = 20) -> Answer:
    drafted = sum(len(one["draft_token_ids"]) for one in records)
    times = {"draft_ms": 1.0 * drafted, "verify_ms": 10.0 * len(records)}
    counts = {"rounds": len(records), "drafted_tokens": drafted}
    sources = {"model": {**counts, "accepted_tokens": drafted // 2}} if drafted else {}
    shown = {"sources": sources} if sources else {"sources": sources, "reason": "nothing fits"}
    meta = {"parse": [{"mode": "parse", "trace": [*records], **counts, **times, **shown}]}
    return Answer(0, "text", tokens, wall_ms, meta, token_ids=(A,) * tokens)


def run_of(*answers: Answer) -> BenchRun:
    seconds = sum(one.wall_ms for one in answers) / 1e3
    return BenchRun(Variant("parse"), 0, 1, seconds, answers)


def test_which_tokens_are_refused():
    """A synonym, a wrong number that the target finds likely, and behind a round the next one."""
    first = record([A, ONE, A], [THE, TWO, A], [0.3, 0.9, 0.8])
    found = answer(first, record([THE], [A], [0.1], start=5))
    marks = {at: [*refused(found, TEXTS, at)] for at in (None, 0.5, 0.2)}
    assert marks[None] == marks[0.5] == [True, True, False, True]
    assert marks[0.2] == [False, True, False, True]


def test_code_is_strict():
    texts = {**TEXTS, 9: "\n```\n"}
    found = answer(record([9, A, 9, A], [9, THE, 9, THE], [0.9] * 4))
    assert [*refused(found, texts, 0.5)] == [False, True, False, False]


def test_what_follows_a_refused_token_is_no_output():
    """As in token mode, which accepts nothing behind it, whatever the threshold."""
    one = record([A, ONE, A], [A, TWO, A], [0.9] * 3, accepted=1, judge=None)
    assert [*refused(answer(one), TEXTS, None)] == [False, True]


def test_what_was_not_verified_is_not_read():
    """A draft of four whose last line is not over."""
    one = record([A, A, A, A], [A, THE], [0.9, 0.3], accepted=2)
    assert [*refused(answer(one), TEXTS, 0.5)] == [False, True]


# -- a trial --------------------------------------------------------------------------------


def trial(judge: str | None = "likelihood") -> Trial:
    """Every twelfth token is a synonym of likelihood 0.3, and every 48th a wrong number."""
    draft, choices, verdicts = [A] * 48, [A] * 48, [0.9] * 48
    for place in (11, 23, 35):
        choices[place], verdicts[place] = THE, 0.3
    draft[47], choices[47] = ONE, TWO
    whole = answer(record(draft, choices, verdicts, judge=judge, length=48))
    served = record(draft[:16], choices[:16], verdicts[:16], accepted=11, judge=judge)
    plain = run_of(*[answer(wall_ms=400.0)] * 2)
    parse = run_of(*[answer(served, served)] * 3)
    return Trial(parse, plain, 1, run_of(*[whole] * 4), 10.0, TEXTS)


def test_what_is_measured():
    found = trial()
    assert (found.speedup, found.per_round) == (4, PerRound(12, 16))
    costs = found.costs
    assert (costs.plain_ms, costs.draft_ms) == (pytest.approx(20), 1)
    assert costs.verify_ms(16) == pytest.approx(10)
    assert costs.other_ms == pytest.approx((100 - 32 - 20) / 20)
    # Drafts of 16 bring 12 tokens a round: 16 ms of drafting, 10 of verifying.
    assert costs.speedup(PerRound(12, 16)) == pytest.approx(20 / (26 / 12 + 2.4))


def test_what_is_predicted():
    found = trial()
    refusals = {one.threshold: one.tokens / one.refusals for one in found.forecasts}
    assert refusals == {None: 12, 0.5: 12, 0.2: 48}
    assert found.predicted.tokens == 12
    # The likelihood refuses what token mode refuses.
    assert advised(found.forecasts).threshold is None


def test_drafts_that_ended_in_doubt_are_predicted_at_their_own_length():
    found = trial()
    for one in found.rounds:
        one.update(plan={"draft_tokens": 48}, in_doubt=True)
    assert found.predicted.drafted == pytest.approx(16, abs=1)


@pytest.mark.parametrize("judge", ["question", "head"])
def test_other_judges_are_not_predicted(judge: str):
    found = trial(judge)
    if judge == "question":
        for key in ("draft_logprobs", "draft_entropies"):
            for one in found.drafts.answers:
                one.parse["trace"][0].pop(key, None)
    assert found.predicted is None
    assert len(found.forecasts) == (1 if judge == "question" else 3)
    assert "not predicted" in next(said(found, models()))


def test_the_result_in_words():
    shown = sections(trial(), models(), ["size ratio: 2 to 1"], {"date": "today"})
    gain, drafting, verifying, lost, advice, command = shown[""]
    assert gain.startswith("Measured as it is served: 4.00x plain decoding, 12.0 tokens per round")
    assert "predicted from drafts: 4.46x, 12.0." in gain
    assert drafting.startswith("Drafting takes 32% of the time: a draft token costs 0.05 of a tok")
    assert verifying == "Verifying takes 20%: a pass of 17 rows costs 0.5 of them."
    assert lost == "31% of the draft tokens are refused, or behind a refused one."
    assert advice.startswith("Set --parse-verification token --parse-draft-tokens ")
    assert advice.endswith("x predicted, exact.")
    assert command.startswith("python -m sglang.launch_server --device cpu")
    assert command.endswith(advice.partition(": ")[0].removeprefix("Set "))
    assert "--speculative-draft-model-path small" in command
    assert shown["From the doctor"][0].text == "size ratio: 2 to 1"
    (grid,) = shown["What each judge would give"]
    assert [row[0] for row in grid.rows] == ["token mode", "likelihood 0.5", "likelihood 0.2"]
    assert len(grid.headings) == len(grid.rows[0]) == 3 + len(LENGTHS)


def test_nothing_pays():
    slow = trial()
    slow = replace(slow, plain=run_of(answer(wall_ms=40.0)))
    assert [*said(slow, models())][-1].startswith("No judge is expected to pay")
    assert content(slow, {})["advised"] is None


def test_answers_without_a_round():
    """The only timed answer is one token long; what judges would give is known all the same."""
    found = replace(trial(), parse=run_of(answer(wall_ms=8.0, tokens=1)))
    assert (found.per_round, found.predicted, found.costs.draft_ms) == (None, None, 1)
    gain, advice, _ = said(found, models())
    assert gain.endswith(
        "2.50x plain decoding, in answers without a round of drafting: ask for longer ones."
    )
    assert advice.startswith("Set --parse-verification token")
    shown = content(found, {})
    assert (shown["measured"], shown["predicted"]) == ({"speedup": 2.5, "identical": 0}, None)


def test_results_are_plain_data():
    found = content(trial(), {"date": "today"})
    assert json.loads(json.dumps(found)) == found
    assert found["predicted"]["tokens"] == found["measured"]["tokens"] == 12
    assert found["advised"][:2] == ["--parse-verification", "token"]


# -- as it is served ------------------------------------------------------------------------


def served(*parse: Answer, concurrency: int = 1) -> Answered:
    plain = [answer(wall_ms=400.0), answer(wall_ms=200.0), answer(wall_ms=100.0)]
    return Answered(run_of(*parse), run_of(*plain), concurrency)


def test_the_speedup_of_requests_together():
    """Each wait for the longest of those that were asked with them."""
    ours = [answer(record([A] * 8, [A] * 8, [0.9] * 8)), answer(wall_ms=100), answer(wall_ms=100)]
    one, two = served(*ours), served(*ours, concurrency=2)
    assert (one.speedup, two.speedup) == (700 / 300, 500 / 200)
    assert one.speedups == two.speedups == [1, 2, 4]
    assert (one.num_same, one.reason) == (3, "")
    # What the plain target had no time for is left out.
    assert replace(one, plain=run_of(answer(wall_ms=400.0))).speedup == 4


def test_what_is_said_without_a_draft_model():
    some = settings("--target", "large", "--flags", CPU_FLAGS).models
    drafted = served(*[answer(record([A] * 8, [A] * 8, [0.9] * 8))] * 3)
    gain, same, command = said(drafted, some)
    assert gain.startswith("Measured as it is served: 2.33x plain decoding, 3 answers; 1.00x to 4.")
    assert same.startswith("3 of them are the plain target's")
    assert command.endswith(
        "--model-path large --speculative-algorithm PARSE --parse-judge likelihood"
    )
    shown = sections(drafted, some, [], {})
    (grid,) = shown["Where drafts came from"]
    assert grid.rows == [["model", "3", "24", "12"]]
    assert "What each judge would give" not in shown
    found = content(drafted, {})
    assert found["sources"]["model"]["accepted_tokens"] == 12
    assert "forecasts" not in found


def test_what_is_said_where_nothing_drafts():
    slow = served(*[answer(wall_ms=300.0)] * 3, concurrency=2)
    gain, why, _, advice = said(slow, models())
    assert "0.83x plain decoding, 3 answers, 2 at a time" in gain
    assert why == "Nothing was drafted: nothing fits."
    assert advice.startswith("It does not pay on these prompts")


# -- settings and prompts -------------------------------------------------------------------


def settings(*words: str) -> TrialSettings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return TrialSettings.read(parser.parse_args(words))


def models() -> Any:
    return settings("--target", "large", "--draft", "small", "--flags", CPU_FLAGS).models


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no server for parse, plain; fix: give --target"),
        (("--url", "parse=http://h:1"), "no server for plain; fix: give --target, or --url of"),
        (("--target", "t", "--url", "eagle3=http://h:1"), "names eagle3; use plain=URL or parse="),
        (("--target", "t", "--url", "x"), "use NAME=http://host:port"),
    ],
)
def test_settings_that_cannot_be(words: Sequence[str], message: str):
    with pytest.raises(BenchError, match=message):
        settings(*words)


def test_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sglang_parse.trial.settings.has_gpu", lambda: False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "config.json").write_text("{}")
    parse, plain = settings("--target", str(tmp_path), "--draft", str(tmp_path)).specs()
    assert parse.flags[-2:] == ("--parse-judge", "likelihood")
    assert plain.flags == ("--model-path", str(tmp_path))
    assert plain.common == tuple(CPU_FLAGS.split())
    assert plain.environment.keys() == {"OMP_NUM_THREADS"}
    head = settings("--target", str(tmp_path), "--eagle3", str(tmp_path)).specs()[0]
    assert (head.name, "--parse-eagle3-path" in head.flags) == ("parse", True)
    own = settings("--target", str(tmp_path), "--mtp", "own")
    assert own.specs()[0].flags[-2:] == ("--parse-mtp", "own")
    assert not own.predicts
    (parse,) = settings("--target", "org/name", "--url", "plain=http://h:1").specs()
    assert "--speculative-draft-model-path" not in parse.flags
    assert parse.environment["HF_HUB_OFFLINE"] == "0"
    for words in (("--eagle3", "org/head"), ("--mtp", "org/name")):
        (parse, _) = settings("--target", str(tmp_path), *words).specs()
        assert parse.environment["HF_HUB_OFFLINE"] == "0"
    assert "HF_HUB_OFFLINE" not in own.specs()[0].environment
    with pytest.raises(BenchError, match="holds no model"):
        settings("--target", str(tmp_path / "none")).specs()


def test_prompts(tmp_path: Path):
    def asked(content: str | None, *more: str) -> list[str]:
        words = ["--target", "t", "--requests", "20", *more]
        if content is not None:
            (tmp_path / "prompts").write_text(content)
            words += ["--prompts", str(tmp_path / "prompts")]
        return [item.text for item in program.items_for(settings(*words), "t")]

    assert asked("Say a.\n\nWhy?\n") == ["Say a.", "Why?"]
    assert asked('{"prompt": "Say a."}\n"Why?"\n') == ["Say a.", "Why?"]
    assert asked(None) == [f"{task}\n\n{text}" for task, text in _ON_TEXTS]
    assert asked(None, "--eagle3", "head") == asked(None, "--draft", "d") == [*_EVERYDAY]
    assert len({*_EVERYDAY}) == 20
    with pytest.raises(BenchError, match="is empty"):
        asked("")


# -- the program ----------------------------------------------------------------------------


def doctor_says(monkeypatch: pytest.MonkeyPatch, *findings: tuple[str, str, str, str]) -> None:
    rows = [dict(zip(("check", "status", "found", "fix"), one, strict=True)) for one in findings]
    done = SimpleNamespace(stdout=json.dumps({"findings": rows}), stderr="", returncode=1)
    monkeypatch.setattr(program.subprocess, "run", lambda *_, **__: done)


def test_a_pair_that_does_not_fit_ends_with_the_doctor_s_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(cli, "end_on_sigterm", lambda: None)
    fails = ("tokenizers", "fails", "they differ", "use a draft model of the same family")
    doctor_says(monkeypatch, ("models", "ok", "fine", ""), fails)
    words = ["--target", "org/t", "--draft", "org/d", "--output", str(tmp_path)]
    assert cli.main(["try", *words, "--flags", "--device cpu"]) == 1
    assert "tokenizers: they differ. Fix: use a draft model" in capsys.readouterr().err


def test_the_doctor_s_warnings(monkeypatch: pytest.MonkeyPatch):
    doctor_says(monkeypatch, ("size ratio", "warning", "2 to 1", "a smaller draft"))
    (spec, _) = settings("--target", "org/t", "--flags", "--device cpu").specs()
    assert program.check_start(spec, lambda _: None) == ["size ratio: 2 to 1. Fix: a smaller draft"]
    broken = SimpleNamespace(stdout="", stderr="no such module", returncode=1)
    monkeypatch.setattr(program.subprocess, "run", lambda *_, **__: broken)
    with pytest.raises(BenchError, match="the doctor ended with 1: no such module"):
        program.check_start(spec, lambda _: None)


class FakeServers:
    """Answers as those of ``trial``; remembers options and lengths."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, dict, int]] = []
        self.trial = trial()
        self.most_at_once = 0
        monkeypatch.setattr(program, "ask", self.ask)
        monkeypatch.setattr(program.httpx, "post", lambda *_, **__: None)
        monkeypatch.setattr(program, "decode_there", lambda _, ids: [TEXTS[one] for (one,) in ids])
        monkeypatch.setattr("sglang_parse.client.servers.Remote.check_alive", lambda _: None)
        monkeypatch.setattr("sglang_parse.client.servers.Remote.model_path", lambda _: "t")

    def ask(
        self, server: Any, _: Any, indices: Sequence[int], *, concurrency: int, asking: Any
    ) -> BenchRun:
        self.most_at_once = max(self.most_at_once, min(concurrency, len(indices)))
        self.asked.append((server.name, dict(asking.parse), asking.max_tokens))
        run = self.trial.plain
        if asking.parse.get("enabled") is False:
            meta = {"parse": [{"decode_ms": 150.0}]}
            run = run_of(Answer(0, "", 16, 160.0, meta))
        elif asking.parse:
            run = self.trial.drafts if asking.parse.get("threshold") == 0 else self.trial.parse
        return BenchRun(Variant(server.name), -1, 1, 1.0, run.answers[:1] * len(indices))


def test_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    servers = FakeServers(monkeypatch)
    urls = ("--url", "plain=http://h:1", "--url", "parse=http://h:2")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = (*urls, "--requests", "3", "--output", str(tmp_path))
    with (tmp_path / "printed").open("w") as file:
        assert program.run(parser.parse_args(words), Console(file=file, width=140)) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["measured"]["speedup"] == 4
    page = (tmp_path / "report.html").read_text()
    printed = (tmp_path / "printed").read_text()
    for text in ("What each judge would give", "Set --parse-verification token"):
        assert text in page
        assert text in printed
    # Each time a short answer first.
    whole = [parse for _, parse, _ in servers.asked if parse.get("threshold") == 0]
    assert whole == [{"threshold": 0.0, "strict": "none", "trace": True, "drafting": "always"}] * 4
    assert [name for name, *_ in servers.asked] == ["plain"] * 2 + ["parse"] * 8 + ["plain"] * 4


def test_several_prompts_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    servers = FakeServers(monkeypatch)
    urls = ("--url", "plain=http://h:1", "--url", "parse=http://h:2")
    found = settings(*urls, "--concurrency", "4", "--requests", "6")
    with program.Pool([], tmp_path, remotes=found.remotes) as pool:
        measured = program.measure(found, pool, lambda _: None)
    assert (servers.most_at_once, len(measured.pairs)) == (4, 6)
    assert not isinstance(measured, Trial)  # nothing is predicted for several
    assert not any({"drafting", "trace", "threshold"} & {*parse} for _, parse, _ in servers.asked)


def test_a_server_without_a_draft_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    servers = FakeServers(monkeypatch)
    servers.trial = replace(servers.trial, drafts=run_of(answer()), parse=run_of(answer()))
    urls, lines = ("--url", "plain=http://h:1", "--url", "parse=http://h:2"), []
    with program.Pool([], tmp_path, remotes=settings(*urls).remotes) as pool:
        measured = program.measure(settings(*urls), pool, lines.append)
    assert not isinstance(measured, Trial)
    assert program.NO_DRAFTS in lines


def test_answers_are_short_where_the_target_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """At 10 ms a token and 4 seconds, four answers of a quarter of them."""
    servers = FakeServers(monkeypatch)
    urls = ("--url", "plain=http://h:1", "--url", "parse=http://h:2")
    found = settings(*urls, "--budget", "4", "--requests", "1")
    with program.Pool([], tmp_path, remotes=found.remotes) as pool:
        program.measure(found, pool, lambda _: None)
    assert {most for _, _, most in servers.asked} == {16, 25}
