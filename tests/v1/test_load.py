# SPDX-License-Identifier: Apache-2.0
"""The load that a V1 engine reports to routers, as a V0 engine does; and where its KV events are (B67)."""
import collections
import time
from types import SimpleNamespace

import pytest
import zmq
from vllm.config import KVEventsConfig

from tests.v1.simulated import OWN, Engine
from tests.v1.test_hazards import parked, prompt
from vllm_pd.events import notice
from vllm_pd.events.messages import EngineLoad
from vllm_pd.protocol.actions import Released
from vllm_pd.router.events.followers import LoadFollower
from vllm_pd.rpc import sockets
from vllm_pd.settings.engine import PDConfig
from vllm_pd.v1 import events
from vllm_pd.v1.settings import OWN_KEY, front_of_rank


def reader(engine: Engine):
    engine.binding.agent.member = SimpleNamespace(incarnation=OWN)
    return events.load_reader(engine.scheduler, engine.binding)


def test_the_load_of_a_decode_engine(model_folder, in_flight):
    engine = Engine(model_folder, in_flight)
    read = reader(engine)
    total = read().total_blocks
    assert read() == EngineLoad(total_blocks=total)
    attempt = parked(engine)  # 100 tokens in 7 blocks
    assert read() == EngineLoad(remote_prefilling=1, parked_blocks=7, used_blocks=7, total_blocks=total)
    engine.abort("a")
    assert read() == EngineLoad(quarantined=1, quarantined_blocks=7, used_blocks=7, total_blocks=total)
    engine.tell(Released(attempt))
    engine.run()
    assert read() == EngineLoad(total_blocks=total)
    engine.protocol.peers = 0
    engine.add("b", prompt(30))
    assert (read().waiting, read().queued_prefill_tokens) == (1, 30)
    engine.run()
    assert read() == EngineLoad(total_blocks=total)


def test_the_load_of_a_prefill_engine(model_folder, in_flight):
    engine = Engine(model_folder, in_flight, role="kv_producer")
    read = reader(engine)
    attempt = engine.job(prompt(100))
    engine.run()
    load = read()
    assert (load.running, load.waiting, load.sending, load.sending_blocks, load.used_blocks) == (0, 0, 1, 7, 7)
    engine.transfer.end(engine.sent(attempt).key)
    engine.run()
    assert read() == EngineLoad(total_blocks=load.total_blocks)


def test_reports_reach_a_reader_and_leave_nothing_behind(model_folder, in_flight, tmp_path):
    engine = Engine(model_folder, in_flight)
    reader(engine)
    config = PDConfig.parse("kv_consumer", {"broker": "tcp://127.0.0.1:1"})
    front = f"ipc://{tmp_path}/front"
    close = events.report_load(config, front, engine.scheduler, engine.binding)
    (file, ) = tmp_path.iterdir()
    where = notice.read(file)
    reports, context = [], zmq.Context()
    try:
        socket = sockets.client(context, where.side, only_connected=False)
        follower = LoadFollower(socket, SimpleNamespace(reported=reports.append), collections.Counter(), 0.0)
        parked(engine)
        deadline = time.monotonic() + 60
        while not (reports and reports[-1].load.parked_blocks == 7):
            follower.turn(time.monotonic())
            assert time.monotonic() < deadline, reports
            time.sleep(0.01)
        assert reports[-1].epoch == where.epoch
    finally:
        context.destroy(linger=0)
        close()
    assert not list(tmp_path.iterdir())


def test_an_engine_works_where_it_can_not_leave_the_address_of_its_load(model_folder, in_flight, tmp_path, caplog):
    engine = Engine(model_folder, in_flight)
    config = PDConfig.parse("kv_consumer", {"broker": "tcp://127.0.0.1:1"})
    close = events.report_load(config, f"ipc://{tmp_path}/none/front", engine.scheduler, engine.binding)
    close()
    assert "will not be found" in caplog.text


@pytest.mark.parametrize("ranks", [1, 2])
def test_b67_a_router_is_told_where_events_and_loads_are(tmp_path, ranks):
    """B67: a port that V1 has chosen by itself is known for one rank."""
    config = configured(tmp_path, "tcp://*:0", data_parallel_size=ranks, data_parallel_size_local=ranks)
    chosen = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint="tcp://10.0.0.7:900",
                            replay_endpoint="tcp://*:901")
    client = SimpleNamespace(get_kv_event_sources=lambda: dict.fromkeys(range(ranks), chosen))
    found = events.find_events(config, client)
    assert found.loads == [f"tcp://127.0.0.1:{700 + rank}" for rank in range(ranks)]
    assert (found.events, found.replay) == (("tcp://10.0.0.7:900", "tcp://*:901") if ranks == 1 else ("", None))
    assert (found.ranks, found.block_size, found.side) == (ranks, 32, None)
    events._file(f"ipc://{tmp_path}/front").unlink()
    assert events.find_events(config, client).loads == [], "one of them does not report"


@pytest.mark.parametrize("balancer, ranks", [("external", 1), ("hybrid", 2)])
def test_b67_a_server_with_some_of_the_ranks_names_only_theirs(tmp_path, balancer, ranks):
    """B67: ranks 2 and 3 of four are here, or rank 2 alone; each publishes at the port plus its own rank."""
    config = configured(tmp_path, "tcp://*:900", data_parallel_size=4, data_parallel_size_local=ranks,
                        data_parallel_rank=2, local_engines_only=True,
                        data_parallel_external_lb=balancer == "external")
    own = [SimpleNamespace(endpoint=f"tcp://*:{902 + rank}", replay_endpoint=None) for rank in range(ranks)]
    found = events.find_events(config, SimpleNamespace(get_kv_event_sources=lambda: dict(enumerate(own, 2))))
    assert (found.events, found.ranks) == ("tcp://*:902", ranks)
    assert found.loads == [f"tcp://127.0.0.1:{702 + rank}" for rank in range(ranks)]


def test_b67_a_publisher_that_connects_is_not_named(tmp_path):
    """B67: nobody can subscribe to it, and what listens there is somebody else's."""
    config = configured(tmp_path, "tcp://127.0.0.1:900")
    found = events.find_events(config, SimpleNamespace(get_kv_event_sources=lambda: {0: config.kv_events_config}))
    assert found.events == "" and found.loads == ["tcp://127.0.0.1:700"]


def configured(folder, endpoint: str, **parallel) -> SimpleNamespace:
    """An engine whose ranks have left the addresses of their loads, which are 700 plus the rank."""
    parallel = {"data_parallel_size": 1, "data_parallel_size_local": 1, "data_parallel_rank": 0,
                "data_parallel_external_lb": False, "local_engines_only": False} | parallel
    front, first = f"ipc://{folder}/front", parallel["data_parallel_rank"]
    for rank in range(first, first + parallel["data_parallel_size_local"]):
        notice.leave(events._file(front_of_rank(front, rank)), notice.SideNotice(f"tcp://127.0.0.1:{700 + rank}", "e"))
    return SimpleNamespace(
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint),
        instance_id="i", cache_config=SimpleNamespace(block_size=32), parallel_config=SimpleNamespace(**parallel),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={
            OWN_KEY: {"kv_role": "kv_consumer", "front": front}}))
