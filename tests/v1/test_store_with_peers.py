# SPDX-License-Identifier: Apache-2.0
"""PDConnector with the store in the worker, in V1's own hands (B104): what it puts, what it reports and how."""
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import Counter as MetricCounter
from prometheus_client import Gauge, Histogram
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.attention import attention
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin
from vllm.v1.worker.gpu_worker import Worker

from tests.v1 import test_store_connector as alone
from tests.v1.test_store_connector import BLOCKS, CONTENT, HEADS, LAYERS, MEMORY_GIB, NAMES, TOKENS, block_named
from vllm_pd.handover.metrics import HandoverFamilies
from vllm_pd.handover.reload import WEIGHT_CALLS
from vllm_pd.store.store import BlockStore
from vllm_pd.v1.store import with_peers

RANK = "what a rank says of itself"
STOPPED = with_peers.StoreReport(0, True)


class FakeRank:
    """In the place of `RankWorker`."""

    def __init__(self, config, state_layers, index_layers, mixed_groups):
        self.steps = []

    def register_kv_caches(self, caches):
        self.caches = caches

    def handshake(self):
        return RANK

    def begin_step(self, brings_kv):
        self.steps.append(("begins", brings_kv))

    def end_forward(self, step):
        self.steps.append(("ends", step, sys.exc_info()[0]))

    def end_drafts(self, step):
        """Nothing: there is no drafter with the store."""

    def close(self):
        self.steps.append("closed")


@pytest.fixture
def worker(model_folder, monkeypatch):
    folder = Path(tempfile.mkdtemp(prefix="vllm-pd-test-", dir="/dev/shm"))
    monkeypatch.setattr("vllm_pd.v1.worker.RankWorker", FakeRank)
    monkeypatch.setattr("vllm_pd.v1.fingerprint.engine_name", lambda config, layers: "engine")
    monkeypatch.setattr("vllm_pd.v1.fingerprint.fingerprint", lambda config, cache, engine: engine)
    monkeypatch.setattr("vllm_pd.model.store_checks.pin_weights", lambda config, given: None)
    for name in WEIGHT_CALLS:
        monkeypatch.setattr(Worker, name, lambda self: None)
    config = VllmConfig(
        model_config=ModelConfig(model=str(model_folder), max_model_len=512, dtype="float32", skip_tokenizer_init=True),
        cache_config=CacheConfig(block_size=TOKENS), kv_transfer_config=KVTransferConfig(
            kv_connector="PDConnectorWithStore", kv_connector_module_path="vllm_pd.v1.store.with_peers",
            kv_role="kv_both", kv_load_failure_policy="recompute",
            kv_connector_extra_config={"store": {"folder": str(folder), "memory_gib": MEMORY_GIB}}))
    config.cache_config.num_gpu_blocks, config.cache_config.kv_cache_layout = BLOCKS, "LBHNC"
    made = with_peers.PDConnectorWithStore(config, KVConnectorRole.WORKER, alone.cache_of())
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", made)
    monkeypatch.setattr(mixin, "get_forward_context", lambda: None)
    monkeypatch.setattr(attention, "get_attention_context", lambda layer: ("metadata", None, None, None))
    caches = torch.arange(BLOCKS, dtype=torch.float32).repeat(LAYERS, 1)[..., None, None, None]
    made.register_kv_caches(dict(zip(NAMES, caches.repeat(1, 1, HEADS, TOKENS, CONTENT), strict=True)))
    yield made
    made.shutdown()
    assert made._rank.steps[-1] == "closed"
    shutil.rmtree(folder)


def run(connector, number, puts=(), loads=None, error=None, gone=(), layers=NAMES):
    """One step, which fills these blocks, as far as these layers compute, and begins these loads; these requests have
    ended before it. Its output."""
    step = with_peers.StoreStep(number, True, loads or {}, [block_named(one) for one in puts])
    metadata = with_peers.PairedStep(with_peers.StepMetadata(number, number == 2), step)
    output = SimpleNamespace(kv_connector_metadata=metadata, has_sync_kv_loads=False,
                             finished_req_ids=set(gone))
    connector.handle_preemptions(metadata)
    with mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(output) as found:
        for name in layers:
            connector.save_kv_layer(name, None, None)
        if error is not None:
            raise error
    return found


def is_stored(connector, block):
    """Whether another engine finds the block."""
    return alone.is_stored(connector._store, block)


