"""Tables of measurements, from what ``make demo``, ``make load`` and ``make compare`` wrote.

``docs/figures/NAME.json`` is the part of a results.json that the tables need, under the same keys,
with the commit that was measured. ``take_over`` writes it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from goals import (
    MAX_ACCURACY_LOSS,
    MIN_LIMIT_FRACTION,
    MIN_OVER_PLAIN,
    MIN_OVER_PLAIN_CONCURRENT,
    MIN_OVER_STOCK,
    MIN_OVER_TOKEN,
    Goal,
)
from tables import table

from sglang_parse.client.records import (
    ALL,
    DRAFT,
    DRAFTING,
    EAGLE3,
    PARSE,
    PARSE_EAGLE3,
    PARSE_HEAD,
    PARSE_LIKELIHOOD,
    PARSE_ONE,
    PARSE_QUESTION,
    PARSE_TOKEN,
    PLAIN,
    STANDALONE,
    SWITCHED_OFF,
)

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "figures"
TITLES = {
    PLAIN: "plain target",
    DRAFT: "draft alone",
    STANDALONE: "stock STANDALONE",
    EAGLE3: "stock EAGLE3",
    PARSE_ONE: "PARSE, one token per draft forward",
    PARSE: "PARSE",
    PARSE_TOKEN: "PARSE, token mode",
    PARSE_HEAD: "PARSE, verdict head",
    PARSE_QUESTION: "PARSE, question",
    PARSE_LIKELIHOOD: "PARSE, likelihood",
    PARSE_EAGLE3: "PARSE + EAGLE-3",
}
KEY = ("server", "threshold", "off_fraction", "group")
DEFAULTS = (None, 0.0, ALL)
"""Of all parts of a key but the server."""
MEASURED_CODE = ("sglang_parse", "patches", "examples/demo_pair")
LATENCIES = {"ttft": "TTFT", "itl": "ITL", "e2e": "end-to-end latency"}

# Further goals than those of tests/goals.py: concurrency -> mark.
MIN_HEAD_OVER_PARSE = {4: 0.97, 16: 0.97}
MAX_OFF_SLOWDOWN = dict.fromkeys((4, 8, 16), 1.3)
MAX_OFF_ITL = dict.fromkeys((4, 8, 16), 2.5)


# -- results files ----------------------------------------------------------------


def take_over(folder: Path) -> Path:
    """Reduces ``folder``/results.json to ``docs/figures/``'s file of the folder's name."""
    path = FOLDER / f"{folder.name}.json"
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    path.write_text(as_text(reduced(results)), encoding="utf-8")
    return path


def as_text(content: dict[str, Any]) -> str:
    """Returns JSON with a line per variant."""
    conditions = json.dumps(content["conditions"], indent=1)
    variants = ",\n".join(map(json.dumps, content["variants"]))
    return f'{{"conditions": {conditions},\n"variants": [\n{variants}\n]}}\n'


def reduced(results: dict[str, Any]) -> dict[str, Any]:
    """Returns what the tables need of a results.json."""
    conditions = results["conditions"]
    names = ("date", "minutes", "machine", "versions", "requests_per_run")
    return {
        "conditions": {
            "commit": commit_of(conditions["date"], conditions["minutes"]),
            **{name: conditions[name] for name in names},
            "runs": conditions["settings"]["runs"],
        },
        "variants": [_variant(one) for one in results["variants"]],
    }


def _variant(found: dict[str, Any]) -> dict[str, Any]:
    kept = {name: found[name] for name in (*KEY, "time", "accept_length")}
    quality = found["quality"]
    if quality is not None:
        test = quality["test"]
        quality = {
            "problems": quality["problems"],
            "score": quality["score"],
            "p_value": None if test is None else test["p_value"],
        }
    speeds = [
        {
            "concurrency": speed["concurrency"],
            "tokens_per_s": speed["tokens_per_s"]["median"],
            "over": {name: over["median"] for name, over in speed["over"].items()},
            "latency_ms": {
                kind: [speed["latency_ms"][kind][p] for p in ("p50", "p99")] for kind in LATENCIES
            },
        }
        for speed in found["speeds"]
    ]
    return kept | {"quality": quality, "speeds": speeds}


def commit_of(date: str, minutes: float) -> str:
    """Returns the last commit to the measured code before a run that ended at ``date``.

    Raises:
        subprocess.CalledProcessError: git knows no history here.
    """
    ended = datetime.strptime(date, "%Y-%m-%d %H:%M UTC").replace(tzinfo=UTC)
    began = ended + timedelta(minutes=1 - minutes)  # the end is cut to the minute
    command = ("git", "log", "-1", "--format=%h", "--abbrev=10", f"--before={began.isoformat()}")
    done = subprocess.run(
        (*command, "--", *MEASURED_CODE), cwd=ROOT, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


# -- reading them -----------------------------------------------------------------


class Figures:
    """The figures of one command."""

    def __init__(self, name: str) -> None:
        found = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        self.conditions: dict[str, Any] = found["conditions"]
        self.variants: list[dict[str, Any]] = found["variants"]

    @property
    def concurrencies(self) -> list[int]:
        return sorted({s["concurrency"] for one in self.variants for s in one["speeds"]})

    @property
    def loads(self) -> list[dict[str, Any]]:
        """The variants at the server's threshold, without requests that switch PARSE off."""
        return [one for one in self.variants if _key(one)[1:] == DEFAULTS]

    def find(self, server: str, off: float = 0.0, group: str = ALL) -> dict[str, Any] | None:
        key = (server, None, off, group)
        return next((one for one in self.variants if _key(one) == key), None)

    def speed(
        self, server: str, concurrency: int, off: float = 0.0, group: str = ALL
    ) -> dict[str, Any] | None:
        found = self.find(server, off, group)
        speeds = found["speeds"] if found else ()
        return next((speed for speed in speeds if speed["concurrency"] == concurrency), None)

    @property
    def fastest_stock(self) -> str | None:
        """The stock speculative algorithm with the most tokens per second over all loads."""
        rates = {
            server: sum(speed["tokens_per_s"] for speed in found["speeds"])
            for server in (STANDALONE, EAGLE3)
            if (found := self.find(server))
        }
        return max(rates, key=rates.__getitem__, default=None)


