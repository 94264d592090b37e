"""Question tokens of each chat-template family, compared with the template's rendering."""

from __future__ import annotations

import pytest

from sglang_parse.core.question import (
    SHORT,
    QuestionError,
    QuestionWording,
    built_in_questions,
    question_file,
    render_question,
)
from support.chat_families import FAMILIES, QUESTIONS, Family
from support.question_rows import families_of, rows_of

pytestmark = pytest.mark.unit

ASKED = {"role": "user", "content": "What is the answer?"}
EMPTY_BLOCK = "<think>\n\n</think>\n\n"
THINKING = [name for name, family in FAMILIES.items() if family.thinking]
# Families whose template opens the prompt inside a think block.
ALWAYS = ("qwen3-always", "deepseek-r1")


class Chat:
    """A family's tokenizer, its rendered question, and chats rendered by the template."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.tokenizer = family.tokenizer()
        self.question = render_question(self.tokenizer, family.wording)

    def text(self, *turns: dict[str, str], reply: bool = True, **options: bool) -> str:
        return self.tokenizer.apply_chat_template(
            list(turns), tokenize=False, add_generation_prompt=reply, **options
        )

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prompt(self) -> list[int]:
        """The prompt with an opened turn and without a think block."""
        return self.ids(self.text(ASKED).removesuffix("<think>\n"))

    def asked(self, answer: str, question: str, **options: bool) -> str:
        """The template's rendering of the chat with the question."""
        turns = (ASKED, {"role": "assistant", "content": answer})
        return self.text(*turns, {"role": "user", "content": question}, **options)

    def full(self, answer: str, question: str) -> list[int]:
        """Its token ids; the reply starts with an empty think block if the family has one."""
        off = {"enable_thinking": False}
        text = self.asked(answer, question, **off if self.family.thinking else {})
        return self.ids(text + ("\n</think>\n\n" if text.endswith("<think>\n") else ""))


@pytest.fixture(params=FAMILIES)
def chat(request: pytest.FixtureRequest) -> Chat:
    return Chat(FAMILIES[request.param])


def thinking_chats(*names: str):
    return pytest.mark.parametrize("chat", names or THINKING, indirect=True)


# -- open and finished answers ---------------------------------------------------


def test_the_question_about_an_unfinished_answer_equals_the_template(chat: Chat):
    answer = "The answer is so far right"
    prefix = chat.prompt() + chat.ids(answer)
    suffix = chat.question.ids_for(chat.ids(answer), complete=False)
    assert prefix + list(suffix) == chat.full(answer, chat.family.wording.partial)


def test_the_turn_of_a_finished_answer_ends_once(chat: Chat):
    draft = [*chat.ids("The answer"), chat.tokenizer.eos_token_id]
    suffix = chat.question.ids_for(draft, complete=True)
    expected = chat.full("The answer", chat.family.wording.complete)
    assert chat.prompt() + draft + list(suffix) == expected


@pytest.mark.parametrize(
    ("chat", "end"),
    [("llama3", "<|end_of_text|>"), ("llama3", "<|eom_id|>"), ("gemma", "<eos>")],
    indirect=["chat"],
)
def test_another_stop_token_does_not_end_the_turn(chat: Chat, end: str):
    """The template's end token follows it."""
    draft = [*chat.ids("The answer"), chat.tokenizer.convert_tokens_to_ids(end)]
    suffix = chat.question.ids_for(draft, complete=True)
    assert suffix == chat.question.complete_ids
    assert suffix[0] == chat.tokenizer.eos_token_id


def test_the_verdict_is_the_first_token_of_a_reply(chat: Chat):
    """The verdict tokens are those a reply of that word starts with."""
    question, wording = chat.question, chat.family.wording
    assert question.accept_id != question.reject_id
    for word, token in ((wording.accept, question.accept_id), (wording.reject, question.reject_id)):
        turns = (ASKED, {"role": "assistant", "content": "so far"})
        reply = {"role": "assistant", "content": word}
        rendered = chat.text(
            *turns, {"role": "user", "content": wording.partial}, reply, reply=False
        )
        asked = chat.full("so far", wording.partial)
        if (
            chat.family.name == "deepseek-r1"
        ):  # the template opens a block but omits it from replies
            asked = asked[: -len(chat.ids(EMPTY_BLOCK))]
        assert chat.ids(rendered)[: len(asked) + 1] == [*asked, token]


