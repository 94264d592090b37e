"""Checks of a running server: its settings, and what it answers.

The server answers prompts with PARSE and without it, one at a time, until the budget is spent.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from sglang_parse.algorithm import NAME
from sglang_parse.client.ask import ANY_MODEL, REQUEST_LIMIT_S, Asking, ask
from sglang_parse.client.prompts import prompts_for
from sglang_parse.client.records import Answer, BenchError, Item
from sglang_parse.client.servers import Remote
from sglang_parse.core.request import NAN_CAUSE, NAN_FIX, NAN_IN_TARGET
from sglang_parse.doctor.evidence import CHECKS, Evidence
from sglang_parse.doctor.finding import WARNING, Check, Problem, not_checked, simulated, warn_if
from sglang_parse.doctor.settings import DoctorSettings
from sglang_parse.startup import compat

MIN_TOKENS = 32
"""Length of the first answers, by which that of the others is chosen."""
TRACED, FORCED, OFF = {"trace": True}, {"trace": True, "drafting": "always"}, {"enabled": False}
"""Options of a prompt's requests; ``FORCED`` where nothing was drafted."""
GRAPHS = re.compile(r'^sglang:parse_graph_speedup\{.*graph="([^"]+)".*\} (\S+)$', re.MULTILINE)
NAMES = ("answers", *CHECKS, "CUDA graphs")
"""By methods of these names."""


@dataclass
class Served(Evidence):
    """A running server and its answers.

    Attributes:
        ended: Ctrl-C or SIGTERM, if it ended the prompts.
    """

    settings: DoctorSettings
    note: Callable[[str], None] = lambda _: None
    info: dict[str, Any] = field(default_factory=dict)
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
        for name in NAMES:
            yield name, getattr(self, name.lower().replace(" ", "_"))
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

    def cuda_graphs(self) -> str:
        """What the server's own check of them has found."""
        if not self.info.get("enable_metrics"):
            not_checked("the server was started without --enable-metrics; its log has a line each")
        page = httpx.get(f"{self.server.url}/metrics", timeout=60).raise_for_status().text
        found = {name: float(value) for name, value in GRAPHS.findall(page)}
        if not found:
            return "none of PARSE's own, as on a CPU, or no request yet"
        off = [name for name, ratio in found.items() if not ratio]
        kept = ", ".join(f"{name} {ratio:.1f}x" for name, ratio in found.items() if ratio)
        text = f"as fast as in pieces: {kept or 'none'}"
        text += f"; switched off at start: {', '.join(off)}" if off else ""
        fix = "the server's log has the figures ('no CUDA graphs'); report those that differ"
        return warn_if(bool(off), text, fix)

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
        limit_s = min(REQUEST_LIMIT_S, max(1.0, self._left_s))
        asking = Asking(ANY_MODEL, max_tokens, parse=options, limit_s=limit_s)
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
