# SPDX-License-Identifier: Apache-2.0
"""How an engine with our connector joins its peers: the parts of a `V1Handover`, put together."""
from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from vllm_pd.decisions.prefix import PrefixReads
from vllm_pd.handover.jobs import PrefillCapacity
from vllm_pd.handover.reload import watch_reload
from vllm_pd.model.drafter import drafter_layers
from vllm_pd.peer.agent import ControlAgent
from vllm_pd.protocol.scope import SALT
from vllm_pd.rpc.ports import require_free_front
from vllm_pd.settings.engine import PDConfig
from vllm_pd.transfer.choice import TransportChoice
from vllm_pd.transfer.heap import freeze_heap
from vllm_pd.v1.adapters import watch_adapters
from vllm_pd.v1.binding import V1Handover
from vllm_pd.v1.engine_access import EngineAccess
from vllm_pd.v1.events import publishes_events, report_load
from vllm_pd.v1.groups import block_rows, draft_blocks, state_layers, states_name
from vllm_pd.v1.media import make_media_book
from vllm_pd.v1.metrics import MetricsRecorder
from vllm_pd.v1.settings import front_of_rank, read_settings

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

    from vllm_pd.v1.worker import RankHandshake

logger = logging.getLogger("vllm.pd")


def begin_handover(engine: EngineCoreProc, handshakes: Mapping[tuple[int, int], RankHandshake],
                   make: Callable[..., V1Handover] = V1Handover) -> V1Handover:
    """Attach to the engine's ranks, start the control thread, and bind the scheduler by what `make` makes. Raises
    ConfigError and ControlError, which end the engine before it serves anybody."""
    from vllm_pd.v1.fingerprint import token_bytes
    from vllm_pd.v1.worker import attach_ranks
    vllm_config = engine.vllm_config
    settings = read_settings(vllm_config)
    config = PDConfig.parse(settings.kv_role, settings.extra)
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    rows = block_rows(groups)
    if rows.windows:  # only the rows that a job sends were tried with several groups
        config = dataclasses.replace(config, prefix_reads=PrefixReads.NEVER.value, hold_s=0.0)
        level = logging.WARNING if {"prefix_reads", "hold_s"} & settings.extra.keys() else logging.INFO
        logger.log(level, "layers are in groups of blocks %s: no prefix is read from a decode engine (prefix_reads), "
                   "and no prompt kept for one (hold_s)", "for KV and for states" if rows.state_tokens else
                   f"with windows of {rows.windows} tokens (0: all)" + (
                       "" if rows.sizes else "; --disable-hybrid-kv-cache-manager has both"))
    kv_layers = None
    if rows.state_tokens:  # then there is one stage: these are all layers
        kv_layers = sum(len(group.layer_names) for group in groups) - len(state_layers(groups))
        kv_layers -= drafter_layers(vllm_config)
    access = EngineAccess(engine)
    member, metadata, transfer = attach_ranks(vllm_config, config.role, handshakes,
                                              TransportChoice.of(config.transport, config.transport_host),
                                              config.holds_prompts, rows, states_name(groups), access.rank_lost)
    member = msgspec.structs.replace(member, scopes=(SALT, ))
    front = front_of_rank(settings.front, vllm_config.parallel_config.data_parallel_index)
    require_free_front(front, vllm_config.kv_transfer_config.engine_id)
    agent = ControlAgent(config, member, metadata, wake=access.wake, front=front, look=transfer.watch)
    agent.start()
    transfer.hold(agent.lifeline_fileno())
    capacity = PrefillCapacity(rows, vllm_config.model_config.get_vocab_size(),
                               vllm_config.parallel_config.world_size, token_bytes(vllm_config, kv_layers),
                               bool(vllm_config.cache_config.enable_prefix_caching),
                               engine.scheduler.max_num_scheduled_tokens, vllm_config.cache_config.num_gpu_blocks,
                               1 + vllm_config.scheduler_config.async_scheduling, draft_blocks(groups))
    binding = make(config, engine.scheduler, access, agent, transfer, capacity, MetricsRecorder(),
                   make_media_book(vllm_config, config.role, rows.own_tokens, config.media))
    watch_reload(engine, binding.weights_replaced)
    watch_adapters(engine, binding.adapters)
    if publishes_events(vllm_config):
        binding.end_reports = report_load(config, front, engine.scheduler, binding)
    logger.info("disaggregation is on: %s as %s at %s", config.role.value, member.incarnation, agent.member.address)
    freeze_heap()
    return binding
