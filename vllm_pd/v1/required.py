# SPDX-License-Identifier: Apache-2.0
"""The names of vLLM that the V1 binding stands on, each with the reason, and the check that a vLLM has them.

The check reads vLLM's source and neither imports nor runs it. An engine does it at its start (`check_installed`), and
`scripts/v1_canary.py` for any release. Only what has no promise of stability is listed: private names, and public ones
whose signature or place the binding depends on. Whoever uses another one adds it here.
"""
from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from vllm_pd.errors import ConfigError
from vllm_pd.extras import require_vllm
from vllm_pd.model.installation import find_installation
from vllm_pd.model.source_names import Required, missing_names

SUPPORTED = ("0.32", "0.33")  # releases on which the names were found; docs/rebasing.md has the table

_LAYERS = "how layers are grouped, and whether they have one shape"
_ADAPTER = "which adapter was loaded, with which a job is computed"
_HOOK = "replaced by ours in PDConnector"
_STEP = "replaced by ours in the scheduler"
_STEPS = "replaced by ours where ranks count their steps"
_STORE = "replaced by ours in PDStoreConnector"
_GAUGES = "of an engine that rests, for each of its front ends"
_MEDIA = "images, video and audio of prompts, from one engine to another"
_PREEMPTED = "the workers get all media of a request, for it may be preempted"
_BESIDE = "called where OffloadingConnector is beside ours"

