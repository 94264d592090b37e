"""Questions on token ids for each chat-template family, against the template's own rendering."""

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
# Which prompts are opened inside a think block by the template itself.
ALWAYS = ("qwen3-always", "deepseek-r1")


class Chat:
    """A family's tokenizer, its rendered question, and what the template makes of a chat."""

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
        """The prompt without a think block: the reply's turn is open, nothing is in it."""
        return self.ids(self.text(ASKED).removesuffix("<think>\n"))

    def asked(self, answer: str, question: str, **options: bool) -> str:
        """The template's own rendering of the chat in which the question is asked."""
        turns = (ASKED, {"role": "assistant", "content": answer})
        return self.text(*turns, {"role": "user", "content": question}, **options)

    def full(self, answer: str, question: str) -> list[int]:
        """The same as ids, the reply opened behind an empty think block where there is one."""
        off = {"enable_thinking": False}
        text = self.asked(answer, question, **off if self.family.thinking else {})
        return self.ids(text + ("\n</think>\n\n" if text.endswith("<think>\n") else ""))


@pytest.fixture(params=FAMILIES)
def chat(request: pytest.FixtureRequest) -> Chat:
    return Chat(FAMILIES[request.param])


def thinking_chats(*names: str):
    return pytest.mark.parametrize("chat", names or THINKING, indirect=True)


# -- open and finished answers ---------------------------------------------------


def test_an_open_prefix_is_closed_and_asked_about_as_the_template_does(chat: Chat):
    answer = "The answer is so far right"
    prefix = chat.prompt() + chat.ids(answer)
    suffix = chat.question.ids_for(chat.ids(answer), complete=False)
    assert prefix + list(suffix) == chat.full(answer, chat.family.wording.partial)


def test_a_finished_answer_is_closed_once(chat: Chat):
    draft = [*chat.ids("The answer"), chat.tokenizer.eos_token_id]
    suffix = chat.question.ids_for(draft, complete=True)
    expected = chat.full("The answer", chat.family.wording.complete)
    assert chat.prompt() + draft + list(suffix) == expected


@pytest.mark.parametrize(
    ("chat", "end"),
    [("llama3", "<|end_of_text|>"), ("llama3", "<|eom_id|>"), ("gemma", "<eos>")],
    indirect=["chat"],
)
def test_another_stop_token_does_not_close_the_turn(chat: Chat, end: str):
    """The template's own mark follows: the question stands in an ordinary turn."""
    draft = [*chat.ids("The answer"), chat.tokenizer.convert_tokens_to_ids(end)]
    suffix = chat.question.ids_for(draft, complete=True)
    assert suffix == chat.question.complete_ids
    assert suffix[0] == chat.tokenizer.eos_token_id


def test_the_verdict_is_read_where_the_template_puts_a_reply(chat: Chat):
    """One token each, different, and the ones an answer of that word starts with."""
    question, wording = chat.question, chat.family.wording
    assert question.accept_id != question.reject_id
    for word, token in ((wording.accept, question.accept_id), (wording.reject, question.reject_id)):
        turns = (ASKED, {"role": "assistant", "content": "so far"})
        reply = {"role": "assistant", "content": word}
        told = chat.text(*turns, {"role": "user", "content": wording.partial}, reply, reply=False)
        asked = chat.full("so far", wording.partial)
        if chat.family.name == "deepseek-r1":  # opens a block for a reply, shows none in a reply
            asked = asked[: -len(chat.ids(EMPTY_BLOCK))]
        assert chat.ids(told)[: len(asked) + 1] == [*asked, token]


def test_every_question_file_is_some_familys_and_has_a_short_variant():
    long = {"default", *(family.question for family in FAMILIES.values())}
    names = {path.stem for path in QUESTIONS.glob("*.json")}
    assert names == long | {f"{name}_short" for name in long}
    for name in long:
        wording, short = (QuestionWording.read(question_file(n)) for n in (name, f"{name}_short"))
        assert (wording.accept, wording.reject) == (short.accept, short.reject)
        assert bool(wording.thinking) == bool(short.thinking)


@pytest.mark.parametrize("name", [name for name in built_in_questions() if name.endswith(SHORT)])
def test_short_questions_are_short(name: str):
    """Counted as a real vocabulary does, with each template of the family."""
    for family in families_of(name):
        rows, long = rows_of(name, family), rows_of(name.removesuffix(SHORT), family)
        assert max(rows.partial, rows.complete) <= 28
        assert all(few < many for few, many in zip(rows, long, strict=True) if many)
        # Where thoughts are asked about: chatml is for thinking off.
        if family.question == "qwen3_thinking":
            assert rows.thinking <= 28


# -- where a template would not show what was written -----------------------------


@pytest.mark.parametrize("chat", ["llama3", "gemma"], indirect=True)
def test_trimming_templates_do_not_touch_the_prefix(chat: Chat):
    """A prefix cut behind a line keeps its line end; rendered again it would lose it."""
    draft = chat.ids("step\n\n")
    ours = chat.prompt() + draft + list(chat.question.ids_for(draft, complete=False))
    assert chat.ids(chat.asked("step\n\n", chat.family.wording.partial)) != ours
    assert chat.tokenizer.decode(ours) == chat.tokenizer.decode(
        chat.full("step", chat.family.wording.partial)
    ).replace("step", "step\n\n")


