# SPDX-License-Identifier: Apache-2.0
"""B107: engines try addresses for an operator, and `vllm-pd doctor --from` says which path between two is broken."""
import contextlib
import errno
import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.fakes.brokers import serving
from tests.sockets.test_agent import Engine, Settings
from tests.waiting import wait_for
from vllm_pd import cli
from vllm_pd.broker.members import Access
from vllm_pd.ops.paths import EngineCalls
from vllm_pd.peer.trials import MAX_ORDERS, TRIAL_S, AddressTrials
from vllm_pd.protocol.messages import Role, Trial
from vllm_pd.rpc.ports import take_free
from vllm_pd.rpc.tcp import listening
from vllm_pd.transfer.layout import CacheDescription, Layout, Memory
from vllm_pd.transfer.transport import PeerMetadata, RanksMetadata, kv_addresses

LOCAL = "tcp://127.0.0.1:"


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """An address where no connection is made: as many wait there as may."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        with contextlib.ExitStack() as waiting:
            for _ in range(4):
                client = waiting.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(server.getsockname())
            yield f"{LOCAL}{server.getsockname()[1]}"


@pytest.fixture
def trials():
    trials = AddressTrials(local_only=True)
    yield trials
    trials.close()


def test_each_address_is_tried_and_nobody_is_waited_for(trials):
    with socket.create_server(("127.0.0.1", 0)) as server, silent() as nobody:
        there, gone = f"{LOCAL}{server.getsockname()[1]}", f"{LOCAL}{take_free('127.0.0.1')}"
        others = ["tcp://192.0.2.1:9", "tcp://127.0.0.1", "tcp://:80", "tcp://127.0.0.1:0",
                  "tcp://[::1", "ipc:///tmp/x", "tcp://127.0.0.1:99999", "tcp://name:1", ""]
        trials.add("one", [there, gone, nobody, *others, there])
        trials.add("other", [nobody])
        assert trials.next_timeout() == 0.0 and trials.poll(100.0) == [], "one after another"
        assert trials.next_timeout() == 100.0 + TRIAL_S and trials.poll(100.0 + TRIAL_S - 0.1) == []
        done = trials.poll(100.0 + TRIAL_S)
        assert server.accept()[0].recv(1) == b"", "it gets nothing but an end"
        assert trials.next_timeout() == 0.0 and trials.poll(200.0) == []
        assert trials.poll(200.0 + TRIAL_S) == [("other", {nobody: Trial.SILENT})]
    assert done == [("one", {there: Trial.OPEN, gone: Trial.REFUSED, nobody: Trial.SILENT,
                             **dict.fromkeys(others, Trial.FAILED)})]
    assert trials.next_timeout() is None and trials.poll(300.0) == []


@pytest.mark.parametrize("code, trial", [(errno.ENETUNREACH, Trial.NO_ROUTE), (errno.EHOSTUNREACH, Trial.NO_ROUTE),
                                         (errno.ETIMEDOUT, Trial.SILENT), (errno.EMFILE, Trial.FAILED)])
def test_what_the_kernel_says_at_once(trials, monkeypatch, code, trial):
    def refuse(url: str) -> None:
        raise OSError(code, "why", url)

    monkeypatch.setattr("vllm_pd.peer.trials.begin_connect", refuse)
    trials.add("one", [f"{LOCAL}9"])
    assert trials.poll(0.0) == [("one", {f"{LOCAL}9": trial})]


def test_orders_are_bounded(trials):
    with silent() as nobody:
        trials.add("first", [nobody])
        assert trials.poll(0.0) == []
        for number in range(MAX_ORDERS + 5):
            trials.add(number, ["no address"])
        found = [[asker for asker, _ in trials.poll(TRIAL_S)] for _ in range(MAX_ORDERS + 2)]
    assert found == [["first"], *([number] for number in range(5, MAX_ORDERS + 5)), []], "one in each call"


def test_an_order_without_addresses_waits_for_nobody(trials):
    """It asks where the engine listens."""
    with silent() as nobody:
        trials.add("first", [nobody])
        trials.poll(0.0)
        for number in range(MAX_ORDERS + 5):
            trials.add(number, [])
        assert trials.next_timeout() == 0.0 and len(trials.poll(0.1)) == MAX_ORDERS and trials.poll(0.1) == []


def test_a_connection_that_can_not_be_watched_harms_nobody(trials, monkeypatch):
    full = SimpleNamespace(register=lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no room")),
                           poll=lambda _: [], close=lambda: None)
    monkeypatch.setattr(trials, "_epoll", full)
    with silent() as nobody:
        trials.add("one", [nobody])
        assert trials.poll(0.0) == [("one", {nobody: Trial.FAILED})]


def test_what_is_open_ends_with_it():
    trials = AddressTrials(local_only=True)
    with silent() as nobody:
        trials.add("one", [nobody])
        trials.poll(0.0)
        trials.close()
    with pytest.raises(ValueError, match="closed"):
        trials.poll(0.0)


def test_where_this_process_listens():
    before = listening()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        assert listening() - before == {f"{LOCAL}{server.getsockname()[1]}"}
        socket.create_connection(server.getsockname()).close()
        assert listening() - before == {f"{LOCAL}{server.getsockname()[1]}"}, "it is still open here"


def metadata(*listens: str) -> bytes:
    """That of an engine whose ranks listen there, one each."""
    cache = CacheDescription(Layout.HEADS_FIRST, Memory.DRAM, 0, "float32", 1, 16, 8, 0, 1, 0, 1, 512, 512, (1, 1))
    ranks = [PeerMetadata(f"e/{rank}", b"", cache, (one, )).encode() for rank, one in enumerate(listens)]
    return RanksMetadata(ranks).encode()


def test_metadata_says_where_the_ranks_listen():
    found = metadata(f"{LOCAL}1", f"{LOCAL}2")
    assert kv_addresses(found) == [f"{LOCAL}1", f"{LOCAL}2"]
    assert kv_addresses(RanksMetadata.decode("e", found).ranks[1]) == [f"{LOCAL}2"]
    assert kv_addresses(b"") == kv_addresses(b"memory of a test") == kv_addresses(RanksMetadata([b"x"]).encode()) == []


@pytest.fixture
def fleet(request: pytest.FixtureRequest):
    """(broker's address, decode, prefill) that know each other, and listen for KV at addresses that `listen`."""
    with serving(ttl_s=600.0) as broker, socket.create_server(("127.0.0.1", 0)) as kv:
        engines = [Engine(Settings(broker.address), role) for role in (Role.DECODE, Role.PREFILL)]
        for engine in engines:
            request.addfinalizer(engine.close)
            engine.protocol._core.generations.metadata = metadata(f"{LOCAL}{kv.getsockname()[1]}")
        decode, prefill = engines
        decode.expect_view(lambda view: view.prefill_peers == 1)
        yield broker.address, decode, prefill


def doctor(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, broker: str, engine: Engine) -> list[str]:
    """The lines about paths of `vllm-pd doctor --from`, and last its status."""
    monkeypatch.setattr(sys, "argv", ["vllm-pd", "doctor", "--broker", broker, "--from",
                                      engine.agent.member.incarnation[:12]])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok   broker") and lines[1].endswith("fit each other")
    return [*(line for line in lines[2:] if line.startswith(("ok", "BAD"))), str(ended.value.code)]


def test_b107_doctor_names_the_path_that_is_broken(fleet, capsys, monkeypatch):
    broker, decode, prefill = fleet
    for engine in (decode, prefill):
        line, status = doctor(capsys, monkeypatch, broker, engine)
        assert line.startswith("ok   paths") and "1 of control, 2 of lifeline, 2 of kv" in line and status == "0"
    decode.agent._lifeline.close()
    prefill.protocol._core.generations.metadata = metadata(gone := f"{LOCAL}{take_free('127.0.0.1')}")
    lifeline, kv = sorted(doctor(capsys, monkeypatch, broker, prefill)[:-1], reverse=True)
    assert lifeline.startswith("BAD  lifeline") and decode.agent.member.lifeline in lifeline and "refused" in lifeline
    assert kv.startswith("BAD  kv") and gone in kv and "(kv_consumer" in kv.partition(" to ")[0]


def test_b107_an_engine_that_does_not_answer_is_named(fleet, capsys, monkeypatch):
    broker, decode, prefill = fleet
    decode.agent.thread.stop(0.0)
    wait_for(lambda: not decode.agent.thread.is_alive())
    with EngineCalls(Access(), [decode.agent.member, prefill.agent.member]) as calls:
        names = [decode.agent.member.incarnation, prefill.agent.member.incarnation]
        assert calls.ask(dict.fromkeys([*names, "unknown"], ()), 2.0).keys() == {names[1]}
