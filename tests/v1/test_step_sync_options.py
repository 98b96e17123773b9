# SPDX-License-Identifier: Apache-2.0
"""How an engine comes to count its steps, and what is refused before a model is loaded (B70, B80)."""
import contextlib
import copy
import json
import pickle
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from torch.distributed import HashStore
from vllm.config import ParallelConfig
from vllm.distributed.utils import stateless_destroy_torch_distributed_process_group
from vllm.v1.engine.core import DPEngineCoreProc

from vllm_pd.dp.interface import GroupFailed
from vllm_pd.errors import ConfigError
from vllm_pd.model.offloading import is_named
from vllm_pd.v1.lockstep import mark
from vllm_pd.v1.lockstep.core import StepSyncCore, adopt
from vllm_pd.v1.lockstep.mark import Mark, claim_step_sync
from vllm_pd.v1.lockstep.options import ADDITIONAL_KEY, StepSyncOptions, parse
from vllm_pd.v1.lockstep.store import over_store


def configuration(additional=None, *, ranks: int = 2, experts: bool = True, interval: int = 1, **parallel):
    """The part of a VllmConfig that is read."""
    parallel = {"data_parallel_size": ranks, "enable_elastic_ep": False, "enable_fault_tolerance": False,
                "data_parallel_backend": "mp", "distributed_executor_backend": "uni",
                "data_parallel_master_ip": "127.0.0.1", "data_parallel_hybrid_lb": False, "data_parallel_rank": 1,
                **parallel}
    encoders = parallel.pop("encoders", None)
    return SimpleNamespace(additional_config={} if additional is None else additional, ec_transfer_config=encoders,
                           parallel_config=SimpleNamespace(**parallel),
                           model_config=SimpleNamespace(is_moe=experts),
                           scheduler_config=SimpleNamespace(prefill_schedule_interval=interval))


def test_b70_a_mark_goes_to_the_processes_of_an_engine_and_says_what_the_user_wrote():
    written = {ADDITIONAL_KEY: {"horizon": 4, "shared_memory": False}, "other": 1}
    config = configuration(written)
    claim_step_sync(config)
    claim_step_sync(config)
    assert type(written[ADDITIONAL_KEY]) is dict, "the user's own was changed"
    sent = pickle.loads(pickle.dumps(config.additional_config))
    assert type(sent[ADDITIONAL_KEY]) is Mark and sent["other"] == 1
    assert parse(dict(sent[ADDITIONAL_KEY])) == StepSyncOptions(horizon=4, shared_memory=False)
    json.dumps(sent, sort_keys=True)  # vLLM hashes it so


@pytest.mark.parametrize(("additional", "asks", "marked"), [
    (None, False, False), (None, True, True), ({ADDITIONAL_KEY: True}, False, True),
    ({ADDITIONAL_KEY: {"horizon": 2}}, False, True), ({ADDITIONAL_KEY: {}}, False, True),
    ({ADDITIONAL_KEY: False}, False, False), ({"dp_sync": {"horizon": 3}}, False, False)])
def test_b70_who_does_not_ask_has_waves(additional, asks, marked):
    config = configuration(additional)
    before = config.additional_config
    claim_step_sync(config, asks)
    assert isinstance(config.additional_config.get(ADDITIONAL_KEY), Mark) is marked
    assert marked or config.additional_config is before


@pytest.mark.parametrize("other", [{"ranks": 1}, {"experts": False}])
def test_where_no_ranks_run_in_lockstep_there_is_nothing_to_count(other):
    config = configuration({ADDITIONAL_KEY: True}, **other)
    claim_step_sync(config, True)
    assert config.additional_config == {ADDITIONAL_KEY: True}
    assert not isinstance(config.additional_config[ADDITIONAL_KEY], Mark)


@pytest.mark.parametrize(("additional", "more", "match"), [
    ({ADDITIONAL_KEY: "yes"}, {}, "vllm_pd_step_sync='yes'.*write true, false"),
    ({ADDITIONAL_KEY: {"horizn": 4}}, {}, "horizn.*the keys are horizon"),
    ({ADDITIONAL_KEY: {"horizon": 0}}, {}, "vllm_pd_step_sync.horizon=0"),
    ({ADDITIONAL_KEY: {"stall_s": 0}}, {}, "vllm_pd_step_sync.stall_s=0"),
    ({ADDITIONAL_KEY: {"lockstep": True}}, {}, "vllm_pd_step_sync.lockstep=True"),
    ({ADDITIONAL_KEY: {"call_wait_s": -1}}, {}, "vllm_pd_step_sync.call_wait_s=-1"),
    ({ADDITIONAL_KEY: True}, {"interval": 4}, "prefill_schedule_interval=4"),
    ({ADDITIONAL_KEY: True}, {"enable_elastic_ep": True}, "enable_elastic_ep=True"),
    ({ADDITIONAL_KEY: True}, {"enable_fault_tolerance": True}, "enable_fault_tolerance=True"),
    ({ADDITIONAL_KEY: True}, {"data_parallel_backend": "ray"}, "data_parallel_backend='ray'"),
    ({ADDITIONAL_KEY: True}, {"distributed_executor_backend": "ray"}, "distributed_executor_backend='ray'"),
    ({ADDITIONAL_KEY: True}, {"encoders": SimpleNamespace(is_ec_producer=True, is_ec_consumer=False,
                                                          ec_role="ec_producer")}, "ec_transfer_config='ec_producer'"),
])
def test_b80_what_cannot_be_is_refused(additional, more, match):
    """B80: with the key, the value and the cure."""
    with pytest.raises(ConfigError, match=match):
        claim_step_sync(configuration(additional, **more))