def test_every_question_file_has_a_family_and_a_short_variant():
    long = {"default", *(family.question for family in FAMILIES.values())}
    names = {path.stem for path in QUESTIONS.glob("*.json")}
    assert names == long | {f"{name}_short" for name in long}
    for name in long:
        wording, short = (QuestionWording.read(question_file(n)) for n in (name, f"{name}_short"))
        assert (wording.accept, wording.reject) == (short.accept, short.reject)
        assert bool(wording.thinking) == bool(short.thinking)


@pytest.mark.parametrize("name", [name for name in built_in_questions() if name.endswith(SHORT)])
def test_short_questions_are_short(name: str):
    """Counted with a real vocabulary and each template of the family."""
    for family in families_of(name):
        rows, long = rows_of(name, family), rows_of(name.removesuffix(SHORT), family)
        assert max(rows.partial, rows.complete) <= 28
        assert all(few < many for few, many in zip(rows, long, strict=True) if many)
        # Reasoning: chatml is for models without thinking.
        if family.question == "qwen3_thinking":
            assert rows.thinking <= 28


# -- templates that would change the prefix -----------------------------


@pytest.mark.parametrize("chat", ["llama3", "gemma"], indirect=True)
def test_trimming_templates_do_not_touch_the_prefix(chat: Chat):
    """A prefix keeps its newline, which rendering would trim."""
    draft = chat.ids("step\n\n")
    ours = chat.prompt() + draft + list(chat.question.ids_for(draft, complete=False))
    assert chat.ids(chat.asked("step\n\n", chat.family.wording.partial)) != ours
    assert chat.tokenizer.decode(ours) == chat.tokenizer.decode(
        chat.full("step", chat.family.wording.partial)
    ).replace("step", "step\n\n")


@pytest.mark.parametrize("chat", ["mistral", "mistral-tekken"], indirect=True)
def test_mistrals_system_text_is_not_moved(chat: Chat):
    """Rendering would move it to the question."""
    system = {"role": "system", "content": "Only right answers."}
    question = {"role": "user", "content": chat.family.wording.partial}
    prompt = chat.ids(chat.text(system, ASKED))
    ours = chat.tokenizer.decode([*prompt, *chat.ids("so far"), *chat.question.partial_ids])
    answer = {"role": "assistant", "content": "so far"}
    again = chat.text(system, ASKED, answer, question)
    assert ours.index("Only right") < ours.index(ASKED["content"]) < ours.index("so far")
    assert again.index("Only right") > again.index("so far")


@thinking_chats("qwen3", "qwen3-thinking")
def test_thinking_off_keeps_the_prompts_empty_block(chat: Chat):
    """The template drops the block from earlier turns, but its KV is part of the prefix."""
    prompt = chat.ids(chat.text(ASKED, enable_thinking=False))
    draft = chat.ids("The answer")
    ours = chat.tokenizer.decode([*prompt, *draft, *chat.question.partial_ids])
    again = chat.tokenizer.decode(chat.full("The answer", chat.family.wording.partial))
    assert ours == again.replace("assistant\nThe", f"assistant\n{EMPTY_BLOCK}The")
    assert not chat.question.thinking.is_open_after(prompt)


# -- thinking -------------------------------------------------------------------


@thinking_chats()
def test_the_reply_starts_after_an_empty_think_block(chat: Chat):
    for ids in (
        chat.question.partial_ids,
        chat.question.complete_ids,
        chat.question.thinking.suffix_ids,
    ):
        assert chat.tokenizer.decode(ids).endswith(EMPTY_BLOCK)


@thinking_chats("qwen3", "qwen3-thinking", "qwen3-always")
def test_unfinished_reasoning_is_closed_as_in_the_template(chat: Chat):
    wording = chat.family.wording
    turn = {"role": "assistant", "content": "", "reasoning_content": "step 1"}
    closed = chat.text(ASKED, turn, reply=False)  # the template shows reasoning of the last turn
    asked = chat.text({"role": "user", "content": wording.thinking or wording.partial})
    asked = asked.removesuffix("<think>\n") + EMPTY_BLOCK
    draft = chat.ids("<think>\nstep 1\n")
    suffix = chat.question.ids_for(draft, complete=False, ends_line=True)
    assert chat.prompt() + draft + list(suffix) == chat.ids(closed + asked)
    draft = chat.ids("<think>\nstep 1")
    suffix = chat.question.ids_for(draft, complete=False)
    assert chat.prompt() + draft + list(suffix) == chat.ids(closed + asked)


