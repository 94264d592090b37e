"""Tables of the documents, generated from the code.

Texts of a record's fields come from the "Attributes:" section of its docstring.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import textwrap
import tomllib
from collections.abc import Iterable, Sequence
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import griffe

from sglang_parse.bench.settings import SETTINGS
from sglang_parse.client.records import STAGES
from sglang_parse.core import config
from sglang_parse.core.block import ONE_TOKEN
from sglang_parse.core.options import RequestOptions
from sglang_parse.core.question import SHORT, QuestionWording, built_in_questions
from sglang_parse.core.setting import settings_of
from sglang_parse.doctor import settings as doctor
from sglang_parse.explain import settings as explain
from sglang_parse.roofline.forwards import BLOCKS, Workload
from sglang_parse.roofline.run import speedups
from sglang_parse.roofline.settings import RooflineSettings
from sglang_parse.startup import families as startup_families
from sglang_parse.telemetry.metrics import META_INFO, METRICS, PREFIX
from sglang_parse.trial import settings as trial
from support import question_rows  # tests: the chat-template families they know

ROOT = Path(__file__).resolve().parents[2]
KINDS = griffe.DocstringSectionKind

# Keys of results files that are no field of a record -> meaning.
BENCH_KEYS = {
    **dict.fromkeys(
        (f"conditions.{name}" for name in ("target", "draft", *SETTINGS)), "from the command line"
    ),
    "conditions.environment": "environment variables, by server",
    "conditions.failed": "server that failed -> why",
}
COMPARE_KEYS = {
    **dict.fromkeys(
        (f"conditions.{name}" for name in ("date", "minutes", "machine", "versions")),
        "when, where, with what",
    ),
    "conditions.task": "the problems, for people",
    "conditions.servers": "every server's command line, or where it runs",
    "conditions.environment": "environment variables of the servers that were started",
    "conditions.bench_serving": "the command line of SGLang's benchmark",
    "conditions.settings": "flags of the command, by their settings' names",
    "conditions.requests_per_run": "by concurrency",
    "conditions.baseline": "the server that answers are compared with",
    "conditions.stock": "servers without PARSE that answer as the target does",
    "conditions.notes": "what a fair reader must know about a server",
    "graded_runs.server": "the server that answered",
    "graded_runs.threshold": "of the requests; null for `--parse-threshold`, or without PARSE",
    "graded_runs.off_fraction": "of the requests that switch PARSE off",
    "graded_runs.repeat": "0, or 1 for the baseline's second time",
    "graded_runs.output_tokens": "of all answers",
    "graded_runs.scores": "0 to 1 per problem; null each where the task could not be graded",
}
CALIBRATE_KEYS = {
    "guarantee": "the certificate in words",
    "conditions": "date, machine, versions, server and sizes of the run",
}
TRAIN_JUDGE_KEYS = {
    "unit": "what AUROC compares: prefixes up to the first wrong one of each draft, or complete "
    "drafts",
    "num_drafts": "with a label",
    "num_prompts": "different prompts of those",
    "num_wrong_drafts": "with a wrong prefix",
    "num_right_units": "right prefixes, or complete drafts",
    "num_wrong_units": "wrong ones",
    "auroc_gain": "of the head over each other reader, paired, with its 95 % interval",
    "learning_curve": "out-of-fold AUROC by the number of drafts that trained a fold's head",
    "strength": "inverse regularization, scikit-learn's C",
    "candidates": "every head that was tried, best first; `rank`: tokens kept at 2 % risk, 0 where "
    "only complete drafts have labels, then AUROC",
    "question": "the same figures of the question; null where none was asked",
    "logprob": "the same figures of `--parse-judge likelihood`",
    "conditions": "date, machine, versions, server, data and settings of the run",
}


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    lines = (headings, ["---"] * len(headings), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- texts of the code ------------------------------------------------------------


@cache
def package() -> griffe.Module:
    """Parses ``sglang_parse`` from its sources, without importing it."""
    return griffe.load("sglang_parse", search_paths=[str(ROOT)], allow_inspection=False)


def attributes(path: str) -> dict[str, str]:
    """Returns the attribute texts of a record such as ``core.phases.Stats``.

    "a, b: text" gives the same text to both.
    """
    docstring = package()[path].docstring
    found: dict[str, str] = {}
    for section in docstring.parse("google") if docstring else ():
        for item in section.value if section.kind is KINDS.attributes else ():
            # Of "a, b: text" griffe takes the names after the first one for a type.
            names = f"{item.name} {item.annotation}" if item.name.endswith(",") else item.name
            found |= dict.fromkeys(re.findall(r"\w+", names), one_line(item.description))
    return found


def first_sentence(path: str) -> str:
    """Returns the first sentence of a module's docstring, or ""."""
    docstring = package()[path].docstring
    return one_line(re.split(r"\.\s", docstring.value)[0]) if docstring else ""


