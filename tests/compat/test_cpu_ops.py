"""The CPU patches for stock speculation, against hand-made cases and reference implementations."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.compat

FULL_MASK, QLEN_ONLY, BITPACKING = 0, 1, 2


# -- slots ------------------------------------------------------------------------------------


@pytest.fixture
def table() -> torch.Tensor:
    """req_to_token with slot 100 * row + column."""
    return (100 * torch.arange(5)[:, None] + torch.arange(20)[None]).to(torch.int32)


def test_extend_slots_are_packed_by_request(table):
    from sglang_parse.patches.cpu.req_to_token_cpu import assign_extend_cache_locs

    start, end = torch.tensor([3, 0, 7]), torch.tensor([5, 1, 10])
    slots = assign_extend_cache_locs(torch.tensor([4, 0, 2]), table, start, end, 3, 2, "cpu")
    assert slots.dtype == torch.int64
    assert slots.tolist() == [403, 404, 0, 207, 208, 209]


def test_draft_slots_follow_the_committed_tokens(table):
    from sglang_parse.patches.cpu.req_to_token_cpu import assign_draft_cache_locs_contiguous

    out = torch.empty(2 * 2 * 3, dtype=torch.int64)
    pool, lengths = torch.tensor([1, 3]), torch.tensor([4, 0])
    assign_draft_cache_locs_contiguous(pool, table, lengths, out, 2, 3)
    assert out.tolist() == [104, 105, 106, 107, 108, 109, 300, 301, 302, 303, 304, 305]
    with pytest.raises(NotImplementedError, match="positions"):
        assign_draft_cache_locs_contiguous(pool, table, lengths, out, 2, 3, positions=lengths)


def test_front_slots_of_each_window_are_packed():
    from sglang_parse.patches.cpu.req_to_token_cpu import fill_front_out_cache_loc

    out = torch.zeros(6, dtype=torch.int64)
    window = torch.tensor([11, 12, 13, 21, 22, 23])
    fill_front_out_cache_loc(torch.tensor([2, 3], dtype=torch.int32), window, out)
    assert out.tolist() == [11, 12, 21, 22, 23, 0]


# -- trees ------------------------------------------------------------------------------------

# topk 2, 3 steps. Candidates: 0 1 continue the root; 2 3 continue 0, 4 5 continue 1; at step 2 the
# kept ones were 2 and 5, so 6 7 continue 2 and 8 9 continue 5. Selected: 0 1 2 5 8.
#
#     node    0 root
#             1 (0)      2 (1)
#             3 (2)      4 (5)
#                        5 (8)
PARENT_LIST = torch.tensor([[-1, 0, 1, 2, 5]])
SELECTED = torch.tensor([[0, 1, 2, 5, 8]])
PARENTS = [-1, 0, 0, 1, 2, 4]
SEES = ["1.....", "11....", "1.1...", "11.1..", "1.1.1.", "1.1.11"]
WIDTH = len(PARENTS)


def _built(parent_list, selected, seq_lens, topk, mode=FULL_MASK):
    from sglang_parse.patches.cpu.tree_cpu import build_tree

    num, width = len(seq_lens), selected.shape[1] + 1
    sizes = [width * ((0 if mode == QLEN_ONLY else n) + width) for n in seq_lens]
    mask = torch.ones(sum(sizes), dtype=torch.bool)
    positions = torch.empty(num * width, dtype=torch.int64)
    retrieve = [torch.full((num, width), -1) for _ in range(3)]
    lengths = torch.tensor(seq_lens)
    build_tree(parent_list, selected, lengths, mask, positions, *retrieve, topk, 3, width, mode)
    masks = [part.view(width, -1) for part in mask.split(sizes)]
    return masks, positions.view(num, width), *retrieve


@pytest.mark.parametrize("mode", [FULL_MASK, QLEN_ONLY])
def test_a_tree_made_by_hand(mode):
    seq_lens = [4, 9]
    two = (PARENT_LIST.repeat(2, 1), SELECTED.repeat(2, 1))
    masks, positions, index, first_child, sibling = _built(*two, seq_lens, 2, mode)
    square = torch.tensor([[c == "1" for c in row] for row in SEES])
    for mask, length in zip(masks, seq_lens, strict=True):
        prefix = 0 if mode == QLEN_ONLY else length
        assert torch.equal(mask[:, prefix:], square)
        assert mask[:, :prefix].all()
    depths = torch.tensor([0, 1, 1, 2, 2, 3])
    assert torch.equal(positions, torch.tensor(seq_lens)[:, None] + depths)
    assert index.tolist() == [list(range(6)), list(range(6, 12))]
    assert first_child[1].tolist() == [1, 3, 4, -1, 5, -1]
    assert sibling[1].tolist() == [-1, 2, -1, -1, -1, -1]


def test_a_chain_has_the_causal_mask():
    masks, positions, _, first_child, sibling = _built(
        torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 1, 2]]), [5], 1
    )
    assert torch.equal(masks[0], torch.ones(4, 9, dtype=torch.bool).tril(5))
    assert positions.tolist() == [[5, 6, 7, 8]]
    assert first_child.tolist() == [[1, 2, 3, -1]]
    assert (sibling == -1).all()


def test_a_node_selected_without_its_parent_is_never_accepted():
    """Equal scores can select a child without its parent."""
    _, positions, _, first_child, sibling = _built(
        PARENT_LIST, torch.tensor([[0, 1, 2, 4, 8]]), [7], 2
    )
    reached, ahead = {0}, [0]
    while ahead:
        child = first_child[0, ahead.pop()].item()
        while child != -1:
            reached.add(child)
            ahead.append(child)
            child = sibling[0, child].item()
    assert reached == {0, 1, 2, 3, 4}  # node 5 continues candidate 5, which was not kept
    assert positions.min() >= 7


def test_a_packed_mask_is_refused():
    with pytest.raises(NotImplementedError, match="QLEN_ONLY_BITPACKING"):
        _built(PARENT_LIST, SELECTED, [4], 2, BITPACKING)


def test_random_trees_of_sglangs_selection():
    """Scores and candidates as in the draft worker; ancestors are recomputed from tokens."""
    from sglang.srt.speculative.eagle_utils import organize_draft_results
    from sglang.srt.speculative.spec_utils import (
        _select_top_k_tokens_first,
        _select_top_k_tokens_later,
    )

    torch.manual_seed(0)
    # Without torch.compile, or where TORCHDYNAMO_DISABLE was set before the import.
    compiled = _select_top_k_tokens_later
    later = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    topk, steps, width, num = 3, 4, 9, 5
    lists: tuple[list, list, list] = ([], [], [])
    texts: dict[tuple[int, int], tuple[int, ...]] = {}  # (request, token) -> the text it ends
    beams = [[() for _ in range(topk)] for _ in range(num)]
    scores, vocab = None, itertools.count(1)
    for step in range(steps):
        rows = num if step == 0 else num * topk
        probabilities = torch.rand(rows, topk).softmax(-1)
        # Every candidate is a new token, so a token names its place in the tree.
        tokens = torch.tensor([[next(vocab) for _ in range(topk)] for _ in range(rows)])
        if step == 0:
            chosen, _, scores, info = _select_top_k_tokens_first(probabilities, tokens, None, topk)
        else:
            chosen, _, scores, info = later(step, probabilities, tokens, None, scores, topk)
        for row in range(rows):
            request, beam = (row, 0) if step == 0 else divmod(row, topk)
            for token in tokens[row].tolist():
                texts[request, token] = (*beams[request][beam], token)
        for request, kept in enumerate(chosen.view(num, topk).tolist()):
            beams[request] = [texts[request, token] for token in kept]
        for collected, part in zip(lists, info, strict=True):
            collected.append(part)
    parent_list, selected, draft_tokens = organize_draft_results(*lists, width)
    masks, positions, *_ = _built(parent_list, selected, [2] * num, topk)
    for request in range(num):
        for node, token in enumerate(draft_tokens[request].tolist(), 1):
            seen = masks[request][node, 2:].nonzero().flatten().tolist()
            assert seen[0] == 0
            assert (
                tuple(draft_tokens[request, n - 1].item() for n in seen[1:])
                == texts[request, token]
            )
            assert positions[request, node] == 2 + len(texts[request, token])


def _tree(parents: list[int], num: int = 1) -> tuple[torch.Tensor, ...]:
    """retrieve_* of ``num`` equal trees, children in any order of their numbers."""
    width = len(parents)
    first_child, sibling = [-1] * width, [-1] * width
    for node in range(width - 1, 0, -1):
        sibling[node], first_child[parents[node]] = first_child[parents[node]], node
    index = torch.arange(num * width).view(num, width)
    return index, torch.tensor([first_child] * num), torch.tensor([sibling] * num)


def _greedy(parents, tokens, choices, steps):
    from sglang_parse.patches.cpu.tree_cpu import verify_greedy

    num, width = tokens.shape
    outputs = (
        torch.zeros(num * width, dtype=torch.int32),
        torch.full((num, steps + 1), -1, dtype=torch.int32),
        torch.empty(num, dtype=torch.int32),
    )
    verify_greedy(*outputs, tokens, *_tree(parents, num), choices, topk=2)
    return outputs


def test_greedy_verification_of_a_tree_made_by_hand():
    tokens = torch.tensor([[50, 7, 8, 9, 9, 6], [50, 7, 8, 9, 9, 6]])
    # Request 0: 8 after the root, 9 after it, 6 after that, then 3. Request 1: 5, not drafted.
    choices = torch.tensor([[8, 0, 9, 0, 6, 3], [5, 0, 0, 0, 0, 0]])
    predicts, accepted, num_accepted = _greedy(PARENTS, tokens, choices, 3)
    assert num_accepted.tolist() == [3, 0]
    assert accepted.tolist() == [[0, 2, 4, 5], [6, -1, -1, -1]]
    assert predicts.view(2, 6)[0, [0, 2, 4, 5]].tolist() == [8, 9, 6, 3]
    assert predicts.view(2, 6)[1, 0] == 5


def test_greedy_verification_against_texts():
    """On random trees the accepted text is the longest branch of the target's choices."""
    rng = random.Random(0)
    for _ in range(50):
        width, vocab = 8, 3
        parents = [-1, *(rng.randrange(node) for node in range(1, width))]
        tokens = torch.tensor([[rng.randrange(vocab) for _ in range(width)]])
        choices = torch.tensor([[rng.randrange(vocab) for _ in range(width)]])
        predicts, accepted, num_accepted = _greedy(parents, tokens, choices, width)
        matching = {0}
        for node in range(1, width):
            if parents[node] in matching and tokens[0, node] == choices[0, parents[node]]:
                matching.add(node)
        path = accepted[0, : num_accepted[0] + 1].tolist()
        assert set(path) <= matching
        assert not any(parents[node] == path[-1] for node in matching)
        assert [parents[node] for node in path[1:]] == path[:-1]
        assert predicts[path].tolist() == choices[0, path].tolist()


