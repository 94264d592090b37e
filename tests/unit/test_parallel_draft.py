"""The recipe for a draft that writes blocks of tokens: its rows and its counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_draft import (  # examples is on pytest's pythonpath
    IGNORE,
    Recipe,
    Text,
    find_mask,
    num_forwards,
    pack,
    read_texts,
    right_by_depth,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.demo_pair import DEMO, held_out
from support.random_pair import PairShape, make_pair

pytestmark = pytest.mark.unit

BLOCK, MASK = 4, 190


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pair(tmp_path_factory.mktemp("pair"), PairShape(num_layers=2))[1]


@pytest.fixture(scope="module")
def lm(draft: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32).eval()


@torch.inference_mode()
def logits_of(lm: Any, ids: list[int]) -> torch.Tensor:
    """[ids, vocabulary], causal and nothing else."""
    return lm(torch.tensor([ids])).logits[0]


@torch.inference_mode()
def greedy(lm: Any, prompt: list[int], count: int) -> Text:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits_of(lm, ids)[-1].argmax()))
    return Text(ids, len(prompt))


def test_golden_rows():
    text = Text([7, 8, 9, 10, 11], num_prompt=2)
    batch = pack([text], [[1, 3]], 3, MASK)
    assert batch["input_ids"].tolist() == [[7, 8, 9, 10, 11, MASK, MASK, MASK, MASK]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 2, 3, 4, 5]]
    assert batch["depths"].tolist() == [[0, 0, 0, 0, 0, 1, 2, 1, 2]]
    none = IGNORE
    assert batch["labels"].tolist() == [[none, 9, 10, 11, none, 10, 11, none, none]]
    seen = [[column for column in range(9) if row[column]] for row in batch["attention_mask"][0, 0]]
    assert seen[4] == [0, 1, 2, 3, 4]
    assert seen[5:7] == [[0, 1, 5], [0, 1, 5, 6]]
    assert seen[7:] == [[0, 1, 2, 3, 7], [0, 1, 2, 3, 7, 8]]


@torch.inference_mode()
def test_masks_attend_as_when_served(lm: Any):
    """Packed rows against the text up to each anchor followed by masks, one by one."""
    texts = [Text(list(range(3, 43)), 11), Text(list(range(90, 120)), 20)]
    anchors = [[10, 25, 38], [19, 28]]
    batch = pack(texts, anchors, BLOCK, MASK)
    inputs = {k: batch[k] for k in ("input_ids", "position_ids", "attention_mask")}
    logits = lm(**inputs, use_cache=False).logits
    for text, places, rows in zip(texts, anchors, logits, strict=True):
        assert torch.allclose(rows[: len(text.ids)], logits_of(lm, text.ids), atol=1e-4)
        for number, anchor in enumerate(places):
            alone = logits_of(lm, text.ids[: anchor + 1] + [MASK] * (BLOCK - 1))[anchor + 1 :]
            start = len(text.ids) + number * (BLOCK - 1)
            assert torch.allclose(rows[start : start + BLOCK - 1], alone, atol=1e-4)


@torch.inference_mode()
def served(
    lm: Any, prompt: list[int], count: int, mask_id: int, behind_every: bool
) -> tuple[list[int], int]:
    """The tokens a draft writes in verified blocks, forward by forward, and how many forwards."""
    text, candidates, forwards = list(prompt), [], 0
    while len(text) < len(prompt) + count:
        forwards += 1
        kept = 0
        for place in range(len(candidates) + 1):  # the rows of this forward, one prefix each
            drawn = int(logits_of(lm, text + candidates[:place])[-1].argmax())
            kept = place
            if place == len(candidates) or drawn != candidates[place]:
                break
        anchor = text + candidates[:kept]
        masks = logits_of(lm, anchor + [mask_id] * (BLOCK - 1))[len(anchor) :]
        has_masks = behind_every or kept == len(candidates)
        text, candidates = [*anchor, drawn], masks.argmax(-1).tolist() if has_masks else []
    return text[: len(prompt) + count], forwards


@pytest.mark.parametrize("behind_every", [True, False])
def test_forwards_are_those_of_serving(behind_every: bool):
    """With the demo draft, which foresees most of what it writes, but not all."""
    lm = AutoModelForCausalLM.from_pretrained(DEMO / "draft", dtype=torch.float32).eval()
    mask_id, num_tokens, num_blocks = lm.config.pard_token, 0, 0
    for problem in held_out(2):
        prompt = AutoTokenizer.from_pretrained(DEMO / "draft").encode(problem.prompt)
        text = greedy(lm, prompt, 48)
        right = right_by_depth(lm, text, BLOCK, mask_id)
        assert right[:, 0].all()
        written, forwards = served(lm, prompt, 48, mask_id, behind_every)
        assert written == text.ids
        assert num_forwards(right, behind_every=behind_every) == forwards
        num_tokens, num_blocks = num_tokens + 48, num_blocks + forwards
    assert BLOCK / 2 < num_tokens / num_blocks < BLOCK


def test_an_unused_id_is_the_mask():
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "draft")
    assert find_mask(tokenizer, len(tokenizer) + 8, None) == len(tokenizer) + 7
    assert find_mask(tokenizer, len(tokenizer), "\N{LATIN SMALL LETTER Y WITH DIAERESIS}") == MASK
    with pytest.raises(ValueError, match="every one of the model's 384 token ids is in use"):
        find_mask(tokenizer, len(tokenizer), None)
    with pytest.raises(ValueError, match="--mask-token 'two words' is no single token"):
        find_mask(tokenizer, len(tokenizer), "two words")


def test_given_answers_are_read_and_what_is_missing_is_named(tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "draft")
    ask, answer = {"role": "user", "content": "Start"}, {"role": "assistant", "content": "so far"}
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"messages": t}) + "\n" for t in ([ask, answer], [ask])))
    recipe = Recipe(model="", data=str(data), answers="given")
    with pytest.raises(ValueError, match=r"line 2 has no user turn with an answer .*answers own"):
        read_texts(recipe, None, tokenizer)
    data.write_text(json.dumps({"messages": [ask, answer, ask, answer]}))
    (text,) = read_texts(recipe, None, tokenizer)
    chat = tokenizer.apply_chat_template([ask, answer, ask, answer], tokenize=False)
    assert tokenizer.decode(text.ids) + "\n" == chat
    assert tokenizer.decode(text.ids[text.num_prompt :]) == "so far<|im_end|>"