def _key(found: dict[str, Any]) -> tuple:
    return tuple(found[name] for name in KEY)


# -- cells ------------------------------------------------------------------------


def graded(value: float, kind: str, mark: float | None, show: Callable[[float], str]) -> str:
    """Returns a figure, and where it has a goal whether it was reached.

    Args:
        kind: "at least" or "at most" ``mark``.
        show: formats the figure and the mark.
    """
    if mark is None:
        return show(value)
    goal = Goal("", value, kind, mark)
    missed = "" if goal.is_reached else f", **missed by {percent(goal.missed_by)}**"
    return f"{show(value)} (goal: {kind} {show(mark)}{missed})"


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def times(value: float) -> str:
    return f"{value:.2f}x"


def points(value: float) -> str:
    return f"{100 * value:.1f} points"


def drafted(time: dict[str, Any]) -> str:
    """Returns the accepted and the matched fraction of the output."""
    matched = time.get("matched_fraction")
    text = f"{percent(time['draft_fraction'])} accepted"
    return text if matched is None else f"{text}, {percent(matched)} matched"


def rate(speed: dict[str, Any] | None, baseline: str) -> str:
    """Returns output tokens/s and the speedup over another server in the same run."""
    if speed is None:
        return ""
    over = speed["over"].get(baseline)
    return f"{speed['tokens_per_s']:.0f}" + (f" ({over:.2f}x)" if over else "")


Ratio = Callable[[Figures, int], float | None]
"""(figures, concurrency) -> ratio, None where something was not measured."""


def over(server: str, other: str, figures: Figures, concurrency: int) -> float | None:
    """Returns a ratio of output tokens/s in the same run."""
    speed = figures.speed(server, concurrency)
    return speed["over"].get(other) if speed else None


def latency_over(
    mine: tuple, other: tuple, kind: str, place: int, figures: Figures, concurrency: int
) -> float | None:
    """Returns a ratio of latencies; ``mine`` and ``other`` are variants, place 0 is p50, 1 p99."""
    first, second = (figures.speed(key[0], concurrency, *key[1:]) for key in (mine, other))
    if not first or not second:
        return None
    return first["latency_ms"][kind][place] / second["latency_ms"][kind][place]


def ratios(
    figures: Figures, rows: Iterable[tuple[str, Ratio, str, dict[int, float]]]
) -> Iterator[list[str]]:
    """Yields a row per ratio, with a cell per concurrency and its goal, if it has one."""
    for title, ratio, kind, marks in rows:
        found = {c: ratio(figures, c) for c in figures.concurrencies}
        if any(found.values()):
            yield [
                title,
                *(
                    graded(value, kind, marks.get(c), times) if value else ""
                    for c, value in found.items()
                ),
            ]


# -- tables -----------------------------------------------------------------------


def conditions(name: str) -> str:
    """Returns commit, day, machine and runs in a sentence."""
    found = Figures(name).conditions
    machine = found["machine"]
    runs = "one run" if found["runs"] == 1 else f"medians of {found['runs']} runs"
    day = datetime.strptime(found["date"][:10], "%Y-%m-%d")
    return (
        f"Commit `{found['commit']}`, {day.day} {day:%B %Y}, SGLang {found['versions']['sglang']}; "
        f"{machine['cpus']} CPUs ({machine['processor']}, {machine['system']}), {runs}, "
        f"{found['minutes']:.0f} minutes in all."
    )


