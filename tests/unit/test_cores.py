# SPDX-License-Identifier: Apache-2.0
"""Which cores the transfer threads of a worker on the CPU use: those that vLLM has left free for them, or none."""
import logging
import multiprocessing
import os
from types import SimpleNamespace

import pytest

from vllm_pd.transfer import cores
from vllm_pd.transfer.cores import leave_model_cores, parse_cores, spare_cores

ONE_NODE, TWO_NODES = [set(range(8))], [set(range(4)), set(range(4, 8))]


@pytest.mark.parametrize("text, found", [
    ("", set()), ("auto", set()), ("nobind", set()), ("0 1 2", {0, 1, 2}), ("0-3,8", {0, 1, 2, 3, 8}),
    ("0-1|4,6-7", {0, 1, 4, 6, 7}), ("{0,1}", {0, 1}), ("0-1\n", {0, 1}),
    ("granularity=fine,explicit,proclist=[2,3]", {2, 3}),
])
def test_lists_of_cores(text, found):
    assert parse_cores(text) == found


@pytest.mark.parametrize("bound", [
    {"GOMP_CPU_AFFINITY": "0 1 2 3 4 5"}, {"OMP_PLACES": "{0,1,2,3,4,5}", "OMP_PROC_BIND": "true"},
    {"KMP_AFFINITY": "granularity=fine,explicit,proclist=[0,1,2,3,4,5]"},
], ids=["gomp", "places", "iomp"])
def test_the_cores_that_vllm_has_left_free(bound):
    assert spare_cores(bound, set(range(8)), ONE_NODE) == {6, 7}
    assert spare_cores(bound, set(range(8)), []) == {6, 7}, "of a kernel that says nothing of nodes"


@pytest.mark.parametrize("environ, allowed", [
    ({}, {0, 1}), ({"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}, {0, 1}),
    ({"GOMP_CPU_AFFINITY": "0"}, {0}), ({"GOMP_CPU_AFFINITY": "0 1"}, {0, 1}),
    ({"GOMP_CPU_AFFINITY": "0", "VLLM_CPU_SIM_MULTI_NUMA": "1"}, {0, 1}),
    ({"GOMP_CPU_AFFINITY": "0", "VLLM_CPU_OMP_THREADS_BIND": "0"}, {0, 1}),
], ids=["not bound", "nobind", "one core", "none left", "nodes that there are not", "chosen by the user"])
def test_threads_stay_where_they_are(environ, allowed):
    assert spare_cores(environ, allowed, ONE_NODE) == set()


def test_no_core_of_another_rank_or_engine():
    """Of a container's cores, on the rank's own NUMA node."""
    assert spare_cores({"GOMP_CPU_AFFINITY": "0 1"}, set(range(8)), TWO_NODES) == {2, 3}
    assert spare_cores({"GOMP_CPU_AFFINITY": "4 5"}, set(range(8)), TWO_NODES) == {6, 7}
    assert spare_cores({"GOMP_CPU_AFFINITY": "0 1"}, {0, 1, 2}, TWO_NODES) == {2}
    assert spare_cores({"GOMP_CPU_AFFINITY": "0 1", "VLLM_CPU_OMP_THREADS_BIND": "auto"}, {0, 1, 2}, []) == {2}


@pytest.fixture
def worker(monkeypatch):
    """A worker bound to core 0, whose EngineCore may use cores 0 to 2. The masks that were set."""
    masks = {0: {0}, 4711: {0, 1, 2}}
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0 1")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(cores, "_numa_nodes", lambda: [])
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=4711))
    monkeypatch.setattr(os, "sched_getaffinity", masks.__getitem__)
    monkeypatch.setattr(os, "sched_setaffinity", masks.__setitem__)
    return masks


def test_a_thread_moves(worker, caplog):
    with caplog.at_level(logging.INFO, "vllm.pd"):
        leave_model_cores()
        leave_model_cores()
    assert worker[0] == {2} and caplog.text.count("on the cores [2]") == 1


def test_a_worker_in_the_engines_process_is_not_moved(worker, monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    leave_model_cores()
    assert worker[0] == {0}


@pytest.mark.parametrize("call", ["sched_getaffinity", "sched_setaffinity"])
def test_what_the_system_refuses_is_logged(worker, monkeypatch, caplog, call):
    def refuse(*_):
        raise OSError("not allowed here")

    monkeypatch.setattr(os, call, refuse)
    leave_model_cores()
    assert worker[0] == {0} and caplog.text.count("not allowed here") == 1
