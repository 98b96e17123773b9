# SPDX-License-Identifier: Apache-2.0
"""The ranks of a V1 engine: the worker role of the connector, and how EngineCore attaches to it.

Every rank of every pipeline stage has its own transport over its own cache, and a thread that carries transfers without
an engine step (`vllm_pd.transfer.ranks.process`). Life of a rank:

1. `register_kv_caches` describes the cache, refuses one that can't be transferred, and opens a socket.
2. The executor carries the `RankHandshake` of each rank to EngineCore, where `attach_ranks` connects to the sockets and
   sends each rank the engine's incarnation. The rank makes its transport and answers with its metadata.
3. From then on requests go down and progress comes up over that socket, at any time. The lifeline's file goes down too.
4. `close` on either side ends the thread. A rank whose EngineCore is gone ends its process at once, because a peer
   reuses the blocks that we may write to only when all processes of the engine are gone.

A rank on another node than EngineCore (`--nnodes`) listens at an address (`vllm_pd.transfer.ranks.remote`), has a
lifeline of its own, and is guarded (`vllm_pd.peer.liveness.guardian`). What EngineCore decides it is sent; where it
listens follows from its own node's settings. For its peers such an engine is on another machine, whichever theirs is:
what they fence by their own act (`vllm_pd.protocol.generations`) is then fenced for all its ranks. So all of them use
the network only, also to engines of their machine.
"""
from __future__ import annotations

import functools
import itertools
import logging
import os
import sys
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from vllm_pd.errors import ConfigError
from vllm_pd.extras import PLUGIN, version_of
from vllm_pd.model.checks import stage_layers
from vllm_pd.model.drafter import keeps_kv
from vllm_pd.model.layers import FP8_DS_MLA
from vllm_pd.peer.liveness.guardian import start_guardian
from vllm_pd.peer.liveness.lifeline import Lifeline
from vllm_pd.peer.liveness.process import local_member, parent_pid, this_process
from vllm_pd.protocol.messages import Member, Process, Role
from vllm_pd.protocol.rows import BlockRows
from vllm_pd.settings.engine import PDConfig
from vllm_pd.transfer.choice import NIXL, TransportChoice, TransportKind
from vllm_pd.transfer.cores import leave_model_cores
from vllm_pd.transfer.device import CudaDevice, Device, HostDevice
from vllm_pd.transfer.engine import RemoteEngineTransfer
from vllm_pd.transfer.layout import CacheDescription, Memory, describe_views, distinct_caches
from vllm_pd.transfer.mixed import mixed_blocks, mixed_name, own_caches
from vllm_pd.transfer.nixl.devices import only_network
from vllm_pd.transfer.plan import head_range, said_regions
from vllm_pd.transfer.ranks.gather import RankTransfers
from vllm_pd.transfer.ranks.process import AttachRank, RankServer, connect_ranks
from vllm_pd.transfer.ranks.remote import RankAddress, RankPort
from vllm_pd.transfer.ranks.transport import RankedTransport
from vllm_pd.transfer.states import views_of_states
from vllm_pd.transfer.steps import ComputedSteps, StepOrderedTransfer
from vllm_pd.transfer.transport import RanksMetadata, rank_name
from vllm_pd.transfer.whole import regions_beside
from vllm_pd.transfer.worker import TransferWorker
from vllm_pd.v1.cpu_adapters import leave_base_tokens
from vllm_pd.v1.fingerprint import engine_name, fingerprint, index_type, total_kv_heads
from vllm_pd.v1.settings import read_settings

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.pd")

NODE_KEYS = {"bind", "lifeline_port", "zone", "keys", "nats_credentials", "nats_ca"}  # may differ between the nodes