@pytest.mark.parametrize("chat", ["mistral", "mistral-tekken"], indirect=True)
def test_mistrals_system_text_stays_where_it_was(chat: Chat):
    """Rendered again, the template would move it to the question."""
    told = {"role": "system", "content": "Only right answers."}
    question = {"role": "user", "content": chat.family.wording.partial}
    prompt = chat.ids(chat.text(told, ASKED))
    ours = chat.tokenizer.decode([*prompt, *chat.ids("so far"), *chat.question.partial_ids])
    answer = {"role": "assistant", "content": "so far"}
    again = chat.text(told, ASKED, answer, question)
    assert ours.index("Only right") < ours.index(ASKED["content"]) < ours.index("so far")
    assert again.index("Only right") > again.index("so far")


@thinking_chats("qwen3", "qwen3-thinking")
def test_thinking_off_keeps_the_prompts_empty_block(chat: Chat):
    """The template drops the block from earlier turns; its KV is there, so it stays for us."""
    prompt = chat.ids(chat.text(ASKED, enable_thinking=False))
    draft = chat.ids("The answer")
    ours = chat.tokenizer.decode([*prompt, *draft, *chat.question.partial_ids])
    again = chat.tokenizer.decode(chat.full("The answer", chat.family.wording.partial))
    assert ours == again.replace("assistant\nThe", f"assistant\n{EMPTY_BLOCK}The")
    assert not chat.question.thinking.is_open_after(prompt)


# -- thinking -------------------------------------------------------------------


@thinking_chats()
def test_the_reply_is_opened_behind_an_empty_think_block(chat: Chat):
    for ids in (
        chat.question.partial_ids,
        chat.question.complete_ids,
        chat.question.thinking.suffix_ids,
    ):
        assert chat.tokenizer.decode(ids).endswith(EMPTY_BLOCK)


@thinking_chats("qwen3", "qwen3-thinking", "qwen3-always")
def test_reasoning_cut_in_the_middle_is_closed_as_the_template_closes_it(chat: Chat):
    wording = chat.family.wording
    turn = {"role": "assistant", "content": "", "reasoning_content": "step 1"}
    closed = chat.text(ASKED, turn, reply=False)  # the last turn: its reasoning is shown
    asked = chat.text({"role": "user", "content": wording.thinking or wording.partial})
    asked = asked.removesuffix("<think>\n") + EMPTY_BLOCK
    draft = chat.ids("<think>\nstep 1\n")
    suffix = chat.question.ids_for(draft, complete=False, ends_line=True)
    assert chat.prompt() + draft + list(suffix) == chat.ids(closed + asked)
    draft = chat.ids("<think>\nstep 1")
    suffix = chat.question.ids_for(draft, complete=False)
    assert chat.prompt() + draft + list(suffix) == chat.ids(closed + asked)


@thinking_chats()
def test_reasoning_stays_in_sight_though_the_template_would_drop_it(chat: Chat):
    answer = "<think>\nstep 1\n</think>\n\nThe answer"
    draft = chat.ids(answer)
    wording = chat.family.wording
    ours = [*chat.prompt(), *draft, *chat.question.ids_for(draft, complete=False)]
    assert chat.tokenizer.decode(ours).count("step 1") == 1
    assert "step 1" not in chat.asked(answer, wording.partial)
    assert chat.question.ids_for(draft, complete=False) == chat.question.partial_ids
    cut = chat.question.ids_for(draft[:-4], complete=False)  # at the closed block, no answer yet
    assert cut == chat.question.partial_ids


@thinking_chats()
def test_where_a_block_is_open(chat: Chat):
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
def test_a_user_who_writes_the_mark_opens_no_block(chat: Chat):
    turn = {"role": "user", "content": "What does <think> mean?"}
    assert not chat.question.thinking.is_open_after(chat.ids(chat.text(turn)))


def test_room_is_kept_for_the_longest_suffix():
    question = Chat(FAMILIES["qwen3-thinking"]).question
    thinking = question.thinking
    assert question.max_len == len(thinking.line_end_ids) + len(thinking.suffix_ids)


def test_models_without_think_tokens_have_no_such_suffix():
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
def test_refusals(name: str, changes: dict[str, str], message: str):
    with pytest.raises(QuestionError, match=message):
        render_question(FAMILIES[name].tokenizer(), wording(**changes))


def test_verdicts_of_several_tokens_name_the_tokens():
    """Words that are one token for one family need not be for another."""
    tokenizer = FAMILIES["mistral"].tokenizer()
    words = QuestionWording("Right?", "All right?", "Yes", "Unmistakably")
    with pytest.raises(QuestionError, match=r"reject 'Unmistakably' is \d+ tokens \[.*another"):
        render_question(tokenizer, words)


def test_a_template_that_hides_the_question_is_refused():
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


def test_own_openings_and_suffixes():
    tokenizer = FAMILIES["qwen3"].tokenizer()
    own = wording(opening="<think>\nIn short:\n</think>\n\n", suffix="<|im_end|>\n{question} ")
    question = render_question(tokenizer, own)
    assert tokenizer.decode(question.partial_ids) == f"<|im_end|>\nRight? {own.opening}"
    closed = tokenizer.decode(question.thinking.suffix_ids)
    assert closed == f"</think>\n\n<|im_end|>\nRight? {own.opening}"
