# SPDX-License-Identifier: Apache-2.0
"""What a V1 engine under test shows of its scheduler and of our binding. In EngineCore's process and thread, but for
`count_objects`."""
import gc
import os


def count_objects(worker) -> tuple[int, int]:
    """The process of a worker and the number of Python objects in it that can refer to others. For `collective_rpc`.

    It takes the place of the worker's memory, which grows with each new batch size in stock vLLM 0.32 on the CPU, too:
    by 360 MB over 2,000 prompts of 20 to 500 tokens (the tiny model, one engine without a connector)."""
    gc.collect()
    return os.getpid(), len(gc.get_objects())


def core_counts(scheduler, binding) -> dict[str, int]:
    """All that must be 0 when nothing is open in this EngineCore (B20). `binding` None: without disaggregation."""
    pool = scheduler.kv_cache_manager.block_pool
    counts = {
        "unfinished": len(scheduler.requests),
        "waiting": len(scheduler.waiting),
        "running": len(scheduler.running),
        "parked": len(scheduler.kv_holding_waiting),
        "received": len(scheduler.finished_recving_kv_req_ids) + len(scheduler.failed_recving_kv_req_ids),
        "deferred_frees": len(scheduler.deferred_frees),
        "block_tables": sum(len(one.req_to_blocks) for one in scheduler.kv_cache_manager.coordinator.
                            single_type_managers),
        "used_blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),  # but for the null block
        "references": sum(block.ref_cnt for block in pool.blocks if not block.is_null),
    }
    if binding is None:
        return counts
    prefills, jobs = binding.remote_prefills, binding.prefill_jobs
    members = binding.agent.counts()
    return counts | {
        "fences": len(binding.fence),
        "open_attempts": len(binding.protocol.operators.open_attempts()),
        **prefills.debug_state(),
        "parked_ids": len(prefills.parked_ids()) + len(prefills._matched),
        "jobs": 0 if jobs is None else len(jobs._jobs),
        "internal_requests": 0 if jobs is None else len(jobs._attempts) + len(jobs._parked),
        "live_handles": binding.transfer.live_handles(),
        "agent_errors": int(binding.agent.error is not None),
        "peers": members["peers"],
        "sockets": members["sockets"],
    }
