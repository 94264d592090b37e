"""One decision from measured prices: whether to draft, how far, judged where, in what bursts.

A round costs its draft and its pass, then what the target writes after a cut; it yields what it
emits. Running requests share iterations: those that draft make a burst, the others share one
forward of the target. Of n requests that follow one plan, each spends a share of its iterations
drafting, one being judged and the rest continuing. So the mean iteration is known, and the rate:

    tokens/ms = n * emitted / (iterations of a round * mean time of an iteration)

The plan with the highest rate is taken, if that is above the plain target's at the load there is.
Prices are what stages took lately (``prices``); what a draft is worth follows from where earlier
ones of the same threshold were cut (``cuts``), and how far the target agreed with them behind the
cut (``agreement``). Neither load, context length nor an EAGLE-3 head is modelled: all are in the
prices.

A threshold that nothing is known of begins as its neighbours stand, or with a few short drafts, one
at a time. Where drafting does not pay, one request tries it again now and then. Numbers only: the
same observations give the same decisions, on every tensor-parallel rank.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sglang_parse.core.cuts import PRIOR, Cuts, Expected, Judgement
from sglang_parse.core.limits import Limits
from sglang_parse.core.phases import RoundPlan
from sglang_parse.core.prices import Stage, StageCost, Timed
from sglang_parse.core.reading import Reading
from sglang_parse.core.recent import used

PILOT = 16
"""Draft tokens of a round that is to find out."""
PILOTS = 3
"""Rounds of an unknown threshold before drafting is given up: one bad draft says little."""
YOUNG = 32
"""Rounds of an account in which each is news."""
RENEW_EVERY = 12
"""Rounds asked for, or one for each running request, between two looks at all plans there are."""
RENEW_MS = 500.0
"""Time of stages between them: a look takes milliseconds, and requests that rest ask often."""
LOADS_PER_OCTAVE = 2
"""How finely numbers of running requests are told apart meanwhile."""
PATIENCE = 12
"""Drafts not begun while a pilot is under way, before another is sent: that one may be gone."""
RETRY_SHARE = 0.005
"""Most of the plain target's time that later trials may lose."""
EARLY = 16.0
"""How much sooner a server's first trial comes, the next ones half as much each, where drafting was
given up after few rounds: those may have compiled kernels, or found the machine busy."""
PRICE_SOON, PRICE_EVERY = 8, 256
"""Drafts after which the plain target's price is taken anew, if nothing else showed it: soon at
first, and half as often each time."""
SURE, SURE_TIMES = 1.5, 8
"""Expected speedup from which the plain target's price is wanted that many times as seldom: all
that ask meanwhile write a segment without a draft."""
WORTH, COMEBACK = 1.05, 1.1
"""Expected speedup below which drafting ends, and at which it is resumed: what is expected was 4 to
6 % more than what came of it where drafts were about even (simulated shares of 10 and 30 %)."""
NEWEST = 0.05
"""Weight of a step in the mean of what a step writes."""
MOST_FAILED = 3
"""Failures in a row that are told apart: one more makes no difference."""
MAX_ACCOUNTS = 128
"""Accounts kept, the ones used last: a client may send any threshold."""


class Pace(NamedTuple):
    """What a plan is expected to bring.

    Attributes:
        rate: output tokens per ms of all running requests together.
        silence_ms: how long a request's draft and its pass take.
    """

    rate: float
    silence_ms: float


Key = tuple[float, int]
"""Of an account: its threshold, and how many drafts in a row were good for nothing."""


def account_of(threshold: float, num_failed: int = 0) -> Key:
    return threshold, min(num_failed, MOST_FAILED)


class Shares(NamedTuple):
    """What requests do in an iteration.

    Attributes:
        active: those that make rounds; ``resting``: those that do not draft now.
        drafting, judged: the shares of its iterations that one of the former spends so; it spends
            the others continuing.
    """

    active: int
    resting: int
    drafting: float
    judged: float


