# SPDX-License-Identifier: Apache-2.0
"""The binding of KV events and load figures to the V0 engine: `--kv-events-config`, as upstream's V1 engine has it.

Used whether or not prefills are handed over. Nothing of it runs in the engine's thread but the sink.
"""
from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
from vllm.core.block.prefix_caching_block import PrefixCachingBlockAllocator
from vllm.distributed.kv_events import EventBatch, EventPublisher, EventPublisherFactory
from vllm.utils import Device

from vllm_pd.errors import ConfigError
from vllm_pd.events import notice, reach
from vllm_pd.events.announcer import EventAnnouncer
from vllm_pd.events.messages import EngineLoad, KVEvent
from vllm_pd.events.metrics import EventMetrics
from vllm_pd.events.side import SidePort
from vllm_pd.events.sink import BlockSink, Salt
from vllm_pd.rpc.addresses import hosts_of, url_of
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.ports import is_free
from vllm_pd.settings.engine import PDConfig
from vllm_pd.v0 import SETTINGS_KEY

if TYPE_CHECKING:
    from vllm.config import KVEventsConfig, VllmConfig
    from vllm.core.scheduler import Scheduler
    from vllm.engine.llm_engine import LLMEngine
    from vllm.sequence import Sequence, SequenceGroup

logger = logging.getLogger("vllm.pd")

RELEASE_S = 5.0


def check_events(config: VllmConfig) -> None:
    """Raises ConfigError, before the model is loaded, where `attach_events` would fail."""
    if config.parallel_config.pipeline_parallel_size > 1:
        raise ConfigError("pipeline_parallel_size", config.parallel_config.pipeline_parallel_size,
                          "use 1, or leave out --kv-events-config: each stage batch has a prefix cache of its own")
    _open_publisher(config.kv_events_config).shutdown()
    _await_release(config.kv_events_config)


def attach_events(engine: LLMEngine) -> None:
    """Publish what this engine's prefix cache holds, and its load, for as long as the engine lives. Raises ConfigError
    where a port that was free when `check_events` looked is free no more."""
    config = engine.vllm_config
    events = config.kv_events_config
    events = dataclasses.replace(events, endpoint=reach.with_port(events.endpoint), replay_endpoint=(
        None if events.replay_endpoint is None else reach.with_port(events.replay_endpoint)))
    host, keys = _side_host(config.additional_config)
    try:
        side = SidePort(url_of(host, 0), keys)
    except zmq.ZMQError as error:
        raise ConfigError("bind", host, f"the events' side socket can't listen there: {error}") from error
    try:
        publisher = _open_publisher(events)
    except ConfigError:
        side.close()
        raise
    scheduler = engine.scheduler[0]
    sink = BlockSink(side.waker.set, explainer(scheduler))
    announcer = EventAnnouncer(sink, config.cache_config.block_size, _publish_to(publisher), load_reader(scheduler),
                               lambda: not scheduler.running, side,
                               EventMetrics(engine.model_config.served_model_name))
    bind_sink(scheduler, sink)
    announcer.start()
    file = notice.leave(notice.path_of(config), notice.SideNotice(announcer.address, announcer.epoch, events.endpoint,
                                                                  events.replay_endpoint))
    weakref.finalize(engine, _shut, announcer, publisher, file)
    if not reach.listens(events.endpoint):
        logger.warning("the publisher of KV events connects to %s and does not listen there, so nobody can subscribe "
                       'to it: write "endpoint": "tcp://*:PORT" in --kv-events-config', events.endpoint)
    logger.info("KV events at %s, snapshots and load at %s", events.endpoint, announcer.address)


def _open_publisher(events: KVEventsConfig) -> EventPublisher:
    try:
        return EventPublisherFactory.create(events)
    except (zmq.ZMQError, ValueError) as error:
        raise ConfigError("kv_events_config", f"{events.publisher} at {events.endpoint}",
                          f"choose a free endpoint, and publisher zmq: {error}") from error


