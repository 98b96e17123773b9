# SPDX-License-Identifier: Apache-2.0
"""The ranks of a V1 engine: what they register, what EngineCore learns of it, and what is refused.

B42 (fingerprints), B80 (refusals), B20, B21 (ends). Deaths and noise on the sockets: tests/transfer, without vLLM.
"""
import dataclasses
import json
import multiprocessing
import os
import pickle
import queue
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from vllm.config import CacheConfig, KVTransferConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig

from tests.waiting import wait_for
from vllm_pd.errors import ConfigError, ControlError
from vllm_pd.peer.liveness.process import lost as process_lost
from vllm_pd.peer.liveness.process import this_process
from vllm_pd.protocol.messages import Process, Role
from vllm_pd.transfer.layout import CacheDescription
from vllm_pd.transfer.requests import Write
from vllm_pd.transfer.transport import PeerMetadata, RanksMetadata
from vllm_pd.v1 import worker as v1_worker
from vllm_pd.v1.fingerprint import engine_name, fingerprint, token_bytes, total_kv_heads
from vllm_pd.v1.settings import OWN_KEY
from vllm_pd.v1.worker import RankHandshake, RankWorker, attach_ranks

LAYERS, BLOCKS, KV_HEADS, TOKENS, HEAD_SIZE = 12, 5, 4, 32, 32
WAIT_S = 200.0


def write_model(folder: Path, **more) -> Path:
    """A Llama's configuration; its weights are dummies."""
    settings = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256,
                "hidden_size": KV_HEADS * HEAD_SIZE, "num_hidden_layers": LAYERS, "num_attention_heads": KV_HEADS,
                "num_key_value_heads": KV_HEADS, "intermediate_size": 64, "max_position_embeddings": 1024, **more}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def make_config(folder: Path, ranks: int = 1, dtype: str = "float32", stages: int = 1, **cache) -> VllmConfig:
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), max_model_len=512, dtype=dtype, skip_tokenizer_init=True),
        load_config=LoadConfig(load_format="dummy"), parallel_config=ParallelConfig(),
        cache_config=CacheConfig(**{"block_size": TOKENS, **cache}))
    config.cache_config.num_gpu_blocks = BLOCKS
    config.parallel_config.tensor_parallel_size = ranks  # its own check wants that many devices
    config.parallel_config.pipeline_parallel_size = stages
    return config


