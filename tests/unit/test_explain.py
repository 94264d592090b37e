"""``sglang-parse explain`` without a server: files, their errors, the scale of a verdict."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from sglang_parse.client.prompts import read_prompts
from sglang_parse.client.records import BenchError
from sglang_parse.client.traced import explain_answer
from sglang_parse.client.traced_table import answer_table
from sglang_parse.explain import page, run
from sglang_parse.explain.run import summary
from sglang_parse.explain.settings import ExplainSettings, add_arguments
from support.traces import decode, record, traced

pytestmark = pytest.mark.unit
ONE = traced("Say a.", "abc\n", record(0, ["abc\n"], [0.9], 1))


def saved(folder: Path, content: object) -> Path:
    path = folder / "answers.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def settings(*words: str) -> ExplainSettings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return ExplainSettings.read(parser.parse_args(words))


def test_answers_as_they_come_from_each_api(tmp_path: Path):
    ours = run.as_json(ONE)
    of_generate = {key: ours[key] for key in ("output_ids", "meta_info")} | {"text": "abc\n"}
    choice = {"response_token_ids": ours["output_ids"], "meta_info": ours["meta_info"]}
    for content in (ours, [ours], [of_generate], {"choices": [choice]}):
        (found,) = run.read(saved(tmp_path, content))
        assert (list(found.output_ids), found.parse) == (ONE.output_ids, ONE.parse)
        assert found.prompt == ("Say a." if "prompt" in str(content) else "")
    assert len(run.read(saved(tmp_path, [ours, of_generate]))) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ([3], "holds 3; fix: save answers of /generate"),
        ({"text": "abc"}, "without output_ids"),
        ({"choices": [{"meta_info": {"parse": [{}]}}]}, "without output_ids.*return_token_ids"),
        ({"output_ids": [1], "meta_info": {"parse": [1, 2]}}, r"is \[1, 2\], expected one object"),
    ],
)
def test_files_that_hold_something_else(tmp_path: Path, content: object, message: str):
    with pytest.raises(BenchError, match=message):
        run.read(saved(tmp_path, content))


def test_settings_that_cannot_be():
    with pytest.raises(BenchError, match="nothing to explain; fix: give --url"):
        settings()
    with pytest.raises(BenchError, match="fix: give --tokenizer"):
        settings("a.json")
    assert settings("a.json", "--tokenizer", "t").traces == (Path("a.json"),)
    assert settings("--url", "u", "--prompt", "a", "--prompt", "b").prompt == ("a", "b")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("Say a.", ":1 is not JSON"),
        ('"a"\n{"text": "b"}', ":2 has no prompt"),
        ('{"prompt": ""}', ":1 has no prompt"),
        ('{"prompt": "a", "request": 1}', ":1 has the request 1; fix: use an object"),
    ],
)
def test_bad_prompts(tmp_path: Path, content: str, message: str):
    with pytest.raises(BenchError, match=message):
        read_prompts(saved(tmp_path, content))


def test_prompts(tmp_path: Path):
    path = saved(tmp_path, '"a\\nb"\n\n{"prompt": "c", "answer": 1, "request": {"regex": "d"}}\n')
    items = read_prompts(path)
    assert [item.text for item in items] == ["a\nb", "c"]
    assert [item.request for item in items] == [{}, {"regex": "d"}]


def test_the_scale_of_a_verdict():
    ticks = [page.position(value) for value in (0.0, 1e-9, 0.001, 0.5, 0.999, 1 - 1e-9, 1.0, 1.5)]
    assert ticks == sorted(ticks)
    assert (ticks[0], ticks[1], ticks[3], ticks[-3:]) == (0, 0, 50, [100, 100, 100])
    assert page.position(0.999) - page.position(0.99) > 10  # where the demo pair's verdicts are
    assert [page.level(v) for v in (None, 0.05, 0.1, 0.5, 0.9, 0.99, 1.0)] == [
        *("unasked", "lowest", "low", "middle", "high", "highest", "highest")
    ]


def test_an_end_of_line_shows_where_nothing_else_does():
    assert [page.visible(text) for text in ("a\n", "\n\n", "  \n", "a\nb\n")] == [
        *("a", "↵↵", "  ↵", "a\nb")
    ]


def test_refused_prefixes_that_the_target_would_have_written_are_named():
    ours = record(0, ["a\n", "b\n"], [0.9, 0.4], 1)
    for target_ids, count in (([*b"a\nb\n?"], 1), ([*b"X\nb\n?"], 0)):
        answer = explain_answer(
            traced(
                *("?", "a\nX\n", {**ours, "target_token_ids": target_ids}),
                **{"matched_prefixes": 2 * count, "rejected_matched_prefixes": count},
            ),
            decode,
        )
        shown = page.render([answer], {"date": "today", "source": "a test"})
        assert shown.count("the verdict refused it") == count
        said = "the verdicts refused 1 of them: the question does not work for this model"
        assert summary(answer).count(said) == count
        printed = Console(width=120, record=True, file=io.StringIO())
        printed.print(answer_table(answer, ""))
        assert printed.export_text().count("rejected (the target's own)") == count


def test_other_wordings_are_marked_with_the_targets_choice():
    reworded = {**record(0, ["so 5\n"], [0.9], 1), "target_token_ids": [*b"is 5\n", 0]}
    answer = explain_answer(traced("?", "so 5\n", reworded), decode)
    shown = page.render([answer], {"date": "today", "source": "a test"})
    assert '<span class="other" title="the target would have written: i">so</span> 5</div>' in shown
    assert "in place of 2 accepted tokens the target would have chosen others" in shown
    text = answer_table(answer, "").columns[1]._cells[0]
    assert [(span.start, span.end) for span in text.spans if "underline" in span.style] == [(0, 2)]


def test_drafts_that_ended_in_doubt_are_named():
    one = {**record(0, ["a: 1\n"], [0.9], 1), "in_doubt": True}
    answer = explain_answer(traced("?", "a: 1\n", one, doubted_drafts=1), decode)
    assert "; 1 drafts ended in doubt" in summary(answer)
    assert "ended in doubt" in page.render([answer], {"date": "today", "source": "a test"})
    older = explain_answer(traced("?", "a: 1\n", record(0, ["a: 1\n"], [0.9], 1)), decode)
    assert "in doubt" not in summary(older)
    assert "in doubt" not in page.render([older], {"date": "today", "source": "a test"})
