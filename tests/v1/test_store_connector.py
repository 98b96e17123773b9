# SPDX-License-Identifier: Apache-2.0
"""PDStoreConnector in V1's own hands, without an engine: steps that fail, and calls that come at any time."""
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from prometheus_client import Counter, Gauge, Histogram
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.attention import attention, kv_transfer_utils
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin
from vllm.v1.worker.gpu import kv_connector as second_runner
from vllm.v1.worker.gpu_worker import Worker

from vllm_pd.errors import ConfigError
from vllm_pd.handover.reload import WEIGHT_CALLS
from vllm_pd.store.blocks import BlockKey
from vllm_pd.store.copies import DeviceCopies
from vllm_pd.store.metrics import StoreFamilies
from vllm_pd.store.plan import NamedBlock
from vllm_pd.store.store import BlockStore
from vllm_pd.store.worker import StoreWorker
from vllm_pd.v1.plugin import register
from vllm_pd.v1.store import connector as connector_module
from vllm_pd.v1.store.connector import PDStoreConnector, StoreHandshake, StoreReport, StoreStep
from vllm_pd.v1.store.stats import StoreStats

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 8, 2, 16, 64
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
MEMORY_GIB = 0.01
SHAPE = dict(block_size=TOKENS, num_kv_heads=HEADS, head_size=CONTENT // 2, dtype=torch.float32)
FULL = FullAttentionSpec(**SHAPE)
PREFIX_LM = FullAttentionSpec(**SHAPE, non_causal=True)


def cache_of(spec: KVCacheSpec = FULL) -> KVCacheConfig:
    """All layers in one group."""
    return KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(NAMES, spec)])


@pytest.fixture
def settings():
    """Of all engines of a test."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-pd-test-", dir="/dev/shm"))
    yield {"folder": str(folder), "memory_gib": MEMORY_GIB}
    shutil.rmtree(folder)


@pytest.fixture
def make(settings, model_folder, monkeypatch):
    """Makes a connector in a role; in that of the worker with caches whose blocks have their number as content."""
    register()
    # What reads a model that is loaded.
    monkeypatch.setattr("vllm_pd.v1.fingerprint.engine_name", lambda config, layers: "engine")
    monkeypatch.setattr("vllm_pd.v1.fingerprint.fingerprint", lambda config, cache, engine: engine)
    monkeypatch.setattr("vllm_pd.model.store_checks.pin_weights", lambda config, given: None)
    made, reloads = [], []

    def one(role: KVConnectorRole, spec: KVCacheSpec = FULL, rank: int = 0, ranks: int = 1) -> PDStoreConnector:
        config = VllmConfig(
            model_config=ModelConfig(model=str(model_folder), max_model_len=512, dtype="float32",
                                     skip_tokenizer_init=True), cache_config=CacheConfig(block_size=TOKENS),
            kv_transfer_config=KVTransferConfig(
                kv_connector="PDStoreConnector", kv_role="kv_both", kv_load_failure_policy="recompute",
                kv_connector_extra_config=settings))
        config.cache_config.num_gpu_blocks = BLOCKS
        config.parallel_config.rank, config.parallel_config.world_size = rank, ranks
        if role is KVConnectorRole.WORKER:
            for name in WEIGHT_CALLS:
                monkeypatch.setattr(Worker, name, lambda self, path, name=name: reloads.append((name, path)))
        made.append(PDStoreConnector(config, role, cache_of(spec)))
        if role is KVConnectorRole.WORKER:
            caches = torch.arange(BLOCKS, dtype=torch.float32).repeat(LAYERS, 1)[..., None, None, None]
            monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", made[-1])
            made[-1].register_kv_caches(dict(zip(NAMES, caches.repeat(1, 1, HEADS, TOKENS, CONTENT), strict=True)))
        return made[-1]

    one.reloads = reloads
    yield one
    for connector in made:
        connector.shutdown()


@pytest.fixture
def worker(make, monkeypatch):
    """The connector of a worker, as the model runner and the attention layers find it."""
    connector = make(KVConnectorRole.WORKER)
    monkeypatch.setattr(mixin, "get_forward_context", lambda: None)
    monkeypatch.setattr(attention, "get_attention_context", lambda layer: ("metadata", None, None, None))
    monkeypatch.setitem(globals(), "attend", kv_transfer_utils.maybe_transfer_kv_layer(attend))
    return connector


def attend(layer_name: str) -> None:
    """An attention layer; `worker` decorates it as vLLM does."""


def block_named(number: int) -> tuple[bytes, int]:
    return bytes([number]) * 32, number


def output_of(number: int, block: int) -> SimpleNamespace:
    return SimpleNamespace(kv_connector_metadata=StoreStep(number, True, {}, [block_named(block)]),
                           has_sync_kv_loads=False, finished_req_ids=set())


def compute(number: int, block: int, layers: int = LAYERS, error: BaseException | None = None) -> KVConnectorOutput:
    """A step that fills a block, in the first model runner's context manager; `error` after so many layers."""
    with mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(output_of(number, block)) as output:
        for name in NAMES[:layers]:
            attend(name)
        if error is not None:
            raise error
    return output