def one_line(text: str) -> str:
    """Formats a docstring for a table cell: one line, no final full stop, Markdown code."""
    text = re.sub(r"(?<!\.)\.$", "", " ".join(text.split()))
    return text.replace("``", "`").replace("|", "\\|")


def rows_of(texts: dict[str, str]) -> list[tuple[str, str]]:
    """Returns (names, text) rows; adjacent names with the same text are one row: `a.b`, `.c`."""
    rows = []
    for text, group in groupby(texts, key=lambda name: texts[name]):
        first, *others = group
        parent = first.rpartition(".")[0]
        shown = (first, *(name.removeprefix(parent) for name in others))
        rows.append((", ".join(f"`{name}`" for name in shown), text))
    return rows


# -- tables -----------------------------------------------------------------------


def settings() -> str:
    """Returns the flags of a server."""
    rows = [
        (
            f"`{config.flag(setting.name)}`",
            values_of(setting),
            f"`{setting.default}`" if setting.default != "" else "",
            one_line(setting.description),
        )
        for setting in settings_of(config.ParseConfig)
    ]
    return table(("flag", "values", "default", "meaning"), rows)


def values_of(setting: config.Setting) -> str:
    """Returns the allowed values of a setting, in short."""
    if setting.choices:
        return ", ".join(f"`{value}`" for value in setting.choices)
    return setting.metavar or setting.expected.removeprefix("a whole number ")


def request_options() -> str:
    """Returns the keys of ``custom_params["parse"]``."""
    options = settings_of(RequestOptions)
    rows = [(f"`{o.name}`", o.expected, one_line(o.description)) for o in options]
    return table(("key", "value", "meaning"), rows)


def metrics() -> str:
    kinds = {(True, False): "histogram", (False, True): "gauge"}
    rows = [
        (
            f"`{PREFIX}{metric.name}`",
            kinds.get((bool(metric.buckets), metric.is_gauge), "counter"),
            f"`{metric.label}`" if metric.label else "",
            one_line(metric.text),
        )
        for metric in METRICS
    ]
    return table(("metric", "type", "label", "meaning"), rows)


def meta_info() -> str:
    texts = {key: one_line(text) for key, text in META_INFO.items()}
    return table(("key", "meaning"), rows_of(texts | attributes("core.phases.Stats")))


def trace() -> str:
    return table(("key", "meaning"), rows_of(attributes("core.phases.TraceRecord")))


def question_keys() -> str:
    keys = settings_of(QuestionWording)
    return table(("key", "meaning"), rows_of({k.name: one_line(k.description) for k in keys}))


QUESTIONS_ARE_FOR = {
    "default": "any chat template whose tokenizer has Correct and Incorrect as single tokens",
    "chatml": "ChatML: Qwen2.5, Qwen3 with thinking off",
    "qwen3_thinking": "Qwen3 with thinking on (or off), other models with `<think>` and `</think>` "
    "tokens",
    "llama3": "Llama 3 to 3.3",
    "mistral": "Mistral Instruct",
    "gemma": "Gemma, Gemma 2, Gemma 3",
}


def questions() -> str:
    """Returns the built-in questions and the maximum rows each adds to a verify pass.

    Raises:
        KeyError: a question is missing in ``QUESTIONS_ARE_FOR``.
    """
    rows = []
    for name in sorted(built_in_questions(), key=_question_order):
        long = name.removesuffix(SHORT)
        counted = [
            question_rows.rows_of(name, family) for family in question_rows.families_of(name)
        ]
        most = [str(max(column) or "") for column in zip(*counted, strict=True)]
        if long != "qwen3_thinking":
            most[2] = ""  # with thinking off no thoughts are asked about
        rows.append((f"`{name}`", "the same" if long != name else QUESTIONS_ARE_FOR[name], *most))
    return table(("name", "for", "unfinished answer", "finished", "thoughts"), rows)


def _question_order(name: str) -> tuple[int, str]:
    return list(QUESTIONS_ARE_FOR).index(name.removesuffix(SHORT)), name