def test_bonus_tokens_and_accepted_slots():
    from sglang_parse.patches.cpu.tree_cpu import fill_accept_out_cache_loc, fill_bonus_tokens

    bonus = torch.empty(2, dtype=torch.int32)
    emitted = torch.tensor([[4, 5, 6, 0], [7, 0, 0, 0]], dtype=torch.int32)
    fill_bonus_tokens(emitted, torch.tensor([3, 1], dtype=torch.int32), bonus, 4, 2)
    assert bonus.tolist() == [6, 7]
    slots = torch.zeros(8, dtype=torch.int64)
    accepted = torch.tensor([[0, 2, 5, -1], [6, -1, -1, -1]], dtype=torch.int32)
    fill_accept_out_cache_loc(accepted, torch.arange(100, 112), slots, 8)
    assert slots.tolist() == [100, 102, 105, 106, 0, 0, 0, 0]


# -- temperature > 0 --------------------------------------------------------------------------


def test_top_k_and_top_p_equal_transformers():
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    from sglang_parse.patches.cpu.verify_sampling_cpu import top_k_renorm_prob, top_p_renorm_prob

    torch.manual_seed(1)
    logits = torch.randn(6, 40)
    for k in (1, 3, 40):
        expected = TopKLogitsWarper(k)(None, logits).softmax(-1)
        found = top_k_renorm_prob(logits.softmax(-1), torch.full((6,), k))
        torch.testing.assert_close(found, expected)
    for p in (0.2, 0.75, 1.0):
        expected = TopPLogitsWarper(p)(None, logits).softmax(-1)
        found = top_p_renorm_prob(logits.softmax(-1), torch.full((6,), p))
        torch.testing.assert_close(found, expected)