@thinking_chats()
def test_reasoning_stays_in_the_prefix_although_the_template_drops_it(chat: Chat):
    answer = "<think>\nstep 1\n</think>\n\nThe answer"
    draft = chat.ids(answer)
    wording = chat.family.wording
    ours = [*chat.prompt(), *draft, *chat.question.ids_for(draft, complete=False)]
    assert chat.tokenizer.decode(ours).count("step 1") == 1
    assert "step 1" not in chat.asked(answer, wording.partial)
    assert chat.question.ids_for(draft, complete=False) == chat.question.partial_ids
    closed = chat.question.ids_for(draft[:-4], complete=False)  # after the block, before the answer
    assert closed == chat.question.partial_ids


@thinking_chats()
def test_whether_a_think_block_is_open(chat: Chat):
    is_open = chat.question.thinking.is_open_after
    ids, eos = chat.ids, chat.tokenizer.eos_token_id
    prompt = ids(chat.text(ASKED))
    assert is_open(prompt) == (chat.family.name in ALWAYS)
    assert is_open(ids("<think>\nstep"))
    assert is_open(ids("step"), True)
    assert not is_open(ids("step"), False)
    assert not is_open(ids("step</think> answer"), True)
    assert is_open([], True)
    assert not is_open([*ids("<think> step"), eos, *ids("answer")])
    suffix = chat.question.ids_for(ids("step"), complete=False, was_thinking=True)
    assert suffix == chat.question.thinking.line_end_ids + chat.question.thinking.suffix_ids


@thinking_chats("qwen3")
def test_think_marks_in_a_user_turn_open_no_block(chat: Chat):
    turn = {"role": "user", "content": "What does <think> mean?"}
    assert not chat.question.thinking.is_open_after(chat.ids(chat.text(turn)))


def test_max_len_includes_the_thinking_suffix():
    question = Chat(FAMILIES["qwen3-thinking"]).question
    thinking = question.thinking
    assert question.max_len == len(thinking.line_end_ids) + len(thinking.suffix_ids)


def test_models_without_think_tokens_have_no_thinking_suffix():
    assert all(Chat(FAMILIES[name]).question.thinking is None for name in ("chatml", "llama3"))


# -- errors -----------------------------------------------------------------------


def wording(**changes: str) -> QuestionWording:
    return QuestionWording("Right?", "All right?", "Yes", "No", **changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3", {"opening": "<think>\n"}, "opened inside a think block .*'</think>', or leave"),
        ("qwen3-always", {"opening": "So: "}, "opened inside a think block"),
        ("llama3", {"thinking": "Right?"}, "'<think>' and '</think>' are not both added tokens"),
        ("qwen3", {"think_start": "[THINK]"}, r"'\[THINK\]' and '</think>' are not both"),
    ],
)
def test_invalid_wordings_are_refused(name: str, changes: dict[str, str], message: str):
    with pytest.raises(QuestionError, match=message):
        render_question(FAMILIES[name].tokenizer(), wording(**changes))


def test_verdicts_of_several_tokens_name_the_tokens():
    """A word that is one token for one family may be several for another."""
    tokenizer = FAMILIES["mistral"].tokenizer()
    words = QuestionWording("Right?", "All right?", "Yes", "Unmistakably")
    with pytest.raises(QuestionError, match=r"reject 'Unmistakably' is \d+ tokens \[.*another"):
        render_question(tokenizer, words)


def test_a_template_that_omits_the_question_is_refused():
    tokenizer = FAMILIES["chatml"].tokenizer()
    template = "{% for m in messages[:2] %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(QuestionError, match="does not show the question 'Right[?]'"):
        render_question(tokenizer, wording(), template)


def test_a_given_template_is_used_instead_of_the_tokenizers():
    tokenizer = FAMILIES["chatml"].tokenizer()
    ids = render_question(tokenizer, wording(), FAMILIES["qwen3-always"].template).partial_ids
    assert tokenizer.decode(ids).endswith(f"assistant\n{EMPTY_BLOCK}")
    assert not tokenizer.decode(render_question(tokenizer, wording()).partial_ids).endswith(
        EMPTY_BLOCK
    )


def test_given_openings_and_suffixes():
    tokenizer = FAMILIES["qwen3"].tokenizer()
    own = wording(opening="<think>\nIn short:\n</think>\n\n", suffix="<|im_end|>\n{question} ")
    question = render_question(tokenizer, own)
    assert tokenizer.decode(question.partial_ids) == f"<|im_end|>\nRight? {own.opening}"
    closed = tokenizer.decode(question.thinking.suffix_ids)
    assert closed == f"</think>\n\n<|im_end|>\nRight? {own.opening}"