@dataclass(frozen=True)
class RankHandshake(KVConnectorHandshakeMetadata):
    """What a rank reports to EngineCore when its cache is registered. Plain values: the executor pickles it."""
    process: tuple[int, int]  # a vllm_pd.protocol.messages.Process
    address: bytes  # of the rank's socket
    cache: bytes  # its CacheDescription, in msgpack
    engine: str  # Fingerprint.engine, without what is beside the KV
    kv_dtype: str = ""  # of the cache, as the model's layers have chosen it
    index: str = ""  # who has written what is beside the KV, and in which type; "" where nothing is
    mixed: str = ""  # `transfer.mixed.mixed_name`, where layers of several shapes share blocks
    node: int = 0
    remote: RankAddress | None = None  # where it is, on another node than EngineCore's
    same: tuple[tuple[str, str], ...] = ()  # there: what must be as it is on EngineCore's node, by name


class RankWorker:
    """The worker role of the connector. One in each worker process. All methods are for the worker's main thread."""

    def __init__(self, vllm_config: VllmConfig, state_layers: Collection[str] = (),
                 index_layers: Collection[str] = (), mixed_groups: Mapping[str, int] | None = None) -> None:
        """`state_layers`: the names of those that have a recurrent state, and no KV. `index_layers`: of those that are
        an index beside another's KV. `mixed_groups`: if layers of several shapes share blocks, the number of each
        one's group."""
        self._config = vllm_config
        self._state_layers, self._index_layers = frozenset(state_layers), frozenset(index_layers)
        self._mixed_groups = mixed_groups or {}
        self._tp = vllm_config.parallel_config.tensor_parallel_size
        self._drafts = keeps_kv(vllm_config)
        if vllm_config.lora_config is not None and vllm_config.device_config.device_type == "cpu":
            leave_base_tokens()
        self._rank = 0  # known when the process groups are
        self._device: Device = HostDevice()
        self._steps = ComputedSteps(self._device)
        self._ended_step = 0
        self._server: RankServer | None = None
        self._handshake: RankHandshake | None = None

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> None:
        """Describe the cache and open the socket. `kv_caches`: for each layer a view [blocks, heads, tokens, content],
        of a layer with a recurrent state one [blocks, ...], or one for each of its parts. Also under a name of its own,
        [blocks, 1, tokens, content], is a layer's index. Raises ConfigError for a cache that can't be transferred."""
        if self._server is not None:
            raise ConfigError("kv_cache", "registered twice", "an engine that replaces its cache can't transfer it")
        stage = get_pp_group().rank_in_group
        self._rank = stage * self._tp + get_tensor_model_parallel_rank()
        if self._mixed_groups:
            stages = self._config.parallel_config.pipeline_parallel_size
            if stages > 1:
                raise ConfigError("pipeline_parallel_size", stages, "use 1: stages of a model whose layers have "
                                  "several shapes were not tried")
            kv_caches = own_caches(kv_caches, self._mixed_groups)
            blocks = mixed_blocks(kv_caches, self._config.cache_config.num_gpu_blocks)
            heads = head_range(self._rank % self._tp, self._tp, self._cache_heads)
            self._open([blocks], describe_views([blocks], num_blocks=blocks.shape[0], block_size=1,
                                                first_head=heads.start),
                       kv_caches, mixed=f"{mixed_name(kv_caches, self._mixed_groups)}, fp8 as {index_type()}")
            return
        states = {name: cache for name, cache in kv_caches.items() if name in self._state_layers}
        beside = {name: cache for name, cache in kv_caches.items() if name in self._index_layers}
        views = distinct_caches({name: cache for name, cache in kv_caches.items()
                                 if not (name in states or name in beside)})
        description = self._describe(list(views.values()), stage)  # what is wrong with KV is said first
        all_views = [*views.values(), *views_of_states(states, views)]
        if len(all_views) > len(views):
            description = self._describe(all_views, stage)
        if beside:
            regions = regions_beside(beside, views, description.first_layer)
            try:
                description = msgspec.structs.replace(description, whole=regions)
            except ValueError as error:
                raise ConfigError("kv_cache", f"{len(regions)} caches beside the KV", f"{error}: such a layout is not "
                                  "transferred; set VLLM_KV_CACHE_LAYOUT to LBHNC or BLHNC") from error
            all_views += beside.values()
        self._open(all_views, description, views,
                   f"{engine_name(self._config, beside)} in {index_type()}" if beside else "")

    def _open(self, views: list[torch.Tensor], description: CacheDescription, layers: Collection[str], index: str = "",
              mixed: str = "") -> None:
        """Listen, with what is known of the cache. `layers`: the names of those with KV."""
        enter = leave_model_cores
        if description.memory is Memory.VRAM:
            import torch
            self._device = CudaDevice(torch.cuda)
            enter = functools.partial(torch.cuda.set_device, description.device_id)  # UCX goes by the thread's device
        self._steps = ComputedSteps(self._device)
        node, port, same = self._config.parallel_config.node_rank_within_dp, None, ()
        engine = engine_name(self._config, layers)
        if node:
            port, same = self._listen(), node_settings(self._config, description, engine)
        self._server = RankServer(lambda order: self._attach(order, views, description),
                                  {os.getpid(), parent_pid()}, enter, port)
        self._handshake = RankHandshake(
            msgspec.structs.astuple(this_process()), b"" if node else self._server.address,
            msgspec.msgpack.encode(description), engine, self._config.cache_config.cache_dtype, index, mixed, node,
            port.address if node else None, same)

    def handshake(self) -> RankHandshake | None:
        """For `get_handshake_metadata`. None before `register_kv_caches`."""
        return self._handshake

    def begin_step(self, brings_kv: bool) -> None:
        """To be called before the forward pass (`handle_preemptions`). `brings_kv`: this step is the first that may
        read what a transfer has written; its data is made visible to the device."""
        if brings_kv:
            self._device.flush()

    def end_forward(self, step: int) -> None:
        """To be called after the forward pass of step `step` was launched, also without a forward pass
        (`get_transfer_results`). That ends the step, but where a drafter keeps KV: model runner V1 runs that later."""
        if not self._drafts:
            self.end_step(step)

    def end_drafts(self, step: int) -> None:
        """To be called after all of step `step` was launched (`wait_for_save`), which ends a step with a drafter."""
        if self._drafts:
            self.end_step(step)

    def end_step(self, step: int) -> None:
        """All kernels of step `step` that write KV have been launched. `step` counts the steps from 1: EngineCore puts
        it into the connector's metadata. Blocks of a step that has raised are never sent. Model runner V1 calls this
        while the exception leaves the forward pass. If it is raised earlier, in a drafter, or in model runner V2, the
        step is missing when the next one ends."""
        if sys.exc_info()[0] is None and step <= self._ended_step + 1:
            self._steps.launched(step)
        else:
            self._steps.fail()
        self._ended_step = step

    def close(self) -> None:
        """For `shutdown`. End the thread and release everything. Idempotent."""
        if self._server is not None:
            self._server.close()

    def _describe(self, views: list[torch.Tensor], stage: int) -> CacheDescription:
        cache, layers = self._config.cache_config, stage_layers(self._config, stage)
        heads = head_range(self._rank % self._tp, self._tp, total_kv_heads(self._config))
        description = describe_views(views, num_blocks=cache.num_gpu_blocks, block_size=cache.block_size,
                                     first_head=heads.start, first_layer=layers.start)
        staged = self._config.parallel_config.pipeline_parallel_size > 1  # else layers may share their caches
        if description.kv_heads != len(heads) or (staged and description.layers != len(layers)):
            raise ConfigError("kv_cache", f"{description.layers} layers of {description.kv_heads} KV heads on rank "
                              f"{self._rank}", f"{len(layers)} of {len(heads)} were expected there")
        return description

    @property
    def _cache_heads(self) -> int:
        """The heads of all ranks' caches together, as transfers know them: where whole blocks go, a rank has one."""
        config = self._config
        return self._tp if self._mixed_groups and not config.model_config.use_mla else total_kv_heads(config)

    def _listen(self) -> RankPort:
        """Where EngineCore connects, and the lifeline, on another node: at the address of this node's `bind`, at its
        port and at `lifeline_port`, each with the rank's number on this node added, or at free ports."""
        ours = own_settings(self._config)
        bind, index = urlsplit(ours.bind), self._rank % self._config.parallel_config.local_world_size
        key, value = "lifeline_port", ours.lifeline_port
        try:
            name = uuid.uuid4().hex
            lifeline = Lifeline(name, bind.hostname, ours.lifeline_port and ours.lifeline_port + index)
            key, value = "bind", ours.bind
            return RankPort(bind.hostname, bind.port and bind.port + index, lifeline, lifeline.address, name)
        except (OSError, OverflowError) as error:
            raise ConfigError(key, value, f"rank {self._rank} can't listen there ({error}): write an address of this "
                              "node and ports that are free, one for each of its ranks, or 0") from error

    def _attach(self, order: AttachRank, views: list[torch.Tensor],
                description: CacheDescription) -> tuple[StepOrderedTransfer, bytes]:
        """Runs in the rank's thread."""
        choice, parallel = order.transport, self._config.parallel_config
        if parallel.nnodes_within_dp > 1 and choice.kind is TransportKind.NIXL:
            only_network()
        if parallel.node_rank_within_dp:
            choice = msgspec.structs.replace(choice, host=own_settings(self._config).transport_host)
        transport = choice.make(rank_name(order.incarnation, self._rank), views, description, order.receives)
        ranked = RankedTransport(transport, self._rank, self._tp, self._cache_heads)
        return StepOrderedTransfer(TransferWorker(ranked, rank=self._rank), self._steps), transport.metadata()


