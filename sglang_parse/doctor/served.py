"""Checks of a running server: its settings, its verdicts and its speedup.

The server answers prompts with PARSE and without it, one at a time, until the budget is spent.
Notation as in ``client.figures``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import httpx

from sglang_parse.algorithm import NAME
from sglang_parse.client.ask import REQUEST_LIMIT_S, Asking, ask
from sglang_parse.client.figures import costs_of, limit_of
from sglang_parse.client.prompts import prompts_for
from sglang_parse.client.records import Answer, BenchError, BenchRun, Item, Variant
from sglang_parse.client.servers import Remote
from sglang_parse.core import phases
from sglang_parse.core.question import LOW_VERDICT_MASS
from sglang_parse.core.request import NAN_CAUSE, NAN_FIX, NAN_IN_TARGET
from sglang_parse.core.selection import contradicts_target, matching_tokens
from sglang_parse.doctor import command
from sglang_parse.doctor.finding import WARNING, Check, Problem, not_checked, simulated, warn_if
from sglang_parse.doctor.settings import DoctorSettings
from sglang_parse.doctor.start import Start
from sglang_parse.startup import compat

MODEL = "default"
LOW_ACCEPT_RATIO = 0.2
"""Accepted / drafted tokens below which most of the drafting is wasted."""
MIN_TOKENS = 32
"""Length of the first answers, by which that of the others is chosen."""
TRACED, FORCED, OFF = {"trace": True}, {"trace": True, "drafting": "always"}, {"enabled": False}
"""Options of a prompt's requests; ``FORCED`` where nothing was drafted."""
NAMES = ("answers", "verdict mass", "matched prefixes", "refusals", "acceptance", "speedup")
"""Checks by answers, by methods of these names."""
ANOTHER_JUDGE = (
    "--parse-judge likelihood, or a head of sglang-parse train-judge; another --parse-question; "
    "a threshold from sglang-parse calibrate; or --parse-verification token"
)
CHEAP_REFUSALS = (
    "leave out --parse-on-reject and --parse-segment, if they are set; a lower --parse-threshold; "
    "or --parse-verification token"
)


