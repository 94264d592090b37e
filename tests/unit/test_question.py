"""Question tokens with a tiny byte-level BPE tokenizer and the ChatML template."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sglang_parse.core.question import (
    DEFAULT_QUESTION_FILE,
    Question,
    QuestionError,
    QuestionWording,
    question_file,
    render_question,
)

pytestmark = pytest.mark.unit

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDING = QuestionWording("Free of errors?", "Is it right?", "Correct", "Incorrect")


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ["Correct Incorrect\nCorrect", "Incorrect", "Is it right? Free of errors? hello"]
    bpe.train_from_iterator(corpus * 5, trainer)
    return bpe


@pytest.fixture
def tokenizer(bpe) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=CHATML
    )


def write(tmp_path, content: object) -> str:
    path = tmp_path / "question.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def as_content(**changes: object) -> dict[str, object]:
    names = ("partial", "complete", "accept", "reject")
    return {name: getattr(WORDING, name) for name in names} | changes


def test_the_suffix_ends_the_answer_asks_and_opens_the_reply(tokenizer):
    question = render_question(tokenizer, WORDING)
    assert tokenizer.decode(question.partial_ids) == (
        "<|im_end|>\n<|im_start|>user\nFree of errors?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "Is it right?" in tokenizer.decode(question.complete_ids)
    assert tokenizer.decode([question.accept_id]) == "Correct"
    assert tokenizer.decode([question.reject_id]) == "Incorrect"
    assert question.max_len == max(len(question.partial_ids), len(question.complete_ids))


def test_prompt_answer_and_suffix_equal_a_rendered_conversation(tokenizer):
    answer = "hello Correct"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]
    asked = {"role": "user", "content": WORDING.partial}

    def render(messages: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False)

    prefix = render(turns[:1]) + tokenizer.encode(answer, add_special_tokens=False)
    question = render_question(tokenizer, WORDING)
    assert prefix + list(question.ids_for(prefix, complete=False)) == render([*turns, asked])


def test_the_prefix_is_never_tokenized_again(tokenizer):
    """The suffix does not depend on a prefix that ends inside a word."""
    question = render_question(tokenizer, WORDING)
    odd = [tokenizer.convert_tokens_to_ids(letter) for letter in "Correct"]
    assert tokenizer.encode(tokenizer.decode(odd)) != odd
    assert question.ids_for(odd, complete=False) == question.partial_ids
    assert question.ids_for(odd, complete=True) == question.complete_ids


def test_the_turn_of_a_finished_answer_ends_once(tokenizer):
    question = render_question(tokenizer, WORDING)
    end = tokenizer.eos_token_id
    assert question.complete_ids[0] == question.partial_ids[0] == end
    assert question.ids_for([5, end], complete=True) == question.complete_ids[1:]
    assert question.ids_for([5], complete=True) == question.complete_ids
    assert question.ids_for([5, end], complete=False) == question.partial_ids
    assert question.ids_for([], complete=True) == question.complete_ids


def test_opening_follows_the_opened_turn(tokenizer):
    wording = QuestionWording("a?", "b?", "Correct", "Incorrect", opening="hello")
    text = tokenizer.decode(render_question(tokenizer, wording).partial_ids)
    assert text.endswith("<|im_start|>assistant\nhello")


def test_a_given_suffix_needs_no_template(tokenizer):
    tokenizer.chat_template = None
    wording = QuestionWording("{a}?", "b?", "Correct", "Incorrect", ">", " [{question}] {} =")
    question = render_question(tokenizer, wording)
    assert tokenizer.decode(question.partial_ids) == " [{a}?] {} =>"
    assert tokenizer.decode(question.complete_ids) == " [b?] {} =>"


def test_max_len_is_the_longer_suffix():
    assert Question((1, 2, 3), (1, 2), 8, 9).max_len == 3
    assert Question((1,), (1, 2), 8, 9).max_len == 2


def test_built_in_questions_by_name():
    built_in = DEFAULT_QUESTION_FILE.parent
    assert question_file("qwen3_thinking") == built_in / "qwen3_thinking.json"
    assert question_file("qwen3") == Path("qwen3")  # no such name: a file
    assert question_file("q.json") == Path("q.json")


def test_read_the_default_file():
    wording = QuestionWording.read(DEFAULT_QUESTION_FILE)
    assert (wording.accept, wording.reject, wording.suffix) == ("Correct", "Incorrect", "")
    assert wording.partial != wording.complete


def test_read_all_keys(tmp_path):
    content = as_content(opening="o", suffix="s {question}")
    assert QuestionWording.read(write(tmp_path, content)).suffix == "s {question}"


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(
        QuestionError,
        match="cannot be read .*; give --parse-question a JSON file .* one of .*llama3",
    ):
        QuestionWording.read(tmp_path / "none.json")
    with pytest.raises(QuestionError, match="cannot be read"):
        QuestionWording.read(tmp_path)


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "latin.json"
    path.write_bytes(json.dumps(as_content(), ensure_ascii=False).encode() + b"\xe9")
    with pytest.raises(QuestionError, match="is not a JSON object: 'utf-8' codec can't decode"):
        QuestionWording.read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"is not a JSON object: .*; give .*keys \(partial, complete, accept, reject, "),
        ("{'partial'", "is not a JSON object"),
        ([1], "is not a JSON object"),
        ({"partial": "p", "complete": "c"}, "accept: Field required, reject: Field required"),
        (as_content(accept=""), "wrong accept: String should have at least 1 character"),
        (as_content(extra="x"), "wrong extra: Unexpected keyword argument"),
        (as_content(accept=5), "wrong accept: Input should be a valid string"),
        (as_content(opening=None), "wrong opening: Input should be a valid string; .*suffix"),
    ],
)
def test_invalid_files_are_refused(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(QuestionError, match=message) as error:
        QuestionWording.read(path)
    assert path in str(error.value)


def test_verdicts_of_several_tokens_are_refused(tokenizer):
    for accept, reject, name in [("Correct!", "Incorrect", "accept"), ("Correct", "xyz", "reject")]:
        with pytest.raises(QuestionError, match=f"{name} .* tokens .*must be a single token"):
            render_question(tokenizer, QuestionWording("a?", "b?", accept, reject))


def test_equal_verdicts_are_refused(tokenizer):
    with pytest.raises(QuestionError, match="are the same token [0-9]+; choose two texts"):
        render_question(tokenizer, QuestionWording("a?", "b?", "Correct", "Correct"))


def test_a_tokenizer_without_template_is_refused(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(QuestionError, match="no chat template; set 'suffix'"):
        render_question(tokenizer, WORDING)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1].content }}",  # drops earlier turns
        "{% for m in messages[1:2] %}<|im_start|>{{ m.content }}{% endfor %}",  # nothing after
        "{% for m in messages[1:] %}{{ m.content }}\n{% endfor %}",  # nothing before
    ],
)
def test_a_template_that_omits_the_answer_is_refused(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(QuestionError, match="does not show an earlier answer; set 'suffix'"):
        render_question(tokenizer, WORDING)


def test_a_suffix_without_the_question_is_refused(tokenizer):
    wording = QuestionWording("a?", "b?", "Correct", "Incorrect", suffix="no place")
    with pytest.raises(QuestionError, match=r"has no \{question\} in it"):
        render_question(tokenizer, wording)