def test_b80_what_the_connector_says_and_what_vllm_is_given_must_agree():
    """B80"""
    with pytest.raises(ConfigError, match="vllm_pd_step_sync=False.*remove it"):
        claim_step_sync(configuration({ADDITIONAL_KEY: False}), True)
    with pytest.raises(ConfigError, match="step_sync=True.*additional_config as an object"):
        claim_step_sync(configuration(object()), True)


class Rank:
    """An engine between its process group and its model."""

    def __init__(self, rank: int, ranks: int, shared, **options) -> None:
        self.engine = StepSyncCore.__new__(DPEngineCoreProc)
        self.engine.__dict__.update(dp_rank=rank, dp_size=ranks, dp_store=shared, has_coordinator=True,
                                    publish_dp_lb_stats=True)
        self.options, self.error = StepSyncOptions(**{"join_s": 5.0, **options}), None
        self.thread = threading.Thread(target=self._join, daemon=True)

    def _join(self) -> None:
        try:
            adopt(self.engine, configuration(ranks=self.engine.dp_size), self.options)
        except Exception as error:
            self.error = error

    def end(self) -> Exception | None:
        self.thread.join(60.0)
        if self.error is None:
            self.engine.step_sync.member.expect_end()
            self.engine.step_sync.close()
        return self.error


def meet(*ranks: Rank) -> list[Exception | None]:
    for rank in ranks:
        rank.thread.start()
    for rank in ranks:
        rank.thread.join(60.0)
    return [rank.end() for rank in ranks]


@pytest.mark.parametrize("shared_memory", [True, False])
def test_b70_ranks_meet_before_they_load_a_model(shared_memory):
    shared = HashStore()
    ranks = [Rank(number, 3, shared, shared_memory=shared_memory) for number in range(3)]
    assert meet(*ranks) == [None] * 3
    assert all(type(rank.engine) is StepSyncCore for rank in ranks)


def test_b80_ranks_that_differ_refuse_each_other():
    """B80: each with the rank, the key and both values."""
    shared = HashStore()
    errors = meet(Rank(0, 2, shared, horizon=4), Rank(1, 2, shared, horizon=8))
    assert [str(error) for error in errors] == [
        "vllm_pd_step_sync.horizon=4 can't be used: rank 1 has horizon=8; start all ranks with the same",
        "vllm_pd_step_sync.horizon=8 can't be used: rank 0 has horizon=4; start all ranks with the same"]


def test_b80_ranks_that_disagree_on_the_back_end_refuse_each_other():
    """B80: no rank takes the network in silence because another one is set to."""
    shared = HashStore()
    errors = meet(Rank(0, 2, shared), Rank(1, 2, shared, shared_memory=False))
    cure = "start all ranks with the same"
    assert [str(error) for error in errors] == [
        f"vllm_pd_step_sync.shared_memory=True can't be used: rank 1 has shared_memory=False; {cure}",
        f"vllm_pd_step_sync.shared_memory=False can't be used: rank 0 has shared_memory=True; {cure}"]


def test_b80_a_rank_that_does_not_count_its_steps_is_named_within_a_deadline():
    """B80: it was started without the step sync, and so has said nothing."""
    with pytest.raises(GroupFailed, match="rank 1 has not joined .* within 0.2 s: rank 0 has step_sync=True; start"):
        over_store(HashStore(), 0, 2, 0.2)(b"here")


