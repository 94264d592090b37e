"""The question is rendered by the served chat template, or the server does not start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.counters import Counters
from sglang_parse.core.phases import Draft, Phase, RequestPolicy
from sglang_parse.core.question import QuestionError, QuestionWording, render_question
from sglang_parse.core.request import RequestState
from sglang_parse.core.segment import Segmenter
from sglang_parse.engine.judge.judge import Judge
from sglang_parse.startup.models import AdmissionError
from sglang_parse.startup.questions import question_for
from support.chat_families import FAMILIES, QUESTIONS

NO_TEMPLATE, ASKED = SimpleNamespace(chat_template=None), ParseConfig(judge="question")
CHATML = str(QUESTIONS / "chatml.json")


def ask(chat_template: str | None, question: str = CHATML, **settings: str):
    tokenizer = FAMILIES["qwen3"].tokenizer()
    config = ParseConfig(**{"judge": "question", "question": question} | settings)
    args = SimpleNamespace(chat_template=chat_template)
    return question_for(args, tokenizer, config), tokenizer


def test_the_servers_chat_template_renders_the_question(tmp_path: Path):
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
def test_templates_without_a_question_are_refused(name: str):
    with pytest.raises(AdmissionError, match=rf"--chat-template is '{name}'. Fix: .*'suffix'"):
        ask(name)


def test_a_suffix_needs_no_template(tmp_path: Path):
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


FOUND = {name: family.question for name, family in FAMILIES.items()}
# Its template can think, whether or not requests switch that off: the same words, and one more.
FOUND["qwen3"] = "qwen3_thinking"


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_gets_its_question(name: str, caplog: pytest.LogCaptureFixture):
    tokenizer = FAMILIES[name].tokenizer()
    with caplog.at_level("INFO"):
        found = question_for(NO_TEMPLATE, tokenizer, ASKED)
    wording = QuestionWording.read(QUESTIONS / f"{FOUND[name]}.json")
    assert found == render_question(tokenizer, wording)
    [line] = [
        record.getMessage() for record in caplog.records if "built-in question" in record.message
    ]
    assert f"built-in question '{FOUND[name]}': the chat template has " in line
    assert f"{wording.accept!r} and {wording.reject!r} are single tokens" in line


def tokenizer_of(template: str, *words: str) -> PreTrainedTokenizerFast:
    """A tokenizer with these words as tokens."""
    raw = Tokenizer(models.WordLevel({word: n for n, word in enumerate(("?", *words))}, "?"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w\w?"), "isolated")
    raw.add_tokens(list(words))
    return PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=template)


def found_by(template: str, *words: str, caplog: pytest.LogCaptureFixture) -> str:
    """The log line of a server without a question setting, for a model with these words."""
    tokenizer = tokenizer_of(template, *words)
    with caplog.at_level("INFO"):
        question_for(NO_TEMPLATE, tokenizer, ASKED)
    return caplog.records[-1].getMessage()


OWN_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[assistant]"


@pytest.mark.parametrize(
    ("template", "words", "name", "why"),
    [
        # The family's words are several tokens here.
        (FAMILIES["chatml"].template, ("Correct", "Incorrect"), "default", "fits better"),
        (OWN_TEMPLATE, ("Correct", "Incorrect", "Yes", "No"), "default", "fits better"),
        (OWN_TEMPLATE, ("Yes", "No"), "chatml", "fits better"),
        (FAMILIES["llama3"].template, ("Yes", "No"), "llama3", "has '<|start_header_id|>'"),
    ],
)
def test_the_question_of_other_templates(
    template: str, words: tuple, name: str, why: str, caplog: pytest.LogCaptureFixture
):
    line = found_by(template, *words, caplog=caplog)
    assert f"built-in question '{name}'" in line
    assert why in line


def test_no_built_in_question_fits(caplog: pytest.LogCaptureFixture):
    refusal = (
        "--parse-question is not set, and no built-in question fits this model .chatml: accept "
        "'Yes' is . tokens .*; give it a question file"
    )
    with pytest.raises(QuestionError, match=refusal):
        found_by(FAMILIES["chatml"].template, "Good", "Bad", caplog=caplog)


def test_a_refusal_names_the_built_in_questions_that_fit():
    """As with SmolLM2, whose Incorrect is two tokens."""
    refusal = (
        "--parse-question is 'default': reject 'Incorrect' is . tokens .* single token, .*"
        "Built-in questions that fit this model: chatml, gemma, llama3, mistral, "
        "chatml_short, gemma_short, llama3_short, mistral_short$"
    )
    tokenizer = tokenizer_of(FAMILIES["chatml"].template, "Yes", "No", "Correct")
    args, config = SimpleNamespace(chat_template=None), ParseConfig(question="default")
    with pytest.raises(QuestionError, match=refusal):
        question_for(args, tokenizer, config)


def test_token_mode_has_no_question():
    assert ask("chatml", judge="auto", verification="token")[0] is None


def request_of(state: RequestState, *prompt: int) -> SimpleNamespace:
    """SGLang's side of a request, far from its length limit."""
    params = SimpleNamespace(max_new_tokens=1000)
    return SimpleNamespace(parse_state=state, origin_input_ids=list(prompt), sampling_params=params)


@pytest.mark.parametrize("name", ["llama3", "mistral", "gemma"])
def test_sentences_end_before_a_space_with_every_tokenizer(name: str):
    """Mistral's and Llama 2's decode a single token without its leading space."""
    family = FAMILIES[name]
    config = ParseConfig(question=str(QUESTIONS / f"{family.question}.json"), segment="sentence")
    tokenizer = family.tokenizer()
    question = render_question(tokenizer, family.wording)
    segments = Segmenter(tokenizer, config.segment_rule)
    judge = Judge(config, question, None, segments, Counters())
    draft = tokenizer.encode("step one. The answer. So", add_special_tokens=False)
    state = RequestState(RequestPolicy(threshold=0.5), phase=Phase.VERIFYING, draft=Draft(draft))
    judge.ask(request_of(state))
    texts = [tokenizer.decode(draft[:end]) for end in state.draft.prefix_ends]
    assert texts == ["step one.", "step one. The answer."]


def test_a_think_block_is_followed_through_prompt_output_and_draft():
    """Draft lines that end before, in and after a think block opened in an earlier round."""
    config = ParseConfig(question=str(QUESTIONS / "qwen3_thinking.json"))
    tokenizer = FAMILIES["qwen3-thinking"].tokenizer()
    question = question_for(SimpleNamespace(chat_template=None), tokenizer, config)
    assert question is not None
    segments = Segmenter(tokenizer, config.segment_rule)
    judge = Judge(config, question, None, segments, Counters())
    state = RequestState(RequestPolicy(threshold=0.5), phase=Phase.VERIFYING)
    req = request_of(state, 5, 6)

    def planned(output: str, draft: str, *, finished: bool = False) -> list[tuple[int, ...]]:
        state.output_ids += tokenizer.encode(output)
        state.draft = Draft(tokenizer.encode(draft), finished=finished)
        judge.ask(req)
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
