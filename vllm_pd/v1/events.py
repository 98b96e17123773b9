# SPDX-License-Identifier: Apache-2.0
"""What a router learns of a V1 engine that publishes KV events: where V1's own publisher is, and the engine's load.

The events are V1's, unchanged. Their addresses come to the front end with V1's start. The load goes over a side socket
of our own (`vllm_pd.events.side`), as of a V0 engine, but without snapshots: the publisher's replay is in their place.
Each rank leaves the address of its side socket in a file beside the socket where it meets the front end.
"""
from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import zmq

from vllm_pd.errors import ConfigError
from vllm_pd.events import notice, reach
from vllm_pd.events.announcer import EventAnnouncer
from vllm_pd.events.messages import EngineLoad
from vllm_pd.events.side import SidePort
from vllm_pd.events.sink import BlockSink
from vllm_pd.rpc.addresses import hosts_of, url_of
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.ports import require_free
from vllm_pd.settings.engine import PDConfig
from vllm_pd.v1.settings import fronts_of_server, ranks_of_server

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_pd.v1.binding import V1Handover
    from vllm_pd.v1.scheduler import HandoverScheduling

logger = logging.getLogger("vllm.pd")


def publishes_events(config: VllmConfig) -> bool:
    """Whether the user has KV events on."""
    events = config.kv_events_config
    return events is not None and events.enable_kv_cache_events and events.publisher != "null"


def check_ports(config: VllmConfig) -> None:
    """Raises ConfigError where a rank's publisher could not listen, as far as this is known before the model is loaded.
    With several processes of a server only the first one asks, which starts the engines: for the others these ports may
    be taken by their own engine."""
    parallel, events = config.parallel_config, config.kv_events_config
    if not publishes_events(config) or (parallel._api_process_count > 1 and parallel._api_process_rank >= 0):
        return
    taken: set[tuple[str, int]] = set()
    for rank in ranks_of_server(config):
        for key, endpoint in (("endpoint", events.endpoint), ("replay_endpoint", events.replay_endpoint)):
            if endpoint is None or not (key == "replay_endpoint" or reach.listens(endpoint)):
                continue
            address = urlsplit(reach.of_rank(endpoint, rank).replace("*", "0.0.0.0"))
            if address.scheme != "tcp" or not address.port:
                continue
            name = f"kv_events_config.{key}"
            if (address.hostname, address.port) in taken:
                raise ConfigError(name, endpoint, f"port {address.port} is another socket's of this server: each "
                                  "data-parallel rank adds its number to both ports, so leave room between the two")
            require_free(name, address.hostname, [address.port])
            taken.add((address.hostname, address.port))


def report_load(config: PDConfig, front: str, scheduler: HandoverScheduling,
                binding: V1Handover) -> Callable[[], None]:
    """Report the engine's load to routers. Returns what ends it. Raises ConfigError where the side socket can't
    listen at the host of `bind`."""
    (host, ) = hosts_of(config.bind)
    try:
        side = SidePort(url_of(host, 0), Keys.load(config.keys) if config.keys is not None else None)
    except zmq.ZMQError as error:
        raise ConfigError("bind", config.bind, f"the load's side socket can't listen there: {error}") from error
    # It announces no blocks: its sink stays empty.
    reporter = EventAnnouncer(BlockSink(), scheduler.block_size, lambda events: None,
                              load_reader(scheduler, binding), lambda: True, side)
    file = notice.leave(_file(front), notice.SideNotice(reporter.address, reporter.epoch))
    reporter.start()

    def close() -> None:
        reporter.close()
        notice.remove(file)

    return close


def load_reader(scheduler: HandoverScheduling, binding: V1Handover) -> Callable[[], EngineLoad]:
    """Returns what reads the load, in another thread than the engine's: queues are copied before they are read."""
    pool, own = scheduler.kv_cache_manager.block_pool, binding.agent.member.incarnation

    def read() -> EngineLoad:
        running, waiting = list(scheduler.running), list(scheduler.waiting)
        fenced, parked = binding.fence.attempts(), set(binding.remote_prefills.parked_attempts())
        blocks = {attempt: len(binding.fence.block_ids(attempt)) for attempt in fenced}
        unproven = binding.protocol.operators.unproven_attempts()  # with reads for peers' jobs that have failed
        sending = [one for one in fenced if one.incarnation != own and one not in unproven]
        quarantined = [one for one in fenced if one not in parked and one not in sending]
        total = pool.num_gpu_blocks - 1  # the null block is nobody's
        return EngineLoad(
            running=len(running), waiting=len(waiting), remote_prefilling=len(parked), sending=len(sending),
            quarantined=len(quarantined), parked_blocks=sum(blocks.get(one, 0) for one in parked),
            sending_blocks=sum(blocks[one] for one in sending),
            quarantined_blocks=sum(blocks[one] for one in quarantined),
            used_blocks=max(0, total - pool.get_num_free_blocks()), total_blocks=total,
            queued_prefill_tokens=sum(max(0, one.num_prompt_tokens - one.num_computed_tokens)
                                      for one in (*running, *waiting)))

    return read


def find_events(config: VllmConfig, client: Any) -> notice.EventsNotice:
    """The answer to `GET /pd/events`, in the front end. `client` is vLLM's client of its engines."""
    found = notice.find(config, config.parallel_config.local_engines_only)
    sources = client.get_kv_event_sources()
    if len(sources) == 1 and reach.lacks_port(config.kv_events_config.endpoint):  # it has chosen one by now
        (source, ) = sources.values()
        found = msgspec.structs.replace(found, events=source.endpoint, replay=source.replay_endpoint)
    sides = [notice.read(_file(front)) for front in fronts_of_server(config)]
    loads = [side.side for side in sides if side is not None]
    return msgspec.structs.replace(found, loads=loads if len(loads) == found.ranks else [])


def _file(front: str) -> Path:
    return Path(front.removeprefix("ipc://") + "-side")