def is_stored(connector: PDStoreConnector, block: int) -> bool:
    """Whether another engine finds the block."""
    told = connector.get_handshake_metadata()
    other = BlockStore(connector._settings, told.slot_bytes)
    with memoryview(bytearray(told.slot_bytes)) as out:
        found = other.get(BlockKey(told.model, block_named(block)[0]), [out])
    other.close()
    return found


@pytest.mark.parametrize("spec, words", [
    (PREFIX_LM, "non_causal.*without the store"),
    (UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=dict(zip(NAMES, (FULL, PREFIX_LM), strict=False))),
     "non_causal.*without the store"),
    (SlidingWindowSpec(**SHAPE, sliding_window=64), "SlidingWindowSpec.*one group"),
], ids=["all layers", "one layer", "windows"])
def test_b80_b104_kv_that_does_not_follow_from_the_tokens_before_is_refused(make, spec, words):
    """B80, B104: a block is named by the tokens up to its end."""
    with pytest.raises(ConfigError, match=f"kv_cache_groups=.*{words}"):
        make(KVConnectorRole.SCHEDULER, spec)


@pytest.mark.parametrize("error", [RuntimeError("in the forward pass"), SystemExit()], ids=["raises", "SIGTERM"])
@pytest.mark.parametrize("layers", [0, LAYERS - 1])
def test_b104_a_step_that_fails_puts_nothing(worker, error, layers):
    """B104: V1 asks for the results also while an exception leaves the step. What it did not compute is not stored, and
    neither is what later steps compute from it."""
    compute(1, 1)
    assert is_stored(worker, 1)
    with pytest.raises(type(error)):
        compute(2, 2, layers, error)
    compute(3, 3)
    assert is_stored(worker, 1) and not is_stored(worker, 2) and not is_stored(worker, 3)


