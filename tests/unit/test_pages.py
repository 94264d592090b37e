"""The README and docs/, checked without a server: tables, links, flags, metrics, paths."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import generate
import pytest
from markdown.extensions.toc import slugify

from sglang_parse import cli
from sglang_parse.calibrate.report import content
from sglang_parse.compare.report import results
from sglang_parse.core import config
from sglang_parse.core.loss import Budget
from sglang_parse.core.notes import Notes
from sglang_parse.core.options import RequestOptions
from sglang_parse.core.phases import DraftPlan, RequestPolicy, Stats, TraceRecord
from sglang_parse.core.policy.constants import DEFAULTS
from sglang_parse.core.policy.texts import TextLength, TextSourceStats
from sglang_parse.core.question import QuestionWording, built_in_questions
from sglang_parse.core.request import RequestState
from sglang_parse.core.request_telemetry import MAX_TRACE_BYTES, RequestTelemetry
from sglang_parse.core.request_text import RequestText
from sglang_parse.core.setting import settings_of
from sglang_parse.core.text_match import TextMatch
from sglang_parse.telemetry.metrics import METRICS, PREFIX, response_info
from support import calibration, comparison
from support.comparison import FACTS
from support.pages import PAGES, README, ROOT, TABLES, documented_keys, page

pytestmark = pytest.mark.unit

LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")
ALL_PAGES = [path.read_text(encoding="utf-8") for path in (*generate.PAGES, *generate.PATCH_PAGES)]
CODE = re.compile(r"`([^`\n]+)`")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
PROGRAM_FLAG = "--parse-flags"
"""A flag of the benchmarks, not of a server."""


def first_column(text: str) -> set[str]:
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return {name for row in rows for name in CODE.findall(row)}


def section(name: str, title: str) -> str:
    """A section of a page, up to the next title of its level or a higher one."""
    text = page(name)
    level = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)[1]
    rest = text.partition(f"\n{level} {title}\n")[2]
    return re.split(rf"^#{{1,{len(level)}}} ", rest, flags=re.MULTILINE)[0]


# -- generated parts --------------------------------------------------------------


def test_generated_parts_are_what_the_code_generates():
    names = [str(path.relative_to(ROOT)) for path in generate.outdated(generate.PAGES)]
    assert not names, f"out of date: {', '.join(names)}; fix: run `make generate`"


def test_every_part_has_a_place():
    placed = re.findall(rf"^{generate.START}(.+) -->$", "\n".join(ALL_PAGES), re.MULTILINE)
    assert set(placed) == set(generate.PARTS)


def test_an_old_part_is_replaced_and_the_prose_around_it_is_not():
    page = "Before.\n\n<!-- generated: demo stages -->\nold\n<!-- end -->\n\nAfter.\n"
    filled = generate.fill(page)
    assert filled.startswith("Before.\n\n<!-- generated: demo stages -->\n\nOne request at a time")
    assert filled.endswith("\n\n<!-- end -->\n\nAfter.\n")
    assert generate.fill(filled) == filled


@pytest.mark.parametrize(
    ("page", "error"),
    [
        ("<!-- generated: unknown -->\n<!-- end -->\n", KeyError),
        ("<!-- generated: demo stages -->\n", ValueError),
    ],
)
def test_a_part_that_cannot_be_made(page: str, error: type[Exception]):
    with pytest.raises(error):
        generate.fill(page)


# -- tables -----------------------------------------------------------------------


def defaults_shown() -> dict[str, str]:
    """Flag -> default, as the table of settings shows them."""
    rows = re.findall(r"^\| `(--parse-\S+)` \| .*? \| (.*?) \|", page("settings"), re.MULTILINE)
    return dict(rows)


def test_every_setting_is_in_the_table_with_its_default():
    shown = {
        config.flag(setting.name): f"`{setting.default}`" if setting.default != "" else ""
        for setting in settings_of(config.ParseConfig)
    }
    assert defaults_shown() == shown
    assert all(setting.description for setting in settings_of(config.ParseConfig))


def test_the_flags_of_the_readme_are_settings_with_their_defaults():
    rows = re.findall(r"^\| `(--parse-\S+)` \| (.*?) \|", PAGES[README], re.MULTILINE)
    assert len(rows) == 6
    for flag, default in rows:
        assert default == defaults_shown()[flag]


def test_every_metric_is_in_the_table():
    table = page("metrics")
    for metric in METRICS:
        assert re.search(
            rf"^\| `{PREFIX}{metric.name}` \|.*{re.escape(metric.text[:20])}", table, re.M
        )


def test_request_options_are_documented():
    keys = first_column(section("settings", "Request options"))
    assert keys == {option.name for option in settings_of(RequestOptions)}


class FinishedReq:
    """A finished request with the fields that telemetry reads."""

    def __init__(self, state: RequestState) -> None:
        self.parse_state, self.output_ids, self.output_ids_through_stop = state, [], []

    def finished(self) -> bool:
        return True


def test_every_key_of_meta_info_is_in_the_table():
    policy = RequestPolicy(
        threshold=0.5,
        judge="question",
        keep_trace=True,
        plain_reason="multimodal input",
        proposer="eagle3",
        certified=True,
        strict=("numbers",),
    )
    table = page("response-metadata").partition("## Fallback to plain decoding")[0]
    telemetry = RequestTelemetry(trace_bytes=MAX_TRACE_BYTES)
    state = RequestState(policy, plan=DraftPlan(64, 8, 16), notes=Notes(telemetry=telemetry))
    length = TextLength(TextSourceStats(DEFAULTS), Budget(0.75, 0.01, 8.0))
    state.notes.texts["prediction"] = RequestText(TextMatch(), length)
    assert first_column(table) == set(response_info(FinishedReq(state), simulated=0.5))
    assert {field.name for field in fields(Stats)} <= first_column(table)


def test_every_fallback_reason_is_documented():
    source = (ROOT / "sglang_parse/startup/fallback.py").read_text(encoding="utf-8")
    listed = re.findall(r'^\| "([^"]+)"', TABLES["plain reasons"](), re.MULTILINE)
    assert len(listed) == source.count("lambda req:")
    assert all(f'"{reason}"' in source for reason in listed)


def test_trace_keys_are_documented():
    trees = [ast.parse(path.read_text("utf-8")) for path in ROOT.glob("sglang_parse/**/*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    (function,) = [node for node in functions if node.name == "trace_record"]
    records = [node for node in ast.walk(function) if isinstance(node, ast.Dict)]
    keys = {ast.literal_eval(key) for record in records for key in record.keys if key}
    added = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    added = [node.targets[0] for node in added if isinstance(node.targets[0], ast.Subscript)]
    keys |= {ast.literal_eval(target.slice) for target in added}
    assert keys == first_column(section("response-metadata", "Trace"))
    assert keys == set(TraceRecord.__annotations__)


def paths(content: object, path: str = "") -> Iterator[str]:
    """Dotted keys of a report; of a list, those of all of its entries."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from paths(value, f"{path}.{key}".lstrip("."))
    elif isinstance(content, list) and any(isinstance(entry, dict) for entry in content):
        for entry in content:
            yield from paths(entry, path)
    else:
        yield path


