"""SGLang's server arguments that PARSE does not refuse, by what was found out about them.

A new SGLang's new one is in none of these lists: ``tests/compat/test_server_settings.py`` fails
until somebody has looked at it.
"""

from __future__ import annotations

SERVED: dict[str, str] = {
    "the models: PARSE reads them with the same settings; SGLang shares them with the draft": """
        model_path load_format model_loader_extra_config trust_remote_code context_length
        revision model_impl model_config_parser json_model_override_args dtype quantization
        kv_cache_dtype quantization_param_path modelopt_quant modelopt_checkpoint_restore_path
        quantize_and_serve rl_quant_profile custom_weight_loader download_dir
        decrypted_config_file decrypted_draft_config_file enable_fp32_lm_head enable_tf32_matmul
        speculative_draft_model_path speculative_draft_model_revision
        speculative_draft_load_format speculative_draft_model_quantization
        speculative_draft_kv_cache_dtype _speculative_draft_quantization_explicitly_set""",
    "the tokenizer: PARSE reads it with the same settings": """
        tokenizer_path tokenizer_mode tokenizer_backend skip_tokenizer_init chat_template
        hf_chat_template_name""",
    "parallelism: rank 0 decides, and all ranks run the same forwards": """
        tp_size dp_size ep_size nnodes node_rank load_balance_method""",
    "scheduling: PARSE plans within what the scheduler hands it": """
        mem_fraction_static max_running_requests max_queued_requests max_total_tokens
        chunked_prefill_size prefill_decode_interval prefill_decode_interval_min_bs
        max_prefill_tokens prefill_max_requests schedule_policy enable_priority_scheduling
        disable_priority_preemption default_priority_value abort_on_priority_when_disabled
        schedule_low_priority_values_first priority_scheduling_preemption_threshold
        retraction_policy schedule_conservativeness page_size disable_overlap_schedule
        num_continuous_decode_steps scheduler_recv_interval min_free_slots_delay
        num_reserved_decode_tokens allow_auto_truncate""",
    "prefix cache, KV tiers: draft KV is marked by slot, and computed again where it is gone": """
        disable_radix_cache radix_eviction_policy radix_eviction_policy_config
        _radix_eviction_policy_explicitly_set radix_cache_backend enable_session_radix_cache
        strip_thinking_cache enable_streaming_session enable_hierarchical_cache
        hicache_host_memory_mode hicache_host_memory_fraction hicache_ratio hicache_size
        hicache_write_policy hicache_io_backend hicache_mem_layout hicache_storage_backend
        hicache_storage_prefetch_policy hicache_storage_backend_extra_config
        hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts
        enable_unified_cache_external_linker unified_cache_external_linker_backend
        unified_cache_external_linker_config enable_flexkv flexkv_config_file""",
    "attention and sampling: PARSE checks the backend, or samples with SGLang's functions": """
        device attention_backend prefill_attention_backend decode_attention_backend
        speculative_draft_attention_backend sampling_backend grammar_backend random_seed
        sampling_defaults preferred_sampling_params enable_custom_logit_processor
        sampling_mask_max_tokens enable_deterministic_inference
        constrained_json_whitespace_pattern constrained_json_disable_any_whitespace
        constrained_json_max_whitespace_cnt enable_strict_thinking reasoning_parser""",
    "CUDA graphs: decode steps replay SGLang's, verify passes run beside them": """
        cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill
        cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_bs_decode
        cuda_graph_bs_prefill cuda_graph_max_seq_len_prefill disable_prefill_cuda_graph
        disable_decode_cuda_graph disable_cuda_graph disable_cuda_graph_padding
        enable_torch_compile torch_compile_max_bs""",
    "adapters: verified with the request's adapter": """
        enable_lora enable_lora_overlap_loading max_lora_rank lora_target_modules lora_paths
        max_loaded_loras max_loras_per_batch lora_eviction_policy lora_backend
        max_lora_chunk_size experts_shared_outer_loras lora_use_virtual_experts
        lora_strict_loading lora_drain_wait_threshold""",
    "an EAGLE-3 head's, refused without one": """
        speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens""",
    "PARSE itself, and what it adds to": "speculative_algorithm stat_loggers",
}

REFUSED_BY_SGLANG = """
    enable_mixed_chunk enable_lmcache lmcache_config_file enable_kv_cache_sharding
    enable_layernorm_sp enable_megamoe_for_layernorm_sp dwdp_size enable_unified_memory
    enable_watermark watermark_config watermark_key watermark_key_b watermark_context_window
    watermark_mixing_probability watermark_max_probability watermark_default_enabled
    watermark_enforce_all enable_return_aux_hidden_states aux_hidden_state_capture
    return_aux_hidden_state_layer_ids"""