REQUIRED: Mapping[str, tuple[Required, ...]] = {
    "v1/core/sched/scheduler.py": (
        Required("Scheduler.finished_recving_kv_req_ids", "an id in it resumes a parked request, or ends it at once"),
        Required("Scheduler._handle_failed_recving", "begins a parked request anew", takes=("failed_req_ids", )),
        Required("Scheduler._handle_blocked_waiting_request", "frees a failed one's blocks; ours also counts adapters",
                 takes=("request", )),
        Required("Scheduler.kv_cache_config", "how layers are grouped"),
        Required("Scheduler.vllm_config", "whether there is a drafter with KV"),
        Required("Scheduler.kv_holding_waiting", "where parked requests wait"),
        Required("Scheduler.waiting", "where a request goes that begins anew, and that may wait for a grammar"),
        Required("Scheduler.deferred_waiting", "a request that begins anew is taken out of it"),
        Required("Scheduler.connector_prefix_cache_stats", "a hit is counted when its KV has come"),
        Required("Scheduler.deferred_frees", "no hold ends for blocks that will be free when a step ends"),
        Required("Scheduler._inflight_prefills", "as deferred_waiting: no block is reserved for it"),
        Required("Scheduler.need_mamba_block_aligned_split", "whether a prompt's part of a step ends with a block"),
        Required("Scheduler.block_size", "the tokens of that block"),
        Required("Scheduler.running", "asked whether a step would do anything; requests of ours change places in it"),
        Required("Scheduler.max_num_encoder_input_tokens", "0 for a model that takes text only; else what a job's item "
                 "may have"),
        Required("Scheduler.encoder_cache_manager", "likewise"),
        Required("Scheduler.use_v2_model_runner", "the first one does not get the media of a preempted request again"),
        Required("Scheduler.max_num_active_reqs", "whether a request of ours would be begun"),
        Required("Scheduler.adaptive_long_prefill_threshold", "off in a step in which a request of ours is to pass"),
        Required("Scheduler.max_num_scheduled_tokens", "less for a step with requests of ours"),
        Required("Scheduler._spec_decode_step_blocks", "free beside a request that is parked, or V1 waits for them"),
        Required("Scheduler.num_spec_tokens", "a step with requests of ours has room for drafts"),
        Required("Scheduler.num_lookahead_tokens", "a request of ours has room for drafts"),
        Required("Scheduler.requests", "finds a request by its id"),
        Required("Scheduler.finished_req_ids", "a step must carry these to the workers"),
        Required("Scheduler.finished_req_ids_dict", "ids of our own requests are taken out of it"),
        Required("Scheduler.reset_preempted_req_ids", "no load of OffloadingConnector begins with such a step"),
        Required("Scheduler.processed_step_seq", "whether a step in flight may still write an ended request's blocks"),
        Required("Scheduler._kv_fetch_stages", "our own requests are taken out of these figures"),
        Required("Scheduler.ec_connector", "an engine that waits for encoder outputs does not sleep"),
        Required("Scheduler.get_request_counts", "the load that is reported", takes=()),
        Required("Scheduler.get_kv_connector", "finds our connector in an engine", takes=()),
        Required("Scheduler.pause_state", "a paused engine takes no request of ours"),
        Required("Scheduler.schedule", _STEP, exactly=("throttle_prefills", )),
        Required("Scheduler.update_from_output", _STEP, exactly=("scheduler_output", "model_runner_output")),
        Required("Scheduler.add_request", _STEP, exactly=("request", )),
        Required("Scheduler.finish_requests", _STEP, exactly=("request_ids", "finished_status")),
        Required("Scheduler.has_requests", _STEP, exactly=()),
        Required("Scheduler.set_pause_state", _STEP, exactly=("pause_state", )),
        Required("Scheduler.reset_prefix_cache", _STEP, exactly=("reset_running_requests", "reset_connector")),
        Required("Scheduler.make_stats", _STEP),
    ),
    "v1/outputs.py": (
        Required("KVConnectorOutput.kv_connector_worker_meta", "which loads from the store have ended"),
    ),
    "sampling_params.py": (
        Required("SamplingParams.extra_args", "a request's kv_transfer_params come in it"),
        Required("SamplingParams.allowed_token_ids", "a job with a drafter's KV samples its prompt's own next token"),
        Required("SamplingParams.prompt_logprob_token_ids", "such a request is computed whole: it stays local"),
    ),
    "v1/core/sched/output.py": (
        Required("SchedulerOutput.num_scheduled_tokens", "how fast prompts are computed, measured step by step"),
        Required("SchedulerOutput.scheduled_spec_decode_tokens", "drafts are no tokens of prompts"),
        Required("SchedulerOutput.scheduled_new_reqs", _PREEMPTED),
        Required("NewRequestData.mm_features", _PREEMPTED),
        Required("SchedulerOutput.preempted_req_ids", "an engine does not sleep after a step that preempts"),
    ),
    "v1/core/sched/async_scheduler.py": (Required("AsyncScheduler", "the other base of our schedulers"), ),
    "v1/core/sched/interface.py": (
        Required("SchedulerInterface.has_unfinished_requests", _STEP, exactly=()),
        Required("PauseState.UNPAUSED", "a paused engine takes no request of ours"),
        Required("PauseState.PAUSED_NEW", "jobs that wait are given back"),
        Required("PauseState.PAUSED_ALL", "jobs are given back; no step is scheduled while others are processed"),
    ),
    "v1/core/sched/request_queue.py": (
        Required("RequestQueue.remove_request", "a request begins anew", takes=("request", )),
        Required("RequestQueue.prepend_request", "a request begins anew", takes=("request", )),
        Required("RequestQueue.remove_requests", "requests change places", takes=("requests", )),
        Required("RequestQueue.add_request", "requests change places", takes=("request", )),
    ),
    "lora/ops/torch_ops/lora_ops.py": (
        Required("bgmv_expand", "tokens without an adapter are left out on the CPU",
                 takes=("inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor")),
        Required("bgmv_expand_slice", "likewise",
                 takes=("inputs", "lora_b_weights", "output_tensor", "lora_indices_tensor", "slice_offset",
                        "slice_size")),
    ),
    "tracing/otel.py": (
        Required("extract_trace_context", "our spans have the parent of V1's own", takes=("headers", )),
    ),
    "v1/core/encoder_cache_manager.py": (Required("EncoderCacheManager.cache_size", "what a job's item may have"), ),
    "multimodal/inputs.py": (
        Required("MultiModalFeatureSpec", _MEDIA, takes=("data", "modality", "identifier", "mm_position")),
        Required("PlaceholderRange", _MEDIA, takes=("offset", "length", "is_embed")),
        Required("MultiModalFieldElem", _MEDIA, takes=("data", "field")),
        Required("MultiModalKwargsItem", _MEDIA),
        Required("BaseMultiModalField.keep_on_cpu", _MEDIA),
        Required("MultiModalBatchedField", _MEDIA),
        Required("MultiModalFlatField", _MEDIA, takes=("slices", "dim")),
        Required("MultiModalSharedField", _MEDIA, takes=("batch_size", )),
    ),
    "multimodal/encoder_budget.py": (
        Required("MultiModalBudget.mm_max_toks_per_item", "which kinds of media a prefill engine takes"),
        Required("MultiModalBudget.get_dummy_encoder_profile_inputs", "what they consist of",
                 takes=("modality", "max_items_per_batch")),
    ),
    "v1/request.py": (
        Required("Request.from_engine_core_request", "makes a request of our own", takes=("request", "block_hasher")),
        Required("Request.mm_features", "which media a job carries"),
        Required("RequestStatus.WAITING_FOR_REMOTE_KVS", "an id goes into the scheduler's sets while this holds only"),
        Required("RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "an engine does not sleep while this holds"),
        Required("RequestStatus.FINISHED_ERROR", "how a refused request ends, with an error for its client"),
        Required("Request.trace_headers", "the client's trace, which our spans are in"),
        Required("Request.block_hashes", "equal prompts that are parked together"),
        Required("Request.skip_reading_prefix_cache", "such a request is computed whole: it stays local"),
        Required("Request.num_preemptions", "a preempted request stays local, and the steps before do not count"),
        Required("Request.num_in_flight_tokens", "what a step in flight computes is not offered to a peer"),
        Required("Request.last_sched_seq", "as processed_step_seq"),
        Required("Request.kv_transfer_params", "a client's are dropped"),
        Required("Request.prefill_stats", "what a client's usage says about cached tokens"),
        Required("Request.is_prefill_chunk", "whether a request that fell back is computed"),
        Required("Request.client_index", "our own requests have no client"),
        Required("Request.priority", "a prompt's turn"),
        Required("Request.num_output_placeholders", "the tokens that steps in flight make"),
        Required("Request.arrival_time", "changes with a request's place in the queue"),
    ),
    "v1/core/block_pool.py": (
        Required("BlockPool.touch", "raises a fence", takes=("blocks", )),
        Required("BlockPool.free_blocks", "takes a fence down", takes=("ordered_blocks", )),
        Required("BlockPool.num_gpu_blocks", "the load that is reported"),
        Required("BlockPool.get_cached_block", "what a job finds cached", takes=("block_hash", "kv_cache_group_ids")),
        Required("BlockPool.get_num_free_blocks", "the load that is reported", takes=()),
        Required("BlockPool.blocks", "finds a block by its id"),
    ),
    "v1/core/kv_cache_manager.py": (
        Required("KVCacheManager.block_pool", "the pool that fences hold blocks of"),
        Required("KVCacheManager.coordinator", "the hit of a prompt that has states, if no peer brings one"),
        Required("KVCacheManager.free", "a request with a prefix hit begins anew", takes=("request", )),
        Required("KVCacheManager.record_prefix_cache_stats", "counts a look-up whose KV has come",
                 takes=("request", "num_hits")),
        Required("KVCacheManager.get_block_ids", "the blocks of a request that is computed", takes=("request_id", )),
        Required("KVCacheBlocks.get_block_ids", "the blocks that a request was given", takes=()),
    ),
    "v1/engine/core.py": (
        Required("EngineCoreProc.run_busy_loop", "hands the engine to the connector before its first step", takes=()),
        Required("DPEngineCoreProc.run_busy_loop", "as EngineCoreProc's", takes=()),
        Required("EngineCoreProc.input_queue", "WAKEUP goes into it"),
        Required("EngineCoreProc.output_queue", "start_wave goes into it"),
        Required("EngineCoreProc.engines_running", "whether a wave runs"),
        Required("EngineCoreProc.has_coordinator", "whether waves are announced to the other ranks"),
        Required("EngineCoreProc.is_running", "whether a shutdown was requested", takes=()),
        Required("EngineCore.model_executor", "is ended when a rank on another node is gone"),
        Required("EngineCore.batch_queue", "steps in flight: a reset of the prefix cache has them processed first"),
        Required("EngineCoreProc._process_engine_step", "processes them", takes=()),
        Required("EngineShutdownState.REQUESTED", "its loop is yet to see that it is to shut down"),
        Required("EngineCoreProc.shutdown_state", "whether that holds"),
        Required("EngineCore._idle_state_callbacks", "an engine that somebody waits for does not sleep"),
        Required("EngineCore.collective_rpc", "loads the weights anew", takes=("method", )),
        Required("EngineCore.add_lora", "which adapters the front end has loaded", takes=("lora_request", )),
        Required("EngineCore.execute_dummy_batch", "the other ranks are started before it", takes=()),
        Required("EngineCoreProc._send_abort_outputs", "answers clients at the end", takes=("aborted_reqs", )),
        Required("EngineCoreProc._send_error_outputs_to_client", "answers the client of a prompt that is refused",
                 takes=("req_ids", "client_index")),
        Required("EngineCore.preprocess_add_request", "replaced by ours, which spares the sampling of a prompt that is "
                 "only kept, and looks at media", exactly=("request", )),
        Required("EngineCore.request_block_hasher", "makes a request of our own"),
        Required("DPEngineCoreProc.current_wave", "the wave that is started"),
        Required("DPEngineCoreProc._init_data_parallel", "a rank joins its group after it", takes=("vllm_config", )),
        Required("DPEngineCoreProc.dp_store", "through which the ranks of a group meet"),
        Required("DPEngineCoreProc.dp_rank", "which of them this one is"),
        Required("DPEngineCoreProc.dp_size", "how many they are"),
        Required("DPEngineCoreProc.step_counter", _STEPS),
        Required("DPEngineCoreProc.add_request", _STEPS, takes=("request", "request_wave")),
        Required("DPEngineCoreProc.resume_scheduler", _STEPS, takes=()),
        Required("DPEngineCoreProc.reinitialize_distributed", _STEPS),
        Required("DPEngineCoreProc._pause_complete", _STEPS, takes=()),
        Required("DPEngineCoreProc._handle_client_request", _STEPS, takes=("request_type", "request")),
        Required("EngineCoreProc._notify_idle_state_callbacks", _STEPS, takes=()),
        Required("EngineCoreProc._handle_shutdown", _STEPS, takes=()),
        Required("EngineCoreProc.has_work", _STEPS, takes=()),
        Required("DPEngineCoreProc.shutdown", _STEPS, takes=()),
        Required("EngineCoreProc.publish_dp_lb_stats", "whether one front end calls all ranks"),
        Required("EngineCoreProc._send_engine_dead", "says that a group has failed", takes=()),
        Required("EngineShutdownState.SHUTTING_DOWN", "then a rank stays as long as others need it"),
    ),
    "v1/executor/multiproc_executor.py": (
        Required("MultiprocExecutor.is_failed", "set where a rank on another node is gone, as it is for a local one"),
        Required("MultiprocExecutor.shutdown", "as is_failed: ends what waits for that rank", takes=()),
        Required("MultiprocExecutor.failure_callback", "as is_failed: ends the engine's loop"),
    ),
    "v1/engine/__init__.py": (
        Required("EngineCoreRequest", "a request of our own", takes=(
            "request_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params", "arrival_time",
            "lora_request", "cache_salt", "data_parallel_rank", "priority")),
        Required("EngineCoreRequestType.WAKEUP", "wakes the engine"),
        Required("EngineCoreRequestType.START_DP_WAVE", "nothing where ranks count their steps"),
        Required("EngineCoreRequestType.UTILITY", "a call that all ranks may have to make together"),
        Required("UtilityOutput", "the answer of one that none makes", takes=("call_id", "failure_message")),
        Required("EngineCoreOutputs.start_wave", "wakes the other ranks"),
        Required("EngineCoreOutputs.finished_requests", "our own requests are taken out of it"),
    ),
    "distributed/kv_transfer/kv_connector/v1/base.py": (
        Required("KVConnectorBase_V1.__init__", _HOOK, exactly=("vllm_config", "role", "kv_cache_config")),
        Required("KVConnectorBase_V1.set_xfer_handshake_metadata_pp_aware", _HOOK, exactly=("metadata", )),
        Required("KVConnectorBase_V1.get_num_new_matched_tokens", _HOOK, exactly=("request", "num_computed_tokens")),
        Required("KVConnectorBase_V1.get_loaded_kv_cache_group_ids", _HOOK, exactly=("request", )),
        Required("KVConnectorBase_V1.supports_divergent_local_hybrid_hits", _HOOK),
        Required("KVConnectorBase_V1.update_state_after_alloc", _HOOK,
                 exactly=("request", "blocks", "num_external_tokens")),
        Required("KVConnectorBase_V1.build_connector_meta", _HOOK, exactly=("scheduler_output", )),
        Required("SupportsHMA.request_finished_all_groups", _HOOK, exactly=("request", "block_ids")),
        Required("KVConnectorBase_V1.request_finished", _STORE, exactly=("request", "block_ids")),
        Required("KVConnectorBase_V1.register_kv_caches", _HOOK, exactly=("kv_caches", )),
        Required("KVConnectorBase_V1.get_handshake_metadata", _HOOK, exactly=()),
        Required("KVConnectorBase_V1.handle_preemptions", _HOOK, exactly=("kv_connector_metadata", )),
        Required("KVConnectorBase_V1.get_transfer_results", _HOOK, exactly=("finished_req_ids", )),
        Required("KVConnectorBase_V1.wait_for_save", _HOOK, exactly=()),
        Required("KVConnectorBase_V1.get_required_kvcache_layout", _HOOK, exactly=("vllm_config", )),
        Required("KVConnectorBase_V1.shutdown", _HOOK, exactly=()),
        Required("KVConnectorBase_V1.get_kv_connector_stats", _HOOK, exactly=()),
        Required("KVConnectorBase_V1.build_kv_connector_stats", _HOOK, exactly=("data", )),
        Required("KVConnectorBase_V1.build_prom_metrics", _HOOK, exactly=(
            "vllm_config", "metric_types", "labelnames", "per_engine_labelvalues")),
        Required("KVConnectorBase_V1.set_xfer_handshake_metadata", _STORE, exactly=("metadata", )),
        Required("KVConnectorBase_V1.bind_kv_cache_manager", _STORE, exactly=("kv_cache_manager", )),
        Required("KVConnectorBase_V1.on_new_request", _STORE, exactly=("request", )),
        Required("KVConnectorBase_V1.update_connector_output", _STORE, exactly=("connector_output", )),
        Required("KVConnectorBase_V1.reset_cache", _STORE, exactly=()),
        Required("KVConnectorBase_V1.has_pending_push_work", _STORE, exactly=()),
        Required("KVConnectorBase_V1.build_connector_worker_meta", _STORE, exactly=()),
        Required("KVConnectorBase_V1.bind_connector_metadata", _STORE, exactly=("connector_metadata", )),
        Required("KVConnectorBase_V1.clear_connector_metadata", _STORE, exactly=()),
        Required("KVConnectorBase_V1.finish_forward", _STORE, exactly=()),
        Required("KVConnectorBase_V1.save_kv_layer", _STORE, takes=("layer_name", "kv_layer", "attn_metadata")),
        Required("KVConnectorBase_V1._get_connector_metadata", "the number of the step, in a worker", takes=()),
        Required("KVConnectorBase_V1._kv_cache_config", "the groups of the cache"),
        Required("KVConnectorTransferResults", "what get_transfer_results returns"),
        Required("KVConnectorHandshakeMetadata", "what a rank reports to EngineCore"),
        Required("KVConnectorWorkerMetadata", "which loads from the store have ended"),
    ),
    "distributed/kv_transfer/kv_connector/v1/offloading_connector.py": (
        Required("OffloadingConnector.__init__", _BESIDE, takes=("vllm_config", "role", "kv_cache_config")),
        Required("OffloadingConnector.get_num_new_matched_tokens", _BESIDE, takes=("request", "num_computed_tokens")),
        Required("OffloadingConnector.update_state_after_alloc", _BESIDE,
                 takes=("request", "blocks", "num_external_tokens")),
        Required("OffloadingConnector.build_connector_meta", _BESIDE, takes=("scheduler_output", )),
        Required("OffloadingConnector.update_connector_output", _BESIDE, takes=("connector_output", )),
        Required("OffloadingConnector.request_finished_all_groups", _BESIDE, takes=("request", "block_ids")),
        Required("OffloadingConnector.on_new_request", _BESIDE, takes=("request", )),
        Required("OffloadingConnector.has_pending_push_work", _BESIDE, takes=()),
        Required("OffloadingConnector.reset_cache", _BESIDE, takes=()),
        Required("OffloadingConnector.take_events", _BESIDE, takes=()),
        Required("OffloadingConnector.register_kv_caches", _BESIDE, takes=("kv_caches", )),
        Required("OffloadingConnector.handle_preemptions", _BESIDE, takes=("kv_connector_metadata", )),
        Required("OffloadingConnector.start_load_kv", _BESIDE, takes=("forward_context", )),
        Required("OffloadingConnector.wait_for_save", _BESIDE, takes=()),
        Required("OffloadingConnector.get_finished", _BESIDE, takes=("finished_req_ids", )),
        Required("OffloadingConnector.build_connector_worker_meta", _BESIDE, takes=()),
        Required("OffloadingConnector.get_kv_connector_stats", _BESIDE, takes=()),
        Required("OffloadingConnector.build_prom_metrics", _BESIDE),
        Required("OffloadingConnector.get_required_kvcache_layout", _BESIDE, takes=("vllm_config", )),
    ),
    "distributed/kv_transfer/kv_connector/v1/offloading/common.py": (
        Required("OffloadingConnectorMetadata.store_jobs", "the blocks that it copies out are held"),
        Required("TransferJob.src_spec", "as store_jobs"),
        Required("OffloadingWorkerMetadata.completed_jobs", "until all ranks have copied them"),
    ),
    "distributed/kv_transfer/kv_connector/utils.py": (
        Required("get_current_attn_backends", "the fingerprint names them", takes=("vllm_config", "layer_names")),
    ),
    "v1/attention/backends/cpu_attn.py": (
        Required("_get_attn_isa", "the fingerprint names it: the order inside a block depends on it",
                 takes=("dtype", "block_size", "head_size", "kv_cache_dtype")),
    ),
    "v1/worker/kv_connector_model_runner_mixin.py": (
        Required("KVConnectorModelRunnerMixin.finalize_kv_connector", "calls wait_for_save when a drafter has run",
                 takes=()),
    ),
    "v1/worker/gpu_worker.py": (
        Required("Worker.reload_weights", "the store is left before it"),
        Required("Worker.reset_weights", "as reload_weights"),
        Required("Worker.load_model", "as reload_weights"),
        Required("Worker.elastic_ep_execute", "as reload_weights"),
    ),
    "v1/engine/async_llm.py": (
        Required("AsyncLLM.get_kv_event_sources", "where each rank publishes KV events", takes=()),
    ),
    "v1/metrics/stats.py": (
        Required("SchedulerStats.prefix_cache_stats", "look-ups of our own requests are taken out of it"),
        Required("SchedulerStats.connector_prefix_cache_stats", "as prefix_cache_stats"),
        Required("SchedulerStats.num_running_reqs", _GAUGES),
        Required("SchedulerStats.num_waiting_reqs", _GAUGES),
        Required("SchedulerStats.num_skipped_waiting_reqs", _GAUGES),
        Required("SchedulerStats.num_kv_fetch_reqs_by_stage", _GAUGES),
        Required("SchedulerStats.kv_cache_usage", _GAUGES),
        Required("PrefixCacheStats.hits_by_source", "as prefix_cache_stats"),
        Required("PrefixCacheStats.record", "counts KV that has come",
                 takes=("num_tokens", "num_hits", "preempted", "hits_by_source")),
        Required("PrefillStats.num_cached_tokens", "what a client's usage says about cached tokens"),
    ),
    "v1/metrics/cache_hit_source.py": (
        Required("CacheHitSource.P2P", "the label of tokens that a peer brings"),
    ),
    "config/parallel.py": (
        Required("ParallelConfig.data_parallel_index", "the number of a rank behind its server"),
        Required("ParallelConfig.data_parallel_size_local", "how many ranks of a server are on its host"),
        Required("ParallelConfig.local_engines_only", "whether a server has other ranks than those"),
        Required("ParallelConfig._api_process_rank", "whether this one starts the engines"),
        Required("ParallelConfig.nnodes", "refused above 1 with data-parallel ranks"),
        Required("ParallelConfig.nnodes_within_dp", "whether an engine is on several nodes"),
        Required("ParallelConfig.node_rank_within_dp", "which one this is: a rank on another than the first listens"),
        Required("ParallelConfig.local_world_size", "the ranks of a node, which have ports of their own"),
        Required("ParallelConfig.master_addr", "where the first node is: the others must be reached from there"),
        Required("ParallelConfig.enable_elastic_ep", "refused"),
        Required("ParallelConfig.enable_fault_tolerance", "refused"),
        Required("ParallelConfig.data_parallel_rank_local", "set without a server, and then refused"),
        Required("ParallelConfig._api_process_count", "whether the server has several processes"),
    ),
    "distributed/kv_transfer/kv_connector/v1/metrics.py": (
        Required("KVConnectorStats", "carries our figures"),
        Required("KVConnectorPromMetrics.observe", "makes our figures", exactly=("transfer_stats_data", "engine_idx")),
    ),
    "entrypoints/serve/middleware/authenticate.py": (
        Required("AuthenticationMiddleware", "the operator routes ask for its keys, too"),
        Required("AuthenticationMiddleware.__init__", "they are its tokens", takes=("app", "tokens")),
    ),
    "entrypoints/launchers/launcher.py": (
        Required("NoSignalServer", "the server that gets our routes, before its application begins"),
    ),
    "distributed/kv_transfer/kv_connector/factory.py": (
        Required("KVConnectorFactory._registry", "whether our name is registered"),
        Required("KVConnectorFactory.register_connector", "makes our name known",
                 takes=("name", "module_path", "class_name")),
        Required("KVConnectorFactory.supports_hma_config", "imports our connector while a configuration is made"),
    ),
    "config/vllm.py": (
        Required("VllmConfig._verify_kv_transfer_compat", "takes over the settings, in __post_init__", takes=()),
        Required("VllmConfig.weight_transfer_config", "refused"),
        Required("VllmConfig.diffusion_config", "refused with the store"),
        Required("VllmConfig.num_prefill_lookahead_tokens", "a drafter of several modules is refused", takes=()),
        Required("VllmConfig.num_speculative_tokens", "with recurrent states both engines draft as many", takes=()),
        Required("VllmConfig.shutdown_timeout", "how long the first process of a server lets the others drain"),
    ),
    "v1/core/kv_cache_coordinator.py": (
        Required("KVCacheCoordinator.find_longest_cache_hit", "as KVCacheManager.coordinator",
                 takes=("block_hashes", "max_cache_hit_length")),
    ),
    "v1/kv_cache_interface.py": (
        Required("FullAttentionSpec.non_causal", "refused with the store"),
        Required("FullAttentionSpec", _LAYERS), Required("MLAAttentionSpec.cache_role", _LAYERS),
        Required("SparseCacheRole.INDEXER", "what a layer has beside its KV"),
        Required("SlidingWindowSpec.sliding_window", _LAYERS), Required("SlidingWindowMLASpec", _LAYERS),
        Required("SlidingWindowSpec.extra_retained_tokens", "refused where layers have several shapes"),
        Required("KVCacheSpec.prefix_replay_tokens", "as extra_retained_tokens"),
        Required("KVCacheSpec.tokens_per_state", _LAYERS), Required("KVCacheSpec.page_size_bytes", _LAYERS),
        Required("MambaSpec.shapes", "the fingerprint names what a state is"),
        Required("MambaSpec.dtypes", "as shapes"),
        Required("MambaSpec.mamba_type", "as shapes"),
        Required("MambaSpec.mamba_cache_mode", _LAYERS),
        Required("MambaSpec.num_speculative_blocks", _LAYERS),
        Required("UniformTypeKVCacheSpecs.kv_cache_specs", _LAYERS), Required("KVCacheConfig.kv_cache_groups", _LAYERS),
    ),
    "v1/engine/core_client.py": (
        Required("AsyncMPClient._call_utility_async", "a call to an engine that is gone ends"),
        Required("BackgroundResources.engine_dead", "as _call_utility_async"),
    ),
    "v1/engine/exceptions.py": (Required("EngineDeadError", "as _call_utility_async"), ),
    "config/attention.py": (Required("AttentionConfig.hisparse_config", "refused with an index"), ),
    "config/aux_output.py": (Required("AuxOutputConfig.enable_return_routed_experts", "refused"), ),
    "v1/kv_cache_layout.py": (
        Required("KVCacheLayout.is_block_outermost", "whether a block of all layers is one run of bytes"),
    ),
    "config/cache.py": (
        Required("CacheConfig.get_resolved_kv_cache_layout", "as KVCacheLayout.is_block_outermost", takes=()),
        Required("CacheConfig.kv_cache_dtype_skip_layers", "refused"),
        Required("CacheConfig.use_replayssm", "refused"),
        Required("CacheConfig.prefix_caching_hash_algo", "the names of blocks in the store must be equal everywhere"),
    ),
    "config/model_arch.py": (Required("ModelArchitectureConfig.__getitem__", _LAYERS, takes=("layer_idx", )), ),
    "config/model.py": (
        Required("ModelConfig.architecture", "the class of the model is in the fingerprint", takes=()),
        Required("ModelConfig.enable_cumem_allocator", "refused"),
        Required("ModelConfig.quantization_config", "in the fingerprint"),
        Required("ModelConfig.model_class_overrides", "in the fingerprint"),
    ),
    "config/kv_transfer.py": (
        Required("KVTransferConfig.kv_load_failure_policy", "set to recompute"),
        Required("KVTransferConfig.kv_connector_module_path", "names another class for ours, with the store"),
        Required("KVTransferConfig.has_connector", "finds our name", takes=("connector_name", )),
    ),
    "config/lora.py": (
        Required("LoRAConfig.max_loras", "a job with another adapter waits while so many are used"),
        Required("LoRAConfig.max_cpu_loras", "so many adapters are offered"),
        Required("LoRAConfig.lora_dtype", "in the digest of an adapter"),
        Required("LoRAConfig.target_modules", "in the digest of an adapter"),
    ),
    "lora/request.py": (
        Required("LoRARequest.lora_name", _ADAPTER), Required("LoRARequest.lora_int_id", _ADAPTER),
        Required("LoRARequest.lora_path", _ADAPTER), Required("LoRARequest.load_inplace", _ADAPTER),
        Required("LoRARequest.is_3d_lora_weight", _ADAPTER),
    ),
    "config/speculative.py": (
        Required("SpeculativeConfig.method", "some are refused; in the fingerprint"),
        Required("SpeculativeConfig.draft_model_config", "in the fingerprint"),
        Required("SpeculativeConfig.draft_load_config", "in the fingerprint"),
        Required("SpeculativeConfig.parallel_drafting", "in the fingerprint"),
        Required("SpeculativeConfig.use_heterogeneous_vocab", "in the fingerprint"),
        Required("SpeculativeConfig.kv_cache_dtype", "refused, but for the target's"),
    ),
    "config/scheduler.py": (
        Required("SchedulerConfig.scheduler_cls", "set to ours"),
        Required("SchedulerConfig.disable_hybrid_kv_cache_manager", _LAYERS),
        Required("SchedulerConfig.long_prefill_token_threshold", "leaves room for a request that is to pass another"),
        Required("SchedulerConfig.get_scheduler_cls", "calls ours by its name", takes=()),
        Required("SchedulerConfig.disable_chunked_mm_input", "an item that no step computes whole is refused"),
        Required("SchedulerConfig.enable_chunked_prefill", "without it a prompt is computed in one step"),
        Required("SchedulerConfig.async_scheduling", "chooses the base of ours"),
    ),
}


def check_installed() -> None:
    """Raises ConfigError, with the names and the supported releases, if the installed vLLM lacks any; MissingPackage
    where none is installed."""
    require_vllm()
    package = Path(find_spec("vllm").origin).parent
    missing = missing_names(REQUIRED, lambda file: _read(package / file))
    if missing:
        found = find_installation()
        raise ConfigError(found.distribution, found.vllm, "PDConnector needs what this release has not: "
                          f"{'; '.join(missing)}. Install a supported release: {', '.join(SUPPORTED)}")


@functools.cache
def check_once() -> None:
    """As `check_installed`, but what was found right is not looked at again by this process and its forks."""
    check_installed()


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None