@dataclass
class Served:
    """A running server and its answers.

    Attributes:
        note: reports progress.
        info: its /server_info; empty until it has been read.
        with_parse: answers as the server gives them, with traces.
        drafted: the same, or where nothing was drafted, answers that were asked to be drafted.
        plain: answers to the same prompts without PARSE.
        ended: Ctrl-C or SIGTERM, if it ended the prompts.
    """

    settings: DoctorSettings
    note: Callable[[str], None] = lambda _: None
    info: dict[str, Any] = field(default_factory=dict)
    with_parse: list[Answer] = field(default_factory=list)
    drafted: list[Answer] = field(default_factory=list)
    plain: list[Answer] = field(default_factory=list)
    ended: BaseException | None = None

    def __post_init__(self) -> None:
        self.server = Remote("the server", self.settings.url.rstrip("/"))
        self.deadline = time.monotonic() + self.settings.budget

    def checks(self) -> Iterator[Check]:
        """Yields each check when the last one has been made."""
        yield "server", self.read_info
        if self.info:
            yield "PARSE", self.is_parse
        if self.info.get("speculative_algorithm") != NAME:
            return
        yield from self.start_checks()
        for name in NAMES:
            yield name, getattr(self, name.replace(" ", "_"))
        if self.ended is not None:
            raise self.ended

    def read_info(self) -> str:
        url = f"{self.server.url}/server_info"
        try:
            self.server.check_alive()
            self.info = httpx.get(url, timeout=60).raise_for_status().json()
        except (BenchError, httpx.HTTPError, ValueError) as error:
            fix = "give the URL of a running server, without a path"
            raise Problem(f"{url}: {error}", fix) from error
        found, wanted = self.info.get("version"), compat.pinned_version()
        if found != wanted:
            why = f"it runs SGLang {found}, this PARSE is for {wanted}"
            raise Problem(why, "update one", WARNING)
        return f"it answers; SGLang {found}"

    def is_parse(self) -> str:
        value = self.info.get("speculative_algorithm")
        if value != NAME:
            fix = f"start it with --speculative-algorithm {NAME}"
            raise Problem(f"its --speculative-algorithm is {value!r}", fix)
        found = "target {model_path}, draft {speculative_draft_model_path}"
        return f"{found}; KV pool of {{max_total_num_tokens:,}} tokens".format_map(self.info)

    def start_checks(self) -> Iterator[Check]:
        """Checks of the flags it was started with, if its models are on this machine."""
        words = command.words_of(self.info.get("launch_command") or "", self.info)
        if Path(self.info["model_path"]).is_dir() and words[0].startswith("--"):
            yield from Start(words, is_running=True).checks()
        else:
            why = "the server's models are not on this machine, or its command line is unknown"
            yield "flags", partial(not_checked, why)

    # -- answers --------------------------------------------------------------------

    def answers(self) -> str:
        """Asks the prompts until the budget is spent or somebody ends the doctor."""
        settings = self.settings
        items = prompts_for(settings.prompts, self.info["model_path"], settings.requests)
        missing = ""
        try:
            self._ask_all(items)
        except (KeyboardInterrupt, SystemExit) as ended:
            self.ended, missing = ended, "then it was ended"
        except BenchError as error:
            # An error quotes another, which escapes the apostrophe.
            if NAN_IN_TARGET.partition("'")[0] in str(error):
                found = f"the target answers NaN: {NAN_CAUSE}"
                raise Problem(f"{found} ({error})", NAN_FIX) from error
            if self._left_s > 0:
                raise
        if len(self.plain) < len(items):
            missing = missing or f"then the budget of {settings.budget} s was spent (--budget)"
        count = f"{len(self.with_parse)} of {len(items)} prompts answered"
        return self.described(f"{count}, {missing}" if missing else count)

    @property
    def _left_s(self) -> float:
        return self.deadline - time.monotonic()

    def _ask_all(self, items: list[Item]) -> None:
        tokens, longest = min(MIN_TOKENS, self.settings.max_tokens), self.settings.max_tokens
        for options in (TRACED, OFF):
            self._answer(items, 0, options, max(1, tokens // 2))  # may compile kernels
        expected_s = 0.0
        for number in range(len(items)):
            if self._left_s < expected_s:
                return
            started = time.monotonic()
            self._ask_one(items, number, tokens)
            self.note(f"{number + 1} of {len(items)} prompts answered, with PARSE and without")
            if not number:
                # Two more fit in. Where all drafts are rejected, time grows as the length squared.
                took = max(1e-3, time.monotonic() - started)
                longer = math.sqrt(max(0.0, self._left_s) / (2 * took))
                longer = min(max(1.0, longer), longest / tokens)
                tokens, expected_s = int(tokens * longer), took * longer**2

    def _ask_one(self, items: list[Item], number: int, tokens: int) -> None:
        answer = self._answer(items, number, TRACED, tokens)
        self.with_parse.append(answer)
        if answer.parse["mode"] == "parse" and not answer.parse["rounds"]:
            answer = self._answer(items, number, FORCED, tokens)
        if answer.parse.get("rounds"):
            self.drafted.append(answer)
        self.plain.append(self._answer(items, number, OFF, tokens))

    def _answer(
        self, items: list[Item], number: int, options: dict[str, Any], max_tokens: int
    ) -> Answer:
        asking = Asking(
            model=MODEL,
            max_tokens=max_tokens,
            custom_params={"parse": options},
            limit_s=min(REQUEST_LIMIT_S, max(1.0, self._left_s)),
        )
        (answer,) = ask(self.server, items, [number], asking=asking).answers
        return answer

    def described(self, count: str) -> str:
        infos = [answer.parse for answer in self.with_parse]
        if not infos:
            not_checked(count)
        plain = [info["reason"] for info in infos if info["mode"] == "plain"]
        if plain:
            found = f"{count}; plain decoding served {len(plain)} of {len(infos)}: {plain[0]}"
            fix = "see 'Fallback to plain decoding' in the documentation"
            raise Problem(found, fix, WARNING)
        if fraction := infos[0].get("simulated"):
            simulated(fraction)
        rounds, skipped = (sum(info[key] for info in infos) for key in ("rounds", "skipped_drafts"))
        if not rounds:
            reason = infos[-1].get("reason") or f"drafting was suspended {skipped} times"
            fix = "see below, where these requests asked for drafts all the same"
            raise Problem(f"{count}; nothing was drafted: {reason}", fix, WARNING)
        return f"{count}; {rounds} drafts verified, {skipped} suspended"

    # -- drafts ---------------------------------------------------------------------

    @property
    def run(self) -> BenchRun:
        """The drafted answers. Raises: Problem, without any."""
        if not self.drafted:
            not_checked("no drafts")
        return BenchRun(Variant("the server"), -1, 1, 1.0, tuple(self.drafted))

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """Records of their traces."""
        return [record for answer in self.run.answers for record in answer.parse["trace"]]

    @property
    def _masses(self) -> list[float]:
        """Of all verdicts by a question."""
        masses = (mass for record in self.rounds for mass in record["verdict_mass"])
        return [mass for mass in masses if mass is not None]

    def verdict_mass(self) -> str:
        """A target may answer with other tokens than the verdict tokens."""
        values = self._masses
        if not values:
            has_verdicts = any(record["verdicts"] for record in self.rounds)
            return f"no questions: {self._judge_name if has_verdicts else 'token mode'}"
        found = (
            f"mean {fmean(values):.3f}, smallest {min(values):.3f} of the probability, "
            f"of {len(values)} verdicts"
        )
        fix = (
            "give --parse-question a wording that this model answers with the verdict tokens, "
            "or other tokens; then take --parse-threshold from its own verdicts"
        )
        is_low = fmean(values) < LOW_VERDICT_MASS
        return warn_if(is_low, f"{found}: they mean little" if is_low else found, fix)

    def matched_prefixes(self) -> str:
        matched, rejected = self._matched()
        if not matched:
            return "the target would have written no whole prefix itself, or nothing was asked"
        found = f"{rejected} of {matched} prefixes that the target would have written are rejected"
        if contradicts_target(matched, rejected):
            found += ": the target would have written what the judge refuses, so the "
            found += f"{self._judge_name} does not work for this model"
            raise Problem(found, ANOTHER_JUDGE, WARNING)
        return found

    def refusals(self) -> str:
        """Settings may make a refused draft so expensive that token mode is faster with the same
        drafts: they are compared by output tokens per target forward."""
        rounds, answers = self.rounds, self.run.answers
        refused = sum(record["accepted_len"] < _num_verified(record) for record in rounds)
        output = sum(record["accepted_len"] + len(record["bonus_token_ids"]) for record in rounds)
        decoded = sum(a.output_tokens - 1 - a.parse["skipped_drafts"] for a in answers) - output
        steps = max(0, decoded)
        matched = sum(
            matching_tokens(record["draft_token_ids"], record["target_token_ids"])
            for record in rounds
        )
        ours = (output + steps) / (len(rounds) + steps)
        exact = matched / len(rounds) + 1
        found = f"{ours:.1f} tokens per target forward; token mode: {exact:.1f} with these drafts"
        if refused:
            every = (output + steps) / refused
            found += f"; one refusal in {every:.0f} tokens, {steps / refused:.1f} decode steps each"
        return warn_if(ours < exact, found, CHEAP_REFUSALS)

    @property
    def _judge_name(self) -> str:
        return str(self.run.answers[0].parse.get("judge", "question"))

    def _matched(self) -> list[int]:
        """Counts prefixes that the target would have written itself, and the rejected ones."""
        keys = ("matched_prefixes", "rejected_matched_prefixes")
        return [sum(answer.parse[key] for answer in self.run.answers) for key in keys]

    @property
    def _accept_fix(self) -> str:
        """What would make more draft tokens accepted, by the evidence."""
        matched, rejected = self._matched()
        if not matched:
            return "a better draft model: see what it writes with sglang-parse explain"
        if contradicts_target(matched, rejected):
            return ANOTHER_JUDGE
        rejections = "see which prefixes are rejected with sglang-parse explain"
        return f"another --parse-threshold, or another --parse-judge: {rejections}"

    def acceptance(self) -> str:
        run, verdicts = self.run, [value for record in self.rounds for value in record["verdicts"]]
        ratio = run.per_request("accepted_tokens") / run.per_request("drafted_tokens")
        found = (
            f"{ratio:.0%} of draft tokens accepted, {run.per_token('accepted_tokens'):.0%} of the "
            "output; "
        )
        if sources := self._by_source():
            found += f"{sources}; "
        if verdicts:
            thresholds = sorted({record["threshold"] for record in self.rounds})
            found += (
                f"verdicts {min(verdicts):.4f} to {max(verdicts):.4f}, median "
                f"{median(verdicts):.4f}; threshold {', '.join(map('{:g}'.format, thresholds))}"
            )
        else:
            found += "token-level verification"
        return warn_if(ratio < LOW_ACCEPT_RATIO, found, self._accept_fix)

    def _by_source(self) -> str:
        """Accepted tokens of each source of drafts, where there are others than the draft model."""
        found: dict[str, list[int]] = {}
        for answer in self.run.answers:
            for source, counts in answer.parse.get("sources", {}).items():
                total = found.setdefault(source, [0, 0])
                total[0] += counts["accepted_tokens"]
                total[1] += counts["drafted_tokens"]
        if not found.keys() - {phases.MODEL}:
            return ""
        return ", ".join(f"{source} {part} of {all_}" for source, (part, all_) in found.items())

    def speedup(self) -> str:
        run = self.run
        if not self.plain:
            not_checked("no prompt was answered without PARSE")
        t = _ms_per_token(self.plain)
        r, v, a = costs_of(run, t)
        speedup = t / _ms_per_token(self.with_parse[: len(self.plain)])
        shorter = "fewer prefixes (--parse-max-prefixes), a shorter question, longer drafts"
        cost, stage, fix = max(
            (r, "drafting", "a smaller or faster draft model"),
            (v, "verify", shorter if self._masses else "longer drafts"),
            (1 - a, "decode", self._accept_fix),
        )
        found = (
            f"{speedup:.2f}x over plain decoding, one request at a time; with these drafts at most "
            f"{limit_of(r, v, a):.2f}x = 1 / (r {r:.2f} + v {v:.2f} + 1 - a {a:.2f}). "
            f"Largest cost: {stage} ({cost:.2f}; {fix})"
        )
        return warn_if(speedup < 1, found, fix)


def _num_verified(record: dict[str, Any]) -> int:
    ends = record["prefix_ends"]
    return ends[-1] if ends else len(record["draft_token_ids"])


def _ms_per_token(answers: Sequence[Answer]) -> float:
    tokens = sum(answer.output_tokens for answer in answers)
    if not tokens:
        raise BenchError("the answers have no tokens")
    return sum(answer.wall_ms for answer in answers) / tokens
