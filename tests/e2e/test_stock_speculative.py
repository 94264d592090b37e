"""Stock STANDALONE and EAGLE3 on a CPU, chains and trees: the plain server's greedy tokens, and
samples of the target's exact distribution at temperature > 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from eagle3_head import EagleHead, head_config, save_head

from support.client import Client, greedy_ids, ids_of, random_prompts
from support.demo_pair import DEMO
from support.distribution import ACCEPTABLE_P, Places, Rule
from support.models import load_model
from support.servers import SEED, Start, served

pytestmark = pytest.mark.nightly("tests/compat/test_cpu_ops.py")

HEAD = DEMO / "eagle3"
SEEDS = (61, 62)
CHAIN = ("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
TREE = ("--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "12")


def _serve(start: Start, name: str, algorithm: str, target: Path, draft: Path, *flags: str):
    yield from served(
        start,
        name,
        *("--model-path", str(target), "--speculative-algorithm", algorithm),
        *("--speculative-draft-model-path", str(draft), "--speculative-num-steps", "3"),
        *flags,
        *SEED,
    )


@pytest.fixture(scope="module")
def random_head(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE-3 head for the random target; only its path to the LM head is not random."""
    target = load_model(pair[0])
    torch.manual_seed(7)
    head = EagleHead(head_config(target.config, [0]))
    head.lm_head.load_state_dict(target.lm_head.state_dict())
    folder = tmp_path_factory.mktemp("head")
    save_head(head, folder)
    return folder


@pytest.fixture(scope="module")
def standalone_chain(start_server: Start, pair: tuple[Path, Path]) -> Iterator[Client]:
    yield from _serve(start_server, "standalone-chain", "STANDALONE", *pair, *CHAIN)


@pytest.fixture(scope="module")
def standalone_tree(start_server: Start, pair: tuple[Path, Path]) -> Iterator[Client]:
    yield from _serve(start_server, "standalone-tree", "STANDALONE", *pair, *TREE)


@pytest.fixture(scope="module")
def eagle3_tree(
    start_server: Start, pair: tuple[Path, Path], random_head: Path
) -> Iterator[Client]:
    yield from _serve(start_server, "eagle3-tree", "EAGLE3", pair[0], random_head, *TREE)


RANDOM = ("standalone_chain", "standalone_tree", "eagle3_tree")


@pytest.fixture(params=RANDOM)
def speculative(request: pytest.FixtureRequest) -> Client:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def expected(plain: Client) -> dict[int, list[list[int]]]:
    return greedy_ids(plain, SEEDS)


@pytest.mark.parametrize(("concurrency", "count"), [(1, 2), (8, 6)])
def test_greedy_output_equals_the_plain_servers(
    speculative: Client, expected: dict, concurrency: int, count: int
):
    for seed in SEEDS:
        answers = speculative.generate_all(
            random_prompts(6, seed)[:count], concurrency, max_new_tokens=48, ignore_eos=True
        )
        assert ids_of(answers) == expected[seed][:count]
        # Not vacuous: the text is diverse, some drafts are accepted and some rejected.
        assert len({token for ids in expected[seed] for token in ids}) > 50
        infos = [answer["meta_info"] for answer in answers]
        accepted = sum(info["spec_num_correct_drafts"] for info in infos)
        assert 0 < accepted < sum(info["spec_num_proposed_drafts"] for info in infos)
    speculative.flush()


NUM_TOKENS = 4
PROMPT = random_prompts(1, 63)[0]


@pytest.fixture(scope="module")
def target_model(pair: tuple[Path, Path]):
    return load_model(pair[0])


@pytest.mark.parametrize("top_k", [-1, 5])
def test_sampled_output_has_the_targets_distribution(speculative: Client, target_model, top_k: int):
    params = {"temperature": 0.8, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    answers = ids_of(speculative.generate_all([PROMPT] * 120, 16, top_k=top_k, **params))
    assert len({tuple(ids) for ids in answers}) > 20
    right, wrong = (Places(target_model, Rule(t, top_k)) for t in (0.8, 0.2))
    for first, *rest in answers:  # prefill samples the first token
        right.add((*PROMPT, first), rest)
        wrong.add((*PROMPT, first), rest)
    assert right.pvalue() > ACCEPTABLE_P
    # Not vacuous: the same samples do not fit another temperature.
    assert wrong.pvalue() < ACCEPTABLE_P


def test_greedy_and_sampled_requests_share_a_batch(speculative: Client, expected: dict):
    """One sampled request puts the whole batch on the sampling path; top_k 1 stays greedy."""
    prompts = random_prompts(6, SEEDS[0])
    params = {"max_new_tokens": 48, "ignore_eos": True}
    with ThreadPoolExecutor(12) as pool:
        sampled = [
            pool.submit(speculative.generate, prompt, **params | {"temperature": 1.0})
            for prompt in prompts
        ]
        greedy = [pool.submit(speculative.generate, prompt, **params) for prompt in prompts]
    assert [job.result()["output_ids"] for job in greedy] == expected[SEEDS[0]]
    assert all(
        job.result()["output_ids"] != ids
        for job, ids in zip(sampled, expected[SEEDS[0]], strict=True)
    )