"""By its own message beside any algorithm but some of its own, with the settings that need them."""

WITHOUT_EFFECT: dict[str, str] = {
    "where and how the server is reached": """
        host port fastapi_root_path smg_grpc_mode grpc_mode grpc_port grpc_worker_threads
        grpc_response_timeout_secs sidecar sidecar_args skip_server_warmup warmups enable_http2
        http2_max_concurrent_streams http2_initial_connection_window_size ssl_keyfile
        ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key
        smg_http_sidecar_port enable_http_worker_reuseport engine_info_bootstrap_port""",
    "the form of requests and answers, in other processes than the scheduler": """
        tokenizer_worker_num detokenizer_worker_num served_model_name weight_version
        trust_request_chat_template completion_template file_storage_path enable_cache_report
        return_input_ids return_output_ids default_chat_template_kwargs tool_call_parser
        tool_server asr_max_buffer_seconds asr_max_concurrent_sessions stream_interval
        batch_notify_size stream_response_default_include_usage incremental_streaming_output
        enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size
        dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode
        disable_tokenizer_batch_decode enable_response_store""",
    "logs, metrics and traces": """
        log_level log_level_http log_requests log_requests_level log_requests_format
        log_requests_target uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost
        enable_metrics enable_mfu_metrics enable_metrics_for_all_schedulers
        load_snapshot_publish_interval tokenizer_metrics_custom_labels_header
        tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token
        bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets
        generation_tokens_buckets gc_warning_threshold_secs decode_log_interval
        enable_request_time_stats_logging kv_events_config load_publish_endpoint
        enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name
        enable_trace trace_modules otlp_traces_endpoint otlp_service_name export_metrics_to_file
        export_metrics_to_file_dir""",
    "debugging: looks at what runs": """
        kv_canary kv_canary_real_data kv_canary_sweep_interval debug_tensor_dump_output_folder
        debug_tensor_dump_layers debug_tensor_dump_input_file forward_hooks msprobe_dump_config
        enable_profile_cuda_graph debug_cuda_graph enable_cudagraph_gc
        enable_layerwise_nvtx_marker enable_torch_compile_debug_mode
        expert_distribution_recorder_mode expert_distribution_recorder_buffer_size
        expert_balancedness_report_mode""",
    "processes, devices and garbage collection": """
        base_gpu_id gpu_id_step watchdog_timeout soft_watchdog_timeout sleep_on_idle use_ray
        custom_sigquit_handler numa_node gc_threshold nccl_port dist_timeout dist_init_addr
        gated_launch_port enable_p2p_check disable_outlines_disk_cache""",
    "how weights get into memory": """
        modelopt_checkpoint_save_path modelopt_export_path startup_weight_load_mode
        weight_loader_disable_mmap weight_loader_prefetch_checkpoints
        weight_loader_prefetch_num_threads weight_loader_drop_cache_after_load
        remote_instance_weight_loader_seed_instance_ip
        remote_instance_weight_loader_seed_instance_service_port
        remote_instance_weight_loader_send_weights_group_ports
        remote_instance_weight_loader_backend
        remote_instance_weight_loader_start_seed_via_transfer_engine modelexpress_config
        model_checksum delete_ckpt_after_loading checkpoint_engine_wait_weights_before_ready
        weight_cache_mode weight_cache_socket weight_cache_timeout enable_memory_saver
        enable_weights_cpu_backup enable_draft_weights_cpu_backup cpu_offload_gb
        offload_group_size offload_num_in_group offload_prefetch_step offload_mode
        ple_offload_embedding ple_offload_backend ple_offload_dir""",
    "kernels of layers that verify passes run as every forward does": """
        fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend
        disable_flashinfer_autotune flashinfer_autotune_skip_ops triton_attention_reduce_in_fp32
        triton_attention_num_kv_splits triton_attention_split_tile_size enable_lean_attention
        enable_fused_qk_norm_rope prefill_kv_cache_dequant_dtype enable_nccl_nvls
        enable_symm_mem disable_custom_all_reduce enable_mscclpp enable_torch_symm_mem
        pre_warm_nccl boundary_reduction speculative_boundary_reduction
        enable_quant_communications enable_flashinfer_allreduce_fusion
        enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend
        enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill
        disable_aiter_allreduce_fusion_in_decode enable_fused_moe_sum_all_reduce
        enable_w4a4_mxfp4_megamoe speculative_enable_w4a4_mxfp4_megamoe moe_runner_backend
        speculative_moe_runner_backend flashinfer_mxfp4_moe_precision
        disable_flashinfer_cutlass_moe_fp4_allgather disable_shared_experts_fusion
        enforce_shared_experts_fusion""",
    "where experts lie": """
        ep_num_redundant_experts ep_dispatch_algorithm init_expert_location enable_eplb
        eplb_algorithm eplb_rebalance_num_iterations eplb_rebalance_layers_per_chunk
        eplb_min_rebalancing_utilization_threshold enable_paged_experts
        paged_experts_num_resident kt_weight_path kt_method kt_cpuinfer kt_threadpool_count
        kt_num_gpu_experts kt_max_deferred_experts_per_token""",
    "only with an all-to-all backend or elastic experts: refused": """
        deepep_v2_mode deepep_mode fuseep_mode deepep_dispatcher_output_dtype deepep_config
        enable_elastic_expert_backup mooncake_ib_device elastic_ep_scale_timeout
        flashinfer_a2a_dispatch_type ep_join_mode ep_join_rank_offset elastic_ep_initial_size
        max_ep_size enable_single_batch_overlap tbo_token_distribution_threshold
        enable_shared_experts_attn_tp shared_experts_tp_size""",
    "only with pipeline, context or attention data parallelism: refused": """
        pp_max_micro_batch_size pp_async_batch_depth enable_dynamic_chunking dcp_comm_backend
        dcp_replicate_q_proj cp_strategy enable_dsa_cache_layer_split enable_cp_decode_attn_tp
        enable_cp_tp_group_sharing enable_dp_attention
        enable_dp_attention_local_control_broadcast enable_dp_lm_head
        enable_tp_lm_head_all_to_all enable_dense_mlp_attn_tp disable_attn_tp_gather
        enable_prefill_delayer prefill_delayer_max_delay_passes
        prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets
        prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio
        prefill_delayer_max_delay_ms""",
    "only with disaggregation, decoupled drafting, diffusion or PD multiplexing: refused": """
        disaggregation_transfer_backend disaggregation_bootstrap_port disaggregation_ib_device
        disaggregation_decode_enable_radix_cache disaggregation_decode_enable_offload_kvcache
        disaggregation_decode_retraction_backup disaggregation_decode_extra_slots
        disaggregation_decode_polling_interval disaggregation_enable_kv_checksum
        disaggregation_decode_host_receive_threshold disaggregation_decode_allocation_policy
        enable_pd_role_switch optimistic_prefill_attempts decoupled_spec_bind_endpoint
        decoupled_spec_connect_endpoints decoupled_spec_rank pdmux_config_path sm_group_num
        dllm_algorithm_config dllm_fdfo""",
    "only for windows, latent, sparse or linear attention and Mamba: refused": """
        c128_page_size swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set
        disable_hybrid_swa_memory swa_prefix_tails enable_encoder_swa_bounded_replay
        enable_decoder_swa_bounded_replay disable_chunked_prefix_cache
        flashinfer_mla_disable_ragged enable_attn_tp_input_scattered enable_page_major_kv_layout
        enable_linker_mla_dedup enable_hisparse hisparse_config qsa_indexer_dtype
        enable_return_indexer_topk dsa_prefill_backend dsv4_prefill_backend dsa_decode_backend
        dsa_paged_mqa_logits_backend dsa_topk_backend dsv4_attn_backend dsa_triton_union
        enable_dsa_fused_indexer enable_deepseek_v4_fp4_indexer cuda_graph_prefill_max_context
        enable_scattered_sconv max_mamba_cache_size mamba_full_memory_ratio mamba_backend
        mamba_ssm_dtype mamba_max_states_per_path enable_mamba_cache_stochastic_rounding
        mamba_cache_philox_rounds mamba_radix_cache_strategy uses_mamba_radix_cache
        mamba_track_interval enable_int8_mamba_checkpoint int8_mamba_ckpt_size
        linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend
        linear_attn_verify_backend enable_linear_replayssm linear_replayssm_cache_len
        enable_linear_replayssm_spec""",
    "multimodal input: its requests are served by plain decoding": """
        enable_multimodal mm_attention_backend enable_broadcast_mm_inputs_process
        enable_prefix_mm_cache mm_enable_dp_encoder mm_process_config mm_processor_worker_num
        mm_io_worker_num allowed_media_domains media_url_max_file_size_mb
        mm_preprocess_cache_size_mb trust_mm_content_hashes limit_mm_data_per_request
        enable_mm_global_cache image_processor_backend mm_global_cache_backend
        disable_fast_image_processor mm_feature_transport enable_precise_embedding_interpolation
        encoder_only language_only language_model_only encoder_transfer_backend encoder_urls
        encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder""",
    "sets enable_return_hidden_states: refused": "return_hidden_states_mode",
    "of another device than PARSE runs on": "mlx_enable_sampling",
}