def test_top_k_of_a_tie_is_argmax_and_all_means_all():
    from sglang_parse.patches.cpu.verify_sampling_cpu import top_k_renorm_prob

    probabilities = torch.tensor([[0.2, 0.4, 0.4], [0.2, 0.4, 0.4]])
    kept = top_k_renorm_prob(probabilities, torch.tensor([1, 1 << 30], dtype=torch.int32))
    torch.testing.assert_close(kept, torch.tensor([[0.0, 1.0, 0.0], [0.2, 0.4, 0.4]]))


NUM_DRAWS = 6000


def _sampled_texts(parents, tokens, probabilities, steps, **thresholds):
    """The output of each of NUM_DRAWS equal requests."""
    from sglang_parse.patches.cpu.verify_sampling_cpu import verify_sampled

    width = len(parents)
    generator = torch.Generator().manual_seed(3)
    predicts = torch.zeros(NUM_DRAWS * width, dtype=torch.int32)
    accepted = torch.full((NUM_DRAWS, steps + 1), -1, dtype=torch.int32)
    num_accepted = torch.empty(NUM_DRAWS, dtype=torch.int32)
    verify_sampled(
        predicts,
        accepted,
        num_accepted,
        torch.tensor([tokens] * NUM_DRAWS),
        *_tree(parents, NUM_DRAWS),
        uniform_samples=torch.rand(NUM_DRAWS, width, generator=generator),
        uniform_samples_for_final_sampling=torch.rand(NUM_DRAWS, generator=generator),
        target_probs=probabilities.expand(NUM_DRAWS, -1, -1),
        draft_probs=torch.zeros(1),
        **thresholds,
    )
    lists = zip(accepted.tolist(), num_accepted.tolist(), strict=True)
    return [tuple(predicts[path[: n + 1]].tolist()) for path, n in lists]


