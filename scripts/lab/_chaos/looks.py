# SPDX-License-Identifier: Apache-2.0
"""What an engine under test shows of itself: counts, counters, memory. To be called between its steps."""
import collections
import contextlib
import time
from collections.abc import Callable, Collection
from pathlib import Path

import psutil


def margin_of(logprobs: list | None) -> list[float]:
    """The least distance between the first and the second choice of all tokens, in log-probability; [] without any."""
    if logprobs is None:
        return []
    values = [sorted((entry.logprob for entry in entries.values()), reverse=True) for entries in logprobs]
    return [min(first - second for first, second, *_ in values)]


def process_counts(without_memory: Collection[int] = ()) -> dict[str, int]:
    """What may not keep growing, over this process and all that it started: open descriptors, threads, and bytes of
    memory that belong to no file, except those of the processes in `without_memory`."""
    totals: collections.Counter[str] = collections.Counter()
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error, FileNotFoundError):  # it has just ended
            if process.pid not in without_memory:
                status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines()
                totals["memory_bytes"] += next((int(line.split()[1]) << 10 for line in status
                                                if line.startswith("RssAnon:")), 0)  # 0: a process that has ended
            totals["descriptors"] += process.num_fds()
            totals["threads"] += process.num_threads()
    return dict(totals)


def open_counts(engine) -> dict[str, int]:
    """All that must be 0 when nothing is open in this `LLMEngine` (B20)."""
    from vllm.utils import Device
    scheduler, manager, disagg = engine.scheduler[0], engine.scheduler[0].block_manager, engine.disagg
    computed, accessed = manager._computed_blocks_tracker, manager._last_access_blocks_tracker
    counts = {
        "unfinished": int(engine.get_num_unfinished_requests() > 0),
        "waiting": len(scheduler.waiting),
        "running": len(scheduler.running),
        "swapped": len(scheduler.swapped),
        "remote_prefilling": len(scheduler.remote_prefilling),
        "prefill_sending": len(scheduler.prefill_sending),
        "quarantined": len(scheduler.quarantined),
        "block_tables": len(manager.block_tables),
        "used_blocks": manager.num_total_gpu_blocks - manager.get_num_free_gpu_blocks(),
        "references": sum(manager.block_allocator._allocators[Device.GPU]._refcounter._refcounts.values()),
        "tracked": len(computed._seq_id_to_blocks_hashes) + len(computed._seq_id_to_num_tokens_computed)
        + len(accessed._seq_last_access),
        "split_requests": len(engine.seq_id_to_seq_group),
    }
    if disagg is None:
        return counts
    prefills, jobs = disagg.remote_prefills, disagg.prefill_jobs
    return counts | {
        "open_attempts": len(disagg.protocol.operators.open_attempts()),
        **prefills.debug_state(),
        "jobs": len(jobs._jobs) if jobs is not None else 0,
        "live_handles": disagg.transfer.live_handles(),
        "agent_errors": int(disagg.agent.error is not None),
    }


def counters_of(disagg, prefix: str = "vllm:pd_") -> dict[str, float]:
    """The metrics of this process that begin with `prefix`, by name and labels without that of V1's `engine` (there is
    one), and the counts of the control thread, if `disagg` is not None."""
    from prometheus_client import REGISTRY
    counters: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples if family.name.startswith(prefix) else ():
            labels = ",".join(v for key, v in sorted(sample.labels.items())
                              if key not in ("model_name", "engine", "le"))
            if not sample.name.endswith(("_created", "_bucket")):
                counters[":".join(filter(None, [sample.name.removeprefix("vllm:pd_"), labels]))] = sample.value
    if disagg is not None:
        agent = disagg.agent
        totals = agent.protocol.operators.totals()
        counters |= {f"agent:{name}": count for name, count in (totals | agent.dropped()).items()}
    return counters


def watch_fallbacks(binding, report: Callable[[str, str, str, float], None]) -> None:
    """Reports when an attempt falls back: request id, reason, peer, time. `binding` None: nothing."""
    if binding is None:
        return
    from vllm_pd.protocol.actions import Fallback
    prefills = binding.remote_prefills
    handle = prefills.handle

    def handle_and_report(event, progress) -> None:
        if isinstance(event, Fallback):
            report(event.attempt.request_id, event.reason.value, event.peer, time.monotonic())
        handle(event, progress)

    prefills.handle = handle_and_report