def results() -> str:
    """Returns the README's table: output tokens/s by load."""
    figures = Figures("demo")
    rows = [
        [TITLES[one], *(rate(figures.speed(one, c), PLAIN) for c in figures.concurrencies)]
        for one in (PLAIN, EAGLE3, STANDALONE, PARSE_TOKEN, PARSE, PARSE_EAGLE3)
        if figures.find(one)
    ]
    rows += [[row[0] + ", same run", *row[1:]] for row in ratios(figures, _over_stock(figures, {}))]
    return table(["server", *map(str, figures.concurrencies)], rows)


def _over_stock(
    figures: Figures, marks: dict[int, float]
) -> list[tuple[str, Ratio, str, dict[int, float]]]:
    stock = figures.fastest_stock
    if stock is None:
        return []
    return [(f"PARSE over {TITLES[stock]}", partial(over, PARSE, stock), "at least", marks)]


def demo() -> str:
    return _servers(Figures("demo"))


def demo_stages() -> str:
    """Returns where the time of PARSE's requests goes, in a sentence."""
    time = Figures("demo").find(PARSE)["time"]
    spent = ", ".join(f"{stage} {ms:.0f}" for stage, ms in time["ms_per_request"].items())
    return (
        f"One request at a time, a request of PARSE takes {time['rounds_per_request']:.2f} verify "
        f"passes, and in ms: {spent}. Draft tokens are this part of the output: {drafted(time)}."
    )


def demo_ratios() -> str:
    """Returns PARSE over the best stock algorithm and over its own token mode."""
    figures = Figures("demo")
    rows = [
        *_over_stock(figures, MIN_OVER_STOCK),
        (
            "PARSE over its token mode",
            partial(over, PARSE, PARSE_TOKEN),
            "at least",
            MIN_OVER_TOKEN,
        ),
        ("PARSE + EAGLE-3 over PARSE", partial(over, PARSE_EAGLE3, PARSE), "", {}),
    ]
    return table(["same run", *map(str, figures.concurrencies)], ratios(figures, rows))


def demo_goals() -> str:
    """Returns PARSE's figures for which there are goals."""
    figures = Figures("demo")
    scores = {one["server"]: one["quality"]["score"] for one in figures.loads if one["quality"]}
    rows = [
        [
            f"speedup over the plain target at concurrency {c}",
            graded(found, "at least", mark, times),
        ]
        for c, mark in ((1, MIN_OVER_PLAIN), (16, MIN_OVER_PLAIN_CONCURRENT))
        if (found := over(PARSE, PLAIN, figures, c))
    ]
    loss = scores[PLAIN] - scores[PARSE]
    lost = graded(loss, "at most", MAX_ACCURACY_LOSS, points)
    rows.append(["accuracy lost against the plain target", lost])
    limit = figures.find(PARSE)["time"]["limit"]
    if limit:
        fraction = over(PARSE, PLAIN, figures, 1) / limit
        reached = graded(fraction, "at least", MIN_LIMIT_FRACTION, percent)
        rows.append([f"of the upper bound, {times(limit)}, at concurrency 1", reached])
    return table(("PARSE", "measured"), rows)


def compare() -> str:
    return _servers(Figures("compare"))


def _servers(figures: Figures) -> str:
    """A row per server: speed by load, tokens per verification, accuracy."""
    rows = []
    for one in figures.loads:
        speeds = [figures.speed(one["server"], c) for c in figures.concurrencies]
        quality = one["quality"] or {"score": None, "p_value": None}
        p, accepted = quality["p_value"], one["accept_length"]
        rows.append(
            [
                TITLES[one["server"]],
                *(rate(speed, PLAIN) for speed in speeds),
                "" if accepted is None else f"{accepted:.1f}",
                "" if quality["score"] is None else percent(quality["score"]),
                "" if p is None else "< 0.001" if p < 0.001 else f"{p:.2g}",
            ]
        )
    problems = max(one["quality"]["problems"] for one in figures.loads if one["quality"])
    loads = map(str, figures.concurrencies)
    return table(["server", *loads, "tokens / pass", f"exact, {problems} problems", "p"], rows)


def compare_ratios() -> str:
    figures = Figures("compare")
    rows = [
        *_over_stock(figures, MIN_OVER_STOCK),
        ("PARSE over PARSE, one token per forward", partial(over, PARSE, PARSE_ONE), "", {}),
        ("PARSE + EAGLE-3 over PARSE", partial(over, PARSE_EAGLE3, PARSE), "", {}),
    ]
    return table(["same run", *map(str, figures.concurrencies)], ratios(figures, rows))


