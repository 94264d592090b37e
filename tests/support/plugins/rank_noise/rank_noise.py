"""Test-only SGLang plugin: tensor-parallel ranks whose logits differ, far beyond rounding.

The tests put this folder on PYTHONPATH of a server and name a folder in ``RANK_NOISE_DIR``;
without that variable the plugin does nothing.

- Every rank but 0 gets noise on all its logits, in both models, and now and then a NaN; but not in
  a prefill with a grammar, where SGLang's sampler takes the smallest of all ranks' tokens.
- ``rank<r>.jsonl`` in the folder: a line per shared decision, the rank's own values and the
  values it acts on.
- ``rank<r>.times`` there: a line per iteration, the stage times that its controller gets.
- While a file ``alone`` is in the folder every rank acts on its own values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NOISE = 0.5
"""Standard deviations of a row's logits."""
NAN_EVERY = 7
"""Forwards of a model runner between two NaNs."""


def register() -> None:
    folder = os.environ.get("RANK_NOISE_DIR")
    if not folder:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    noise = RankNoise(Path(folder))
    for target, hook in (
        ("sglang.srt.model_executor.model_runner.ModelRunner.forward", noise.forward),
        ("sglang_parse.engine.broadcast.broadcast", noise.broadcast),
        ("sglang_parse.core.policy.controller.Controller.observe", noise.observe),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)


class RankNoise:
    """The hooks in one rank's scheduler process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_forwards = 0

    def forward(self, original: Callable, runner: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(runner, *args, **kwargs)
        logits = output.logits_output.next_token_logits
        if _rank() > 0 and logits is not None and not _takes_smallest(*args, **kwargs):
            self.num_forwards += 1
            generator = torch.Generator(logits.device).manual_seed(self.num_forwards)
            noise = torch.randn(logits.shape, generator=generator, device=logits.device)
            logits += NOISE * logits.std(dim=-1, keepdim=True) * noise
            if self.num_forwards % NAN_EVERY == 0:
                logits[0] = float("nan")
        return output

    def broadcast(self, original: Callable, values: torch.Tensor) -> torch.Tensor:
        own = values.tolist()
        agreed = values if (self.folder / "alone").exists() else original(values)
        with (self.folder / f"rank{_rank()}.jsonl").open("a") as lines:
            lines.write(json.dumps({"own": own, "agreed": agreed.tolist()}) + "\n")
        return agreed

    def observe(self, original: Callable, controller: Any, stages: Any, outputs: Any) -> None:
        with (self.folder / f"rank{_rank()}.times").open("a") as lines:
            lines.write(f"{stages} {outputs}\n")
        original(controller, stages, outputs)


def _takes_smallest(forward_batch: Any, *_: Any, **__: Any) -> bool:
    """Whether ``Sampler._sync_token_ids_across_tp`` mixes the ranks' tokens of this forward."""
    from sglang_parse.attention.spec_input import ParseVerifyInput

    is_pass = isinstance(forward_batch.spec_info, ParseVerifyInput)
    info = forward_batch.sampling_info
    return not is_pass and info is not None and bool(info.grammars)


def _rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank
