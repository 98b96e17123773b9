# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench serve` reads the pages of the engines while its load runs."""
import threading
import time
from types import SimpleNamespace

import prometheus_client
import pytest

from tests.fakes.http_engine import FakeEngine
from tests.waiting import wait_for
from vllm_pd.bench.serve import watch
from vllm_pd.bench.serve.watch import EngineWatch
from vllm_pd.ops.launch.plan import EnginePlan
from vllm_pd.protocol.messages import Role


def plan(url: str, role: Role) -> EnginePlan:
    return EnginePlan("engine", role, int(url.rpartition(":")[2]), (), {}, ())


@pytest.fixture
def engines():
    with FakeEngine() as p, FakeEngine() as d:
        p.held = prometheus_client.Gauge("vllm:pd_held_blocks", "", registry=p.registry)
        p.pages, page = [], p.page
        p.page = lambda: p.pages.append(1) or page()
        yield p, d


def test_what_the_engines_count_during_the_load_or_a_little_later(engines, monkeypatch):
    p, d = engines
    d.bytes.inc(1000)  # before
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=time.monotonic,
                                                       sleep=lambda seconds: d.bytes.inc(2_000_000 * seconds)))
    with EngineWatch([plan(p.url, Role.PREFILL), plan(d.url, Role.DECODE)], period_s=0.02, late_s=0.5) as watching:
        wait_for(lambda: p.pages, "no page was read")
        p.held.set(30)
        seen = len(p.pages)
        wait_for(lambda: len(p.pages) >= seen + 3, "no page is read any more")
        p.held.set(0)
    found = watching.figures()
    assert found["bytes"] == 1_000_000 and found["kept_blocks"]["max"] == 30 > found["kept_blocks"]["mean"] > 0
    assert [at_s for at_s, _ in found["kept_over_time"]] == sorted(at_s for at_s, _ in found["kept_over_time"])
    assert found["kept_over_time"][-1][1] == 0 and len(found["kept_over_time"]) >= 4


def test_engines_that_do_not_answer_leave_the_load_alone(engines):
    gone = FakeEngine()
    gone._server.server_close()
    with EngineWatch([plan(gone.url, Role.DECODE)], period_s=0.01, late_s=0) as watching:
        pass
    assert watching.figures() == {}
    with EngineWatch([]) as nothing:
        assert not [one for one in threading.enumerate() if one.name.startswith("engine watch")]
    assert nothing.figures() == {}


def test_an_unexpected_error_is_told_and_no_thread_is_left(engines, monkeypatch):
    monkeypatch.setattr(watch, "needed", lambda page: 1 / 0)
    with EngineWatch([plan(engines[1].url, Role.DECODE)], period_s=0.01, late_s=0) as watching:
        pass
    with pytest.raises(ZeroDivisionError):
        watching.figures()
    wait_for(lambda: not [one for one in threading.enumerate() if one.name.startswith("engine watch")], "a thread")