def test_output_has_the_targets_distribution():
    """Every possible output of a tree, against its exact probability."""
    from scipy import stats

    parents, tokens, steps = [-1, 0, 0, 1, 1, 2], [0, 1, 2, 0, 3, 1], 2
    torch.manual_seed(4)
    probabilities = torch.randn(6, 4).mul(1.2).softmax(-1)
    texts = _sampled_texts(parents, tokens, probabilities, steps)
    exact: dict[tuple[int, ...], float] = {}

    def spread(node: int, text: tuple[int, ...], chance: float) -> None:
        children = {tokens[c]: c for c in range(6) if parents[c] == node and len(text) < steps}
        for token in range(4):
            here = chance * float(probabilities[node, token])
            if token in children:
                spread(children[token], (*text, token), here)
            else:
                exact[*text, token] = here

    spread(0, (), 1.0)
    assert sum(exact.values()) == pytest.approx(1.0)
    assert set(texts) <= set(exact)
    counts = [texts.count(text) for text in exact]
    expected = [NUM_DRAWS * chance for chance in exact.values()]
    assert stats.chisquare(counts, expected, sum_check=False).pvalue > 1e-3
    # The test can fail: the same texts do not fit a flatter target.
    flatter = [NUM_DRAWS / len(exact)] * len(exact)
    assert stats.chisquare(counts, flatter).pvalue < 1e-6


