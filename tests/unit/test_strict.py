"""Tokens that must be the target's own choice: classes, and what they do to real drafts."""

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies
from markdown_it import MarkdownIt
from transformers import PreTrainedTokenizerFast

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.judge import LIKELIHOOD_BIAS, sigmoid
from sglang_parse.core.phases import RequestPolicy
from sglang_parse.core.request import RequestState
from sglang_parse.core.segment import HALF, Segmenter, SegmentRule
from sglang_parse.core.selection import SELECTIONS, select
from sglang_parse.core.setting import ConfigError
from sglang_parse.core.strict import CLASSES, CodeBlocks, Refusal, find_refusal, parse_classes
from support.chat_families import FAMILIES

pytestmark = pytest.mark.unit

ROWS = json.loads((Path(__file__).parents[1] / "data" / "real_rows_numbers.json").read_text())
FIRST_DIGIT = 15
"""Token id of "0" in Qwen's vocabulary, whose every token of digits is one digit."""
EQUAL = 1000
"""In place of tokens that are the target's choice."""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        *((text, ["numbers"]) for text in ("7", " 42", "x2", "²", "½", "Ⅳ", "१", "٣", "三", "①")),
        *((text, []) for text in ("", " seven", ".", ":\n", "<|im_end|>", "</s>", "“", " +", "≤")),
    ],
)
def test_classes(text: str, names: list[str]):
    assert [name for name, holds in CLASSES.items() if holds(text, False)] == names
    assert "code" in [name for name, holds in CLASSES.items() if holds(text, True)]


@pytest.mark.parametrize(
    ("value", "names"),
    [
        *((value, ()) for value in ("none", " none ", [], ["none"], ())),
        *((value, ("numbers",)) for value in ("numbers", ["numbers"], "numbers,numbers")),
        *((value, ("numbers", "code")) for value in ("code, numbers", ["code", "numbers"])),
    ],
)
def test_names_in_any_order(value: object, names: tuple[str, ...]):
    assert parse_classes(value) == names


@pytest.mark.parametrize(
    "value", ["", "digits", "none,numbers", "numbers,", ["none", "numbers"], [1], [[]], 5, None, {}]
)
def test_other_values_are_refused(value: object):
    with pytest.raises(ValueError, match="; use none, or of numbers, code, with commas"):
        parse_classes(value)


def test_a_server_refuses_what_it_cannot_do():
    with pytest.raises(ConfigError, match="--parse-strict: got 'digits'; use none, or of numbers"):
        ParseConfig(strict="digits")
    with pytest.raises(ConfigError, match="--parse-strict is 'numbers', but --parse-verification"):
        ParseConfig(strict="numbers", verification="token")
    assert ParseConfig(strict="numbers", judge="question").strict_classes == ("numbers",)


@pytest.mark.parametrize(
    ("settings", "threshold", "classes"),
    [
        ({}, 0.5, ("numbers", "code")),
        ({"judge": "likelihood", "threshold": 0.2}, 0.2, ("numbers", "code")),
        ({"strict": "none"}, 0.5, ()),
        ({"question": "default"}, 0.5, ()),
        ({"question": "default", "strict": "numbers"}, 0.5, ("numbers",)),
        ({"judge": "likelihood", "strict": "auto", "threshold": 0}, 0, ("numbers", "code")),
    ],
)
def test_the_likelihood_has_defaults_of_its_own(
    settings: dict[str, Any], threshold: float, classes: tuple[str, ...]
):
    config = ParseConfig(**settings)
    assert (config.accept_threshold, config.strict_classes) == (threshold, classes)


def test_token_mode_has_no_strict_classes():
    assert ParseConfig(verification="token", strict="auto").strict_classes == ()


@pytest.mark.parametrize("selection", SELECTIONS)
def test_no_selection_accepts_a_refused_token(selection: str):
    verdicts, ends = [0.9] * 4, [2, 4, 6, 8]
    for place in range(8):
        found = select(verdicts, ends, 0.0, selection, is_finished=True, refused_at=place)
        assert found[0] == place // 2 * 2
    assert select(verdicts, ends, 0.0, selection, is_finished=True)[0] == 8


# -- tokens that are a part of a character ------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Of bytes, so that most characters but ASCII's are several tokens."""
    return FAMILIES["chatml"].tokenizer()