def test_keys_of_a_comparison_are_documented():
    measured = comparison.six_measured()
    content = results(comparison.six_servers(), measured, FACTS)
    found = {path + "." for path in paths(json.loads(json.dumps(content)))}
    keys = {key + "." for key in documented_keys("compare keys")}
    known = {path for path in found for key in keys if path.startswith(key) or key.startswith(path)}
    assert found - known == set()  # the second: null, where others have what the key says
    assert [key for key in keys if not any(path.startswith(key) for path in found)] == []


def test_keys_of_a_calibration_are_documented():
    figures, certificate = calibration.calibration()
    made = content(figures, certificate, calibration.CONDITIONS)
    keys = {key + "." for key in documented_keys("calibrate keys")}
    found = {path + "." for path in paths(json.loads(json.dumps(made)))}
    assert [path for path in found if not any(path.startswith(key) for key in keys)] == []
    assert [key for key in keys if not any(path.startswith(key) for path in found)] == []


def test_recipes_and_questions_are_documented():
    recipes = {f"examples/{path.name}" for path in ROOT.glob("examples/serve_*.sh")}
    assert first_column(section("choosing", "Recipes")) == recipes
    keys = {key.name for key in settings_of(QuestionWording)}
    assert first_column(section("choosing", "The question")) == keys | set(built_in_questions())