def test_a_certain_target_and_thresholds():
    certain = torch.eye(4)[[1, 2, 3]][None]
    assert set(_sampled_texts([-1, 0, 1], [0, 1, 2], certain, 2)) == {(1, 2, 3)}
    # A threshold below the draft token's probability accepts it always.
    half = torch.tensor([0.5, 0.5, 0.0, 0.0]).expand(1, 2, 4)
    texts = _sampled_texts([-1, 0], [0, 1], half, 1, threshold_single=0.4)
    assert {text[0] for text in texts} == {1}
    texts = _sampled_texts([-1, 0], [0, 1], half, 1, threshold_acc=0.5)
    assert {text[0] for text in texts} == {1}


# -- attention --------------------------------------------------------------------------------

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 8, 200


@pytest.fixture
def cache():
    """A KV pool and a table with shuffled slots, as in a model runner."""
    torch.manual_seed(5)
    keys, values = torch.randn(SLOTS, KV_HEADS, DIM), torch.randn(SLOTS, KV_HEADS, DIM)
    pool = SimpleNamespace(
        get_key_buffer=lambda _: keys,
        get_value_buffer=lambda _: values,
        set_kv_buffer=lambda _layer, loc, k, v: (
            keys.__setitem__(loc.loc, k.view(-1, KV_HEADS, DIM)),
            values.__setitem__(loc.loc, v.view(-1, KV_HEADS, DIM)),
        ),
    )
    table = torch.randperm(SLOTS)[:160].view(4, 40).to(torch.int32)
    return SimpleNamespace(
        device="cpu",
        is_draft_worker=False,
        sliding_window_size=None,
        model_config=SimpleNamespace(has_attention_sinks=False),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=pool,
        keys=keys,
        values=values,
        table=table,
    )


def _layer(**changes):
    shape = {"tp_q_head_num": HEADS, "tp_k_head_num": KV_HEADS, "qk_head_dim": DIM}
    fixed = {"layer_id": 0, "v_head_dim": DIM, "scaling": DIM**-0.5, "sliding_window_size": -1}
    return SimpleNamespace(**shape, **fixed | changes)


def _attention(query, keys, values, sinks=None):
    """One row [HEADS, DIM] over keys [n, KV_HEADS, DIM], head by head; ``sinks``: [HEADS]."""
    heads = []
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        scores = keys[:, group] @ query[head] / DIM**0.5
        if sinks is not None:
            scores = torch.cat((scores, sinks[head].view(1)))
        weights = scores.softmax(0)[: len(keys)]
        heads.append(weights @ values[:, group])
    return torch.cat(heads)


def _forward_batch(mode, **fields):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(forward_mode=ForwardMode[mode], **fields)


