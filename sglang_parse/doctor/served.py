"""A server that runs: is it PARSE, how does its target judge, and what does that bring?

A few prompts are answered with PARSE and without it, one at a time, by the same server. Notation as
in ``client.figures``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
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
from sglang_parse.doctor.finding import NOT_CHECKED, WARNING, Finding, Trouble, examine
from sglang_parse.doctor.settings import DoctorSettings
from sglang_parse.startup import compat

MODEL = "default"
LITTLE_KEPT = 0.2
"""Share of the judged draft tokens kept, below which most of the drafting is for nothing."""


def findings(settings: DoctorSettings) -> list[Finding]:
    """Lines about the server at ``settings.url``."""
    server = Remote("the server", settings.url.rstrip("/"))
    try:
        info = _server_info(server)
    except BenchError as error:
        fix = "give the URL of a running server, without a path"
        return [Finding("server", "fails", str(error), fix)]
    found = [examine("server", partial(version, info)), examine("PARSE", partial(is_parse, info))]
    if info.get("speculative_algorithm") != NAME:
        return found
    found += [examine("KV pool", partial(pool, info)), *_as_started(info)]
    served = _Served(server, settings, info)
    return [*found, *served.findings()]


def _server_info(server: Remote) -> dict[str, Any]:
    server.check_alive()
    try:
        return httpx.get(f"{server.url}/server_info", timeout=60).raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        raise BenchError(f"{server.url}/server_info does not answer: {error!r}") from error


def _as_started(info: dict[str, Any]) -> list[Finding]:
    """Lines about its models, where they are on this machine: from the command that started it."""
    command = (info.get("launch_command") or "").split()
    if not Path(info["model_path"]).is_dir() or "--model-path" not in command:
        why = "the server's models are not on this machine, or its command is not known"
        return [Finding("models", NOT_CHECKED, why)]
    return start.findings(command)


def version(info: dict[str, Any]) -> str:
    """Raises: Trouble, when it is not the SGLang that PARSE is for."""
    found, wanted = info.get("version"), compat.pinned_version()
    if found != wanted:
        raise Trouble(f"it runs SGLang {found}, this PARSE is for {wanted}", "update one", WARNING)
    return f"it answers; SGLang {found}"


def is_parse(info: dict[str, Any]) -> str:
    """Raises: Trouble, for a server without PARSE."""
    value = info.get("speculative_algorithm")
    if value != NAME:
        fix = f"start it with --speculative-algorithm {NAME}"
        raise Trouble(f"its --speculative-algorithm is {value!r}", fix)
    return f"target {info['model_path']}, draft {info['speculative_draft_model_path']}"


def pool(info: dict[str, Any]) -> str:
    """Raises: Trouble, when one request may be longer than the pool."""
    tokens, longest = info["max_total_num_tokens"], info["max_req_input_len"]
    found = f"{tokens:,} tokens; a prompt may have {longest:,}"
    if tokens < longest:
        raise Trouble(found, "a smaller --context-length, or a larger pool", WARNING)
    return found


@dataclass
class _Served:
    """What a server answered.

    Attributes:
        info: its /server_info.
    """

    server: Remote
    settings: DoctorSettings
    info: dict[str, Any]

    def findings(self) -> Iterator[Finding]:
        """Lines about its answers."""
        try:
            drafted = [answer for answer in self.with_parse.answers if answer.parse["rounds"]]
        except BenchError as error:
            yield Finding("answers", "fails", str(error), "see the server's log")
            return
        yield examine("answers", self.answers)
        if not drafted:
            why = "nothing was drafted"
            yield from (Finding(name, NOT_CHECKED, why) for name in JUDGED_LINES)
            return
        yield examine("verdict mass", self.mass)
        yield examine("acceptance", self.acceptance)
        yield examine("speedup", self.speedup)

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
        """The same prompts without PARSE. Raises: BenchError."""
        return self._ask({"enabled": False})

    def _ask(self, options: dict[str, Any]) -> BenchRun:
        asking = Asking(
            model=MODEL, max_tokens=self.settings.max_tokens, custom_params={"parse": options}
        )
        # The first answer of a kind may compile kernels.
        ask(self.server, self.items, [0], asking=asking)
        return ask(self.server, self.items, range(len(self.items)), asking=asking)

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """Records of all traces."""
        return [record for answer in self.with_parse.answers for record in answer.parse["trace"]]

    def answers(self) -> str:
        """Raises: Trouble, when PARSE did not serve all of them, or drafted nothing."""
        infos = [answer.parse for answer in self.with_parse.answers]
        plain = [info["reason"] for info in infos if info["mode"] == "plain"]
        if plain:
            raise Trouble(
                f"{len(plain)} of {len(infos)} answers were the plain target's: {plain[0]}",
                "see 'Served plainly' in the documents",
                WARNING,
            )
        if simulated := infos[0].get("simulated"):
            found = f"acceptance is simulated ({simulated:g}): answers mean nothing"
            raise Trouble(found, "unset SGLANG_PARSE_SIMULATE_ACCEPTANCE", WARNING)
        skipped = sum(info["skipped_drafts"] for info in infos)
        if not any(info["rounds"] for info in infos):
            raise Trouble(
                f"nothing was drafted for {len(infos)} prompts; {skipped} drafts were not begun, "
                "because they were not expected to pay",
                "start it with --parse-drafting always, to see what drafts would bring",
                WARNING,
            )
        rounds = sum(info["rounds"] for info in infos)
        return f"{len(infos)} prompts, {rounds} drafts judged, {skipped} not begun"

    def mass(self) -> str:
        """Raises: Trouble, when the target answers the question with other words."""
        values = [mass for record in self.rounds for mass in record["verdict_mass"]]
        if not values:
            return "no question is asked (--parse-verification token)"
        mean = fmean(values)
        found = f"{mean:.3f} of the probability on average, {min(values):.3f} at least"
        if mean < LOW_VERDICT_MASS:
            raise Trouble(
                f"{found}, of {len(values)} verdicts: they mean little",
                "give --parse-question a wording this model answers with the verdict words, or "
                "another pair of words; then take --parse-threshold from its own answers",
                WARNING,
            )
        return f"{found}, of {len(values)} verdicts"

    def acceptance(self) -> str:
        """Raises: Trouble, when little of the drafts is kept."""
        kept = self.with_parse.per_request("accepted_tokens")
        share = kept / self.with_parse.per_request("drafted_tokens")
        of_output = self.with_parse.per_token("accepted_tokens")
        found = f"{share:.0%} of the drafts kept, {of_output:.0%} of the output; {self._verdicts()}"
        if share < LITTLE_KEPT:
            raise Trouble(
                found,
                "see which prefixes are rejected with sglang-parse explain: a better draft, "
                "another --parse-threshold, or another question",
                WARNING,
            )
        return found

    def _verdicts(self) -> str:
        verdicts = sorted(value for record in self.rounds for value in record["verdicts"])
        if not verdicts:
            return "token by token"
        thresholds = sorted({record["threshold"] for record in self.rounds})
        middle = verdicts[len(verdicts) // 2]
        return (
            f"verdicts {verdicts[0]:.4f} to {verdicts[-1]:.4f}, half below {middle:.4f}; "
            f"threshold {', '.join(f'{value:g}' for value in thresholds)}"
        )

    def speedup(self) -> str:
        """Raises: Trouble, when PARSE is the slower one."""
        cost = _Cost.of(self.with_parse, self.plain)
        found = (
            f"{cost.measured:.2f}x over the plain target, one request at a time; at most "
            f"{cost.limit:.2f}x = 1 / (r {cost.r:.2f} + v {cost.v:.2f} + 1 - a {cost.a:.2f}). "
            f"What holds it back most: {cost.largest}"
        )
        if cost.measured < 1:
            raise Trouble(found, cost.fix, WARNING)
        return found


JUDGED_LINES = ("verdict mass", "acceptance", "speedup")


@dataclass(frozen=True, slots=True)
class _Cost:
    """Where the time of an output token goes, in the plain target's time per token.

    Attributes:
        measured: plain time per token / PARSE's.
        r, v, a: see ``client.figures``.
    """

    measured: float
    r: float
    v: float
    a: float

    @classmethod
    def of(cls, drafted: BenchRun, plain: BenchRun) -> _Cost:
        """Raises: BenchError, when the answers have no tokens."""
        t = _ms_per_token(plain)
        return cls(
            measured=t / _ms_per_token(drafted),
            r=drafted.per_token("draft_ms") / t,
            v=drafted.per_token("verify_ms") / t,
            a=drafted.per_token("accepted_tokens") + drafted.per_token("matched_tokens"),
        )

    @property
    def limit(self) -> float:
        """See ``figures.limit_of``."""
        return limit_of(self.r, self.v, self.a)

    @property
    def _shares(self) -> Sequence[tuple[float, str, str]]:
        return (
            (self.r, "drafting", "a smaller or faster draft model"),
            (
                self.v,
                "verification",
                "fewer prefixes (--parse-max-prefixes), a shorter question, longer drafts",
            ),
            (
                1 - self.a,
                "what the target writes itself",
                "a better draft, or a threshold taken from this target's own verdicts",
            ),
        )

    @property
    def largest(self) -> str:
        """The largest part of a token's time, in words."""
        part, name, fix = max(self._shares)
        return f"{name} ({part:.2f}; {fix})"

    @property
    def fix(self) -> str:
        """What would help most."""
        return max(self._shares)[2]


def _ms_per_token(leg: BenchRun) -> float:
    if not leg.output_tokens:
        raise BenchError("the answers have no tokens")
    return sum(answer.wall_ms for answer in leg.answers) / leg.output_tokens
