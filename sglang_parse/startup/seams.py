"""What PARSE calls, overrides or reads of SGLang; ``compat`` checks it at every start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seam:
    """One upstream attribute we call, override or read.

    Attributes:
        path: dotted path of the attribute.
        parameters: names it must have; () where it is not called by us.
        why: what PARSE needs it for.
    """

    path: str
    parameters: tuple[str, ...]
    why: str


_SPEC = "sglang.srt.speculative"
_OPS = "sglang.kernels.ops.speculative"
_MANAGERS = "sglang.srt.managers"
SEAMS = (
    Seam(
        f"{_SPEC}.spec_info.SpeculativeAlgorithm.register",
        ("name", "supports_overlap", "validate_server_args", "spec_class"),
        "registers PARSE under its name",
    ),
    Seam(f"{_SPEC}.spec_registry.CustomSpecAlgo", (), "base of ParseAlgorithm"),
    Seam(
        f"{_MANAGERS}.overlap_utils.FutureMap",
        ("device", "spec_algo", "req_to_token_pool"),
        "the scheduler asks every algorithm to create one",
    ),
    Seam(
        f"{_MANAGERS}.overlap_utils.FutureMap.resolve_seq_lens_cpu",
        ("self", "batch", "stream_ordered"),
        "called before every launch under overlap: sets the batch's lengths",
    ),
    Seam(
        f"{_MANAGERS}.utils.GenerationBatchResult.copy_to_cpu",
        ("self", "return_logprob", "return_hidden_states"),
        "called when the worker has returned: says when the result can be read",
    ),
    Seam(
        f"{_MANAGERS}.scheduler.Scheduler._reqs_finishing_inflight",
        ("self", "batch"),
        "replaced for PARSE: an iteration may emit nothing",
    ),
    Seam(
        "sglang.srt.utils.common.async_h2d",
        ("args", "dtype", "device"),
        "sends an iteration's numbers to the device without a wait",
    ),
    Seam(
        "sglang.srt.utils.common.async_d2h",
        ("tensor",),
        "starts the copy of an iteration's numbers to the host",
    ),
    Seam(f"{_SPEC}.base_spec_worker.BaseSpecWorker", (), "base of the worker"),
    Seam(
        "sglang.srt.lora.backend.base_backend.BaseLoRABackend.skip_inactive_lora_batches",
        (),
        "verification passes hold no request with an adapter and skip the adapter layers",
    ),
    Seam(
        f"{_SPEC}.base_spec_worker.BaseSpecWorker.note_request_finished",
        ("rid", "natural_stop"),
        "fills the draft's KV before tokens enter the radix cache",
    ),
    Seam(
        f"{_SPEC}.base_spec_worker.BaseSpecWorker.alloc_memory_pool",
        ("memory_pool_config", "req_to_token_pool", "token_to_kv_pool_allocator"),
        "gives the draft model the target's slot numbers",
    ),
    Seam(
        f"{_MANAGERS}.tp_worker.TpModelWorker.__init__",
        ("server_args", "gpu_id", "nccl_port", "is_draft_worker", "context_length"),
        "builds the draft model",
    ),
    Seam(
        f"{_MANAGERS}.tp_worker.TpModelWorker.forward_batch_generation",
        ("batch",),
        "prefill and plain decoding of the target",
    ),
    Seam(
        f"{_SPEC}.spec_utils.spec_prepare_for_decode",
        ("batch",),
        "replaced for PARSE: KV slots by phase",
    ),
    Seam(
        f"{_MANAGERS}.schedule_batch.ScheduleBatch._new_tokens_required_next_decode_spec_v2",
        ("self", "requests", "page_size"),
        "replaced for PARSE: the capacity check that goes with it",
    ),
    Seam(
        "sglang.srt.mem_cache.allocation.alloc_token_slots",
        ("tree_cache", "num_tokens"),
        "allocates slots, evicting from the radix cache",
    ),
    Seam(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        ("batch", "model_runner", "capture_hidden_mode", "return_hidden_states_before_norm"),
        "builds the verification pass",
    ),
    Seam(
        "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.bind_own_plan",
        ("self", "forward_batch"),
        "required for hand-built batches",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner.ModelRunner.sample",
        ("self", "logits_output", "forward_batch"),
        "samples drafts and the target's own tokens",
    ),
    Seam(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend",
        ("model_runner",),
        "base of the masked backend for the CPU",
    ),
    Seam(
        f"{_MANAGERS}.scheduler_components.output_streamer."
        "SchedulerOutputStreamer.build_additional_customized_info",
        ("self", "reqs"),
        "puts PARSE's figures into meta_info",
    ),
    Seam(
        "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector",
        ("labels", "server_args"),
        "base of the collector that publishes PARSE's metrics",
    ),
    Seam(
        "sglang.srt.observability.metrics_collector."
        "SchedulerMetricsCollector.increment_realtime_tokens",
        ("self",),
        "called once per iteration: the moment to publish",
    ),
    Seam(
        "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats",
        ("self", "stats"),
        "gives SGLang's acceptance gauges PARSE's figures",
    ),
    Seam(
        "sglang.srt.observability.metrics_collector.resolve_collector_class",
        ("role", "default_cls"),
        "makes the collector that stat_loggers names",
    ),
    Seam(
        f"{_MANAGERS}.schedule_batch.Req.output_ids_through_stop",
        (),
        "output as the client sees it",
    ),
    Seam(
        "sglang.srt.sampling.sampling_params.SamplingParams.verify",
        ("self", "vocab_size"),
        "refuses bad custom_params with a 400",
    ),
    Seam(
        f"{_SPEC}.spec_sampling_mask.validate_spec_sampling_mask_request",
        ("req", "spec_algorithm"),
        "lets requests for sampling masks in, to be served plainly",
    ),
    Seam(
        "sglang.srt.mem_cache.common.checkpoint_kv_cache",
        ("req", "tree_cache"),
        "honours Req.skip_radix_cache_insert: faulty KV stays out of the cache",
    ),
    Seam(
        f"{_SPEC}.spec_info.SpeculativeAlgorithm.create_worker",
        ("self", "server_args"),
        "guards stock speculation on a CPU: every replacement below is in force",
    ),
    Seam(
        f"{_SPEC}.draft_utils.DraftBackendFactory",
        ("draft_model_runner", "topk", "speculative_num_steps"),
        "makes torch_native backends for a stock draft's steps",
    ),
    Seam(
        f"{_OPS}.cache_locs.assign_extend_cache_locs_func",
        ("req_pool_indices", "req_to_token", "start_offset", "end_offset", "batch_size"),
        "replaced on a CPU: slots of the verified tokens",
    ),
    Seam(
        f"{_OPS}.cache_locs.assign_draft_cache_locs_contiguous_func",
        ("req_pool_indices", "req_to_token", "seq_lens", "out_cache_loc", "topk", "num_cols"),
        "replaced on a CPU: slots of the drafted tokens",
    ),
    Seam(
        f"{_OPS}.cache_locs.fill_front_out_cache_loc_func",
        ("num_front", "out_cache_loc", "front_out_cache_loc"),
        "replaced on a CPU: slots the accepted tokens move to",
    ),
    Seam(
        f"{_OPS}.spec_tree.build_tree_kernel_efficient_func",
        ("parent_list", "top_scores_index", "seq_lens", "tree_mask", "tree_mask_mode"),
        "replaced on a CPU: draft trees",
    ),
    Seam(
        f"{_OPS}.spec_tree.verify_tree_greedy_func",
        ("predicts", "accept_index", "accept_token_num", "candidates", "target_predict"),
        "replaced on a CPU: greedy verification of draft trees",
    ),
    Seam(
        f"{_OPS}.eagle.fill_bonus_tokens_func",
        ("accept_tokens", "accept_lens", "bonus_tokens", "accept_stride", "batch_size"),
        "replaced on a CPU: the token after the accepted ones",
    ),
    Seam(
        f"{_OPS}.eagle.fill_accept_out_cache_loc_func",
        ("accept_index", "out_cache_loc", "accept_out_cache_loc", "size"),
        "replaced on a CPU: slots the accepted tokens come from",
    ),
    Seam(
        f"{_SPEC}.eagle_utils.tree_speculative_sampling_target_only",
        (),
        "set on a CPU: verification at temperature above 0",
    ),
    Seam(
        f"{_SPEC}.eagle_worker_v2.EagleDraftWorker",
        ("server_args", "gpu_id", "nccl_port", "target_worker"),
        "runs the EAGLE-3 head beside PARSE's draft model",
    ),
    Seam(
        f"{_SPEC}.eagle_worker_v2.EagleDraftWorker.draft",
        ("self", "batch"),
        "the head's proposals",
    ),
    Seam(
        f"{_SPEC}.eagle_worker_v2.EagleDraftWorker._draft_extend_for_prefill",
        ("self", "batch", "target_hidden_states", "next_token_ids"),
        "lets the head follow tokens it did not propose",
    ),
    Seam(
        f"{_SPEC}.eagle_info.EagleDraftInput",
        ("topk_p", "topk_index", "hidden_states", "bonus_tokens"),
        "what the head goes on from",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state."
        "resolve_spec_aux_hidden_state_config",
        ("server_args", "model_config", "spec_algorithm", "is_draft_worker"),
        "tells the target which layers' states the head reads",
    ),
    Seam("sglang.srt.server_args.ServerArgs.add_cli_args", ("parser",), "adds PARSE's flags"),
    Seam("sglang.srt.server_args.ServerArgs.from_cli_args", ("args",), "reads PARSE's flags"),
    Seam("sglang.srt.runtime_context.get_spec", (), "speculative settings at run time"),
    Seam("sglang.srt.runtime_context.get_exec", (), "which hidden states CUDA graphs keep"),
    Seam("sglang.srt.runtime_context.get_schedule", (), "how many rows a forward may have"),
    Seam("sglang.srt.runtime_context.get_parallel", (), "the ranks that decide together"),
    Seam(
        "sglang.srt.distributed.parallel_state.GroupCoordinator.broadcast",
        ("self", "input_", "src"),
        "shares rank 0's decisions",
    ),
    Seam(
        "sglang.srt.distributed.parallel_state.init_model_parallel_group",
        ("use_pynccl",),
        "told to leave NCCL alone on a CPU",
    ),
    Seam(
        f"{_MANAGERS}.scheduler_components.weight_updater."
        "SchedulerWeightUpdaterManager._select_runners",
        ("self", "selector"),
        "sends new weights to the target or the draft",
    ),
    Seam(
        f"{_MANAGERS}.tokenizer_control_mixin.TokenizerControlMixin.release_memory_occupation",
        ("self", "obj"),
        "refused under PARSE",
    ),
    Seam(
        f"{_MANAGERS}.utils.GenerationBatchResult",
        (
            "logits_output",
            "next_token_ids",
            "accept_lens",
            "new_seq_lens",
            "next_draft_input",
            "speculative_num_draft_tokens",
            "speculative_output_stride",
            "num_non_draft_tokens_per_req",
        ),
        "what the worker returns",
    ),
    Seam(
        f"{_SPEC}.dflash_utils.dflash_draft_cell_size_per_token",
        ("draft_model_config", "draft_num_layers", "draft_kv_cache_dtype", "tp_size"),
        "counts the draft's KV when the pool is sized",
    ),
    Seam(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo",
        ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "custom_logit_processor"),
        "sampling parameters of some rows of a batch",
    ),
)

_ATTENTION = "sglang.srt.layers.attention"
BACKEND_SEAMS = {
    "flashinfer": (
        Seam(
            f"{_ATTENTION}.flashinfer_backend.FlashInferIndicesUpdaterPrefill.update_single_wrapper",
            ("req_pool_indices", "seq_lens", "prefill_wrappers", "use_ragged", "spec_info", "plan"),
            "plans a masked pass",
        ),
        Seam(
            f"{_ATTENTION}.flashinfer_backend.FlashInferAttnBackend.init_forward_metadata_out_graph",
            ("self", "forward_batch", "in_capture"),
            "plans a step that replays a CUDA graph: waits for the plan before",
        ),
        Seam(
            f"{_ATTENTION}.flashinfer_backend.PrefillMetadata",
            ("prefill_wrappers", "use_ragged", "extend_no_prefix"),
            "says that a pass reads all its KV from the pool",
        ),
    ),
    "triton": (
        Seam(
            f"{_ATTENTION}.triton_backend.ForwardMetadata",
            (
                *("custom_mask", "mask_indptr", "qo_indptr", "kv_indptr", "kv_indices"),
                "max_extend_len",
            ),
            "takes the mask, or the pseudo-sequences",
        ),
    ),
    "fa3": (
        Seam(
            f"{_ATTENTION}.flashattention_backend.FlashAttentionMetadata",
            (
                *("cu_seqlens_q", "cu_seqlens_k", "cache_seqlens_int32", "page_table"),
                *("max_seq_len_q", "max_seq_len_k"),
            ),
            "takes the pseudo-sequences",
        ),
    ),
}
"""Looked at where the backend is used: their modules want a GPU's libraries."""