@dataclass(slots=True)
class Account:
    """One threshold, for requests of which so many drafts in a row were good for nothing.

    Attributes:
        cuts: where its drafts were cut.
        best: the plan that was best when it was last asked for; None before.
        num_asked: how often one was asked for since.
        at_load: the load then, in steps by which it is told apart; ``at_rounds``: its rounds then;
            ``at_ms``: the time of stages by then.
        pilots: rounds it still needs before drafting may be given up.
        is_off: drafting did not pay when it was last asked.
        waiting: drafts not begun since a pilot was sent; None while none is under way.
        to_spend_ms: what a trial may lose by now.
    """

    cuts: Cuts
    best: RoundPlan | None = None
    num_asked: int = 0
    at_load: int = 0
    at_rounds: int = 0
    at_ms: float = 0.0
    pilots: int = PILOTS
    is_off: bool = False
    waiting: int | None = None
    to_spend_ms: float = 0.0


@dataclass(slots=True)
class Controller:
    """One per server; every tensor-parallel rank feeds its own with rank 0's times.

    Attributes:
        limits: what there is to decide.
        mode: "auto" decides; "always" drafts and "never" does not, as ``limits`` say.
        num_running: requests that run now, the one asked about included.
        planned: the plan made last; None before the first.
        speedup: what drafting was last expected to bring; None while prices are missing.
        reading: what is known of an EAGLE-3 head's.
    """

    limits: Limits = field(default_factory=Limits)
    mode: str = "auto"
    num_running: int = 1
    planned: RoundPlan | None = None
    speedup: float | None = None
    reading: Reading = field(default_factory=Reading)
    _burst_step: StageCost = field(default_factory=StageCost)
    _pass: StageCost = field(default_factory=StageCost)
    _step: StageCost = field(default_factory=StageCost)
    _host: StageCost = field(default_factory=StageCost)
    _tokens_per_step: float = 1.0
    _resting: Counter[Key | None] = field(default_factory=Counter)
    _accounts: OrderedDict[Key, Account] = field(default_factory=OrderedDict)
    _drafts_since_price: int = 0
    _price_every: int = PRICE_SOON
    _has_plain: bool = False
    _sooner: float = EARLY
    _owed_ms: float = 0.0
    _seen_ms: float = 0.0

    # -- what was seen ----------------------------------------------------------

    def saw_load(self, num_running: int, resting: Iterable[Key | None] = ()) -> None:
        """Requests that run now.

        Args:
            resting: of those that do not draft because it does not pay, their account; None of
                those that never do. They wait for others' bursts all the same.
        """
        self.num_running, self._resting = num_running, Counter(resting)

    def saw(self, iteration: Sequence[Timed]) -> None:
        """The stages of one iteration."""
        self._seen_ms += sum(timed.ms for timed in iteration)
        self._owe(sum(timed.ms for timed in iteration if timed.stage is not Stage.HOST))
        for timed in iteration:
            if timed.stage is Stage.BURST:
                self._burst_step.add(timed.size, timed.ms / max(1, timed.amount))
            elif timed.stage is Stage.PASS:
                self._pass.add(timed.size, timed.ms)
            elif timed.stage is Stage.HOST:
                self._host.add(timed.size, timed.ms)
            elif timed.stage is Stage.FILL:
                self._saw_fill(timed)
            else:
                self._saw_step(timed)

    def _saw_fill(self, timed: Timed) -> None:
        """What the draft model had to read before a trial is lost with it."""
        for key in timed.accounts:
            account = self._accounts.get(key)
            if account is not None and account.is_off:
                account.to_spend_ms -= timed.ms / len(timed.accounts)

    def saw_prefill(self, ms: float, num_read: int = 0, read_ms: float = 0.0) -> None:
        """Prompts of requests that may draft were read: others waited, and more often than among
        their like, as drafts end sooner.

        Args:
            num_read: tokens of all prompts that an EAGLE-3 head read, in ``read_ms``.
        """
        if num_read:
            self.reading.saw_cost(num_read, read_ms)
        if self._has_plain and self.limits.slowdown:
            self._owed_ms += ms

    def _owe(self, ms: float) -> None:
        """What this iteration took too long for those that never draft, the next ones make good."""
        step_ms = self._step.at(self.num_running)
        if not self._has_plain or not self.limits.slowdown or step_ms is None:
            self._owed_ms = 0.0
        else:
            self._owed_ms = max(0.0, self._owed_ms + ms - self.limits.slowdown * step_ms)

    def _saw_step(self, timed: Timed) -> None:
        self._step.add(timed.size, timed.ms)
        self._tokens_per_step += NEWEST * (timed.amount / timed.size - self._tokens_per_step)
        if self._drafts_since_price > self._price_every:
            self._price_every = min(2 * self._price_every, PRICE_EVERY)
        self._drafts_since_price = 0
        self._save_for_trials(timed.ms)

    def _save_for_trials(self, step_ms: float) -> None:
        """Those that would ask share it: one budget is for all trials together."""
        resting = (self._accounts.get(key) for key in self._resting if key is not None)
        off = [account for account in resting if account is not None and account.is_off]
        for account in off:
            sooner = self._sooner if account.cuts.rounds < YOUNG else 1.0
            account.to_spend_ms += sooner * RETRY_SHARE * step_ms / len(off)

    def saw_round(self, threshold: float, judged: Judgement, num_failed: int = 0) -> None:
        """A draft was judged; for ``num_failed`` see ``plan``."""
        account = self._account(account_of(threshold, num_failed))
        account.waiting, account.pilots = None, max(0, account.pilots - 1)
        account.cuts.add(judged, self.num_running)

    def saw_rest(self, threshold: float, num_tokens: int) -> None:
        """The target finished the segment after a cut."""
        self._account(account_of(threshold)).cuts.add_rest(num_tokens)

    @property
    def burst_tokens(self) -> int:
        """Draft tokens per iteration, at most."""
        return self.planned.burst_tokens if self.planned else self.limits.first_burst

    # -- rounds -----------------------------------------------------------------

    def plan(self, threshold: float, num_failed: int = 0) -> RoundPlan | None:
        """How a request with this threshold, about to draft, should; None: it should not.

        A pilot and a trial are promised to whoever is told of them, so ask once per draft.

        Args:
            num_failed: how many of its drafts in a row, up to the last, were good for nothing:
                requests differ.
        """
        plan = self._plan(threshold, num_failed)
        self.planned = plan or self.planned
        return plan

    def _plan(self, threshold: float, num_failed: int) -> RoundPlan | None:
        if self.mode != "auto":
            return self._whole() if self.mode == "always" else None
        if threshold > 1:
            return None  # nothing of a draft can be kept
        key = account_of(threshold, num_failed)
        account = self._account(key)
        if account.pilots == PILOTS:
            return self._pilot(account)
        if self._wants_price():
            return None
        best = self._best_lately(account, self._resting.total() - self._resting[key])
        self.speedup = best.speedup
        account.is_off = (best.speedup or 0.0) < (COMEBACK if account.is_off else WORTH)
        if not account.is_off:
            return best
        return self._pilot(account) if account.pilots else self._trial(account)

    def _wants_price(self) -> bool:
        """Whether it is time to let the plain target write a little, to see what it takes."""
        self._drafts_since_price += 1
        most = self._price_every * (SURE_TIMES if (self.speedup or 0.0) >= SURE else 1)
        return self._step.at(1) is None or self._drafts_since_price > most

    def _pilot(self, account: Account) -> RoundPlan | None:
        """One request finds out; the others wait for what it brings."""
        if account.waiting is not None and account.waiting < PATIENCE:
            account.waiting += 1
            return None
        account.waiting = 0
        return self._short()

    def _trial(self, account: Account) -> RoundPlan | None:
        """One request drafts a little all the same, for a small share of the time."""
        plan, count = self._short(), self.num_running
        expected = self._expect(account.cuts, plan.draft_tokens, plan.max_prefixes)
        # All wait while one request drafts; it saves its share of the steps for what it emits.
        loss = expected.drafted * (self._burst_step.at(1) or 0.0)
        loss += self._pass.at(self._rows(expected)) or 0.0
        emitted = expected.kept + expected.own
        emitted += expected.cut * account.cuts.behind(expected).matched
        steps = emitted / self._tokens_per_step
        loss -= steps * (self._step.at(count) or 0.0) / count
        if account.to_spend_ms < max(loss, 0.0):
            return None
        account.to_spend_ms = 0.0
        self._sooner = max(1.0, self._sooner / 2)
        return plan

    def _whole(self) -> RoundPlan:
        limits = self.limits
        return RoundPlan(limits.draft_tokens, limits.max_prefixes, limits.first_burst)

    def _short(self) -> RoundPlan:
        whole = self._whole()
        if "draft_tokens" in self.limits.fixed:
            return whole
        return replace(whole, draft_tokens=min(PILOT, whole.draft_tokens))

    def _best_lately(self, account: Account, resting: int) -> RoundPlan:
        """``_best``, which takes milliseconds: anew at another load and where something may have
        changed."""
        load = round(LOADS_PER_OCTAVE * math.log2(self.num_running))
        account.num_asked += 1
        rounds = account.cuts.rounds
        is_new = rounds < YOUNG and rounds != account.at_rounds
        is_old = account.num_asked >= max(RENEW_EVERY, self.num_running)
        is_old = is_old and self._seen_ms - account.at_ms >= RENEW_MS
        if account.best is None or is_new or is_old or load != account.at_load:
            account.best, account.at_load = self._best(account.cuts, resting), load
            account.num_asked, account.at_rounds, account.at_ms = 0, rounds, self._seen_ms
        return account.best

    def _best(self, cuts: Cuts, resting: int) -> RoundPlan:
        """The plan of the highest rate at the load there is, of those that are not silent for too
        long; if all are, the one that is so for the shortest time.

        Args:
            resting: requests that do not draft, whatever is chosen.
        """
        count = self.num_running
        step_ms = (self._step.at(count) or 0.0) + (self._host.at(count) or 0.0)
        plain = count * self._tokens_per_step / max(1e-9, step_ms)
        plans = {
            (length, prefixes, burst): self._pace(cuts, expected, burst, resting)
            for length, prefixes in self.limits.drafts(cuts.segment)
            for expected in (self._expect(cuts, length, prefixes),)
            for burst in self.limits.bursts()
        }
        most = self.limits.silence_ms or math.inf
        allowed = [plan for plan, pace in plans.items() if pace.silence_ms <= most]
        if allowed:
            best = max(allowed, key=lambda plan: plans[plan].rate)
        else:
            best = min(plans, key=lambda plan: plans[plan].silence_ms)
        return RoundPlan(*best, speedup=plans[best].rate / plain)

    def _pace(self, cuts: Cuts, expected: Expected, burst: int, resting: int) -> Pace:
        """Of all running requests, if such are the rounds of all that do not rest."""
        resting = min(resting, self.num_running - 1)
        count = self.num_running - resting
        behind = cuts.behind(expected)
        # Behind a cut the wrong token is still ahead. Where prefixes end far apart, the next drafts
        # are cut at their start until the target has come there: from anywhere in the stretch.
        advance = behind.reach + behind.written
        again = max(0.0, expected.spacing - advance) ** 2 / (2 * expected.spacing * advance)
        rounds = 1.0 if self.limits.by_token else 1 + expected.cut * again
        num_cuts = 0.0 if self.limits.by_token else rounds - 1 + expected.cut
        bursts = max(1.0, expected.drafted / burst)
        steps = num_cuts * behind.written / self._tokens_per_step
        iterations = rounds * (bursts + 1) + steps
        shares = Shares(count, resting, rounds * bursts / iterations, rounds / iterations)
        ms = max(1e-9, self._iteration_ms(shares, expected.drafted / bursts, self._rows(expected)))
        emitted = expected.kept + expected.own + num_cuts * (behind.matched + behind.written)
        emitted *= count / iterations
        return Pace((emitted + resting * self._tokens_per_step) / ms, (bursts + 1) * ms)

    def _iteration_ms(self, shares: Shares, burst: float, rows: float) -> float:
        """The mean iteration.

        Args:
            burst: steps of a burst; ``rows``: of one draft's pass.
        """
        count, resting, drafting, judged = shares
        anyone_drafts, anyone_judged = 1 - (1 - drafting) ** count, 1 - (1 - judged) ** count
        only_bursts = 0.0 if resting else drafting**count
        only_steps = max(0.0, (1 - judged) ** count - only_bursts)
        stepping = count * (1 - drafting - judged) + resting
        ms = self._host.at(count + resting) or 0.0
        ms += anyone_drafts * burst * (self._burst_step.at(count * drafting / anyone_drafts) or 0.0)
        # Passes differ in how many drafts they judge, and the price bends: as dear as two of them,
        # one standard deviation smaller and larger.
        mean = count * judged / anyone_judged
        spread = min(mean - 1, math.sqrt(count * judged * (1 - judged))) if mean > 1 else 0.0
        sizes = ((mean + side * spread) * rows + stepping for side in (-1, 1))
        ms += anyone_judged * sum(self._pass.at(size) or 0.0 for size in sizes) / 2
        return ms + only_steps * (self._step.at(max(1.0, stepping)) or 0.0)

    def _expect(self, cuts: Cuts, draft_tokens: int, max_prefixes: int) -> Expected:
        return cuts.expect(draft_tokens, max_prefixes, by_token=self.limits.by_token)

    def _rows(self, expected: Expected) -> float:
        return 1 + expected.judged + expected.prefixes * self.limits.question_rows

    # -- requests ---------------------------------------------------------------

    def head_reads(self, threshold: float) -> bool:
        """Whether an EAGLE-3 head reads along with a request that may draft, about to begin."""
        step_ms = self._step.at(self.num_running)
        if self.mode != "auto" or step_ms is None:
            return True
        return self.reading.pays(threshold, step_ms / self.num_running / self._tokens_per_step)

    # -- iterations -------------------------------------------------------------

    def share(
        self,
        num_drafting: int,
        rows: Sequence[int],
        num_stepping: int,
        num_plain: int = 0,
        *,
        may_join: bool = False,
    ) -> tuple[int, int]:
        """(Draft tokens of the coming burst, how many drafts its pass judges).

        Where nobody waits for a next token, all that is ready; or nothing yet, where the others may
        join that pass and the next draft: two halves in turns pay for twice as many forwards. Else
        as much as keeps the iteration within ``limits.gap`` plain steps, but a token and a draft at
        least; and nothing while requests that never draft are owed time.

        Args:
            num_drafting: requests that draft.
            rows: per draft that is over, the rows of its pass; who waited longest comes first.
            num_stepping: requests that continue or do not draft.
            num_plain: those of them that never do.
            may_join: the burst ends all drafts under way, and no other has waited for them yet.
        """
        self._has_plain = num_plain > 0
        burst, step_ms = self.burst_tokens, self._step.at(self.num_running)
        if self.mode != "auto":
            return burst, len(rows)
        if not num_stepping:
            return burst, 0 if may_join and num_drafting else len(rows)
        if step_ms is None:
            return burst, len(rows)
        if self._has_plain and self._owed_ms:
            return 0, 0
        if not self.limits.gap:
            return burst, len(rows)
        return self._within(self.limits.gap * step_ms, num_drafting, rows, num_stepping)

    def _within(
        self, budget: float, num_drafting: int, rows: Sequence[int], num_stepping: int
    ) -> tuple[int, int]:
        """What ``share`` gives in so many ms."""
        burst, total, judged = self.burst_tokens, num_stepping, 0
        for more in rows:
            if judged and (self._pass.at(total + more) or 0.0) > budget:
                break
            judged, total = judged + 1, total + more
        if "burst_tokens" in self.limits.fixed:
            return burst, judged
        spent = (self._pass if judged else self._step).at(total) or 0.0
        each = self._burst_step.at(max(1, num_drafting)) or 0.0
        room = int((budget - spent) / each) if each else burst
        return max(1, min(burst, room)), judged

    # -- accounts ---------------------------------------------------------------

    def _account(self, key: Key) -> Account:
        return used(self._accounts, key, lambda: self._opened(*key), MAX_ACCOUNTS)

    def _opened(self, threshold: float, num_failed: int) -> Account:
        """As its neighbours stand: a stricter threshold keeps no more, a laxer one no less; and one
        more failure changes little."""
        if num_failed:
            before = self._account(account_of(threshold, num_failed - 1))
            return Account(Cuts(before.cuts.hazard), pilots=0)
        known = {
            value: account.cuts.hazard
            for (value, failed), account in self._accounts.items()
            if not failed and not account.pilots
        }
        laxer = max((value for value in known if value <= threshold), default=None)
        stricter = min((value for value in known if value >= threshold), default=None)
        found = [known[value] for value in (laxer, stricter) if value is not None]
        return Account(Cuts(sum(found) / len(found) if found else PRIOR))
