"""Test-only SGLang plugin: shows and disturbs a real scheduler.

The tests put this folder on PYTHONPATH of the servers they start and give each a folder in
``PARSE_PROBE_DIR``; without that variable the plugin does nothing.

- ``/server_info`` answers with ``internal_states[0]["probe"]``: the running requests and the radix
  tree (for every model the slots, the tokens whose KV was written there and its fingerprint; and
  PARSE's marks of what the draft model has written).
- ``fault.json`` disturbs the forwards of one place (see ``PLACES``): slow, raising, NaN logits; or
  raises in what is done for one request (``SEAMS``).
- ``retract`` makes SGLang retract requests, as its variable SGLANG_TEST_RETRACT does.
- ``record`` makes every decode iteration a line of ``iterations.jsonl``.
- With ``PARSE_PROBE_STRICT`` set, a draft chunk whose launch waits for a GPU fails.
- With ``PARSE_PROBE_AHEAD`` set, draft chunks run as on a GPU: the next may be launched before the
  host has the tokens of the last one, and decode steps catch up with small gaps.
- Requests that all give a ``sampling_seed`` are sampled with it. SGLang does that only under
  ``--enable-deterministic-inference``, which it refuses on a CPU for lack of kernels; the noise
  comes from another hash of the same three numbers.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PLACES = (
    "target-prefill",
    "target-verify",
    "target-decode",
    "draft-prefill",
    "draft-chunk",
    "head-prefill",
    "head-draft",
    "head-extend",
)
"""Model and kind of forward. An EAGLE-3 head drafts, and extends its KV by accepted tokens."""

ENGINE = "sglang_parse.engine"
SEAMS = {
    "options": f"{ENGINE}.admission.policy_for",
    "ask": f"{ENGINE}.judge.judge.Judge.ask",
    "commit": f"{ENGINE}.commit.Committer._accept",
    "sources": f"{ENGINE}.sources.chain.SourceChain.start",
    "observe": f"{ENGINE}.sources.chain.SourceChain.observe",
    "take": f"{ENGINE}.sources.prediction.PredictionSource.take",
    "texts": f"{ENGINE}.sources.chain.SourceChain.begin",
    "keep": f"{ENGINE}.sources.chain.SourceChain.finish",
    "traces": f"{ENGINE}.commit.trace_record",
    "walk": f"{ENGINE}.logits.grammar.fork",
    "matcher": "sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.fill_vocab_mask",
}
"""What is done for one request at a time."""


class InjectedError(RuntimeError):
    """A fault the test asked for."""


def register() -> None:
    folder = os.environ.get("PARSE_PROBE_DIR")
    if not folder:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    probe = Probe(Path(folder))
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    drafting = "sglang_parse.engine.drafting"
    for target, hook, kind in (
        (f"{scheduler}.run_batch", probe.run_batch, HookType.AROUND),
        (f"{scheduler}.get_internal_state", probe.add_state, HookType.AFTER),
        (f"{scheduler}.process_batch_result", probe.process_result, HookType.BEFORE),
        (
            "sglang_parse.engine.verify.TargetForward.last_tokens",
            probe.count_async_decode,
            HookType.BEFORE,
        ),
        (
            "sglang_parse.engine.commit.Committer._accept_step",
            probe.count_dropped,
            HookType.AFTER,
        ),
        (
            f"{drafting}.token_by_token.TokenChunk.last_tokens",
            probe.count_async_chunk,
            HookType.BEFORE,
        ),
        (f"{drafting}.parallel.ParallelChunk.state_of", probe.count_async_chunk, HookType.BEFORE),
        (
            f"{drafting}.chunk.DraftChunk.ids_in_flight",
            probe.count_async_pass,
            HookType.BEFORE,
        ),
        (
            "sglang.srt.model_executor.model_runner.ModelRunner.forward",
            probe.forward,
            HookType.AROUND,
        ),
        (
            "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
            seed_sampling,
            HookType.AFTER,
        ),
        (
            "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
            hash_32_bits,
            HookType.REPLACE,
        ),
    ):
        HookRegistry.register(target, hook, kind)
    for seam, target in SEAMS.items():
        HookRegistry.register(target, partial(probe.seam, seam), HookType.AROUND)
    if os.environ.get("PARSE_PROBE_STRICT"):
        for launch in ("token_by_token.TokenChunk._launch", "parallel.ParallelChunk._launch"):
            HookRegistry.register(f"{drafting}.{launch}", without_waits, HookType.AROUND)
    if os.environ.get("PARSE_PROBE_AHEAD"):
        HookRegistry.register(
            f"{drafting}.draft_model.DraftModel.init_cuda_graphs", draft_ahead, HookType.AFTER
        )


def without_waits(original: Callable, *args: Any) -> Any:
    """PyTorch then raises at copies that wait, and at looks at numbers on the device."""
    import torch

    torch.cuda.set_sync_debug_mode("error")
    try:
        return original(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def draft_ahead(_: Any, model: Any) -> None:
    model.runs_ahead, model.graph_reqs = True, 8


class Probe:
    """Everything that is hooked into one scheduler process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stage = "idle"
        self.seen: Counter[str] = Counter()
        """Forwards seen at the place of each fault, by the fault's id."""
        self.num_launched = self.num_processed = 0
        self.num_late = self.num_async_decodes = self.num_async_chunks = self.num_dropped = 0
        self.num_async_passes = 0
        self.custom_masks: Counter[str] = Counter()
        self.forwards: Counter[str] = Counter()
        """By place, and whether a CUDA graph was replayed: "draft-chunk graph"."""
        self.written: dict[str, dict[int, int]] = {"target": {}, "draft": {}, "head": {}}
        """Model -> slot -> token whose KV was written there last."""

    # -- state ------------------------------------------------------------------

    def run_batch(self, original: Callable, scheduler: Any, batch: Any, *args: Any) -> Any:
        from sglang.srt.managers import scheduler as module

        module.TEST_RETRACT = (self.folder / "retract").exists()
        self.num_launched += 1
        self.stage = "prefill" if batch.forward_mode.is_extend() else "decode"
        if self.stage == "decode" and (self.folder / "record").exists():
            with (self.folder / "iterations.jsonl").open("a") as lines:
                lines.write(json.dumps([held_by(req) for req in batch.reqs]) + "\n")
        try:
            return original(scheduler, batch, *args)
        finally:
            self.stage = "idle"

    def process_result(self, *_: Any) -> None:
        self.num_processed += 1
        self.num_late += self.num_launched > self.num_processed

    def count_async_decode(self, _: Any, reqs: Any) -> None:
        self.num_async_decodes += any(req.parse_state.num_inflight for req in reqs)

    def count_async_chunk(self, *_: Any) -> None:
        self.num_async_chunks += 1

    def count_async_pass(self, *_: Any) -> None:
        self.num_async_passes += 1

    def count_dropped(self, one: Any, *_: Any) -> Any:
        self.num_dropped += not one.tokens
        return one

    def add_state(self, result: Any, scheduler: Any, *_: Any) -> Any:
        result.internal_state["probe"] = {
            "tree": self._tree(scheduler),
            "running": [held_by(req) for req in scheduler.running_batch.reqs],
            "waiting": len(scheduler.waiting_queue),
            "overlap": {
                "launched": self.num_launched,
                "processed_late": self.num_late,  # when the next one had been launched
                "async_decodes": self.num_async_decodes,  # launched before the last token came
                "async_chunks": self.num_async_chunks,
                "async_passes": self.num_async_passes,  # launched before their drafts' last tokens
                "dropped": self.num_dropped,  # decode steps in flight when a draft started
            },
            "forwards": dict(self.forwards),
            "custom_masks": dict(self.custom_masks),
            **self._free_slots(scheduler.token_to_kv_pool_allocator),
        }
        return result

    def _free_slots(self, allocator: Any) -> dict[str, int | None]:
        """Of the pool, or of both: that of full attention, and that of windows."""
        if not hasattr(allocator, "swa_available_size"):
            return {"free_slots": allocator.available_size(), "free_window_slots": None}
        window_slots = allocator.swa_available_size()
        return {
            "free_slots": allocator.full_available_size(),
            "free_window_slots": window_slots,
        }

    def _tree(self, scheduler: Any) -> list[dict[str, Any]]:
        """Every path a later request could reuse: its slots, and what KV is in them."""
        from sglang.srt.kv_canary.radix_cache_walker import walk_radix_cache_for_canary

        walk = walk_radix_cache_for_canary(radix_cache=scheduler.tree_cache)
        slots, previous = list(map(int, walk.slot_indices)), list(map(int, walk.prev_slot_indices))
        runners = [scheduler.tp_worker.model_runner]
        if getattr(scheduler.draft_worker, "draft_worker", None) is not None:
            runners.append(scheduler.draft_worker.draft_worker.draft_runner)
        engine = getattr(scheduler.draft_worker, "engine", None)
        drafter = engine and engine.drafter
        if engine is not None and engine.eagle is not None:
            runners.append(engine.eagle.worker.draft_runner)
        return [
            {
                "slots": path,
                "written": [[self.written[model_of(r)].get(s) for s in path] for r in runners],
                "fingerprints": [kv_fingerprint(runner, path) for runner in runners],
                "marked": drafter.model.kv._marked[path].tolist() if drafter else None,
            }
            for path in tree_paths(slots, previous)
        ]

    # -- disturbing -------------------------------------------------------------

    def forward(
        self, original: Callable, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if runner.device == "cpu":  # a look at a GPU's numbers would wait for it
            slots, ids = forward_batch.out_cache_loc.tolist(), forward_batch.input_ids.tolist()
            self.written[model_of(runner)].update(zip(slots, ids, strict=True))
        place = self._place(runner, forward_batch)
        has_mask = getattr(forward_batch.spec_info, "custom_mask", None) is not None
        self.custom_masks[place] += has_mask
        fault = self._take_fault(place)
        if fault is None:
            output = original(runner, forward_batch, *args, **kwargs)
            self.forwards[f"{place} {'graph' if output.can_run_graph else 'eager'}"] += 1
            return output
        if fault["kind"] == "slow":
            time.sleep(fault["seconds"])
        elif fault["kind"] == "raise":
            raise InjectedError("injected")
        elif fault["kind"] == "attention":
            return _with_broken_attention(runner, original, forward_batch, *args, **kwargs)
        output = original(runner, forward_batch, *args, **kwargs)
        if fault["kind"] == "nan":
            output.logits_output.next_token_logits[0] = float("nan")
        return output

    def seam(self, seam: str, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if self._take_fault(seam) is not None:
            raise InjectedError("injected: the client's words")
        return original(*args, **kwargs)

    def _place(self, runner: Any, forward_batch: Any) -> str:
        if model_of(runner) == "head":
            if self.stage == "prefill":
                return "head-prefill"
            return f"head-{'draft' if forward_batch.forward_mode.is_decode() else 'extend'}"
        if runner.is_draft_worker:
            is_prefill = forward_batch.forward_mode.name == "EXTEND"
            return "draft-prefill" if is_prefill else "draft-chunk"
        if self.stage == "decode":
            return "target-decode" if forward_batch.forward_mode.is_decode() else "target-verify"
        return f"target-{self.stage}"

    def _take_fault(self, place: str) -> dict[str, Any] | None:
        """The fault for this forward, if any: skips ``skip`` of them, then fires ``times``."""
        try:
            fault = json.loads((self.folder / "fault.json").read_text())
        except FileNotFoundError:
            return None
        if fault["place"] != place:
            return None
        number = self.seen[fault["id"]] - fault["skip"]
        self.seen[fault["id"]] += 1
        if number < 0 or 0 <= fault["times"] <= number:
            return None
        with (self.folder / fault["id"]).open("a") as lines:
            lines.write(place + "\n")
        return fault


def _with_broken_attention(runner: Any, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """The attention backend fails in the second layer, when the first has written its KV."""
    backend = runner.attn_backend
    attend = backend.forward_extend

    def fail_in_second_layer(q: Any, k: Any, v: Any, layer: Any, *rest: Any, **more: Any) -> Any:
        if layer.layer_id == 1:
            raise InjectedError("injected into the attention backend")
        return attend(q, k, v, layer, *rest, **more)

    backend.forward_extend = fail_in_second_layer
    try:
        return original(runner, *args, **kwargs)
    finally:
        del backend.forward_extend


def model_of(runner: Any) -> str:
    """Returns target, draft or head."""
    if not runner.is_draft_worker:
        return "target"
    return "head" if runner.spec_algorithm.is_eagle3() else "draft"


def held_by(req: Any) -> dict[str, Any]:
    """Returns a request's phase, and its KV slots: committed, and held beyond those."""
    state = getattr(req, "parse_state", None)
    committed = state.committed_len if state else req.kv.kv_committed_len
    return {
        "rid": req.rid,
        "phase": state.phase.value if state else None,
        "committed": committed,
        "held": req.kv.kv_allocated_len - committed,
    }


def tree_paths(slots: list[int], previous: list[int]) -> list[list[int]]:
    """Every path from the radix tree's root to a leaf, as KV slots."""
    before = dict(zip(slots, previous, strict=True))
    paths = []
    for leaf in set(slots) - set(previous):
        path = [leaf]
        while before[path[-1]] >= 0:
            path.append(before[path[-1]])
        paths.append(path[::-1])
    return paths


def kv_fingerprint(runner: Any, slots: list[int]) -> list[float]:
    """One number per slot: the last layer's values, which depend on the whole context.

    The last with full attention: a slot has no values of others, or has them elsewhere.
    """
    pool = runner.token_to_kv_pool
    layers = getattr(pool, "full_attention_layer_id_mapping", None)  # of a hybrid model
    if pools := getattr(pool, "layers_mapping", None):  # of a model with two pools
        layers = [layer for layer, (_, is_window) in pools.items() if not is_window]
    last = max(layers) if layers else pool.start_layer + pool.layer_num - 1
    values = pool.get_value_buffer(last)[slots].flatten(1).double()
    weights = values.new_tensor([(1 + i % 7) * (-1) ** i for i in range(values.shape[1])])
    return (values @ weights).nan_to_num(nan=1e30).tolist()  # JSON has no NaN


def seed_sampling(info: Any, _class: Any, batch: Any, *_: Any, **__: Any) -> Any:
    import torch

    seeds = [req.sampling_params.sampling_seed for req in batch.reqs]
    if None not in seeds:
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
    return info


def hash_32_bits(seed: Any, positions: Any, columns: Any) -> Any:
    """int64 [n, m] in 0 .. 2**32 - 1 from seed [n], positions [n] and columns [m]."""
    import torch

    mixed = (seed.to(torch.int64) * 0x9E3779B1 + positions * 0x85EBCA6B)[:, None]
    mixed = (mixed + columns * 0xC2B2AE35) & 0xFFFFFFFF
    for factor in (0x7FEB352D, 0x846CA68B):
        mixed = ((mixed ^ (mixed >> 16)) * factor) & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)
