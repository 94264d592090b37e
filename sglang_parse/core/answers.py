"""Earlier answers, found by the end of a prompt or by what an answer has written so far.

Answers of one scope are never found from another. Memory is bounded: the least recently used
answers are dropped, long ones are cut off.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Scope = tuple[str | None, ...]
"""What SGLang's prefix cache keeps apart: ``extra_key``, ``cache_salt``, and the adapter."""
MAX_TOKENS = 4096
"""Tokens that are kept of an answer."""
PROMPT_ENDS = (64, 16)
"""Last tokens of a prompt that find an answer, where no prompt is equal."""
GRAM, STRIDE = 6, 4
"""Newest tokens that find an answer in its middle; every so many places of it can be found."""
MAX_BYTES = 1 << 30
"""Memory of all answers together."""
ANSWER_BYTES, TOKEN_BYTES = 600, 32
"""Memory of an answer, and of each of its tokens, entries included (measured: 28 per token)."""


@dataclass(frozen=True, slots=True)
class EarlierAnswer:
    """One earlier answer.

    Attributes:
        token_ids: int32.
        prompt_keys: of the whole prompt, and of its ends.
    """

    scope: Scope
    token_ids: array
    prompt_keys: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return ANSWER_BYTES + TOKEN_BYTES * len(self.token_ids)

    def entries(self) -> Iterator[tuple[int, int]]:
        """(key, place that it leads to)."""
        for key in self.prompt_keys:
            yield key, 0
        for place in range(GRAM, len(self.token_ids), STRIDE):
            yield _key(self.token_ids[place - GRAM : place]), place


@dataclass(slots=True)
class AnswerIndex:
    """The last ``max_answers`` answers of a server, or as many as ``max_bytes`` hold.

    ``_places`` has one number per entry, ``number * MAX_TOKENS + place``: a tuple takes more
    memory, and Python's garbage collector would visit millions of them.
    """

    max_answers: int
    max_bytes: int = MAX_BYTES
    _answers: OrderedDict[int, EarlierAnswer] = field(default_factory=OrderedDict)
    _places: dict[Scope, dict[int, int]] = field(default_factory=dict)
    _num_added: int = 0
    _num_bytes: int = 0

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, scope: Scope, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> None:
        """Adds an answer; it takes the place of an earlier one to the same prompt."""
        keys = _prompt_keys(prompt_ids)
        before = self._places.get(scope, {}).get(keys[0])
        if before is not None:
            self._remove(before // MAX_TOKENS)
        if not answer_ids:
            return
        answer = EarlierAnswer(scope, array("I", answer_ids[:MAX_TOKENS]), keys)
        number = self._num_added = self._num_added + 1
        self._answers[number] = answer
        self._num_bytes += answer.num_bytes
        places = self._places.setdefault(scope, {})
        for key, place in answer.entries():
            places[key] = number * MAX_TOKENS + place
        while len(self._answers) > self.max_answers or self._num_bytes > self.max_bytes:
            self._remove(next(iter(self._answers)))

    def find_by_prompt(self, scope: Scope, prompt_ids: Sequence[int]) -> Sequence[int]:
        """The latest answer to the prompt, or to one with the same end; () for none."""
        places = self._places.get(scope, {})
        found = (places[key] for key in _prompt_keys(prompt_ids) if key in places)
        return self._use(next(found, 0) // MAX_TOKENS)

    def find(self, scope: Scope, newest_ids: Sequence[int]) -> tuple[Sequence[int], int]:
        """The latest answer that has the newest tokens, the last ``GRAM``, and the place behind
        them; () and 0 for none."""
        found = self._places.get(scope, {}).get(_key(newest_ids), 0)
        number, place = divmod(found, MAX_TOKENS)
        answer = self._use(number)
        if [*answer[max(0, place - GRAM) : place]] != [*newest_ids]:  # equal keys by chance
            return (), 0
        return answer, place

    def clear(self) -> None:
        self._answers.clear()
        self._places.clear()
        self._num_bytes = 0

    def _use(self, number: int) -> Sequence[int]:
        answer = self._answers.get(number)
        if answer is None:
            return ()
        self._answers.move_to_end(number)
        return answer.token_ids

    def _remove(self, number: int) -> None:
        answer = self._answers.pop(number)
        self._num_bytes -= answer.num_bytes
        places = self._places[answer.scope]
        for key, _ in answer.entries():
            if places.get(key, 0) // MAX_TOKENS == number:
                del places[key]
        if not places:
            del self._places[answer.scope]


def _key(token_ids: Sequence[int]) -> int:
    return hash(tuple(token_ids))


def _prompt_keys(prompt_ids: Sequence[int]) -> tuple[int, ...]:
    ends = [prompt_ids[-length:] for length in PROMPT_ENDS if len(prompt_ids) > length]
    # Not the key of an answer's tokens: the last one says what kind it is.
    whole = hash((*prompt_ids, -1))
    return whole, *(hash((*end, -2)) for end in ends)