def attach_ranks(vllm_config: VllmConfig, role: Role, handshakes: Mapping[tuple[int, int], RankHandshake],
                 transport: TransportChoice = NIXL,
                 is_read: bool = False,
                 rows: BlockRows | None = None,
                 states: str = "",
                 lost: Callable[[str], None] = logger.error) -> tuple[Member, bytes, RemoteEngineTransfer]:
    """Attach EngineCore to its ranks. `handshakes` by pipeline stage and tensor-parallel rank, as vLLM has them.
    `is_read`: peers may read from a prefill engine, too. `rows`: how its layers are grouped; None: in one group.
    `states`: what a block of those with states holds. `lost` is called, in any thread, with what has happened to a rank
    on another node, or to its guardian, if that is gone: the executor does not see it. It must not block.

    Returns the engine's registry entry (its address still empty), the metadata by which peers reach its memory, and the
    transfers of all ranks, which the caller owns: it must `start` and `close` them. Raises ConfigError if the ranks'
    caches differ, ControlError if a rank does not answer within ATTACH_S.

    The transfers are used as in V0, but that requests need no step: `execute(requests)` at any time, in any thread. A
    `Write` or `Read` names in `after_step` the last step that used its local blocks; EngineCore must have processed the
    output of that step. Each ends with exactly one `Finished`, unless a rank's process dies: then the executor ends
    this engine. `poll` makes rank 0 look for notices. After `hold` every rank holds the lifeline for as long as it can
    write to a peer's memory.
    """
    ranks = [handshakes[rank] for rank in sorted(handshakes)]
    parallel = vllm_config.parallel_config
    tp = parallel.tensor_parallel_size
    check_handshakes(vllm_config, handshakes)
    if len({rank.engine for rank in ranks}) > 1:
        raise ConfigError("attention backend", sorted({rank.engine for rank in ranks}), "all ranks must have the same")
    if len({rank.kv_dtype for rank in ranks}) > 1:
        raise ConfigError("kv_cache_dtype", sorted({rank.kv_dtype for rank in ranks}), "all ranks must have the same")
    stages = [msgspec.msgpack.decode(rank.cache, type=CacheDescription) for rank in ranks[::tp]]
    beside = said_regions([region for stage in stages for region in stage.whole])
    indexes = sorted({rank.index for rank in ranks if rank.index})
    if len(indexes) > 1:
        raise ConfigError("attention backend", indexes, "the indexes of all ranks must have the same")
    engine = f"{ranks[0].engine}, beside KV {beside} by {indexes[0]}" if beside else ranks[0].engine
    if len({rank.mixed for rank in ranks}) > 1:
        raise ConfigError("kv_cache", sorted({rank.mixed for rank in ranks}), "blocks of all ranks must hold the same")
    states = states or ranks[0].mixed
    chosen = FP8_DS_MLA if ranks[0].kv_dtype == FP8_DS_MLA else ""  # only this one makes blocks of another size
    member = local_member(role, msgspec.structs.replace(
        fingerprint(vllm_config, stages[0], engine, rows, states, chosen),
        layers=sum(stage.layers for stage in stages), transport=transport.kind.value))
    order = AttachRank(member.incarnation, is_read or role is not Role.PREFILL, transport)
    remote = {number: rank.remote for number, rank in enumerate(ranks) if rank.remote is not None}
    if remote:  # no peer is on the machine of all ranks, and they use the network only
        member = msgspec.structs.replace(member, host_id=f"several-{member.incarnation}")
    guardian, guarding = start_guardian(remote) if remote else (None, None)
    try:
        connections, metadata = connect_ranks(
            {number: (0 if number in remote else rank.process[0], remote.get(number, rank.address))
             for number, rank in enumerate(ranks)}, order)
    except Exception:
        if guardian is not None:
            guardian.close()
        raise
    processes = dict.fromkeys([*member.processes, *(Process(*rank.process) for rank in ranks if rank.remote is None),
                               *([] if guarding is None else [guarding])])
    elsewhere = {number: f"rank {number} on node {rank.node} ({rank.remote.url})"
                 for number, rank in enumerate(ranks) if rank.remote is not None}
    if guarding is not None:
        elsewhere[len(ranks)] = f"the guardian of the ranks on other nodes, process {guarding.pid},"
    return (msgspec.structs.replace(member, processes=tuple(processes)), RanksMetadata(metadata).encode(),
            RemoteEngineTransfer(RankTransfers(connections, guardian, elsewhere, lost)))


