"""What PARSE calls, overrides or reads of SGLang; ``compat`` checks it at every start.

Every name that PARSE imports from SGLang is here once, beside what is reached through an object.
What a patch changes stands in the patch instead (``Patch.targets``).
``tests/seams/test_compat.py`` compares both with the sources.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seam:
    """One upstream attribute we call, override or read.

    Attributes:
        path: dotted path of the attribute.
        parameters: names it must have; () where it is not called by us.
        why: what PARSE needs it for.
        through: what in our sources leads to it, where they do not name it.
    """

    path: str
    parameters: tuple[str, ...]
    why: str
    through: str = ""


_SPEC = "sglang.srt.speculative"
_MANAGERS = "sglang.srt.managers"
_FORWARD = "sglang.srt.model_executor.forward_batch_info"
_METRICS = "sglang.srt.observability.metrics_collector"
SEAMS = (
    # The name, and the patches' hooks
    Seam(
        f"{_SPEC}.spec_info.SpeculativeAlgorithm.register",
        ("name", "supports_overlap", "validate_server_args", "spec_class"),
        "registers PARSE under its name",
    ),
    Seam(f"{_SPEC}.spec_info.SpeculativeAlgorithm", (), "names SGLang's own algorithms"),
    Seam(f"{_SPEC}.spec_registry.CustomSpecAlgo", (), "is the base of ParseAlgorithm"),
    Seam(f"{_SPEC}.spec_registry.get_spec", ("name",), "tells whether PARSE is registered"),
    Seam(
        f"{_MANAGERS}.embed_types.PositionalEmbeds", (), "is all a request may bring of embeddings"
    ),
    Seam("sglang.srt.plugins.hook_registry.HookRegistry", (), "applies the patches"),
    Seam(
        "sglang.srt.plugins.hook_registry.HookRegistry.register",
        ("target", "hook", "hook_type"),
        "takes a patch's hooks",
    ),
    Seam("sglang.srt.plugins.hook_registry.HookType", (), "says when a patch's hook is called"),
    # A server's settings and models
    Seam(
        "sglang.srt.configs.model_config.ModelConfig",
        ("model_path", "trust_remote_code", "context_length", "model_override_args", "dtype"),
        "says at start what the models are",
    ),
    Seam("sglang.srt.configs.model_config.AttentionArch", (), "names the kinds of attention"),
    Seam(
        "sglang.srt.utils.hf_transformers_utils.get_tokenizer",
        ("tokenizer_name", "tokenizer_mode", "trust_remote_code"),
        "reads the tokenizers as the server does",
    ),
    Seam("sglang.srt.model_executor.cuda_graph_config.Backend", (), "names the kinds of graphs"),
    Seam(
        "sglang.srt.model_executor.cuda_graph_config.Phase", (), "names what graphs are captured of"
    ),
    Seam(
        "sglang.srt.model_executor.cuda_graph_config.check_cuda_graph_backend",
        ("phase", "backend"),
        "says whether there are graphs of prefills",
    ),
    Seam("sglang.srt.utils.is_confidential_compute", (), "says where overlap is refused"),
    Seam("sglang.srt.runtime_context.get_spec", (), "holds the speculative settings at run time"),
    Seam("sglang.srt.runtime_context.get_exec", (), "says which hidden states CUDA graphs keep"),
    Seam("sglang.srt.runtime_context.get_schedule", (), "says how many rows a forward may have"),
    Seam("sglang.srt.runtime_context.get_memory", (), "says whether there is a prefix cache"),
    Seam("sglang.srt.runtime_context.get_parallel", (), "knows the ranks that decide together"),
    # The worker and its scheduler
    Seam(f"{_SPEC}.base_spec_worker.BaseSpecWorker", (), "is the base of the worker"),
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
        f"{_MANAGERS}.tp_worker.TpModelWorker",
        ("server_args", "gpu_id", "nccl_port", "is_draft_worker", "context_length"),
        "builds the draft model",
    ),
    Seam(
        f"{_MANAGERS}.tp_worker.TpModelWorker.forward_batch_generation",
        ("batch",),
        "does prefill and plain decoding of the target",
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
            "can_run_cuda_graph",
        ),
        "is what the worker returns",
    ),
    Seam(
        f"{_MANAGERS}.utils.GenerationBatchResult.copy_to_cpu",
        ("self", "return_logprob", "return_hidden_states"),
        "is called when the worker has returned: says when the result can be read",
    ),
    Seam(
        f"{_MANAGERS}.overlap_utils.FutureMap",
        ("device", "spec_algo", "req_to_token_pool"),
        "the scheduler asks every algorithm to create one",
    ),
    Seam(
        f"{_MANAGERS}.overlap_utils.FutureMap.resolve_seq_lens_cpu",
        ("self", "batch", "stream_ordered"),
        "is called before every launch under overlap: sets the batch's lengths",
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
    Seam(
        "sglang.srt.distributed.parallel_state.GroupCoordinator.broadcast",
        ("self", "input_", "src"),
        "shares rank 0's decisions",
    ),
    # Requests
    Seam(
        f"{_MANAGERS}.schedule_batch.Req.output_ids_through_stop",
        (),
        "is the output as the client sees it",
    ),
    Seam(f"{_MANAGERS}.schedule_batch.FINISH_ABORT", ("message",), "ends a faulty request"),
    # KV slots
    Seam(
        "sglang.srt.runtime_context.max_speculative_num_draft_tokens",
        (),
        "says how wide a request's row of slot numbers is",
    ),
    Seam(
        "sglang.srt.mem_cache.allocation.alloc_for_spec_decode",
        (
            *("tree_cache", "req_to_token_pool", "reqs", "req_pool_indices", "cur_kv_lens"),
            *("cur_kv_lens_cpu", "nxt_kv_lens", "nxt_kv_lens_cpu", "num_needed_tokens", "batch"),
        ),
        "allocates slots, evicting from the radix cache",
    ),
    Seam(
        "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.bind_own_plan",
        ("self", "forward_batch"),
        "is required for hand-built batches",
    ),
    Seam(
        "sglang.srt.mem_cache.common.checkpoint_kv_cache",
        ("req", "tree_cache"),
        "honours Req.skip_radix_cache_insert: faulty KV stays out of the cache",
        through="skip_radix_cache_insert",
    ),
    # The draft model
    Seam(f"{_SPEC}.base_spec_worker.EagleDraftWorkerBase", (), "is the base of the draft model"),
    Seam(
        "sglang.srt.configs.draft_parallel.DraftParallelSpec",
        ("tp_execution",),
        "asks for a draft on the target's ranks",
    ),
    Seam("sglang.srt.configs.draft_parallel.DraftTPExecution", (), "names these ranks"),
    Seam(
        f"{_SPEC}.draft_parallel.resolve_draft_parallel_layout",
        ("model_spec",),
        "gives the draft its ranks",
    ),
    Seam(f"{_SPEC}.spec_utils.draft_tp_context", ("layout",), "builds and runs on these ranks"),
    Seam(f"{_SPEC}.spec_utils.draft_pp_context", (), "builds a draft without pipeline stages"),
    Seam(
        "sglang.srt.layers.moe.utils.draft_model_build_scope",
        (),
        "builds a draft by a draft's settings for experts",
    ),
    # Forwards and verification passes
    Seam(f"{_FORWARD}.ForwardMode", (), "says what a forward is"),
    Seam(f"{_FORWARD}.CaptureHiddenMode", (), "says which hidden states a forward keeps"),
    Seam(f"{_FORWARD}.ForwardBatch", (), "is what a forward reads"),
    Seam(
        f"{_FORWARD}.ForwardBatch.init_new",
        ("batch", "model_runner", "capture_hidden_mode", "return_hidden_states_before_norm"),
        "builds the verification pass",
    ),
    Seam(
        "sglang.srt.layers.logits_processor.LogitsProcessorOutput",
        ("next_token_logits", "hidden_states"),
        "is what a forward returns",
    ),
    Seam(
        f"{_SPEC}.spec_info.SpecInput", ("spec_input_type",), "is the base of what a pass carries"
    ),
    Seam(
        f"{_SPEC}.spec_info.SpecInputType", (), "names the built-in kinds that PARSE's passes are"
    ),
    Seam(
        "sglang.srt.lora.backend.base_backend.BaseLoRABackend.skip_inactive_lora_batches",
        (),
        "lets passes, which hold no request with an adapter, skip the adapter layers",
    ),
    Seam(
        "sglang.srt.layers.attention.attention_registry.register_attention_backend",
        ("name",),
        "puts PARSE's attention backends in the place of SGLang's",
    ),
    Seam(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend",
        ("model_runner",),
        "is the base of the masked backend for the CPU",
    ),
    Seam(
        "sglang.srt.mem_cache.memory_pool.KVWriteLoc",
        ("loc", "swa_loc"),
        "says where the masked backend for the CPU writes KV",
    ),
    # Sampling
    Seam(
        "sglang.srt.model_executor.model_runner.ModelRunnerOutput",
        ("logits_output", "can_run_graph"),
        "is what a forward returns",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner.ModelRunner.sample",
        ("self", "logits_output", "forward_batch"),
        "samples drafts and the target's own tokens",
    ),
    Seam(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo",
        ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "custom_logit_processor"),
        "holds the sampling parameters of some rows of a batch",
    ),
    Seam(
        "sglang.srt.sampling.sampling_batch_info.ProcessorEntry",
        ("processor", "rows", "indices"),
        "holds the custom logit processors of some rows of a batch",
    ),
    Seam("sglang.srt.sampling.sampling_params.TOP_K_ALL", (), "says that top_k is off"),
    # The EAGLE-3 head
    Seam(
        f"{_SPEC}.eagle_worker_v2.EagleDraftWorker",
        ("server_args", "gpu_id", "nccl_port", "target_worker"),
        "runs the EAGLE-3 head beside PARSE's draft model",
    ),
    Seam(
        f"{_SPEC}.eagle_worker_common.prepare_for_draft",
        (
            "draft_input",
            "req_to_token_pool",
            "batch",
            "cuda_graph_runner",
            "draft_model_runner",
            "topk",
            "num_steps",
            "target_translator",
            "num_draft_tokens",
        ),
        "finds slots for the head's proposals",
    ),
    Seam(
        f"{_SPEC}.eagle_worker_v2.EagleDraftWorker.draft_forward",
        ("self", "forward_batch"),
        "makes the head's proposals",
    ),
    Seam(
        f"{_SPEC}.eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode",
        ("self", "batch", "batch_result"),
        "lets the head follow the chains it proposed",
    ),
    Seam(
        f"{_SPEC}.eagle_worker_v2.EagleDraftWorker._draft_extend_for_prefill",
        ("self", "batch", "target_hidden_states", "next_token_ids"),
        "lets the head follow tokens it did not propose",
    ),
    Seam(
        f"{_SPEC}.eagle_info.EagleDraftInput",
        ("topk_p", "topk_index", "hidden_states", "bonus_tokens"),
        "is what the head goes on from",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state."
        "resolve_spec_aux_hidden_state_config",
        ("server_args", "model_config", "spec_algorithm", "is_draft_worker"),
        "tells the target which layers' states the head reads",
    ),
    Seam(
        "sglang.srt.layers.moe.utils.speculative_moe_backend_context",
        (),
        "runs the head's experts by a draft's settings",
    ),
    Seam(
        "sglang.srt.layers.moe.utils.speculative_moe_a2a_backend_context",
        (),
        "runs what they exchange by a draft's settings",
    ),
    # Metrics
    Seam(
        f"{_METRICS}.SchedulerMetricsCollector",
        ("labels", "server_args"),
        "is the base of the collector that publishes PARSE's metrics",
    ),
    Seam(
        f"{_METRICS}.SchedulerMetricsCollector.increment_realtime_tokens",
        ("self",),
        "is called once per iteration: the moment to publish",
    ),
    Seam(
        f"{_METRICS}.SchedulerMetricsCollector.log_stats",
        ("self", "stats"),
        "gives SGLang's acceptance gauges PARSE's figures",
    ),
    Seam(
        f"{_METRICS}.resolve_collector_class",
        ("role", "default_cls"),
        "makes the collector that stat_loggers names",
        through="stat_loggers",
    ),
    Seam(f"{_METRICS}.STAT_LOGGER_ROLE_SCHEDULER", (), "is the collector's key in stat_loggers"),
    Seam(f"{_METRICS}.SchedulerStats", (), "is what SGLang's gauges are set from"),
    # What patches call
    Seam(
        "sglang.srt.arg_groups.overrides.resolving_view",
        ("server_args",),
        "shows a server's settings while SGLang completes them",
    ),
    Seam(
        f"{_SPEC}.dflash_utils.dflash_draft_cell_size_per_token",
        ("draft_model_config", "draft_num_layers", "draft_kv_cache_dtype", "tp_size"),
        "counts the draft's KV when the pool is sized",
    ),
    Seam(
        "sglang.srt.mem_cache.kv_cache_dtype.configure_kv_cache_dtype",
        (
            *("server_args_kv_cache_dtype", "model", "model_dtype", "is_draft_worker"),
            *("is_dflash", "speculative_draft_attention_backend"),
            "speculative_draft_kv_cache_dtype",
        ),
        "says in which dtype the draft's KV is",
    ),
    Seam("sglang.srt.runtime_context.get_model", (), "holds the setting of the KV's dtype"),
    *(
        Seam(
            f"{_MANAGERS}.io_struct.{name}",
            ("success", "message"),
            "answers that new weights are for one model only",
        )
        for name in (
            "BeginWeightUpdateReqOutput",
            "UpdateWeightsFromDistributedReqOutput",
            "UpdateWeightsFromTensorReqOutput",
        )
    ),
    Seam("sglang.srt.runtime_context.attention_backends", (), "knows the backends a server runs"),
    Seam(
        f"{_SPEC}.draft_utils.DraftBackendFactory",
        ("draft_model_runner", "topk", "speculative_num_steps"),
        "makes the attention backends of a draft's steps",
    ),
    Seam(
        f"{_SPEC}.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner",
        ("eagle_worker", "draft_attn_backend", "speculative_num_steps"),
        "captures and replays several draft steps as one CUDA graph",
    ),
    Seam(
        f"{_SPEC}.eagle_utils.per_step_draft_out_cache_loc",
        ("out_cache_loc", "batch_size", "topk", "num_steps"),
        "says where each of them writes its KV",
    ),
    Seam(
        "sglang.srt.model_executor.forward_context.ForwardContext",
        ("attn_backend",),
        "says which attention backend a step uses",
    ),
    Seam(
        "sglang.srt.model_executor.forward_context.forward_context",
        ("ctx", "forward_batch"),
        "sets it for one forward",
    ),
    Seam(
        "sglang.kernels.ops.speculative.spec_tree.TreeMaskMode",
        (),
        "says how a stock draft tree's mask is laid out",
    ),
)

_ATTENTION = "sglang.srt.layers.attention"
BACKEND_SEAMS = {
    "flashinfer": (
        Seam(
            f"{_ATTENTION}.flashinfer_backend.FlashInferAttnBackend",
            (),
            "is the base of PARSE's backend",
        ),
        Seam(
            f"{_ATTENTION}.flashinfer_backend.FlashInferIndicesUpdaterPrefill.update_single_wrapper",
            ("req_pool_indices", "seq_lens", "prefill_wrappers", "use_ragged", "spec_info", "plan"),
            "plans a masked pass",
            through="indices_updater_prefill",
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
            f"{_ATTENTION}.triton_backend.TritonAttnBackend", (), "is the base of PARSE's backend"
        ),
        Seam(
            f"{_ATTENTION}.triton_backend.ForwardMetadata",
            (
                *("custom_mask", "mask_indptr", "qo_indptr", "kv_indptr", "kv_indices"),
                "max_extend_len",
            ),
            "takes the mask, or the pseudo-sequences",
            through="forward_metadata",
        ),
    ),
    "fa3": (
        Seam(
            f"{_ATTENTION}.flashattention_backend.FlashAttentionBackend",
            (),
            "is the base of PARSE's backend",
        ),
        Seam("sglang.srt.utils.get_device_capability", (), "says whether the kernels run here"),
        Seam(
            f"{_ATTENTION}.flashattention_backend.FlashAttentionMetadata",
            (
                *("cu_seqlens_q", "cu_seqlens_k", "cache_seqlens_int32", "page_table"),
                *("max_seq_len_q", "max_seq_len_k"),
            ),
            "takes the pseudo-sequences",
            through="forward_metadata",
        ),
    ),
}
"""Looked at where the backend is used: their modules want a GPU's libraries."""

PROGRAM_SEAMS = (
    Seam("sglang.benchmark.serving.cli_main", (), "loads servers for comparisons"),
    Seam("sglang.srt.plugins.load_plugins", (), "shows the doctor whether SGLang finds PARSE"),
    Seam(
        "sglang.srt.server_args.prepare_server_args",
        ("argv",),
        "reads the doctor's flags as the launcher does",
    ),
    *(
        Seam(
            f"sglang.lang.backend.runtime_endpoint.RuntimeEndpoint{name}",
            parameters,
            "is the base of the frontend's backend",
        )
        for name, parameters in {
            "": ("base_url", "api_key", "verify", "chat_template_name"),
            ".generate": ("s", "sampling_params"),
            ".generate_stream": ("s", "sampling_params"),
        }.items()
    ),
    Seam("sglang.lang.ir.SglSamplingParams", (), "is the base of what that backend is given"),
    Seam(
        "sglang.lang.ir.SglSamplingParams.to_srt_kwargs",
        ("self",),
        "is what that backend sends of it",
    ),
)
"""What programs call, and no server: the first one's module takes half a minute to import."""