def test_b104_a_step_of_the_second_runner_that_fails_puts_nothing(worker, monkeypatch):
    """B104: it does not ask at all for the results of a step that raised."""
    runner = object.__new__(second_runner.ActiveKVConnector)
    runner.kv_connector, runner._disabled = worker, False
    monkeypatch.setattr(second_runner, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(second_runner, "get_forward_context", lambda: None)
    for number, fails in ((1, False), (2, True), (3, False)):
        runner.pre_forward(output_of(number, number))
        for name in NAMES[:1 if fails else LAYERS]:
            attend(name)
        if not fails:
            runner.post_forward(set())
    assert is_stored(worker, 1) and not is_stored(worker, 2) and not is_stored(worker, 3)


class DeviceAtOnce:
    """In the place of `CudaCache`: a device whose work is done when it is launched. It has two rows."""

    rows = 2

    def __init__(self, parts, buffer_bytes):
        self._parts = [part.numpy() for part in parts]
        self._buffer = [np.empty_like(part[:2]) for part in self._parts]

    def use(self):
        pass

    def gather(self, block_ids, first_row):
        for part, rows in zip(self._parts, self._buffer, strict=True):
            rows[first_row:first_row + len(block_ids)] = part[list(block_ids)]

    def copy_out(self, first_row, count, after):
        pass

    def copy_in(self, block_id, after):
        pass

    def wait(self, event):
        pass

    def row(self, row):
        return [rows[row] for rows in self._buffer]

    def loaded(self):
        return [np.empty(part.shape[1], np.uint8) for part in self._parts]


@pytest.fixture
def on_device(monkeypatch):
    """The caches of the workers that are made from now on count as on a device."""
    def copies(worker, settings, parts):
        worker.on_device = True
        return DeviceCopies(worker.store, DeviceAtOnce(parts, settings.pinned_bytes))

    monkeypatch.setattr(StoreWorker, "_copies", copies)


def report_after(number: int, ended: int, **step) -> KVConnectorOutput:
    """What the worker says when so many blocks are in the store, or at the latest after 30 s."""
    deadline_s = time.monotonic() + 30
    while True:
        found = compute(number, **step) if step else step_without_tokens(number)
        if found.kv_connector_worker_meta.ended >= ended or time.monotonic() > deadline_s:
            return found
        number, step = number + 1, {}


def step_without_tokens(number: int) -> KVConnectorOutput:
    empty = output_of(number, 1)
    empty.kv_connector_metadata = StoreStep(number)
    with mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(empty) as output:
        pass
    return output


@pytest.mark.parametrize("error", [RuntimeError("in the forward pass"), SystemExit()], ids=["raises", "SIGTERM"])
def test_b104_on_a_device_no_layer_reports_and_steps_that_fail_put_nothing(on_device, worker, error):
    """B104: graphs run no Python, so what counts is whether an exception leaves the step."""
    assert worker.get_handshake_metadata().rows == 2
    assert report_after(1, 1, block=1, layers=0).kv_connector_worker_meta == StoreReport(1)
    assert is_stored(worker, 1)
    with pytest.raises(type(error)):
        compute(100, 2, 0, error)
    assert step_without_tokens(101).kv_connector_worker_meta == StoreReport(1, True)
    assert not is_stored(worker, 2)


def test_b104_the_second_runner_copies_blocks_out_before_it_samples(on_device, worker, monkeypatch):
    """B104: so when EngineCore has the tokens, nobody reads the step's blocks any more. Once for each step."""
    runner = object.__new__(second_runner.ActiveKVConnector)
    runner.kv_connector, runner._disabled = worker, False
    monkeypatch.setattr(second_runner, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(second_runner, "get_forward_context", lambda: None)
    for number in (1, 2):
        runner.pre_forward(output_of(number, number))
        runner.finish_forward()
        assert worker._worker.copies._gathered == number
        runner.post_forward(set())
        assert worker._worker.copies._gathered == number


def test_b104_the_scheduler_sends_no_more_blocks_than_there_are_rows(on_device, make, worker, monkeypatch):
    """B104: the others come with later steps."""
    scheduler = make(KVConnectorRole.SCHEDULER)
    scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
    scheduler.bind_kv_cache_manager(SimpleNamespace(get_block_ids=lambda request_id: ([1, 2, 3, 4, 5], )))
    request = request_named("a", 1, 2, 3, 4, 5)
    scheduler.on_new_request(request)

    def put(before: int, tokens: int, ended: int | None) -> list[int]:
        if ended is not None:
            scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=StoreReport(ended)))
        cached = SimpleNamespace(req_ids=["a"], num_computed_tokens=[before])
        step = scheduler.build_connector_meta(SimpleNamespace(
            total_num_scheduled_tokens=tokens, scheduled_new_reqs=[], scheduled_cached_reqs=cached,
            num_scheduled_tokens={"a": tokens}))
        return [block for _, block in step.puts]

    assert put(0, 5 * TOKENS, None) == [1, 2] and put(5 * TOKENS, 1, 0) == []
    assert put(5 * TOKENS + 1, 1, 1) == [3]
    monkeypatch.setattr(connector_module, "IDLE_S", -1.0)  # nothing was heard for long: all of it has arrived
    assert put(5 * TOKENS + 2, 1, None) == [4, 5] and put(5 * TOKENS + 3, 1, 5) == []


def test_a_step_without_tokens_computes_nothing_and_is_whole(worker):
    empty = output_of(1, 1)
    empty.kv_connector_metadata = StoreStep(1)
    with mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(empty):
        pass
    compute(2, 2)
    assert is_stored(worker, 2)


def end_of_load(connector: PDStoreConnector) -> bool:
    """Whether the load that is in flight has succeeded."""
    deadline_s = time.monotonic() + 30
    while not (results := connector.get_transfer_results(set())).finished_recving:
        assert time.monotonic() < deadline_s
    return not results.failed_recving


def test_b104_a_load_that_fails_is_not_tried_again(make, worker):
    """B104: or a disk that fails would hold up the request for ever."""
    compute(1, 1)
    scheduler = make(KVConnectorRole.SCHEDULER)
    scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
    request = request_named("a", 1)
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (TOKENS, True)
    scheduler.update_connector_output(KVConnectorOutput(failed_recving={"a"}, finished_recving={"a"}))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