def _rows(num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(num, HEADS * DIM), *torch.randn(2, num, KV_HEADS * DIM)


def test_tree_verify_attends_to_the_prefix_and_ancestors(cache):
    from sglang_parse.attention.native import MaskedTorchNativeBackend

    lengths, requests = [5, 11], [2, 0]
    two = (PARENT_LIST.repeat(2, 1), SELECTED.repeat(2, 1))
    masks, *_ = _built(*two, lengths, 2)
    new = torch.cat([cache.table[r, n : n + WIDTH] for r, n in zip(requests, lengths, strict=True)])
    batch = _forward_batch(
        "TARGET_VERIFY",
        spec_info=SimpleNamespace(
            custom_mask=torch.cat([m.flatten() for m in masks]), draft_token_num=WIDTH
        ),
        req_pool_indices=torch.tensor(requests),
        seq_lens=torch.tensor(lengths),
        out_cache_loc=new.long(),
    )
    backend = MaskedTorchNativeBackend(cache)
    q, k, v = _rows(2 * WIDTH)
    backend.init_forward_metadata(batch)
    output = backend.forward_extend(q, k, v, _layer(), batch)
    for i, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        for node in range(WIDTH):
            ancestors = [node]
            while PARENTS[ancestors[-1]] != -1:
                ancestors.append(PARENTS[ancestors[-1]])
            columns = [*range(length), *(length + a for a in ancestors)]
            slots = cache.table[request, columns].long()
            row = i * WIDTH + node
            expected = _attention(q[row].view(HEADS, DIM), cache.keys[slots], cache.values[slots])
            torch.testing.assert_close(output[row], expected, atol=1e-5, rtol=1e-5)


def test_a_tree_mask_of_another_size_is_refused(cache):
    from sglang_parse.attention.native import MaskedTorchNativeBackend

    batch = _forward_batch(
        "TARGET_VERIFY",
        spec_info=SimpleNamespace(custom_mask=torch.ones(16).bool(), draft_token_num=4),
        req_pool_indices=torch.tensor([0]),
        seq_lens=torch.tensor([5]),
        out_cache_loc=torch.tensor([1, 2, 3, 4]),
    )
    with pytest.raises(ValueError, match="tree mask has 16 entries, expected 36"):
        MaskedTorchNativeBackend(cache).init_forward_metadata(batch)


@pytest.mark.parametrize("mode", ["DRAFT_EXTEND_V2", "EXTEND"])
def test_draft_extend_is_causal(cache, monkeypatch, mode):
    """A draft model's ordinary extend computes its new rows only."""
    from sglang_parse.attention.native import MaskedTorchNativeBackend

    cache.is_draft_worker = mode == "EXTEND"
    monkeypatch.setattr(MaskedTorchNativeBackend, "_run_sdpa_forward_extend", None)
    requests, kv_lens, num = [1, 3], [9, 4], 4
    starts = [n - num for n in kv_lens]
    new = torch.cat([cache.table[r, s : s + num] for r, s in zip(requests, starts, strict=True)])
    batch = _forward_batch(
        mode,
        spec_info=None if mode == "EXTEND" else SimpleNamespace(),
        req_pool_indices=torch.tensor(requests),
        seq_lens=torch.tensor(kv_lens),
        extend_seq_lens=torch.tensor([num, num]),
        out_cache_loc=new.long(),
    )
    backend = MaskedTorchNativeBackend(cache)
    q, k, v = _rows(2 * num)
    backend.init_forward_metadata(batch)
    output = backend.forward_extend(q, k, v, _layer(), batch)
    for row in range(2 * num):
        i, place = divmod(row, num)
        slots = cache.table[requests[i], : starts[i] + place + 1].long()
        expected = _attention(q[row].view(HEADS, DIM), cache.keys[slots], cache.values[slots])
        torch.testing.assert_close(output[row], expected, atol=1e-5, rtol=1e-5)


def test_draft_steps_attend_to_the_prefix_and_their_branch(cache):
    from sglang_parse.patches.cpu.draft_steps_cpu import DraftStepsBackend

    requests, lengths, topk, steps = [2, 1], [6, 3], 2, 3
    backends = DraftStepsBackend(cache, topk, steps)
    assert len(backends.attn_backends) == steps - 1
    batch = _forward_batch(
        "DECODE",
        spec_info=SimpleNamespace(),
        req_pool_indices=torch.tensor(requests),
        seq_lens=torch.tensor(lengths),
    )
    backends.init_forward_metadata(batch)
    for step, backend in enumerate(backends.attn_backends):
        branches = list(itertools.product(range(2), range(topk)))
        own = [[lengths[i] + branch * steps + s for s in range(step + 1)] for i, branch in branches]
        batch.out_cache_loc = torch.tensor(
            [cache.table[requests[i], c[-1]] for (i, _), c in zip(branches, own, strict=True)]
        )
        q, k, v = _rows(len(branches))
        output = backend.forward_decode(q, k, v, _layer(), batch)
        for row, ((i, _), columns) in enumerate(zip(branches, own, strict=True)):
            slots = cache.table[requests[i], [*range(lengths[i]), *columns]].long()
            expected = _attention(q[row].view(HEADS, DIM), cache.keys[slots], cache.values[slots])
            torch.testing.assert_close(output[row], expected, atol=1e-5, rtol=1e-5)


WINDOW = 3


@pytest.mark.parametrize("has_pools", [True, False], ids=["two-pools", "one-pool"])
@pytest.mark.parametrize(("mode", "num"), [("EXTEND", 4), ("DECODE", 1)])
def test_windows_and_sinks(cache, mode, num, has_pools):
    """In two pools a layer with a window reads its own slots, and none of a token before it. In one
    the class of the model does not announce its windows, as Granite's."""
    from sglang_parse.attention.native import MaskedTorchNativeBackend

    cache.sliding_window_size = WINDOW if has_pools else None
    cache.model_config.has_attention_sinks = not has_pools
    requests, kv_lens = [1, 3], [9, 4]
    first = [max(0, length - num - WINDOW) for length in kv_lens]
    own = [cache.table[r, a:n].long() for r, a, n in zip(requests, first, kv_lens, strict=True)]
    mapping = torch.zeros(SLOTS, dtype=torch.int64)
    mapping[torch.cat(own)] = torch.randperm(SLOTS - 1)[: len(torch.cat(own))] + 1
    cache.table.masked_fill_(cache.table == 0, 1)
    cache.keys[0] = cache.values[0] = torch.nan
    cache.token_to_kv_pool.translate_loc_from_full_to_swa = lambda slots: mapping[slots.long()]
    batch = _forward_batch(
        mode,
        spec_info=None,
        req_pool_indices=torch.tensor(requests),
        seq_lens=torch.tensor(kv_lens),
        extend_seq_lens=torch.tensor([num, num]),
        out_cache_loc=torch.cat([slots[-num:] for slots in own]),
    )
    backend, sinks = MaskedTorchNativeBackend(cache), torch.randn(HEADS)
    backend.use_sliding_window_kv_pool = has_pools
    backend.init_forward_metadata(batch)
    forward = backend.forward_extend if mode == "EXTEND" else backend.forward_decode
    for window in (-1, WINDOW):
        q, k, v = _rows(2 * num)
        layer = _layer(sliding_window_size=window)
        output = forward(q, k, v, layer, batch, save_kv_cache=False, sinks=sinks)
        for row in range(2 * num):
            i, place = divmod(row, num)
            position = kv_lens[i] - num + place
            start = 0 if window < 0 else max(0, position - WINDOW)
            slots = cache.table[requests[i], start : position + 1].long()
            slots = mapping[slots] if has_pools and window > 0 else slots
            seen = cache.keys[slots], cache.values[slots]
            expected = _attention(q[row].view(HEADS, DIM), *seen, sinks)
            torch.testing.assert_close(output[row], expected, atol=1e-5, rtol=1e-5)


def test_a_sliding_window_under_a_mask_is_refused(cache):
    from sglang_parse.attention.native import AttentionPart, MaskedTorchNativeBackend

    backend = MaskedTorchNativeBackend(cache)
    backend.attend_in([AttentionPart(slice(0, 1), torch.tensor([0]))])
    layer = _layer()
    layer.sliding_window_size = 128
    with pytest.raises(NotImplementedError, match="sliding window 128"):
        backend.forward_decode(*_rows(1), layer, SimpleNamespace(out_cache_loc=torch.tensor([0])))


# -- the guard --------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_no_stock_worker_on_a_half_patched_cpu(monkeypatch, algorithm):
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative import eagle_utils
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_parse.patches import PatchError

    load_plugins()
    monkeypatch.setattr(eagle_utils, "top_k_renorm_prob", None)
    with pytest.raises(PatchError, match="verify_sampling_cpu"):
        SpeculativeAlgorithm[algorithm].create_worker(SimpleNamespace())
