"""Request options and their errors, in the native and the OpenAI API."""

import re
from pathlib import Path

import openai
import pytest
from transformers import AutoTokenizer

from sglang_parse.core.question import QuestionWording, render_question
from support.client import DRAFTS, Client, parse_info, random_prompts
from support.demo_pair import DEMO
from support.refused_drafts import assert_the_cause_is_named
from support.servers import THINKING_QUESTION

PROMPT = random_prompts(1, 41)[0]
LIMIT = {"max_new_tokens": 24, "ignore_eos": True}
COUNTERS = (
    "rounds",
    "drafted_tokens",
    "accepted_tokens",
    "target_tokens",
    "draft_ms",
    "verify_ms",
)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"treshold": 0.5}, "treshold"),
        ({"threshold": "high"}, "threshold"),
        ({"threshold": -1}, "threshold"),
        ({"enabled": "yes"}, "enabled"),
        ({"trace": 1}, "trace"),
        ({"drafting": "never"}, "drafting"),
    ],
)
def test_bad_options_are_a_400_that_names_them(semantic: Client, options: dict, named: str):
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 4, "custom_params": {"parse": options}},
    }
    response = semantic.post("/generate", body)
    assert response.status_code == 400
    assert f"{named}" in response.text
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "custom_params": {"parse": options},
    }
    response = semantic.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert f"{named}" in response.text


def test_meta_info_has_every_counter(semantic: Client):
    info = parse_info(semantic.generate(PROMPT, **LIMIT))
    assert info["mode"] == "parse"
    assert all(info[key] > 0 for key in COUNTERS if key != "accepted_tokens")
    assert "trace" not in info


def test_openai_api_carries_options_and_meta_info(semantic: Client):
    api = openai.OpenAI(base_url=f"{semantic.url}/v1", api_key="none")
    for enabled, mode in ((True, "parse"), (False, "plain")):
        reply = api.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Start with 12"}],
            max_tokens=24,
            temperature=0,
            extra_body={
                "custom_params": {"parse": {"enabled": enabled, "trace": True, **DRAFTS}},
                "return_meta_info": True,
                "ignore_eos": True,
            },
        )
        (info,) = reply.choices[0].model_extra["meta_info"]["parse"]
        assert info["mode"] == mode
        assert bool(info["trace"]) is enabled


def test_traces_belong_to_their_requests(semantic: Client):
    prompts = random_prompts(8, 42)
    alone = [semantic.generate(p, parse={"trace": True}, **LIMIT) for p in prompts]
    together = semantic.generate_all(prompts, 8, parse={"trace": True}, **LIMIT)
    for left, right in zip(alone, together, strict=True):
        rounds = [*zip(parse_info(left)["trace"], parse_info(right)["trace"], strict=True)]
        assert rounds
        for a, b in rounds:
            assert a["verdicts"] == pytest.approx(b["verdicts"], abs=1e-4)
            for key in ("draft_token_ids", "prefix_ends", "accepted_len", "next_token_id"):
                assert a[key] == b[key]


def test_trace_adds_up_to_the_output(semantic: Client):
    answer = semantic.generate(PROMPT, parse={"trace": True}, **LIMIT)
    output, trace = answer["output_ids"], parse_info(answer)["trace"]
    assert trace
    for record in trace:
        kept = record["draft_token_ids"][: record["accepted_len"]]
        tokens = kept + record["bonus_token_ids"]
        assert [record["next_token_id"]] == (record["bonus_token_ids"][:1] or [None])
        assert any(output[i : i + len(tokens)] == tokens for i in range(len(output)))
        assert record["accepted_len"] in (0, *record["prefix_ends"])
        assert len(record["verdicts"]) == len(record["prefix_ends"])
        assert len(record["question_token_ids"]) == len(record["prefix_ends"])


def test_a_question_the_target_does_not_understand_is_reported_once(semantic: Client):
    """A random target has low verdict mass: the log reports it once, with the value."""
    for prompt in random_prompts(2, 43):
        info = parse_info(semantic.generate(prompt, parse={"trace": True}, **LIMIT))
        masses = [mass for record in info["trace"] for mass in record["verdict_mass"]]
        assert masses
        assert max(masses) < 0.5
    assert semantic.probe is not None
    log = semantic.probe.folder.with_suffix(".log").read_text()
    reports = [line for line in log.splitlines() if "--parse-question a wording" in line]
    assert len(reports) == 1
    assert re.search(r"get only 0\.\d{3} of the probability", reports[0])


@pytest.mark.parametrize("is_open", [True, False])
def test_reasoning_is_asked_about_inside_its_block(semantic: Client, is_open: bool):
    """Prompt, output or draft may open and close the reasoning block."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    question = render_question(tokenizer, QuestionWording.read(THINKING_QUESTION))
    assert question.thinking is not None
    start, end = question.thinking.start_id, question.thinking.end_id
    prompt = [*PROMPT, start, *PROMPT, *([] if is_open else [end])]
    options = {"parse": {"trace": True, "threshold": 0}, "max_new_tokens": 200, "ignore_eos": True}
    answer = semantic.generate(prompt, **options)
    asked: set[bool] = set()
    for record in parse_info(answer)["trace"]:
        context = prompt + answer["output_ids"][: record["output_start"]]
        was_thinking = question.thinking.is_open_after(context)
        draft = record["draft_token_ids"]
        for cut, ids in zip(record["prefix_ends"], record["question_token_ids"], strict=True):
            expected = question.ids_for(
                draft[:cut],
                complete=False,
                was_thinking=was_thinking,
                ends_line=tokenizer.decode(draft[cut - 1]).endswith("\n"),
            )
            assert tuple(ids) == expected
            asked.add(tuple(ids) != question.partial_ids)
    assert is_open in asked


@pytest.mark.nightly("tests/e2e/test_doctor_and_explain.py")
def test_three_commands_name_a_question_that_does_not_work(
    semantic: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Random verdicts refuse three of four prefixes that the target would have written itself; its
    draft is its near copy."""
    assert_the_cause_is_named(semantic, tmp_path, capsys, "--requests", "2", "--max-tokens", "96")
    semantic.assert_nothing_lost()