def _await_release(events: KVEventsConfig) -> None:
    """Until the ports of a publisher that was shut down can be bound again: ZMQ closes its sockets a moment later, in a
    thread of its own."""
    deadline = time.monotonic() + RELEASE_S
    for endpoint in filter(None, (events.endpoint, events.replay_endpoint)):
        port = endpoint.rpartition(":")[2]
        if reach.listens(endpoint) and endpoint.startswith("tcp://") and port.isdigit() and int(port):
            while not is_free("", int(port)) and time.monotonic() < deadline:
                time.sleep(0.01)


def bind_sink(scheduler: Scheduler, sink: BlockSink) -> None:
    """From now on the scheduler and its device's block allocator report to the sink. Without prefix caching there is
    nothing to report."""
    pool = scheduler.block_manager.block_allocator._allocators[Device.GPU]
    if isinstance(pool, PrefixCachingBlockAllocator):
        pool.event_sink = sink
        scheduler.event_sink = sink
    else:
        logger.warning("KV events are on, but prefix caching is off: only the load is reported; add "
                       "--enable-prefix-caching")


def load_reader(scheduler: Scheduler) -> Callable[[], EngineLoad]:
    """Returns what reads the load, in another thread than the engine's: queues are copied before they are read."""
    total_blocks = scheduler.block_manager.num_total_gpu_blocks

    def read() -> EngineLoad:
        waiting, running = list(scheduler.waiting), list(scheduler.running)
        parked = list(scheduler.remote_prefilling.values())
        sending = list(scheduler.prefill_sending.values())
        quarantined = list(scheduler.quarantined.values())
        tables = scheduler.block_manager.block_tables
        return EngineLoad(
            running=len(running), waiting=len(waiting), swapped=len(scheduler.swapped),
            remote_prefilling=len(parked), sending=len(sending), quarantined=len(quarantined),
            parked_blocks=_blocks(tables, parked), sending_blocks=_blocks(tables, sending),
            quarantined_blocks=sum(len(table.physical_block_ids) for table in quarantined),
            used_blocks=total_blocks - min(total_blocks, scheduler.block_manager.get_num_free_gpu_blocks()),
            total_blocks=total_blocks, queued_prefill_tokens=_queued_tokens(waiting) + _queued_tokens(running))

    return read


def _blocks(tables: dict[int, Any], groups: Iterable[SequenceGroup]) -> int:
    found = (tables.get(group.first_seq.seq_id) for group in groups)
    return sum(len(table.physical_block_ids) for table in found if table is not None)


def _queued_tokens(groups: Iterable[SequenceGroup]) -> int:
    return sum(seq.get_num_new_tokens() for group in groups for seq in group.seqs if seq.is_prefill())


def explainer(scheduler: Scheduler) -> Callable[[int], Salt | None]:
    """Returns what looks an extra hash up among the present sequences: the allocator knows only the number."""

    def explain(extra_hash: int) -> Salt | None:
        for group in (*scheduler.running, *scheduler.remote_prefilling.values(), *scheduler.prefill_sending.values(),
                      *scheduler.swapped, *scheduler.waiting):
            for seq in group.seqs:
                if seq.extra_hash() == extra_hash:
                    return _salt(seq, extra_hash)
        return None

    return explain


def _salt(seq: Sequence, extra_hash: int) -> Salt:
    lora = seq.lora_request
    return Salt(lora_id=lora.lora_int_id if lora else None, lora_name=lora.lora_name if lora else None,
                extra=extra_hash if seq.prompt_adapter_id else None, private=seq.private_hash_key is not None)


def _side_host(additional: Any) -> tuple[str, Keys | None]:
    """(host of the control socket, its keys); only this machine where disaggregation is off."""
    settings = additional.get(SETTINGS_KEY) if isinstance(additional, dict) else None
    if settings is None:
        return "127.0.0.1", None
    config = PDConfig.parse(settings["kv_role"], settings["extra"])
    return hosts_of(config.bind)[0], Keys.load(config.keys) if config.keys is not None else None


def _publish_to(publisher: EventPublisher) -> Callable[[list[KVEvent]], None]:
    return lambda events: publisher.publish(EventBatch(ts=time.time(), events=events))


def _shut(announcer: EventAnnouncer, publisher: EventPublisher, file: Path | None) -> None:
    announcer.close()
    publisher.shutdown()
    notice.remove(file)