def bench_keys() -> str:
    """Keys of ``sglang-parse bench``'s results.json that compare's has not, or means otherwise."""
    return table(("key", "meaning"), rows_of(BENCH_KEYS))


def compare_keys() -> str:
    """Keys of results.json of ``compare``, ``demo`` and ``load``."""
    texts = {
        **COMPARE_KEYS,
        **under("variants", "client.records.Variant"),
        **under("variants", "compare.figures.VariantFigures"),
        **under("variants.speeds", "compare.figures.SpeedAt"),
        **under("variants.quality", "compare.figures.Quality", ("problems", "score", "interval")),
        **under("variants.quality.test", "client.statistics.PairedTest"),
        **under("variants.time", "compare.figures.WhereTimeGoes"),
        **under("noise", "client.statistics.PairedTest"),
        **under("serving_runs", "client.records.ServingRun"),
    }
    return table(("key", "meaning"), rows_of(texts))


def calibrate_keys() -> str:
    """Keys of ``sglang-parse calibrate``'s calibration.json."""
    certificate = attributes("core.certificate.Certificate")
    certificate |= {
        f"fingerprint.{name}": text
        for name, text in attributes("core.certificate.Fingerprint").items()
    }
    del certificate["fingerprint"]
    texts = {
        **certificate,
        **CALIBRATE_KEYS,
        **under("results", "calibrate.figures.Calibration"),
        **under("results.separation", "client.statistics.Separation"),
        **under("results.thresholds", "calibrate.figures.AtThreshold"),
        **under("results.served", "calibrate.figures.ServedFigures"),
    }
    lists = ("results.separation", "results.thresholds", "results.served")
    return table(("key", "meaning"), rows_of({k: t for k, t in texts.items() if k not in lists}))


def train_judge_keys() -> str:
    """Keys of ``sglang-parse train-judge``'s judge.json."""
    texts = {
        **attributes("core.judge.JudgeFile"),
        **attributes("train_judge.figures.ReaderFigures"),
        **TRAIN_JUDGE_KEYS,
    }
    return table(("key", "meaning"), rows_of(texts))


def record_keys(record: str) -> str:
    """Keys of a file that is one record."""
    return table(("key", "meaning"), rows_of(attributes(record)))


def under(prefix: str, record: str, keys: Sequence[str] = ()) -> dict[str, str]:
    """Returns a record's keys in a report, all or ``keys``; ``ms_per_request`` by stage."""
    found = {}
    for name, text in attributes(record).items():
        if not keys or name in keys:
            stages = STAGES if name == "ms_per_request" else ("",)
            found |= {f"{prefix}.{name}.{stage}".rstrip("."): text for stage in stages}
    return found


def roofline() -> str:
    """Speedups that ``sglang-parse roofline`` prints by default."""
    parser = argparse.ArgumentParser()
    RooflineSettings.add_arguments(parser)
    ((grid,),) = speedups(RooflineSettings.read(parser.parse_args([]))).values()
    return table(grid.headings, grid.rows)


CHOICES = {
    "texts: predictions, earlier answers, another server": (
        "[`prediction`, `--parse-reuse-answers`, `--parse-draft-url`](drafts.md)"
    ),
    "a draft model that was trained to fill mask tokens": (
        "`--speculative-draft-model-path`; blocks are the default for it"
    ),
    "any other draft model": "`--speculative-draft-model-path`",
    "an EAGLE-3 head of the draft model": (
        "`--parse-draft-eagle3-path` beside `--speculative-draft-model-path`"
    ),
    "an EAGLE-3 head of the target": "`--parse-eagle3-path`",
    "the same, with passes in pieces": (
        "where a start switches their graphs off: stock SGLang's `--speculative-algorithm EAGLE3`"
    ),
}
PAIRS = {
    "14B + 0.6B, H100": (),
    "32B + 8B, H200": ("--target", "32b", "--draft", "8b", "--gpu", "h200"),
    "235B-A22B-FP8 + 8B, four H200": (
        *("--target", "235b-a22b-fp8", "--draft", "8b", "--gpu", "h200", "--tp-size", "4"),
    ),
}


def choices() -> str:
    """What to configure, and what it brings by the roofline at 1 and 16 requests."""
    parser = argparse.ArgumentParser()
    RooflineSettings.add_arguments(parser)
    found: dict[str, list[str]] = {name: [] for name in CHOICES}
    for words in PAIRS.values():
        settings = RooflineSettings.read(parser.parse_args(words))
        loads = [(Workload(settings, count), settings.accept_length) for count in (1, 16)]
        cells = zip(*(map("{:.1f}x".format, _speedups(*load)) for load in loads), strict=True)
        for name, cell in zip(CHOICES, cells, strict=True):
            found[name].append(", ".join(cell))
    rows = ((name, CHOICES[name], *found[name]) for name in CHOICES)
    return table(("you have", "configure", *PAIRS), rows)