def refusal(tokenizer: Any, before: str, draft: str, target: str) -> Refusal | None:
    """Of a draft after ``before``, where the target writes ``target``."""
    segments = Segmenter(tokenizer, SegmentRule("line"))
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in (before, draft, target)]
    return find_refusal(*ids, ["numbers"], segments.text_of, CodeBlocks())


@pytest.mark.parametrize("before", ["", "a: ", "é१"])
@pytest.mark.parametrize(
    ("draft", "target", "is_refused"),
    [
        ("१३", "१४", True),  # Devanagari: other last bytes
        ("१क", "१ख", False),
        ("é", "è", False),
        ("😀", "😁", False),
        ("三", "二", True),
        ("é", "1", True),
    ],
)
def test_a_character_of_several_tokens(
    tokenizer: Any, before: str, draft: str, target: str, is_refused: bool
):
    found = refusal(tokenizer, before, draft, target)
    assert (found is not None) == is_refused


def test_half_a_character_may_be_a_number(tokenizer: Any):
    """The first byte of one, where the target writes a letter: nobody knows which."""
    half = tokenizer.encode("१", add_special_tokens=False)[:1]
    segments = Segmenter(tokenizer, SegmentRule("line"))
    assert segments.text_of(half[0], []).endswith(HALF)
    letter = tokenizer.encode("a", add_special_tokens=False)
    rest = segments.text_of, CodeBlocks()
    assert find_refusal([], half, letter, ["numbers"], *rest) == Refusal(0, "numbers")
    assert find_refusal([], half, letter, [], *rest) is None


# -- code ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("Say `x` or ``y``.\n", False),
        ("So:\n```python\ndef f():\n", True),
        ("So:\n```python\ndef f():\n```", True),  # what follows in the line may go on
        ("So:\n```python\ndef f():\n```\n", False),
        ("1. So:\n   ~~~\nx", True),
        ("An inline ``` is none,\nand a fence after it is\n```\n", True),
        ("```\na\n```\n\n```\nb", True),
        ("````markdown\n```\na\n```\n", True),
        ("````markdown\n```\na\n```\n````\n", False),
        ("~~~\n```\na\n", True),
        ("```a``` is none\n```\n", True),
        ("```\ncat <<END\n```python\nEND\n", True),
        ("> ```\n> a\n", True),
        ("> ```\n> a\n\nSo.", False),
        ("1. So:\n   ```\n   a\n2. So", True),  # a number of the code's, for all that is known
        ("1. So:\n   ```\n   a\n2. So\n", False),
        ("    ```\n", False),
        ("<pre>\n```\n</pre>\n", False),
        ("```\r\na\r\n```\r", True),
        ("```\r\na\r\n```\r\n", False),
        ("```\n\u2028```\n", True),  # no end of a line
    ],
)
def test_blocks_of_code(text: str, is_open: bool):
    """However the answer is cut into tokens and reads."""
    for size in (1, 2, 5, len(text)):
        code = CodeBlocks()
        for start in range(0, len(text), size):
            code.read([text[start : start + size]])
        assert code.is_open == is_open


PARTS = ("```", "````", "~~~", "~~~~", "``", "`", "> ", ">", "- ", "* ", "+", "-", "1. ", "2. ")
PARTS += ("10) ", " ", "  ", "    ", "\t", "text", "a`b", "---", "***", "- - -", "===", "# h", "&")
PARTS += ("<div>", "</div>", "<b>", "<a href='x'>", "<pre>", "</pre>", "<!--", "-->", "<?", "?>")
LINES = strategies.lists(strategies.lists(strategies.sampled_from(PARTS), max_size=5), max_size=9)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(LINES, strategies.integers(1, 9))
def test_blocks_of_code_are_commonmarks(lines: list[list[str]], size: int):
    """At the start of each line, as markdown-it reads it: behind an opening fence, up to the line
    that closes it or, where its quote or item ends, the first one that is none of theirs."""
    text = "".join("".join(parts) + "\n" for parts in lines)
    code, is_open = CodeBlocks(), []
    for line in text.splitlines(keepends=True):
        is_open.append(code.is_open)
        code.read([line[start : start + size] for start in range(0, len(line), size)])
    wanted = [False] * len(is_open)
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "fence":
            start, end = token.map
            is_closed = end - start - 1 > token.content.count("\n")
            wanted[start + 1 : end + (not is_closed)] = [True] * (end - start - is_closed)
    assert is_open == wanted[: len(is_open)]


