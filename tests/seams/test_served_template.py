"""The question is asked through the chat template that is served, or the server does not start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.payoff import OffSwitch
from sglang_parse.core.phases import Phase, Terms
from sglang_parse.core.question import render_question
from sglang_parse.core.request import Draft, RequestState
from sglang_parse.core.tally import Tally
from sglang_parse.engine.rounds import Rounds
from sglang_parse.startup.checks import question_for
from sglang_parse.startup.models import AdmissionError
from support.chat_families import FAMILIES, QUESTIONS

CHATML = str(QUESTIONS / "chatml.json")


def ask(chat_template: str | None, question: str = CHATML, **settings: str):
    tokenizer = FAMILIES["qwen3"].tokenizer()
    config = ParseConfig(question=question, **settings)
    args = SimpleNamespace(chat_template=chat_template)
    return question_for(args, tokenizer, config), tokenizer


def test_the_template_given_to_the_server_is_the_one_that_asks(tmp_path: Path):
    from sglang.srt.parser.template_manager import TemplateManager

    path = tmp_path / "own.jinja"
    path.write_text(FAMILIES["chatml"].template.replace("\n", "\\n") + "\n")
    question, tokenizer = ask(str(path))
    served = FAMILIES["qwen3"].tokenizer()
    TemplateManager()._load_jinja_template(SimpleNamespace(tokenizer=served), str(path))
    tokenizer.chat_template = served.chat_template
    expected = question_for(
        SimpleNamespace(chat_template=None), tokenizer, ParseConfig(question=CHATML)
    )
    assert question == expected
    assert question != ask(None)[0]


@pytest.mark.parametrize("name", ["chatml", "/no/such.jinja"])
def test_templates_that_cannot_ask_are_refused(name: str):
    with pytest.raises(AdmissionError, match=rf"--chat-template is '{name}'. Fix: .*'suffix'"):
        ask(name)


def test_an_own_suffix_asks_without_the_template(tmp_path: Path):
    path = tmp_path / "question.json"
    wording = '"partial": "a", "complete": "b", "accept": "Yes", "reject": "No"'
    path.write_text(f'{{{wording}, "suffix": "<|im_end|>{{question}}"}}')
    question, tokenizer = ask("chatml", str(path))
    assert tokenizer.decode(question.partial_ids) == "<|im_end|>a"


def test_a_template_that_refuses_the_conversation(tmp_path: Path):
    path = tmp_path / "strict.jinja"
    path.write_text("{{ raise_exception('one turn only') }}")
    with pytest.raises(AdmissionError, match="user turn .one turn only.*Fix: set 'suffix'"):
        ask(str(path))


def test_token_mode_asks_nothing():
    assert ask("chatml", verification="token")[0] is None


def request_of(state: RequestState, *prompt: int) -> SimpleNamespace:
    """SGLang's side of a request, far from its length limit."""
    params = SimpleNamespace(max_new_tokens=1000)
    return SimpleNamespace(parse_state=state, origin_input_ids=list(prompt), sampling_params=params)


@pytest.mark.parametrize("name", ["llama3", "mistral", "gemma"])
def test_sentences_end_before_a_space_with_every_tokenizer(name: str):
    """Mistral's (as Llama 2's) decodes a single token without its leading space."""
    family = FAMILIES[name]
    config = ParseConfig(question=str(QUESTIONS / f"{family.question}.json"), segment="sentence")
    tokenizer = family.tokenizer()
    question = render_question(tokenizer, family.wording)
    rounds = Rounds(config, tokenizer, question, OffSwitch(), Tally())
    draft = tokenizer.encode("step one. The answer. So", add_special_tokens=False)
    state = RequestState(Terms(threshold=0.5), phase=Phase.VERIFYING, draft=Draft(draft))
    questions = rounds.questions(request_of(state))
    texts = [tokenizer.decode(draft[:end]) for end in questions.prefix_ends]
    assert texts == ["step one.", "step one. The answer."]


def test_a_think_block_is_followed_through_prompt_output_and_draft():
    """Lines of a draft, cut before, in and behind a think block that an earlier round opened."""
    config = ParseConfig(question=str(QUESTIONS / "qwen3_thinking.json"))
    tokenizer = FAMILIES["qwen3-thinking"].tokenizer()
    question = question_for(SimpleNamespace(chat_template=None), tokenizer, config)
    assert question is not None
    rounds = Rounds(config, tokenizer, question, OffSwitch(), Tally())
    state = RequestState(Terms(threshold=0.5), phase=Phase.VERIFYING)
    req = request_of(state, 5, 6)

    def planned(output: str, draft: str, *, finished: bool = False) -> list[tuple[int, ...]]:
        state.output_ids += tokenizer.encode(output)
        state.draft = Draft(tokenizer.encode(draft), finished=finished)
        state.ask(rounds.questions(req))
        return state.draft.question_ids

    inside, behind = question.thinking.suffix_ids, question.partial_ids
    assert planned("a\n", "step\n<think>\nstep\n") == [behind, inside, inside]
    assert planned("<think>\n", "step\nstep\n") == [inside, inside]
    assert planned("step\n", "step\n</think>\nanswer\n") == [inside, behind, behind]
    assert planned("</think>\n", "answer\nanswer\n") == [behind, behind]
    ended = planned("", "answer\nanswer<|im_end|>", finished=True)
    assert ended == [behind, question.complete_ids[1:]]
    assert planned("<think>", "") == []
    assert planned("", "step") == [question.thinking.line_end_ids + inside]