@pytest.mark.parametrize("counts", [0, 1])
def test_b80_a_rank_with_the_step_sync_beside_one_with_waves(monkeypatch, counts):
    """B80: both have made vLLM's process group. The one that counts its steps names the other, its own key and value,
    before it loads a model. The other is vLLM's own, and ends at its next collective."""
    monkeypatch.setattr("vllm.distributed.utils.suppress_stdout", contextlib.nullcontext)  # of a whole process
    parallel = ParallelConfig(data_parallel_size=2, data_parallel_rank_local=0, cpu_distributed_timeout_seconds=20)
    engines, errors = [DPEngineCoreProc.__new__(DPEngineCoreProc) for _ in range(2)], [None, None]

    def start(rank: int) -> None:
        config = configuration({ADDITIONAL_KEY: {"join_s": 1.0}} if rank == counts else None)
        claim_step_sync(config)
        config.parallel_config = copy.deepcopy(parallel)
        config.parallel_config.data_parallel_rank = config.parallel_config.data_parallel_rank_local = rank
        engines[rank].__dict__.update(has_coordinator=True, publish_dp_lb_stats=True)
        try:
            engines[rank]._init_data_parallel(config)
        except GroupFailed as error:
            errors[rank] = str(error)  # the error itself would keep the process group

    threads = [threading.Thread(target=start, args=(rank, ), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    waves = 1 - counts
    assert errors[waves] is None and type(engines[waves]) is DPEngineCoreProc
    assert errors[counts].startswith(
        f"rank {waves} has not joined the step sync within 1 s: rank {counts} has step_sync=True; start all ranks")
    stateless_destroy_torch_distributed_process_group(engines[counts].__dict__.pop("dp_group"))  # its process ends
    with pytest.raises(RuntimeError, match="closed by peer"):
        ParallelConfig.has_unfinished_dp(engines[waves].dp_group, True)
    stateless_destroy_torch_distributed_process_group(engines[waves].dp_group)


def test_b80_offline_ranks_are_refused():
    """B80: nobody would say when they have all come to their ends."""
    rank = Rank(0, 2, HashStore())
    rank.engine.has_coordinator = False
    with pytest.raises(ConfigError, match="step_sync=True.*offline"):
        adopt(rank.engine, configuration(), rank.options)


def test_b70_an_engine_without_a_mark_is_left_as_it_is(monkeypatch):
    """And one with it is adopted once."""
    seen = []
    monkeypatch.setattr(DPEngineCoreProc, "_init_data_parallel", lambda engine, config: seen.append("joined"))
    monkeypatch.setattr(mark, "adopt", lambda engine, config, options: seen.append(options))
    mark.hook_engines()
    mark.hook_engines()
    engine = DPEngineCoreProc.__new__(DPEngineCoreProc)
    engine._init_data_parallel(configuration({ADDITIONAL_KEY: True}))  # the front end has not claimed it
    assert seen == ["joined"]
    claimed = configuration({ADDITIONAL_KEY: {"horizon": 2}})
    claim_step_sync(claimed)
    engine._init_data_parallel(claimed)
    assert seen == ["joined", "joined", StepSyncOptions(horizon=2)]


@pytest.mark.parametrize(("front", "engine"), [("0.3.0", "0.4.0"), ("0.4.0", "0.3.0")])
def test_b80_a_front_end_of_another_release_is_refused(monkeypatch, front, engine):
    """B80: its engine, whose package was changed meanwhile, joins no group and loads no model."""
    seen = arrived(monkeypatch, front, engine)
    with pytest.raises(ConfigError, match=f"vllm-pd='{engine}'.* the front end of rank 1 has {front}: install one"):
        seen.start()
    assert seen.events == ["joined"]
    seen = arrived(monkeypatch, front, front)
    seen.start()
    assert seen.events == ["joined", StepSyncOptions()]


def test_b80_a_front_end_whose_release_has_marks_without_it_is_refused(monkeypatch):
    """B80: what it has pickled has no release."""
    seen = arrived(monkeypatch, None, "0.4.0")
    with pytest.raises(ConfigError, match="vllm-pd='0.4.0' can't be used: the front end of rank 1 has None"):
        seen.start()
    assert seen.events == ["joined"]


class Arrived(NamedTuple):
    """A configuration in the process of its engine. `events`: what that engine has done."""
    config: SimpleNamespace
    events: list[Any]

    def start(self) -> None:
        DPEngineCoreProc.__new__(DPEngineCoreProc)._init_data_parallel(self.config)


def arrived(monkeypatch, front: str | None, engine: str) -> Arrived:
    """What a front end of one release has claimed, in the process of an engine of another. `front`: None for one that
    wrote no release."""
    events = []
    monkeypatch.setattr(DPEngineCoreProc, "_init_data_parallel", lambda engine, config: events.append("joined"))
    monkeypatch.setattr(mark, "adopt", lambda engine, config, options: events.append(options))
    mark.hook_engines()
    config = configuration({ADDITIONAL_KEY: True})
    monkeypatch.setattr(mark, "version_of", lambda name: front)
    claim_step_sync(config)
    if front is None:
        del config.additional_config[ADDITIONAL_KEY].release
    config.additional_config = pickle.loads(pickle.dumps(config.additional_config))
    monkeypatch.setattr(mark, "version_of", lambda name: engine)
    return Arrived(config, events)


@pytest.mark.parametrize("words", [
    ["--additional-config", '{"vllm_pd_step_sync": true}'], ["--config", "FILE"], ["--config=FILE"]])
def test_b70_the_plugin_sees_that_the_step_sync_is_asked_for(monkeypatch, tmp_path, words):
    """On the command line, and in the file that it names."""
    file = tmp_path / "serve.yaml"
    file.write_text("additional-config: '{\"vllm_pd_step_sync\": true}'\n")
    monkeypatch.setattr("sys.argv", ["vllm", "serve", *(word.replace("FILE", str(file)) for word in words)])
    assert is_named("vllm_pd_step_sync") and not is_named("PDConnector")
    file.unlink()
    assert is_named("vllm_pd_step_sync") is (words[0] == "--additional-config")