def _speedups(load: Workload, accept_length: float) -> tuple[float, ...]:
    """In the order of ``CHOICES``."""
    ways = [((), 0.0), (BLOCKS, 0.0), ((ONE_TOKEN,), 0.0), ((), accept_length)]
    times = [load.parse(0.97, *way)[0] for way in ways]
    times += [load.eagle3(accept_length, in_pieces=pieces) for pieces in (False, True)]
    return tuple(load.plain() / ms for ms in times)


def program_flags(module: ModuleType) -> str:
    """Returns the flags of a ``sglang-parse`` program, as in its --help."""
    parser = argparse.ArgumentParser(add_help=False)
    module.add_arguments(parser)
    formatter = argparse.HelpFormatter("")
    rows = [
        (
            f"`{action.option_strings[0] if action.option_strings else action.metavar}`",
            one_line(formatter._expand_help(action)),
        )
        for action in parser._actions
    ]
    return table(("flag", "meaning"), rows)


def plain_reasons() -> str:
    """Returns which requests are served by plain decoding, and why."""
    value = package()["startup.fallback._PLAIN_REASONS"].value
    rows = [[ast.literal_eval(str(e.elements[i])) for i in (0, 2)] for e in value.elements]
    return table(("`reason`", "why"), [(f'"{reason}"', why) for reason, why in rows])


def layers(package_name: str) -> str:
    """Returns the modules of a package from top to bottom, as import-linter orders them."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [layers] = [
        one["layers"] for one in linter["contracts"] if one.get("containers") == [package_name]
    ]
    prefix = f"{package_name}.".partition(".")[2]
    rows = [
        (f"`{name}`", first_sentence(prefix + name))
        for layer in layers
        for name in re.findall(r"\w+", layer)
    ]
    return table(("package" if package_name == "sglang_parse" else "module", "purpose"), rows)


def families() -> str:
    """Returns which models are served, and how each was seen."""
    return table(startup_families.HEADINGS, map(startup_families.row, startup_families.FAMILIES))


def patches() -> str:
    """Returns what every patch changes, and how. Imports SGLang."""
    from sglang_parse.patches import PATCHES

    rows = [
        (
            f"`{patch.name}`",
            ", ".join(f"`{'.'.join(path.split('.')[-2:])}`" for path in patch.changes),
            one_line(patch.how),
        )
        for patch in PATCHES
    ]
    return table(("patch", "changes", "how"), rows)


def ledger(name: str) -> str:
    """Returns the entries of a package of patches: every field of every patch. Imports SGLang."""
    package = importlib.import_module(f"sglang_parse.patches.{name}")
    return "\n\n".join([package.__doc__ or "", *map(_entry, package.PATCHES)])


def _entry(patch: Any) -> str:
    fields = {
        "Target": ", ".join(f"`{path}`" for path in patch.changes),
        "SGLang versions": "the pinned one",
        "Why": patch.why,
        "How": patch.how,
        "Upstream": patch.upstream,
        "Removed when": patch.removed_when,
    }
    lines = (_wrapped(f"- {name}: {text}") for name, text in fields.items())
    return "\n".join([f"### {patch.name}", "", *lines])


def _wrapped(line: str) -> str:
    return textwrap.fill(
        line, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


TABLES = {
    "settings": settings,
    "request options": request_options,
    "metrics": metrics,
    "meta_info": meta_info,
    "trace": trace,
    "questions": questions,
    "question keys": question_keys,
    "bench keys": bench_keys,
    "calibrate keys": calibrate_keys,
    "train-judge keys": train_judge_keys,
    "compare keys": compare_keys,
    "doctor flags": partial(program_flags, doctor),
    "explain flags": partial(program_flags, explain),
    "try flags": partial(program_flags, trial),
    "roofline": roofline,
    "choices": choices,
    "plain reasons": plain_reasons,
    "families": families,
    "packages": partial(layers, "sglang_parse"),
    "engine modules": partial(layers, "sglang_parse.engine"),
    "patches": patches,
    "ledger of parse": partial(ledger, "parse"),
    "ledger of cpu": partial(ledger, "cpu"),
}
