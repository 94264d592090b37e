"""New weights go to either the target or the draft (ledger: weight_updates)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers import io_struct

from sglang_parse.algorithm import is_parse
from sglang_parse.patches.base import Hook, Patch, around

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_TWO_MODELS = (
    "PARSE: selector is 'all', which would load the same tensors into the target and the draft. "
    "Fix: update one at a time, with selector 'target' or 'draft'"
)


def _serves_parse(manager: Any) -> bool:
    return is_parse(manager.tp_worker.model_runner.spec_algorithm)


def _select_target(original: Callable, self: Any, selector: str = "") -> list:
    """Selects the target for a checkpoint from disk or IPC, which comes without a selector."""
    return original(self, selector or ("target" if _serves_parse(self) else "all"))


def _refuse_all(output: type) -> Hook:
    """Refuses an update for both models; ``output`` is SGLang's response type for it."""

    def update(original: Callable, self: Any, recv_req: Any) -> Any:
        if recv_req.selector == "all" and _serves_parse(self):
            return output(success=False, message=_TWO_MODELS)
        return original(self, recv_req)

    return around(update)


PATCH = Patch(
    "weight_updates",
    {
        f"{_MANAGER}._select_runners": around(_select_target),
        f"{_MANAGER}.begin_weight_update": _refuse_all(io_struct.BeginWeightUpdateReqOutput),
        f"{_MANAGER}.update_weights_from_tensor": _refuse_all(
            io_struct.UpdateWeightsFromTensorReqOutput
        ),
        f"{_MANAGER}.update_weights_from_distributed": _refuse_all(
            io_struct.UpdateWeightsFromDistributedReqOutput
        ),
    },
    why="SGLang loads one checkpoint into target and draft alike, which suits drafts that are "
    "part of the target. PARSE's draft is a separate model: it would end as a copy of the target, "
    "or with weights of the wrong shape.",
    how="on PARSE servers, checkpoints from disk and IPC go to the target; updates by tensor "
    "must name one of the two.",
    removed_when="an algorithm can state which model an update without a selector is for.",
)