def own_settings(vllm_config: VllmConfig) -> PDConfig:
    """Those of this node's command line."""
    settings = read_settings(vllm_config)
    return PDConfig.parse(settings.kv_role, settings.extra)


def node_settings(vllm_config: VllmConfig, cache: CacheDescription, engine: str) -> tuple[tuple[str, str], ...]:
    """What must be the same on all nodes of an engine, by name: releases, our settings without those of a host, and
    what a rank's KV is, as far as it follows from the command line."""
    import vllm
    ours = own_settings(vllm_config)
    kv = fingerprint(vllm_config, cache, engine)
    return (("vllm", vllm.__version__), *((name, str(version_of(name))) for name in ("vllm-pd", PLUGIN)),
            ("kv_role", ours.role.value),
            *((key.name, repr(getattr(ours, key.name))) for key in PDConfig.settings() if key.name not in NODE_KEYS),
            # The transport is not made yet, and the type of the cache is compared by what the ranks have.
            *((name, str(getattr(kv, name))) for name in kv.__struct_fields__ if name not in ("transport", "kv_dtype")))


def check_handshakes(vllm_config: VllmConfig, handshakes: Mapping[tuple[int, int], RankHandshake]) -> None:
    """Every rank must have a KV cache and our connector, and those on other nodes what this node has. Raises
    ConfigError."""
    parallel = vllm_config.parallel_config
    tp = parallel.tensor_parallel_size
    expected = list(itertools.product(range(parallel.pipeline_parallel_size), range(tp)))
    missing = [rank for rank in expected if rank not in handshakes]
    if missing or len(handshakes) != len(expected):
        nodes = sorted({(stage * tp + rank) // parallel.local_world_size for stage, rank in missing} - {0})
        if nodes and parallel.nnodes_within_dp > 1:
            raise ConfigError("kv_transfer_config", None, "write the same --kv-transfer-config on the command line of "
                              f"each node, and install the plugin there: the ranks of node {nodes[0]} lack it")
        raise ConfigError("tensor_parallel_size", tp, f"only the ranks {sorted(handshakes)} have a KV cache")
    for rank in handshakes.values():
        if rank.remote is None:
            continue
        cache = msgspec.msgpack.decode(rank.cache, type=CacheDescription)
        theirs = dict(rank.same)
        for name, ours in node_settings(vllm_config, cache, rank.engine):
            if theirs.get(name) != ours:
                raise ConfigError(name, theirs.get(name), f"node {rank.node} has that, and node 0 has {ours}: start "
                                  "all nodes with the same")
