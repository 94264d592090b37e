"""Checks of a running server: its settings, its verdicts and its speedup.

The server answers a few prompts with PARSE and without it, one at a time. Notation as in
``client.figures``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import httpx

from sglang_parse.algorithm import NAME
from sglang_parse.client.ask import Asking, ask
from sglang_parse.client.figures import limit_of
from sglang_parse.client.prompts import prompts_for
from sglang_parse.client.records import BenchError, BenchRun, Item
from sglang_parse.client.servers import Remote
from sglang_parse.core.question import LOW_VERDICT_MASS
from sglang_parse.doctor import start
from sglang_parse.doctor.finding import FAILS, NOT_CHECKED, WARNING, Finding, Problem, run_check
from sglang_parse.doctor.settings import DoctorSettings
from sglang_parse.startup import compat

MODEL = "default"
LOW_ACCEPT_RATIO = 0.2
"""Accepted / drafted tokens below which most of the drafting is wasted."""
DRAFT_CHECKS = ("verdict mass", "acceptance", "speedup")


def findings(settings: DoctorSettings) -> list[Finding]:
    """Checks the server at ``settings.url``."""
    server = Remote("the server", settings.url.rstrip("/"))
    try:
        info = _server_info(server)
    except BenchError as error:
        fix = "give the URL of a running server, without a path"
        return [Finding("server", FAILS, str(error), fix)]
    found = [
        run_check("server", partial(version, info)),
        run_check("PARSE", partial(is_parse, info)),
    ]
    if info.get("speculative_algorithm") != NAME:
        return found
    found += [run_check("KV pool", partial(pool, info)), *_check_start(info)]
    return [*found, *_Served(server, settings, info).findings()]


def _server_info(server: Remote) -> dict[str, Any]:
    server.check_alive()
    try:
        return httpx.get(f"{server.url}/server_info", timeout=60).raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        raise BenchError(f"{server.url}/server_info does not answer: {error!r}") from error


def _check_start(info: dict[str, Any]) -> list[Finding]:
    """Checks the flags that the server was started with, if its models are on this machine."""
    command = (info.get("launch_command") or "").split()
    if not Path(info["model_path"]).is_dir() or "--model-path" not in command:
        why = "the server's models are not on this machine, or its command is unknown"
        return [Finding("models", NOT_CHECKED, why)]
    return start.findings(command)


def version(info: dict[str, Any]) -> str:
    """Raises: Problem, for another version of SGLang."""
    found, wanted = info.get("version"), compat.pinned_version()
    if found != wanted:
        raise Problem(f"it runs SGLang {found}, this PARSE is for {wanted}", "update one", WARNING)
    return f"it answers; SGLang {found}"


def is_parse(info: dict[str, Any]) -> str:
    """Raises: Problem, for a server without PARSE."""
    value = info.get("speculative_algorithm")
    if value != NAME:
        fix = f"start it with --speculative-algorithm {NAME}"
        raise Problem(f"its --speculative-algorithm is {value!r}", fix)
    return f"target {info['model_path']}, draft {info['speculative_draft_model_path']}"


def pool(info: dict[str, Any]) -> str:
    """Raises: Problem, if one request may be longer than the KV pool."""
    slots, longest = info["max_total_num_tokens"], info["max_req_input_len"]
    found = f"{slots:,} tokens of KV; a prompt may have {longest:,}"
    if slots < longest:
        raise Problem(found, "a smaller --context-length, or a larger pool", WARNING)
    return found


@dataclass
class _Served:
    """Answers of a server; ``info`` is its /server_info."""

    server: Remote
    settings: DoctorSettings
    info: dict[str, Any]

    def findings(self) -> Iterator[Finding]:
        try:
            has_drafts = any(answer.parse["rounds"] for answer in self.with_parse.answers)
        except BenchError as error:
            yield Finding("answers", FAILS, str(error), "see the server's log")
            return
        yield run_check("answers", self.answers)
        if not has_drafts:
            yield from (Finding(name, NOT_CHECKED, "no drafts") for name in DRAFT_CHECKS)
            return
        checks = (self.verdict_mass, self.acceptance, self.speedup)
        yield from map(run_check, DRAFT_CHECKS, checks)

    @cached_property
    def items(self) -> list[Item]:
        """The prompts. Raises: BenchError."""
        settings = self.settings
        return prompts_for(settings.prompts, self.info["model_path"], settings.requests)

    @cached_property
    def with_parse(self) -> BenchRun:
        """Answers with PARSE and their traces. Raises: BenchError."""
        return self._ask({"trace": True})

    @cached_property
    def plain(self) -> BenchRun:
        """Answers to the same prompts without PARSE. Raises: BenchError."""
        return self._ask({"enabled": False})

    def _ask(self, options: dict[str, Any]) -> BenchRun:
        asking = Asking(
            model=MODEL, max_tokens=self.settings.max_tokens, custom_params={"parse": options}
        )
        ask(self.server, self.items, [0], asking=asking)  # may compile kernels
        return ask(self.server, self.items, range(len(self.items)), asking=asking)

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """Records of all traces."""
        return [record for answer in self.with_parse.answers for record in answer.parse["trace"]]

    def answers(self) -> str:
        """Raises: Problem, on a fallback to plain decoding or without drafts."""
        infos = [answer.parse for answer in self.with_parse.answers]
        plain = [info["reason"] for info in infos if info["mode"] == "plain"]
        if plain:
            raise Problem(
                f"plain decoding served {len(plain)} of {len(infos)} answers: {plain[0]}",
                "see 'Fallback to plain decoding' in the documentation",
                WARNING,
            )
        if simulated := infos[0].get("simulated"):
            found = f"acceptance is simulated ({simulated:g}): answers are meaningless"
            raise Problem(found, "unset SGLANG_PARSE_SIMULATE_ACCEPTANCE", WARNING)
        rounds, skipped = (sum(info[key] for info in infos) for key in ("rounds", "skipped_drafts"))
        if not rounds:
            raise Problem(
                f"no drafts for {len(infos)} prompts: drafting was suspended {skipped} times, as "
                "no speedup was expected",
                "start it with --parse-drafting always to measure drafts",
                WARNING,
            )
        return f"{len(infos)} prompts, {rounds} drafts verified, {skipped} suspended"

    def verdict_mass(self) -> str:
        """Raises: Problem, if the target answers with tokens other than the verdict tokens."""
        values = [mass for record in self.rounds for mass in record["verdict_mass"]]
        if not values:
            return "no questions (--parse-verification token)"
        found = (
            f"mean {fmean(values):.3f}, smallest {min(values):.3f} of the probability, "
            f"of {len(values)} verdicts"
        )
        if fmean(values) < LOW_VERDICT_MASS:
            raise Problem(
                f"{found}: they mean little",
                "give --parse-question a wording that this model answers with the verdict tokens, "
                "or other tokens; then take --parse-threshold from its own verdicts",
                WARNING,
            )
        return found

    def acceptance(self) -> str:
        """Raises: Problem, if few draft tokens are accepted."""
        accepted = self.with_parse.per_request("accepted_tokens")
        ratio = accepted / self.with_parse.per_request("drafted_tokens")
        of_output = self.with_parse.per_token("accepted_tokens")
        found = (
            f"{ratio:.0%} of draft tokens accepted, {of_output:.0%} of the output; "
            f"{self._verdicts()}"
        )
        if ratio < LOW_ACCEPT_RATIO:
            raise Problem(
                found,
                "see which prefixes are rejected with sglang-parse explain: a better draft model, "
                "another --parse-threshold, or another question",
                WARNING,
            )
        return found

    def _verdicts(self) -> str:
        verdicts = [value for record in self.rounds for value in record["verdicts"]]
        if not verdicts:
            return "token-level verification"
        thresholds = sorted({record["threshold"] for record in self.rounds})
        return (
            f"verdicts {min(verdicts):.4f} to {max(verdicts):.4f}, median {median(verdicts):.4f}; "
            f"threshold {', '.join(f'{value:g}' for value in thresholds)}"
        )

    def speedup(self) -> str:
        """Raises: Problem, if PARSE is slower than plain decoding."""
        run, t = self.with_parse, _ms_per_token(self.plain)
        r, v = run.per_token("draft_ms") / t, run.per_token("verify_ms") / t
        a = run.per_token("accepted_tokens") + run.per_token("matched_tokens")
        speedup = t / _ms_per_token(run)
        cost, stage, fix = max(
            (r, "drafting", "a smaller or faster draft model"),
            (
                v,
                "verify",
                "fewer prefixes (--parse-max-prefixes), a shorter question, longer drafts",
            ),
            (1 - a, "decode", "a better draft model, or a threshold from this target's verdicts"),
        )
        found = (
            f"{speedup:.2f}x over plain decoding, one request at a time; at most "
            f"{limit_of(r, v, a):.2f}x = 1 / (r {r:.2f} + v {v:.2f} + 1 - a {a:.2f}). "
            f"Largest cost: {stage} ({cost:.2f}; {fix})"
        )
        if speedup < 1:
            raise Problem(found, fix, WARNING)
        return found


def _ms_per_token(run: BenchRun) -> float:
    if not run.output_tokens:
        raise BenchError("the answers have no tokens")
    return sum(answer.wall_ms for answer in run.answers) / run.output_tokens
