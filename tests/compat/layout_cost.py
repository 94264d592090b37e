"""Prints what the two layouts of a verification pass cost one attention layer on a CPU.

    OMP_NUM_THREADS=1 PYTHONPATH=tests python tests/compat/layout_cost.py

That is where ``attention.support`` has its preference for ``torch_native`` from. For a GPU:
``tests/gpu/mask_cost.py``.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import torch
from rich.console import Console
from rich.table import Table

from sglang_parse.attention.native import MaskedTorchNativeBackend
from sglang_parse.attention.spec_input import ParseVerifyInput
from sglang_parse.core.layout import RequestLayout, VerifyLayout
from sglang_parse.core.mask import flat_mask
from support.timing import milliseconds

HEADS, KV_HEADS, DIM, QUESTION = 8, 4, 64, 12
PREFIXES, DRAFTS, QUESTIONS = (0, 128, 512, 2048, 8192), (64, 256), (4, 16, 64)


def costs(prefix: int, draft: int, num_questions: int) -> list[float]:
    """Milliseconds: preparing a pass under a mask and without, one layer under it and without."""
    cuts = tuple(draft * (i + 1) // num_questions for i in range(num_questions))
    request = RequestLayout(prefix, draft, cuts, (QUESTION,) * num_questions)
    layout = VerifyLayout.of([request])
    keys, values = torch.randn(2, request.kv_len, KV_HEADS, DIM)
    table = torch.randperm(request.kv_len).to(torch.int32)[None]
    runner = SimpleNamespace(
        device="cpu",
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        is_draft_worker=False,
        sliding_window_size=None,
        model_config=SimpleNamespace(has_attention_sinks=False),
        token_to_kv_pool=SimpleNamespace(
            get_key_buffer=lambda _: keys, get_value_buffer=lambda _: values
        ),
    )
    backend = MaskedTorchNativeBackend(runner)
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        qk_head_dim=DIM,
        v_head_dim=DIM,
        scaling=DIM**-0.5,
    )
    q = torch.randn(layout.num_rows, HEADS * DIM)

    def prepare(is_masked: bool) -> None:
        spec_info = ParseVerifyInput(
            layout=layout,
            custom_mask=flat_mask(layout) if is_masked else None,
            select_index=torch.tensor([0]),
        )
        batch = SimpleNamespace(spec_info=spec_info, req_pool_indices=torch.tensor([0]))
        backend.init_forward_metadata(batch)

    def attend(is_masked: bool) -> float:
        prepare(is_masked)
        return milliseconds(
            lambda: backend.forward_extend(q, None, None, layer, None, save_kv_cache=False)
        )

    prepared = [
        milliseconds(lambda is_masked=is_masked: prepare(is_masked)) for is_masked in (1, 0)
    ]
    return [*prepared, attend(True), attend(False)]


def main() -> None:
    table = Table("prefix", "L", "K", "prepare mask", "alias", "layer mask", "alias", "alias/mask")
    for case in product(PREFIXES, DRAFTS, QUESTIONS):
        figures = costs(*case)
        ratio = figures[3] / figures[2]
        table.add_row(*map(str, case), *(f"{ms:.2f}" for ms in figures), f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
