"""One masked verify pass equals K separate prompts, on a random model, up to rounding."""

import dataclasses
import random

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from support.reference import (
    Case,
    VerifyResult,
    pack,
    packed_verdicts,
    separate_verdicts,
    verify_packed,
)

pytestmark = pytest.mark.unit

VOCAB = 199
TOLERANCE = 1e-4


def tiny_model(attention: str) -> Qwen3ForCausalLM:
    """Random and untied, with weights large enough that attention changes the logits."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.15,
        tie_word_embeddings=False,
        attn_implementation=attention,
    )
    return Qwen3ForCausalLM(config).float().eval()


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return tiny_model("sdpa")


def make_case(seed: int, num_prefixes: int, context_len: int = 17, draft_len: int = 40) -> Case:
    """Random prefixes, the complete draft last, and questions of 1 to 5 tokens."""
    rng = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(count))

    ends = sorted(rng.sample(range(1, draft_len), num_prefixes - 1)) + [draft_len]
    return Case(
        context_ids=tokens(context_len),
        draft_ids=tokens(draft_len),
        prefix_ends=tuple(ends),
        question_ids=tuple(tokens(rng.randint(1, 5)) for _ in ends),
        accept_id=11,
        reject_id=12,
    )


def ragged_batch() -> list[Case]:
    return [make_case(1, 5), make_case(2, 1, 1, 3), make_case(3, 9, 30, 21)]


def max_difference(one: VerifyResult, other: VerifyResult) -> float:
    """Returns the largest difference of verdict and next-token logits."""
    verdict = (one.verdict_logits - other.verdict_logits).abs()
    following = (one.next_token_logits - other.next_token_logits).abs()
    return torch.cat((verdict.flatten(), following.flatten())).max().item()


def assert_same(packed: VerifyResult, separate: VerifyResult) -> None:
    assert max_difference(packed, separate) < TOLERANCE
    torch.testing.assert_close(packed.verdicts, separate.verdicts, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(packed.mass, separate.mass, atol=TOLERANCE, rtol=0)
    assert torch.equal(packed.next_token_ids, separate.next_token_ids)


@pytest.mark.parametrize("num_prefixes", [1, 5, 32])
def test_one_request(model, num_prefixes):
    case = make_case(num_prefixes, num_prefixes)
    [packed] = packed_verdicts(model, [case])
    assert packed.verdicts.shape == (num_prefixes,)
    assert packed.next_token_logits.shape == (num_prefixes + 1, VOCAB)
    assert_same(packed, separate_verdicts(model, case))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_ragged_batch(attention):
    model = tiny_model(attention)
    cases = ragged_batch()
    for case, packed in zip(cases, packed_verdicts(model, cases), strict=True):
        assert_same(packed, separate_verdicts(model, case))


def test_repeated_and_unordered_prefixes(model):
    case = dataclasses.replace(make_case(7, 5), prefix_ends=(40, 3, 3, 17, 0))
    [packed] = packed_verdicts(model, [case])
    assert_same(packed, separate_verdicts(model, case))


def test_no_prefix_gives_the_next_token(model):
    case = dataclasses.replace(make_case(4, 1), prefix_ends=(), question_ids=(), draft_ids=())
    [packed] = packed_verdicts(model, [case])
    assert packed.verdicts.shape == (0,)
    assert_same(packed, separate_verdicts(model, case))


def test_separate_verdicts_equal_a_direct_computation(model):
    case = make_case(5, 3)
    result = separate_verdicts(model, case)
    end = case.prefix_ends[1]
    prompt = [*case.context_ids, *case.draft_ids[:end]]
    with torch.no_grad():
        question = model(torch.tensor([[*prompt, *case.question_ids[1]]])).logits[0, -1]
        following = model.generate(torch.tensor([prompt]), max_new_tokens=1, do_sample=False)
    accept, reject = (question[[11, 12]].exp() / question.exp().sum()).tolist()
    assert result.verdicts[1].item() == pytest.approx(accept / (accept + reject), abs=1e-5)
    assert result.mass[1].item() == pytest.approx(accept + reject, abs=1e-5)
    assert result.next_token_ids[2].item() == following[0, -1].item()


def test_a_causal_mask_gives_other_verdicts(model):
    """Later draft tokens would be visible, so the tests above can fail."""
    cases = ragged_batch()
    inputs = pack(cases)
    causal = dataclasses.replace(inputs, allowed=torch.ones_like(inputs.allowed).tril())
    for case, result in zip(cases, verify_packed(model, cases, causal), strict=True):
        separate = separate_verdicts(model, case)
        difference = (result.verdict_logits - separate.verdict_logits).abs().max().item()
        if len(case.prefix_ends) > 1:
            assert difference > 1e-2
        else:  # the only question follows the whole draft
            assert difference < TOLERANCE


def test_row_numbers_as_positions_give_other_verdicts(model):
    case = make_case(1, 5)
    inputs = pack([case])
    row_numbers = torch.arange(inputs.input_ids.shape[1])[None]
    [result] = verify_packed(model, [case], dataclasses.replace(inputs, position_ids=row_numbers))
    assert max_difference(result, separate_verdicts(model, case)) > 1e-2


def test_prefixes_one_token_shorter_give_other_verdicts(model):
    case = make_case(1, 5)
    early = dataclasses.replace(case, prefix_ends=tuple(end - 1 for end in case.prefix_ends))
    [result] = packed_verdicts(model, [early])
    assert max_difference(result, separate_verdicts(model, case)) > 1e-2