def compare_thresholds() -> str:
    """Returns PARSE's speed and accuracy by threshold, one request at a time."""
    rows = []
    for one in Figures("compare").variants:
        if _key(one)[::2] == (PARSE, 0.0):
            time, quality = one["time"], one["quality"]
            rows.append(
                [
                    "the server's" if one["threshold"] is None else f"{one['threshold']:g}",
                    drafted(time) if time else "",
                    rate(one["speeds"][0], PLAIN),
                    f"{percent(quality['score'])} of {quality['problems']}",
                ]
            )
    headings = ("threshold", "draft tokens / output", "output tokens/s", "exact answers")
    return table(headings, rows)


def load() -> str:
    figures = Figures("load")
    keys = [(one["server"],) for one in figures.loads]
    return _latencies(figures, [(TITLES[key[0]], key) for key in keys])


def load_off() -> str:
    """Returns the loads in which requests switch PARSE off."""
    figures = Figures("load")
    groups = {
        (0.5, DRAFTING): "drafting; every second one is off",
        (0.5, SWITCHED_OFF): "off; every second one drafts",
        (1.0, ALL): "off, all of them",
    }
    servers = dict.fromkeys(one["server"] for one in figures.variants if one["off_fraction"])
    variants = [
        (f"{TITLES[server]} | {title}", (server, *key))
        for server in servers
        for key, title in groups.items()
    ]
    return _latencies(figures, variants, heading="server | requests")


def _latencies(
    figures: Figures, variants: Sequence[tuple[str, tuple]], heading: str = "server"
) -> str:
    rows = []
    for c in figures.concurrencies:
        for title, (server, *rest) in variants:
            speed = figures.speed(server, c, *rest)
            if speed is not None:
                latencies = (speed["latency_ms"][kind] for kind in LATENCIES)
                cells = (f"{p50:.0f} / {p99:.0f}" for p50, p99 in latencies)
                rows.append([str(c), title, f"{speed['tokens_per_s']:.0f}", *cells])
    headings = ["concurrency", *heading.split(" | "), "output tokens/s", *LATENCIES.values()]
    return table(headings, rows)


def load_ratios() -> str:
    """Returns ratios of the load's figures, with the project's goals."""
    figures = Figures("load")
    plain, parse = (PLAIN,), (PARSE,)
    rows = [
        *_over_stock(figures, MIN_OVER_STOCK),
        ("PARSE over plain target", partial(over, PARSE, PLAIN), "", {}),
        (
            "PARSE + EAGLE-3 over PARSE",
            *(partial(over, PARSE_EAGLE3, PARSE), "at least", MIN_HEAD_OVER_PARSE),
        ),
    ]
    for kind, place, title in (
        ("ttft", 0, "TTFT p50"),
        ("e2e", 0, "end-to-end p50"),
        ("e2e", 1, "end-to-end p99"),
    ):
        ratio = partial(latency_over, parse, plain, kind, place)
        rows.append((f"{title}, PARSE / plain target", ratio, "", {}))
    return table(["ratio", *map(str, figures.concurrencies)], ratios(figures, rows))


def off_ratios() -> str:
    """Returns what drafting costs requests that switch PARSE off, with the project's goals."""
    figures = Figures("load")
    rows = []
    for server in (PARSE, PARSE_EAGLE3):
        off, all_off = (server, 0.5, SWITCHED_OFF), (server, 1.0, ALL)
        slowdown = partial(latency_over, off, all_off, "e2e", 0)
        title = f"{TITLES[server]}: end-to-end p50, every second one off / all off"
        rows.append((title, slowdown, "at most", MAX_OFF_SLOWDOWN))
        itl = partial(latency_over, off, (PLAIN,), "itl", 1)
        title = f"{TITLES[server]}: ITL p99 of requests that are off / plain target"
        rows.append((title, itl, "at most", MAX_OFF_ITL if server == PARSE else {}))
    return table(["ratio", *map(str, figures.concurrencies)], ratios(figures, rows))


PARTS: dict[str, Callable[[], str]] = {
    **{f"conditions of {name}": partial(conditions, name) for name in ("demo", "load", "compare")},
    "results": results,
    "demo": demo,
    "demo stages": demo_stages,
    "demo ratios": demo_ratios,
    "demo goals": demo_goals,
    "compare": compare,
    "compare ratios": compare_ratios,
    "compare thresholds": compare_thresholds,
    "load": load,
    "load ratios": load_ratios,
    "load off": load_off,
    "off ratios": off_ratios,
}
