"""New weights go to the model they are meant for, target or draft (ledger: weight_updates)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.algorithm import is_parse
from sglang_parse.patches.base import Hook, hook_patch

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_TWO_MODELS = (
    "PARSE: selector is 'all', which would load the same tensors into the target and the draft. "
    "Fix: update one at a time, with selector 'target' or 'draft'"
)


def _serves_parse(manager: Any) -> bool:
    return is_parse(manager.tp_worker.model_runner.spec_algorithm)


def _target_unless_named(original: Callable, manager: Any, *selector: Any) -> list:
    """A checkpoint from disk or IPC comes without a selector: it is the target's."""
    if not selector and _serves_parse(manager):
        selector = ("target",)
    return original(manager, *selector)


def _begin(original: Callable, manager: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput

    return _refuse_both(original, manager, request, BeginWeightUpdateReqOutput)


def _from_tensor(original: Callable, manager: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    return _refuse_both(original, manager, request, UpdateWeightsFromTensorReqOutput)


def _from_distributed(original: Callable, manager: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightsFromDistributedReqOutput

    return _refuse_both(original, manager, request, UpdateWeightsFromDistributedReqOutput)


def _refuse_both(original: Callable, manager: Any, request: Any, answer: type) -> Any:
    if request.selector == "all" and _serves_parse(manager):
        return answer(success=False, message=_TWO_MODELS)
    return original(manager, request)


PATCH = hook_patch(
    "weight_updates",
    {
        f"{_MANAGER}._select_runners": Hook(
            _target_unless_named, HookType.AROUND, ("self", "selector")
        ),
        f"{_MANAGER}.begin_weight_update": Hook(_begin, HookType.AROUND, ("self", "recv_req")),
        f"{_MANAGER}.update_weights_from_tensor": Hook(
            _from_tensor, HookType.AROUND, ("self", "recv_req")
        ),
        f"{_MANAGER}.update_weights_from_distributed": Hook(
            _from_distributed, HookType.AROUND, ("self", "recv_req")
        ),
    },
    why="SGLang loads one checkpoint into target and draft alike, which suits drafts that are "
    "a part of the target. PARSE's draft is a model of its own: it would end as a copy "
    "of the target, or with weights of the wrong shape.",
    how="for PARSE servers, checkpoints from disk and IPC go to the target; updates by tensor "
    "must name one of the two.",
    removed_when="an algorithm can say whose weights an update without a selector is for.",
)