def make_caches(ranks: int = 1, content: int = 2 * HEAD_SIZE, heads: int | None = None) -> dict[str, torch.Tensor]:
    """What the CPU runner registers, in an order of its own, with a layer that uses another layer's cache."""
    heads = KV_HEADS // ranks if heads is None else heads
    buffer = torch.zeros(LAYERS, BLOCKS, heads, TOKENS, content)
    caches = {f"model.layers.{layer}.self_attn.attn": buffer[layer] for layer in reversed(range(LAYERS))}
    return {**caches, "model.layers.12.self_attn.attn": caches["model.layers.3.self_attn.attn"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(folder) -> VllmConfig:
    return make_config(folder)


def place(patch, tp_rank: int = 0, stage: int = 0) -> None:
    """From now on a worker of this process is that one."""
    patch.setattr(v1_worker, "get_tensor_model_parallel_rank", lambda: tp_rank)
    patch.setattr(v1_worker, "get_pp_group", lambda: SimpleNamespace(rank_in_group=stage))


@pytest.fixture
def rank(config, monkeypatch):
    """The worker of rank 0, registered, in this process."""
    place(monkeypatch)
    made = RankWorker(config)
    assert made.handshake() is None
    made.register_kv_caches(make_caches())
    yield made
    made.close()
    made.close()


def description(handshake: RankHandshake) -> CacheDescription:
    return msgspec.msgpack.decode(handshake.cache, type=CacheDescription)


# What a rank says of itself.


def test_b3_the_layers_are_in_their_order_and_a_shared_cache_counts_once(rank):
    cache = description(rank.handshake())
    assert cache.layers == LAYERS and list(cache.planes) == sorted(cache.planes)
    assert (cache.num_blocks, cache.block_size, cache.kv_heads, cache.head_size) == (BLOCKS, TOKENS, KV_HEADS, 64)


def test_a_handshake_passes_the_executors_queue(rank):
    handshake = rank.handshake()
    assert pickle.loads(pickle.dumps(handshake)) == handshake
    assert Process(*handshake.process) == this_process()


def stage_of(folder: Path, patch, stage: int, layers: range) -> RankWorker:
    """The worker of that stage of two, registered, with the caches of these layers."""
    place(patch, stage=stage)
    made = RankWorker(make_config(folder, stages=2))
    caches = make_caches()
    made.register_kv_caches({f"model.layers.{layer}.self_attn.attn": caches[f"model.layers.{layer}.self_attn.attn"]
                             for layer in layers})
    return made


@pytest.mark.parametrize("partition", [None, "5,7"])
def test_b101_the_stages_of_an_engine(folder, monkeypatch, partition):
    """B42: a peer sees the model's layers, and how many stages; where they lie is in the metadata."""
    if partition is not None:
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    cut = 6 if partition is None else 5
    stages = [stage_of(folder, monkeypatch, 0, range(cut)), stage_of(folder, monkeypatch, 1, range(cut, LAYERS))]
    try:
        caches = [description(stage.handshake()) for stage in stages]
        assert [(cache.first_layer, cache.layers) for cache in caches] == [(0, cut), (cut, LAYERS - cut)]
        config = make_config(folder, stages=2)
        member, metadata, transfer = attach_ranks(config, Role.BOTH, {(at, 0): stage.handshake()
                                                                      for at, stage in enumerate(stages)})
        transfer.start(lambda: None, lambda end: None)
        assert (member.fingerprint.layers, member.fingerprint.tp, member.fingerprint.pp) == (LAYERS, 1, 2)
        ranks = [PeerMetadata.decode_any(one) for one in RanksMetadata.decode("d", metadata).ranks]
        assert [one.name for one in ranks] == [f"{member.incarnation}/{rank}" for rank in range(2)]
        assert [one.cache for one in ranks] == caches
        assert token_bytes(config) == token_bytes(make_config(folder))
        transfer.close()
    finally:
        for stage in stages:
            stage.close()


def test_b80_b101_a_stage_with_other_layers_than_its_own_is_refused(folder, monkeypatch):
    """As of a model whose layers share caches."""
    with pytest.raises(ConfigError, match="5 layers of 4 KV heads on rank 1.*6 of 4 were expected"):
        stage_of(folder, monkeypatch, 1, range(6, 11))


def test_b42_the_fingerprint_of_an_engine(rank, config):
    handshake = rank.handshake()
    ours = fingerprint(config, description(handshake), handshake.engine)
    assert (ours.dtype, ours.kv_dtype, ours.block_size, ours.layers) == ("float32", "float32", TOKENS, LAYERS)
    assert (ours.kv_heads, ours.head_size, ours.layout, ours.tp, ours.pp) == (KV_HEADS, 32, "kv-heads-first", 1, 1)
    assert ours.engine.startswith("vllm 0.") and "CPU_ATTN" in ours.engine
    assert token_bytes(config) == LAYERS * KV_HEADS * 2 * HEAD_SIZE * 4
    assert ours.first_difference(fingerprint(config, description(handshake), handshake.engine)) is None
    v0 = msgspec.structs.replace(ours, engine="", block_size=16, layout="heads-first")
    assert ours.first_difference(v0) == ("engine", ours.engine, "")
    for key, value in (("block_size", 64), ("kv_dtype", "fp8"), ("layout", "kv-tokens-first"), ("layers", 1)):
        other = msgspec.structs.replace(ours, **{key: value})
        assert ours.first_difference(other) == (key, getattr(ours, key), value)
    assert ours.first_difference(msgspec.structs.replace(ours, tp=2)) is None


def test_b42_kv_types_and_kernels_count(folder, config, rank, monkeypatch):
    handshake = rank.handshake()
    eight = make_config(folder, cache_dtype="fp8")
    assert fingerprint(eight, description(handshake), "").kv_dtype == "fp8"
    assert token_bytes(eight) * 4 == token_bytes(config)
    assert engine_name(config, []) == handshake.engine
    monkeypatch.setattr("vllm.v1.attention.backends.cpu_attn._get_attn_isa", lambda *_: "amx")
    assert engine_name(config, []) != handshake.engine


def test_mla_has_one_head_on_every_rank(config, monkeypatch):
    monkeypatch.setattr(type(config.model_config), "use_mla", True)
    assert total_kv_heads(config) == 1


# What is refused.


@pytest.mark.parametrize("caches,word", [
    (make_caches(heads=2), "2 KV heads on rank 0.*4 were expected"), ({}, "no layers"),
    ({"a": torch.zeros(2 * BLOCKS, KV_HEADS, TOKENS // 2, 64)}, "--block-size"),
    ({"a": torch.zeros(BLOCKS, KV_HEADS, TOKENS, 64), "b": torch.zeros(BLOCKS, KV_HEADS, TOKENS, 8)}, "several kinds"),
    ({"a": torch.zeros(BLOCKS, KV_HEADS, 64, TOKENS).transpose(2, 3)}, "VLLM_KV_CACHE_LAYOUT"),
], ids=["heads", "none", "split blocks", "kinds", "strides"])
def test_b80_caches_that_cannot_be_transferred_are_refused(config, monkeypatch, caches, word):
    place(monkeypatch)
    made = RankWorker(config)
    with pytest.raises(ConfigError, match=f"(?s){word}"):
        made.register_kv_caches(caches)
    made.close()


def test_b80_a_cache_that_is_replaced_is_refused(rank):
    with pytest.raises(ConfigError, match="registered twice"):
        rank.register_kv_caches(make_caches())


def test_b80_ranks_that_do_not_fit_each_other_are_refused(folder, rank):
    handshake = rank.handshake()
    two = make_config(folder, ranks=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size.*\[\(0, 0\)\]"):
        attach_ranks(two, Role.BOTH, {(0, 0): handshake})
    other = RankHandshake(handshake.process, handshake.address, handshake.cache, "vllm 0.32 OTHER")
    with pytest.raises(ConfigError, match="OTHER"):
        attach_ranks(two, Role.BOTH, {(0, 0): handshake, (0, 1): other})


# An engine and its ranks.


def finished(transfer, count: int) -> list:
    """The ends of that many transfers."""
    ends, deadline_s = [], time.monotonic() + WAIT_S
    while len(ends) < count:
        assert time.monotonic() < deadline_s, ends
        ends += transfer.take_progress().finished
        time.sleep(0.002)
    return ends


@pytest.mark.parametrize("error", [RuntimeError("in the forward pass"), SystemExit()], ids=["raises", "SIGTERM"])
def test_b95_a_step_that_fails_is_never_done(rank, error):
    """V1 calls `end_step` while the exception leaves the step; a write that names it, or a later one, must wait."""
    rank.end_step(1)
    with pytest.raises(type(error)):
        try:
            raise error
        finally:
            rank.end_step(2)
    rank.end_step(3)
    assert rank._steps.reached(1) and not rank._steps.reached(2) and not rank._steps.reached(3)


@pytest.mark.parametrize("where", ["before the connector is asked", "in the forward pass"])
def test_b95_hazard_16_a_step_that_raises_in_model_runner_v2_is_never_done(config, rank, where):
    """V2 then asks the connector for nothing more, and the rank goes on with the next step. So does V1 with a step that
    raises before its forward pass."""
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector

    from vllm_pd.v1.binding import StepMetadata
    from vllm_pd.v1.connector import PDConnector
    runner = ActiveKVConnector.__new__(ActiveKVConnector)
    runner.vllm_config, runner._pending_load_kwargs, runner._disabled = config, None, False
    runner.kv_connector = PDConnector.__new__(PDConnector)
    runner.kv_connector.binding, runner.kv_connector._rank = None, rank
    for step in (0, 0, 1, 2, 3, 4):  # none has a number before the engine's loop begins
        raises = step == 3
        if not (raises and where.startswith("before")):
            runner.pre_forward(SimpleNamespace(kv_connector_metadata=StepMetadata(step, False),
                                               has_sync_kv_loads=False))
        if not raises:
            runner.post_forward(set())
    assert rank._steps.reached(2) and not rank._steps.reached(3) and not rank._steps.reached(4)


def test_a_rank_in_the_engines_process_is_attached_as_any_other(config, rank):
    """With one rank on a GPU V1 has no worker process. Nor does the end of the connection end this process."""
    member, metadata, transfer = attach_ranks(config, Role.BOTH, {(0, 0): rank.handshake()})
    transfer.start(lambda: None, lambda end: None)
    assert member.processes == (this_process(), ) and member.fingerprint.engine and metadata
    transfer.execute([Write("k", "nobody", [1], [1], [b"n"], 1)])
    time.sleep(0.05)
    assert not transfer.take_progress().finished
    rank.begin_step(brings_kv=True)
    rank.end_step(1)
    (end,) = finished(transfer, 1)
    assert not end.ok and "nobody" in end.error
    for connection in rank._server.rank.filenos():
        assert connection >= 0
    assert not transfer.close()


def test_the_transfer_threads_leave_the_models_cores_before_anything_is_made(config, monkeypatch):
    moved, made = [], []
    place(monkeypatch)
    monkeypatch.setattr(v1_worker, "leave_model_cores", lambda: moved.append(threading.current_thread().name))
    one = RankWorker(config)
    monkeypatch.setattr(one, "_attach", lambda *given: made.append(list(moved)) or RankWorker._attach(one, *given))
    one.register_kv_caches(make_caches())
    *_, transfer = attach_ranks(config, Role.BOTH, {(0, 0): one.handshake()})
    transfer.close()
    one.close()
    assert made == [["vllm-pd-attach"]] and moved == ["vllm-pd-attach", "vllm-pd-transfer"]


def serve(pipe: Connection, rank: int, folder: Path) -> None:
    """A worker process of rank `rank` of two."""
    place(pytest.MonkeyPatch(), rank)
    made = RankWorker(make_config(folder, ranks=2))
    made.register_kv_caches(make_caches(ranks=2))
    pipe.send(made.handshake())
    while pipe.recv() == "step":
        made.begin_step(False)
        made.end_step(1)
    made.close()
    pipe.send("closed")


def test_b21_two_ranks_in_processes_of_their_own(folder):
    """They end with EngineCore's connection, as when its process dies; until then all are processes of the engine."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm_pd.v1.worker"])  # which takes longer than all that follows
    pipes, processes = [], []
    try:
        for rank in range(2):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=serve, args=(theirs, rank, folder), daemon=True))
            processes[-1].start()
            pipes.append(ours)
        assert all(pipe.poll(WAIT_S) for pipe in pipes)
        handshakes = {(0, rank): pipe.recv() for rank, pipe in enumerate(pipes)}
        assert [description(one).first_head for one in handshakes.values()] == [0, 2]
        member, _, transfer = attach_ranks(make_config(folder, ranks=2), Role.PREFILL, handshakes)
        assert [one.pid for one in member.processes] == [os.getpid(), *(process.pid for process in processes)]
        assert member.fingerprint.tp == 2 and member.role is Role.PREFILL
        transfer.start(lambda: None, lambda end: None)
        transfer.execute([Write("k", "nobody", [1], [1], [b"0", b"1"], 1)])
        for pipe in pipes:
            pipe.send("step")
        (end,) = finished(transfer, 1)
        assert "rank 0" in end.error and "rank 1" in end.error
        with pytest.raises(ControlError, match="rank 0"):  # they have an engine
            attach_ranks(make_config(folder, ranks=2), Role.PREFILL, handshakes)
        os.kill(processes[1].pid, 9)
        pipes[0].send("close")
        assert pipes[0].poll(WAIT_S) and pipes[0].recv() == "closed"
        assert not transfer.close()
        processes[0].join(WAIT_S)
        assert processes[0].exitcode == 0, "nothing but its own work ended it"
    finally:
        for process in processes:
            process.kill()
            process.join(60)


# An engine on two nodes.


def node_config(folder: Path, node: int, role: str = "kv_producer", **settings) -> VllmConfig:
    """What the plugin has made of the command line of that node of two."""
    config = make_config(folder, ranks=2)
    parallel = config.parallel_config
    parallel.world_size, parallel.nnodes, parallel.node_rank = 2, 2, node
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="PDConnector", kv_role="kv_both", kv_connector_extra_config={
            "broker": "tcp://127.0.0.1:5700", **settings, OWN_KEY: {"kv_role": role, "front": "ipc:///tmp/nobody"}})
    return config


def serve_node(pipe: Connection, node: int, folder: Path) -> None:
    """A worker process of that node, which has one rank."""
    os.environ.pop("UCX_TLS", None)
    place(pytest.MonkeyPatch(), node)
    made = RankWorker(node_config(folder, node))
    made.register_kv_caches(make_caches(ranks=2))
    pipe.send(made.handshake())
    while pipe.recv() == "ways":
        pipe.send(os.environ.get("UCX_TLS"))


@pytest.fixture
def nodes(folder) -> Iterator[tuple[list, list, dict]]:
    """The processes of both, the pipes to them, and their handshakes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm_pd.v1.worker"])
    pipes, processes = [], []
    for node in range(2):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=serve_node, args=(theirs, node, folder), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    assert all(pipe.poll(WAIT_S) for pipe in pipes)
    yield processes, pipes, {(0, node): pipe.recv() for node, pipe in enumerate(pipes)}
    for process in processes:
        process.kill()


def test_b21_b101_a_rank_on_another_node(folder, nodes):
    """Its engine hears of its end, which the executor does not see, and its guardian is one of the engine's processes.
    For its peers the engine is on another machine, and it uses the network only. B21, B101."""
    processes, pipes, handshakes = nodes
    lost: queue.Queue[str] = queue.Queue()
    here, there = handshakes.values()
    assert here.remote is None and there.address == b"" and pickle.loads(pickle.dumps(there)) == there
    member, _, transfer = attach_ranks(node_config(folder, 0), Role.PREFILL, handshakes, lost=lost.put)
    transfer.start(lambda: None, lambda end: None)
    own, first, guardian = member.processes
    assert (own, first.pid) == (this_process(), processes[0].pid) and guardian.pid not in {p.pid for p in processes}
    assert process_lost(member) is None and member.host_id == f"several-{member.incarnation}"
    for pipe in pipes:
        pipe.send("ways")
        assert pipe.poll(WAIT_S) and pipe.recv().startswith("^sm,")
    processes[1].kill()
    assert lost.get(timeout=WAIT_S).startswith(f"rank 1 on node 1 ({there.remote.url}) is gone")
    wait_for(lambda: process_lost(member) == guardian, "the guardian ends, for all it guarded are gone")
    assert not transfer.close()


def test_b80_nodes_that_differ_are_refused_by_name(folder, nodes):
    """B80: with what each has, before anything is attached."""
    *_, handshakes = nodes

    def attach(there: RankHandshake | None, config: VllmConfig | None = None) -> None:
        given = {(0, 0): handshakes[0, 0]} | ({} if there is None else {(0, 1): there})
        attach_ranks(config or node_config(folder, 0), Role.PREFILL, given)

    there = handshakes[0, 1]
    with pytest.raises(ConfigError, match="kv_transfer_config=None.*the ranks of node 1 lack it"):
        attach(None)
    for name, other in (("vllm", "0.31.0"), ("vllm-pd", "7"), ("model", "Other:0")):
        same = tuple((key, other if key == name else value) for key, value in there.same)
        with pytest.raises(ConfigError, match=f"{name}='{other}' can't be used: node 1 has that, and node 0 has "):
            attach(dataclasses.replace(there, same=same))
    with pytest.raises(ConfigError, match="kv_role='kv_producer'.*node 1 has that, and node 0 has kv_consumer"):
        attach(there, node_config(folder, 0, "kv_consumer"))
    with pytest.raises(ConfigError, match="max_local_prefill_tokens='1000'.*node 0 has 7"):
        attach(there, node_config(folder, 0, max_local_prefill_tokens=7))
    attach_ranks(node_config(folder, 0, bind="tcp://127.0.0.2:0", zone="a"), Role.PREFILL, handshakes)[2].close()


def test_b80_a_node_whose_ports_are_taken_is_refused(folder, monkeypatch):
    """B80: the rank's number on its node is added to both."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for key, settings in (("bind", {"bind": f"tcp://127.0.0.1:{port}"}),
                              ("lifeline_port", {"lifeline_port": port})):
            place(monkeypatch, 1)
            made = RankWorker(node_config(folder, 1, **settings))
            with pytest.raises(ConfigError, match=f"{key}=.*rank 1 can't listen there"):
                made.register_kv_caches(make_caches(ranks=2))
            made.close()