def test_code_is_the_targets_own(tokenizer: Any):
    """A colon where the target writes ``or`` is wording in a sentence, and another program here."""
    segments = Segmenter(tokenizer, SegmentRule("line"))
    state = RequestState(RequestPolicy(threshold=0.2, strict=("code",)))

    def refused(before: str, draft: str, target: str) -> int | None:
        """The text of the draft that is refused begins at this place."""
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in (before, draft, target)]
        found = find_refusal(*ids, ["code"], segments.text_of, state.notes.code)
        assert found is None or found.name == "code"
        return found and found.place

    answer = "First:"
    assert refused(answer, " a", " b") is None
    opens, other = "b\n```\nc", "d\n```\ne"  # another word before the block is none of its code
    last = len(tokenizer.encode(opens, add_special_tokens=False)) - 1
    assert refused(answer, opens, other) == last
    answer += "\n```\nif a"
    assert refused(answer, ":", " or b:") == 0
    assert refused(answer, ":\n```\nSo.", ":\n```\nAs.") is None
    assert state.notes.code.num_tokens == len(tokenizer.encode(answer, add_special_tokens=False))
    answer += ":\n```\n"
    assert refused(answer, "So.", "As.") is None
    assert refused(answer, "```\nx", "```\ny") is not None
    state.restart(0, [])
    assert refused("First:", " a", " b") is None


# -- drafts of a real pair ----------------------------------------------------------------------


def text_of(token: int, _before: Sequence[int]) -> str:
    is_digit = FIRST_DIGIT <= token < FIRST_DIGIT + 10
    return str(token - FIRST_DIGIT) if is_digit else " word"


def rounds_of(
    length: int, others: list[list[Any]], threshold: float, names: Sequence[str]
) -> tuple[set[int], Sequence[int]]:
    """Verifies a draft at every token; after a refusal it goes on as it did.

    Returns:
        Places that are refused, and those where a number is not the target's choice.
    """
    draft, choices, scores = [EQUAL] * length, [EQUAL] * length, [LIKELIHOOD_BIAS] * length
    for place, token, choice, score in others:
        draft[place], choices[place], scores[place] = token, choice, score
    refused: set[int] = set()
    start = 0
    while start < length:
        verdicts = [*accumulate(map(sigmoid, scores[start:]), min)]
        rest = draft[start:], choices[start:], names, text_of
        found = find_refusal(draft[:start], *rest, CodeBlocks())
        start += select(
            *(verdicts, range(1, len(verdicts) + 1), threshold, "first-reject"),
            refused_at=found and found.place,
        )[0]
        refused |= {start} & {*range(length)}
        start += 1
    numbers = [x for x in others if any(text_of(t, ()).isdigit() for t in x[1:3])]
    return refused, [place for place, *_ in numbers]


@pytest.mark.parametrize(
    ("task", "threshold", "names", "tokens_per_refusal", "wrong_accepted"),
    [
        ("gsm8k", 0.5, [], 32, 15),
        ("gsm8k", 0.1, [], 92, 22),
        ("gsm8k", 0.2, ["numbers"], 51, 0),
        ("gsm8k", 0.1, ["numbers"], 67, 0),
        ("gsm8k", 0.05, ["numbers"], 86, 0),
        ("humaneval", 0.5, [], 244, 0),
        ("humaneval", 0.5, ["numbers"], 244, 0),
    ],
)
def test_numbers_of_a_real_pair(
    task: str, threshold: float, names: list[str], tokens_per_refusal: int, wrong_accepted: int
):
    """The table of docs/choosing.md. Of the 28 wrong numbers none is accepted, and less wording is
    refused than at 0.5 alone."""
    num_tokens = num_refused = num_wrong = 0
    accepted = 0
    for length, others in ROWS[task]:
        refused, numbers = rounds_of(length, others, threshold, names)
        num_tokens, num_refused = num_tokens + length, num_refused + len(refused)
        num_wrong, accepted = num_wrong + len(numbers), accepted + len({*numbers} - refused)
    assert num_wrong == (28 if task == "gsm8k" else 0)
    assert (round(num_tokens / num_refused), accepted) == (tokens_per_refusal, wrong_accepted)
