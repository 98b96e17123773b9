# SPDX-License-Identifier: Apache-2.0
"""Every field of some classes of vLLM's configuration and of a request, by what it means to a KV block that goes to
another engine or into the store: class -> word -> names. `test_fields.py` compares the names with those of the
installed release. A class that is not here, such as KernelConfig, is in VllmConfig's list as a whole.

    digest    in the fingerprint: engines with another value take no KV from each other, and the store keeps it apart
    refused   by us, or by vLLM beside a connector; where only some values are, the others don't matter
    used      our code reads or sets it
    rounding  other kernels, or sums in another order: KV that is as right, as on another GPU
    local     of one engine: memory, ports, loading, logs, what is sampled. KV is the same
    derived   from other fields, by vLLM
    absent    only of models that are refused (recurrent state, sparse or compressed attention, pooling, encoders) or of
              prompts that stay local (images, audio, video)

Of a request, its prompt is what matters to a peer, all else stays on the engine that was asked:

    stays     such a request is prefilled where it was asked, and the store is not used for it, or knows it by its name
    sampled   decides about output tokens, or how these are shown
    state     of V1's scheduler

A name with a question mark is not in all supported releases.
"""
from __future__ import annotations

from vllm.config import (
    AttentionConfig,
    CacheConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    MultiModalConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.config.aux_output import AuxOutputConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

CONFIGURATIONS: dict[type, dict[str, str]] = {
    VllmConfig: {
        # The digest's and the list's own parts. weight_transfer, diffusion: refused as a whole.
        "used": "model_config cache_config parallel_config scheduler_config load_config attention_config "
                "aux_output_config kv_transfer_config kv_events_config device_config ec_transfer_config "
                "shutdown_timeout",
        "refused": "weight_transfer_config diffusion_config "
                   "speculative_config "  # with the store
                   "lora_config",  # with the store; requests with an adapter stay with their engine
        "rounding": "kernel_config compilation_config optimization_level performance_mode",
        "local": "offload_config engram_config watermark_config structured_outputs_config observability_config "
                 "logging_config profiler_config reasoning_config additional_config instance_id watchdog_config?",
        "derived": "quant_config",
        "absent": "mamba_config ec_manager_config",
    },
    ModelConfig: {
        "digest": "model revision code_revision hf_config hf_text_config hf_config_path hf_overrides config_format "
                  "dtype max_model_len quantization quantization_config model_impl model_class_overrides",
        "refused": "runner enable_sleep_mode enable_cumem_allocator",
        "used": "served_model_name multimodal_config",
        "rounding": "enforce_eager disable_cascade_attn",
        "local": "tokenizer tokenizer_mode tokenizer_revision trust_remote_code seed allow_deprecated_quantization "
                 "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay "
                 "skip_tokenizer_init enable_prompt_embeds hf_token generation_config override_generation_config "
                 "logits_processors io_processor_plugin renderer_num_workers "
                 "model_weights "  # for weights that are read from there weights_digest stands
                 "disable_sliding_window "  # no prompt is longer than the window then
                 "sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph "
                 "enable_nccl_comm_suspend",
        "derived": "is_submodel_config word_embeddings_untied_by_checkpoint spec_target_max_model_len",
        "absent": "convert pooler_config allowed_local_media_path allowed_media_domains",
    },
    ParallelConfig: {
        "digest": "tensor_parallel_size pipeline_parallel_size",
        "refused": "prefill_context_parallel_size decode_context_parallel_size distributed_executor_backend "
                   "nnodes "  # with data-parallel ranks
                   "enable_fault_tolerance "
                   "data_parallel_rank_local "  # with experts, where a server sets none
                   "enable_elastic_ep",  # with the store alone it is local: the weights are moved, and stay the same
        "used": "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_index "
                "data_parallel_external_lb data_parallel_hybrid_lb world_size rank _api_process_count "
                "node_rank master_addr",
        "rounding": "enable_hc_sp enable_expert_parallel enable_eplb eplb_config expert_placement_strategy "
                    "all2all_backend disable_custom_all_reduce enable_dbo ubatch_size dbo_decode_token_threshold "
                    "dbo_prefill_token_threshold",
        "local": "data_parallel_master_ip data_parallel_rpc_port dp_sync_interval "
                 "data_parallel_master_port data_parallel_backend enable_batch_sharded_sampling "
                 "enable_ep_weight_filter max_parallel_loading_workers enable_shm_tensor_arena elastic_ep_max_dp_size "
                 "disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env placement_group "
                 "worker_cls worker_extension_cls master_port numa_bind numa_bind_nodes "
                 "numa_bind_cpus assigned_physical_gpu_ids distributed_timeout_seconds "
                 "cpu_distributed_timeout_seconds _data_parallel_master_port_list _coord_store_port "
                 "_api_process_rank fault_tolerance_config",
        "derived": "is_moe_model",
        "absent": "dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate cp_kv_cache_interleave_size "
                  "_allow_auto_resolve_cp_interleave_size",  # without context parallelism
    },
    CacheConfig: {
        "digest": "block_size cache_dtype kv_cache_layout",
        "refused": "sliding_window kv_cache_dtype_skip_layers "
                   "prefix_caching_hash_algo enable_prefix_caching "  # with the store
                   "prefix_match_unit "  # by vLLM: another one than the block, in one group
                   "use_replayssm "  # with recurrent states
                   "kv_offloading_size kv_offloading_backend "  # vLLM would replace our connector
                   "is_attention_free",
        "used": "num_gpu_blocks",
        "rounding": "kv_sharing_fast_prefill",
        "local": "user_specified_block_size gpu_memory_utilization num_gpu_blocks_override num_cpu_blocks "
                 "kv_cache_memory_bytes prefix_cache_retention_interval",
        "derived": "skip_page_size_padded effective_attention_block_size kv_cache_size_tokens "
                   "kv_cache_max_concurrency hash_block_size cache_hit_alignment_tokens _block_size_resolved "
                   "simple_cpu_offload_num_blocks?",
        "absent": "mamba_page_size_padded mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode "
                  "enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_kda_recoverssm "
                  "swa_bounded_replay",
    },
    SchedulerConfig: {
        "refused": "scheduler_cls disable_hybrid_kv_cache_manager runner_type",
        "used": "max_num_seqs max_num_batched_tokens max_num_scheduled_tokens max_num_active_seqs "
                "long_prefill_token_threshold long_prefill_token_threshold_adaptive enable_chunked_prefill policy "
                "async_scheduling max_num_encoder_input_tokens disable_chunked_mm_input "
                "prefill_schedule_interval",  # such a step is `throttled`
        "local": "max_num_queued_reqs max_num_queued_tokens scheduler_reserve_full_isl watermark stream_interval",
        "derived": "is_multimodal_model encoder_cache_size",
    },
    MultiModalConfig: {
        # In the name of a scope, and what keeps media here: vllm_pd.v1.media.encoder_name.
        "used": "mm_processor_kwargs mm_device_do_normalize mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
                "video_pruning_rate language_model_only mm_encoder_only "
                "limit_per_prompt",  # of a kind that an engine takes none of it lists no jobs
        "rounding": "mm_encoder_tp_mode mm_encoder_attn_backend",
        "local": "enable_mm_embeds media_io_kwargs mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm "
                 "mm_shm_cache_max_object_size_mb mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin "
                 "interleave_mm_strings skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb",
        "derived": "allow_missing_mm_embeddings",
        "absent": "video_pruning_method",
    },
    KVTransferConfig: {
        "used": "kv_connector engine_id kv_role kv_connector_extra_config",
        "refused": "kv_connector_module_path enable_permute_local_kv kv_load_failure_policy",
        "local": "kv_buffer_device kv_port",  # of other connectors
    },
    LoadConfig: {
        "digest": "load_format model_loader_extra_config",  # what it does not tell is refused
        "local": "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
                 "safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location "
                 "ignore_patterns",  # vLLM ends where a tensor of the model is missing
    },
    AttentionConfig: {
        "digest": "backend backend_per_kind",  # the name of the backend that is used
        "rounding": "flash_attn_version flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
                    "use_trtllm_attention disable_flashinfer_q_quantization mla_prefill_backend "
                    "use_prefill_query_quantization trtllm_ragged_backend? flex_attn_block_m flex_attn_block_n "
                    "flex_attn_q_block_size flex_attn_kv_block_size "
                    "use_non_causal",  # which backend is looked at first; the layers say what they are
        "absent": "minimax_m3_msa_decode_backend tq_max_kv_splits_for_cuda_graph indexer_kv_dtype "
                  "indexer_sparse_logits hisparse_config sparse_mla_force_mqa sparse_mla_prefill_workspace_factor "
                  "indexer_tp_shard_min_rows? minimax_m3_indexer_cp?",
    },
    SpeculativeConfig: {
        "digest": "method model revision code_revision quantization parallel_drafting draft_model_config "
                  "draft_load_config index_share_for_mtp_iteration use_heterogeneous_vocab attention_backend",
        "refused": "kv_cache_dtype",  # another one than the target's
        "rounding": "enforce_eager moe_backend",
        # How many tokens are drafted, from which, and which are taken. In a step in which a sequence is longer than
        # max_model_len V1 drafts for none: P then sends blocks without the drafter's KV.
        "local": "num_speculative_tokens num_speculative_tokens_per_batch_size max_model_len "
                 "disable_padded_drafter_batch use_local_argmax_reduction prompt_lookup_max "
                 "prompt_lookup_min suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
                 "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob rejection_sample_method "
                 "synthetic_acceptance_rates synthetic_acceptance_length draft_sample_method "
                 "disable_eagle_block_drop",  # the last entry of a cached block may be of another next token
        "derived": "target_model_config target_parallel_config draft_parallel_config",
        "absent": "enable_adaptive_verification dspark_draft_topk "  # DSpark
                  "draft_tensor_parallel_size tensor_parallel_size",  # ranks have the target's share, or are refused
    },
    AuxOutputConfig: {
        "refused": "enable_return_routed_experts",
        "local": "max_bytes",
    },
}

REQUESTS: dict[type, dict[str, str]] = {
    SamplingParams: {
        "stays": "prompt_logprobs prompt_logprob_token_ids prompt_logprob_start skip_reading_prefix_cache",
        "used": "extra_args",  # kv_transfer_params
        "refused": "routed_experts_prompt_start",  # with --enable-return-routed-experts
        "sampled": "n presence_penalty frequency_penalty repetition_penalty temperature watermarking top_p top_k min_p "
                   "seed stop stop_token_ids ignore_eos max_tokens min_tokens logprobs logprob_token_ids flat_logprobs "
                   "detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output "
                   "output_kind stream_interval skip_clone output_text_buffer_length _eos_token_id "
                   "_all_stop_token_ids _watermarking_skipped structured_outputs logit_bias allowed_token_ids "
                   "bad_words _bad_words_token_ids thinking_token_budget repetition_detection trace_decode_token_ids",
    },
    Request: {
        "stays": "lora_request cache_salt prompt_embeds prompt_is_token_ids pooling_params resumable "
                 "skip_reading_prefix_cache",
        "used": "request_id prompt_token_ids mm_features priority sampling_params kv_transfer_params client_index "
                "arrival_time block_hashes status num_prompt_tokens num_computed_tokens num_in_flight_tokens "
                "num_preemptions prefill_stats is_prefill_chunk "
                "abort_immediately",  # ends it at once, as an abort
        "sampled": "max_tokens structured_output_request",
        "state": "events stop_reason _all_token_ids _output_token_ids all_token_ids output_token_ids _block_hasher "
                 "_prompt_embeds_per_block_hashes num_output_placeholders num_stale_output_tokens drop_stale_output "
                 "next_decode_eligible_step last_sched_seq spec_token_ids streaming_queue num_nans_in_logits "
                 "spec_decode_metrics trace_headers kv_cache_report_mode",
        "local": "session_id kv_hints ec_transfer_params",  # of other connectors
        "absent": "shared_prefix_boundary replay_start",
    },
}