def test_b104_a_session_that_goes_on_with_an_image_is_put_so_far(make, worker):
    """B104: what comes after an image depends on how this engine prepares images, which no name says. V1 adds what
    further input has to the request that it knows."""
    scheduler = make(KVConnectorRole.SCHEDULER)
    scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
    scheduler.bind_kv_cache_manager(SimpleNamespace(get_block_ids=lambda name: ([1, 2], )))
    session = SimpleNamespace(request_id="a", mm_features=[], prompt_embeds=None, sampling_params=None,
                              num_tokens=TOKENS, block_hashes=[block_named(1)[0]])
    scheduler.on_new_request(session)

    def puts(before: int) -> list[tuple[bytes, int]]:
        cached = SimpleNamespace(req_ids=["a"], num_computed_tokens=[before])
        return scheduler.build_connector_meta(SimpleNamespace(
            total_num_scheduled_tokens=TOKENS, scheduled_new_reqs=[], scheduled_cached_reqs=cached,
            num_scheduled_tokens={"a": TOKENS})).puts

    assert puts(0) == [block_named(1)]
    session.mm_features.append("image")
    session.num_tokens, session.block_hashes = 2 * TOKENS, [block_named(1)[0], block_named(2)[0]]
    assert puts(TOKENS) == []
    scheduler.request_finished(session, [1, 2])
    assert not any(scheduler.debug_state().values())


def test_b104_a_load_ends_after_the_cache_was_reset(make, worker):
    """B104: the weights may be others, so this engine uses the store no more, and what it loads just then fails."""
    scheduler = make(KVConnectorRole.SCHEDULER)
    assert scheduler.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=1)) == StoreStep(1, True)
    scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
    assert scheduler.reset_cache()
    scheduler.update_connector_output(KVConnectorOutput(failed_recving={"a"}, finished_recving={"a"}))
    step = scheduler.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=0))
    assert step == StoreStep(2, stops=True)
    compute(1, 1)
    for stops, is_loaded in ((False, True), (True, False)):
        worker.bind_connector_metadata(StoreStep(2, stops=stops))
        worker._worker.begin_loads({"a": [NamedBlock(*block_named(1))]})
        assert end_of_load(worker) is is_loaded
    compute(3, 3)
    assert is_stored(worker, 1) and not is_stored(worker, 3)


def test_b104_an_engine_with_other_weights_has_other_blocks(make, monkeypatch):
    """B104: of the same sizes, in the same folder, where the fingerprint may be the same."""
    first = make(KVConnectorRole.WORKER).get_handshake_metadata()
    assert make(KVConnectorRole.WORKER).get_handshake_metadata() == first
    monkeypatch.setattr("vllm_pd.v1.store.connector.weights_state", lambda config, given: "other")
    assert make(KVConnectorRole.WORKER).get_handshake_metadata().model != first.model


@pytest.mark.parametrize("name", WEIGHT_CALLS)
def test_b104_weights_that_are_loaded_anew_are_another_models(make, worker, name):
    """B104: `collective_rpc("reload_weights")`. The digest is of the old ones: this engine uses the store no more."""
    compute(1, 1)
    getattr(Worker, name)(object(), "path")
    assert make.reloads == [(name, "path")]
    compute(2, 2)
    assert is_stored(worker, 1) and not is_stored(worker, 2)
    worker.bind_connector_metadata(StoreStep(3))
    worker._worker.begin_loads({"a": [NamedBlock(*block_named(1))]})
    assert not end_of_load(worker)


def test_b104_where_a_rank_uses_the_store_no_more_no_load_is_offered(make, worker):
    """B104: each would begin and fail. The rank says so until EngineCore does."""
    scheduler, request = make(KVConnectorRole.SCHEDULER), request_named("a", 1)
    scheduler.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
    scheduler.on_new_request(request)
    outputs = [compute(1, 1), KVConnectorOutput()]
    Worker.reload_weights(object(), "path")
    outputs += [compute(2, 2), compute(3, 3)]
    gather = KVOutputAggregator(2)
    for pair, offered in ((outputs[:2], (TOKENS, True)), (outputs[1:3], (0, False)), (outputs[2:], (0, False))):
        both = gather.aggregate([ModelRunnerOutput([], {}, kv_connector_output=one) for one in pair])
        scheduler.update_connector_output(both.kv_connector_output)
        assert scheduler.get_num_new_matched_tokens(request, 0) == offered
    step = scheduler.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=0))
    assert step.stops
    worker.bind_connector_metadata(step)
    assert worker.build_connector_worker_meta() is None


def request_named(name: str = "a", *blocks: int) -> SimpleNamespace:
    """One whose prompt has these blocks, and a token more."""
    return SimpleNamespace(request_id=name, mm_features=[], prompt_embeds=None, sampling_params=None, num_preemptions=0,
                           num_tokens=len(blocks) * TOKENS + 1, block_hashes=[block_named(one)[0] for one in blocks])


