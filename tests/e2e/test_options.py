"""SGLang's options beside PARSE."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from support.client import DRAFTS, Client, ids_of, parse_info, random_prompts
from support.random_pair import PairShape, make_pair
from support.servers import SEED, Start, parse_flags, served

LIMIT = {"max_new_tokens": 40, "ignore_eos": True}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
KINDS = {
    "qwen3": (partial(Qwen3MoeConfig, num_experts=4, **EXPERTS), Qwen3MoeForCausalLM),
    # As GLM-4.5-Air's: a dense layer first, a shared expert, half of each head is rotated.
    "glm45": (
        partial(Glm4MoeConfig, n_routed_experts=4, num_nextn_predict_layers=1, **EXPERTS),
        Glm4MoeForCausalLM,
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def moe(
    request: pytest.FixtureRequest, start_server: Start, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """A model with experts and its noisy copy as draft, on a server without tokenizers."""
    shape, folder = PairShape(seed=2, noise=0.01), tmp_path_factory.mktemp(request.param)
    pair = make_pair(folder, shape, kind=KINDS[request.param])
    flags = parse_flags(pair, "--parse-verification", "token", "--skip-tokenizer-init", *SEED)
    yield from served(start_server, f"moe_{request.param}", *flags)


@pytest.mark.nightly("tests/compat/test_draft_models.py")
def test_a_moe_draft_without_tokenizers(moe: Client):
    accepted = 0
    for prompt in random_prompts(4, 41):
        answer = moe.generate(prompt, **LIMIT, parse=DRAFTS)
        plain = moe.generate(prompt, **LIMIT, parse={"enabled": False})
        assert answer["output_ids"] == plain["output_ids"]
        assert parse_info(answer)["drafted_tokens"] > 0
        accepted += parse_info(answer)["accepted_tokens"]
    assert accepted > 0


@pytest.fixture(scope="module")
def workers(start_server: Start, pair: tuple[Path, Path]) -> Iterator[Client]:
    """Two processes of tokenizers, which SGLang starts without its plugins. All start cold, because
    ``support.warm`` does not know their variable: uvicorn ends forked ones, which answer no ping.
    """
    flags = ("--parse-verification", "token", "--tokenizer-worker-num", "2", *SEED)
    # Its supervisor otherwise ends what takes more than 5 s to import.
    patience = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "120"}
    yield from served(start_server, "workers", *parse_flags(pair, *flags), **patience)


@pytest.mark.weekly("tests/compat/test_refusals.py")
def test_several_tokenizer_workers(workers: Client, plain: Client):
    prompts = random_prompts(8, 43)
    answers = workers.generate_all(prompts, 8, **LIMIT)
    assert ids_of(answers) == ids_of(plain.generate_all(prompts, 8, **LIMIT))
    assert sum(parse_info(answer)["accepted_tokens"] for answer in answers) > 0
    for _ in range(6):  # connections go to either
        response = workers.send(prompts[0], parse={"treshold": 1}, **LIMIT)
        assert response.status_code == 400
        assert "custom_params.parse has unknown keys ['treshold']" in response.text


def test_beam_search_is_a_400(token: Client):
    response = token.post("/generate", {"input_ids": [5, 6], "sampling_params": {"beam_width": 2}})
    assert response.status_code == 400
    assert "Beam search is not supported with speculative decoding" in response.text
