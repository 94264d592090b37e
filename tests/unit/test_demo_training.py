"""What the demo pair is trained on, and the parts of its training that are our own."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from blocks import begin_answer
from data import FIRST, IGNORE, STYLES, AnswerBatches, InstructionBatches, digit_ids, example
from documents import write_document
from json_answers import WISH, grade
from models import MuonAndAdamW, TrainedLM, grow, make_lm
from problems import SIGNS, WORDS, draw_problem
from tokenizer import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def taught(tokenizer, one) -> str:
    """The tokens that have a label, end of turn included."""
    return tokenizer.decode([label for label in one.labels if label != IGNORE])


def test_the_tokenizer_is_the_served_one(tokenizer):
    """Words of the wordings are tokens; ASCII texts have a byte a letter, as `example` counts."""
    rng = random.Random(0)
    problem, lines = write_document(rng, (3, 3), lambda _: rng.choice(STYLES))
    text = problem.text + "".join(line.text for line in lines)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
    assert sum(map(len, pieces)) == len(text)
    assert len(pieces) < len(text) / 1.7


@pytest.mark.parametrize("seed", range(5))
def test_labels_are_on_right_tokens_of_taught_styles(tokenizer, seed: int):
    """Instruction tuning: own lines after anyone's, none of them from its mistake on."""
    rng = random.Random(seed)
    styles = [WORDS, WORDS, SIGNS, WORDS, SIGNS, SIGNS, SIGNS]
    problem, lines = write_document(rng, (3, 3), lambda index: styles[index], 0.5)
    found = taught(tokenizer, example(tokenizer, problem, lines, (SIGNS,)))
    own = [line for line in lines if line.style is SIGNS]
    assert found.endswith("<|im_end|>")
    for line in own:
        if line.num_right == len(line.text):
            assert line.text in found
    # A token that a mistake is in has no label.
    kept = sum(line.num_right for line in own)
    assert len(found.removesuffix("<|im_end|>")) <= kept
    assert not any(line.text in found for line in lines if line.style is WORDS)


def test_batches_depend_on_their_index_alone(tokenizer):
    texts = {(1.0, 0.0, 0.0): 0.5, (0.0, 0.0, 1.0): 0.5}
    for kind in (AnswerBatches, InstructionBatches):
        batches = kind(tokenizer, 5, 3, "test", (3, 4), texts, 0.3)
        first, again = batches[2], batches[2]
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert not torch.equal(first["input_ids"][:, :9], batches[3]["input_ids"][:, :9])
        labels, ids = first["labels"], first["input_ids"]
        has_label = labels != IGNORE
        assert torch.equal(labels[:, :-1][has_label[:, :-1]], ids[:, 1:][has_label[:, :-1]])


def test_begun_answers_are_right_and_leave_lines_to_write():
    rng = random.Random(1)
    short = num_json = 0
    for _ in range(100):
        problem = draw_problem(rng, held_out=False)
        start = begin_answer(problem, rng, 0.2)
        in_json = start.startswith("{")
        wish = WISH if in_json else ""
        assert grade(problem.text + wish, start, finished=False)[1] is None
        num_lines = sum(len(chain.steps) for chain in problem.chains) + 1
        assert start.count("\n") <= num_lines - 3
        short += start in (FIRST, "{")
        num_json += in_json
    assert 30 < short < 70
    assert 3 < num_json < 25


def test_a_grown_model_says_the_same(tokenizer):
    torch.manual_seed(0)
    lm = make_lm(tokenizer, num_layers=2, hidden=32, intermediate=64).eval()
    ids = torch.randint(0, len(tokenizer), (2, 20))
    with torch.inference_mode():
        torch.testing.assert_close(grow(lm, 5).eval()(ids).logits, lm(ids).logits)


def test_the_optimizer_resumes_from_its_state(tokenizer):
    """Muon's and AdamW's state go through `state_dict`, as the Trainer's checkpoints do."""
    torch.manual_seed(0)
    lm = make_lm(tokenizer, num_layers=1, hidden=32, intermediate=64)
    model = TrainedLM(lm, digit_ids(tokenizer))
    batches = AnswerBatches(tokenizer, 3, 2, "test", (1, 1), {(1.0, 0.0, 0.0): 1.0})
    optimizer = MuonAndAdamW(model, 1e-3)

    def train(model: TrainedLM, optimizer: torch.optim.Optimizer, index: int) -> None:
        optimizer.zero_grad()
        model(**batches[index])["loss"].backward()
        optimizer.step()

    train(model, optimizer, 0)
    train(model, optimizer, 1)
    other = copy.deepcopy(model)
    resumed = MuonAndAdamW(other, 1e-3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 2)
    train(other, resumed, 2)
    for (name, one), again in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, again, msg=name)