def test_b104_a_block_is_a_hit_if_each_rank_has_put_its_part(make):
    """B104: each loads its own and no other, and where one of them is gone by then, the load has failed."""
    workers = [make(KVConnectorRole.WORKER, rank=rank, ranks=2) for rank in range(2)]
    scheduler, request = make(KVConnectorRole.SCHEDULER, ranks=2), request_named("a", 1, 2)
    scheduler.set_xfer_handshake_metadata_pp_aware(
        {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(workers)})
    scheduler.on_new_request(request)
    both = [NamedBlock(*block_named(number)) for number in (1, 2)]
    for rank, worker in enumerate(workers):
        for part in worker._worker.copies._parts:
            part[:] = 10 + rank
        worker._worker.put(both[rank:])
        assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    workers[1]._worker.put(both)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (2 * TOKENS, True)
    gather, ended = KVOutputAggregator(2), []
    for gone in (False, True):
        if gone:
            shown = workers[1].get_handshake_metadata()
            with workers[1]._worker.store.arena.hold(BlockKey(shown.model, both[0].name), shown.slot_bytes) as held:
                held.bytes[7] ^= 1
        for worker in workers:
            for part in worker._worker.copies._parts:
                part[:] = 0
            worker.bind_connector_metadata(StoreStep(1))
            worker._worker.begin_loads({"a": both})
        deadline_s = time.monotonic() + 30
        while len(ended) <= gone:
            assert time.monotonic() < deadline_s
            outputs = [ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(**{
                "finished_recving": results.finished_recving, "failed_recving": results.failed_recving}))
                for results in (worker.get_transfer_results(set()) for worker in workers)]
            found = gather.aggregate(outputs).kv_connector_output
            ended += [found.failed_recving] if found.finished_recving else []
        if not gone:
            for rank, worker in enumerate(workers):
                assert all((part[1:3] == 10 + rank).all() for part in worker._worker.copies._parts)
    assert ended == [set(), {"a"}]


@pytest.mark.parametrize("ranks", [[0], [0, 0], [0, 1, 2]], ids=str)
def test_b104_a_rank_that_has_not_said_which_blocks_are_its_own(make, ranks):
    """B104: or a block would be a hit that is not whole, or be another rank's."""
    scheduler, worker = make(KVConnectorRole.SCHEDULER, ranks=2), make(KVConnectorRole.WORKER)
    theirs = worker.get_handshake_metadata()
    with pytest.raises(ConfigError, match="tensor_parallel_size=2.*each rank must have its part"):
        scheduler.set_xfer_handshake_metadata({number: replace(theirs, model=bytes([rank]) * 16)
                                               for number, rank in enumerate(ranks)})
    with pytest.raises(ConfigError, match="all of one size"):
        scheduler.set_xfer_handshake_metadata({rank: StoreHandshake(bytes([rank]) * 16, 4096 + rank)
                                               for rank in range(2)})


def test_a_child_of_another_connector_is_refused(make, monkeypatch):
    connector = make(KVConnectorRole.SCHEDULER)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", object())
    with pytest.raises(ConfigError, match="kv_connector='object' can't be used: name PDStoreConnector by itself"):
        connector.register_kv_caches({})


def test_the_figures_reach_the_metrics(worker):
    """From the worker's steps, as plain values, to the counters in the front end: each once."""
    first = compute(1, 1).kv_connector_stats
    assert first.data == {"stored": 1} and worker.get_kv_connector_stats() is None
    worker.bind_connector_metadata(StoreStep(2))
    worker._worker.begin_loads({"a": [NamedBlock(*block_named(1))], "b": [NamedBlock(*block_named(2))]})
    later = StoreStats({})
    deadline_s = time.monotonic() + 30
    while len(later.data) < 4:
        assert time.monotonic() < deadline_s
        worker.get_transfer_results(set())
        later = later.aggregate(worker.get_kv_connector_stats() or StoreStats({}))
    assert later.data == {"memory": 1, "missing": 1, "loaded": 1, "failed": 1}
    config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="store"), kv_transfer_config=None)
    types = {kind: kind for kind in (Gauge, Counter, Histogram)}
    shown = PDStoreConnector.build_prom_metrics(config, types, ["model_name", "engine"], {3: ["store", "3"]})
    for one in (first, later):
        shown.observe(PDStoreConnector.build_kv_connector_stats(one.data).to_dict(), 3)
    values = {(sample.name, *sample.labels.values()): sample.value
              for family in StoreFamilies.of_process(True).collect() for sample in family.samples}
    assert values["vllm:pd_store_blocks_total", "store", "3", "stored"] == 1
    assert values["vllm:pd_store_loads_total", "store", "3", "failed"] == 1
    assert values["vllm:pd_store_loads_total", "store", "3", "overdue"] == 0