def test_every_patch_is_on_its_page():
    files = {path.stem for path in (ROOT / "patches").glob("*/*.py")} - {"__init__"}
    assert files == first_column(page("patches"))


# -- names in the pages --------------------------------------------------------------


def links() -> Iterator[tuple[Path, str, str]]:
    """Yields page, file and anchor of every link inside the repository."""
    for path, text in PAGES.items():
        for target, anchor in LINK.findall(text):
            if "://" not in target:
                yield path, target, anchor


def test_links_lead_somewhere():
    """mkdocs checks links between its pages; the README is not one of them."""
    for path, target, anchor in links():
        found = (ROOT / path.parent / target) if target else ROOT / path
        assert found.exists(), f"{path}: {target}"
        if anchor and path == README:
            titles = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {slugify(title, "-") for title in titles}


def test_metrics_named_in_the_pages_exist():
    named = {name for text in PAGES.values() for name in re.findall(r"sglang:parse_(\w+)", text)}
    assert named - {""} <= {metric.name for metric in METRICS}


def test_flags_named_in_the_pages_exist():
    known = {config.flag(setting.name) for setting in settings_of(config.ParseConfig)}
    for path, text in PAGES.items():
        named = set(re.findall(r"--parse-[a-z0-9]+(?:-[a-z0-9]+)*(?![\w.-])", text))
        assert named - {PROGRAM_FLAG} <= known, path


def test_make_targets_named_in_the_pages_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for path, text in PAGES.items():
        assert set(re.findall(r"[`\n]make ([a-z-]+)", text)) <= targets, path


def test_commands_named_in_the_pages_exist():
    commands = {command.name for command in cli.COMMANDS}
    for path, text in PAGES.items():
        named = set(
            re.findall(r"(?:-m sglang_parse\.cli|`sglang-parse|\nsglang-parse) ([a-z-]+)", text)
        )
        assert named <= commands, path


# -- changelog --------------------------------------------------------------------


def renamed(*kinds: str) -> list[tuple[str, str]]:
    """Returns (old, new) names of the changelog's table, for rows of these kinds."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", CHANGELOG, re.MULTILINE)
    return [
        (CODE.findall(old)[0].split()[0], CODE.findall(new)[0].split()[0])
        for kind, old, new in rows
        if kind in kinds
    ]


def test_new_names_in_the_changelog_exist_and_old_ones_do_not():
    flags = {config.flag(setting.name) for setting in settings_of(config.ParseConfig)}
    metrics = {PREFIX + metric.name for metric in METRICS}
    keys = {key for name in ("meta_info", "trace") for key in first_column(TABLES[name]())}
    keys |= {field.name for field in fields(DraftPlan)}
    kinds = {("flag",): flags, ("metric",): metrics, ("meta_info", "plan", "trace"): keys}
    for kind, known in kinds.items():
        assert renamed(*kind)
        for old, new in renamed(*kind):
            assert new in known
            assert old not in known


# -- files ------------------------------------------------------------------------


def test_paths_in_code_exist():
    roots = ("tests/", "examples/", "sglang_parse/", "patches/", "docs/", ".ci/")
    for path, text in PAGES.items():
        for code in CODE.findall(text):
            if code.startswith(roots) and "<" not in code and " " not in code:
                assert (ROOT / code).exists(), f"{path}: {code}"


def test_sizes():
    assert len(PAGES[README].splitlines()) <= 120