def test_b104_a_step_that_fails_puts_nothing_and_neither_do_later_ones(worker):
    """B104: nothing of an aborted forward pass is published, whoever of the layers had ended."""
    run(worker, 1, [1])
    with pytest.raises(RuntimeError):
        run(worker, 2, [2], error=RuntimeError("in the forward pass"), layers=NAMES[:-1])
    assert run(worker, 3, [3]).kv_connector_worker_meta == with_peers.LoadReport(Counter(), set(), STOPPED)
    assert [is_stored(worker, block) for block in (1, 2, 3)] == [True, False, False]
    assert worker._rank.steps == [("begins", False), ("ends", 1, None), ("begins", True), ("ends", 2, RuntimeError),
                                  ("begins", False), ("ends", 3, None)]


def test_b104_b95_ends_of_loads_are_not_in_the_sets_of_v1(worker):
    """B95: V1 ends at an id that it does not know, and an aborted request is gone at once."""
    run(worker, 1, [1])
    found, number = run(worker, 2, loads={"right": [block_named(1)], "wrong": [block_named(2)]}), 3
    ended, failed, deadline_s = set(), set(), time.monotonic() + 30
    while len(ended) < 2:
        assert time.monotonic() < deadline_s
        assert not (found.finished_recving or found.finished_sending or found.failed_recving)
        assert not found.invalid_block_ids
        report = found.kv_connector_worker_meta
        if report is not None:
            assert not ended & report.ended.keys() and set(report.ended.values()) == {1}, "reported twice"
            ended, failed = ended | report.ended.keys(), failed | report.failed
        found, number = run(worker, number), number + 1
    assert failed == {"wrong"} and found.kv_connector_worker_meta is None


def test_b104_b25_the_load_of_a_request_that_is_gone_stops(worker, monkeypatch):
    """B104, B25: after the block that it is at. It is reported: its blocks wait for that."""
    copies, begun, goes_on, get = [], threading.Event(), threading.Event(), BlockStore.get

    def slow(store, key, rows, load):
        copies.append(key)
        begun.set()
        goes_on.wait(30)
        return get(store, key, rows, load)

    monkeypatch.setattr(BlockStore, "get", slow)
    run(worker, 1, [1, 2, 3])
    run(worker, 2, loads={"a": [block_named(one) for one in (1, 2, 3)]})
    assert begun.wait(30)
    found, number = run(worker, 3, gone=["a", "never loaded"]), 4
    goes_on.set()
    deadline_s = time.monotonic() + 30
    while found.kv_connector_worker_meta is None:
        assert time.monotonic() < deadline_s
        found, number = run(worker, number), number + 1
    assert found.kv_connector_worker_meta.failed == {"a"} and len(copies) == 1
    found = run(worker, number, loads={"a": [block_named(1)]}, gone=["a"])
    while found.kv_connector_worker_meta is None:
        assert time.monotonic() < deadline_s
        number += 1
        found = run(worker, number)
    assert not found.kv_connector_worker_meta.failed, "one that begins with this step is of another request"


def test_b104_the_reports_of_several_ranks_with_one_step_are_added():
    """B104: by vLLM's own aggregator, in the form that it has for a connector. One rank's failure is that of all."""
    reports = [with_peers.LoadReport(Counter(ended), failed, with_peers.StoreReport(0, ended == "bc"))
               for ended, failed in (("ab", {"a"}), ("bc", set()), ("b", {"b"}))]
    outputs = [ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=one))
               for one in (reports[0], None, *reports[1:])]
    found = KVOutputAggregator(4).aggregate(outputs).kv_connector_output.kv_connector_worker_meta
    assert found == with_peers.LoadReport(Counter(a=1, b=3, c=1), {"a", "b"}, STOPPED)


def test_the_handshake_has_both(worker):
    theirs = worker.get_handshake_metadata()
    assert theirs.rank == RANK and theirs.store == worker._store.get_handshake_metadata()


def test_the_figures_of_both_reach_the_metrics(worker):
    """Through one class of V1's statistics, which adds the worker's to the scheduler's."""
    stored = run(worker, 1, [1]).kv_connector_stats
    scheduler = with_peers.HandoverStats({"calls": [["attempt", "done"]]})
    config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="both"), kv_transfer_config=None)
    types = {kind: kind for kind in (Gauge, MetricCounter, Histogram)}
    front = with_peers.PDConnectorWithStore
    shown = front.build_prom_metrics(config, types, ["model_name", "engine"], {5: ["both", "5"]})
    sent = front.build_kv_connector_stats(stored.aggregate(scheduler).to_dict())
    shown.observe(sent.to_dict(), 5)
    values = {(sample.name, *sample.labels.values()): sample.value for families in (
        alone.StoreFamilies.of_process(True), HandoverFamilies.of_process(True)) for family in families.collect()
        for sample in family.samples}
    assert values["vllm:pd_store_blocks_total", "both", "5", "stored"] == 1
    assert values["vllm:pd_attempts_total", "both", "5", "done"] == 1
