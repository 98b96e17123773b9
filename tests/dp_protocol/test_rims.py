# SPDX-License-Identifier: Apache-2.0
"""The backends in one process: a network that loses, doubles and delays, strangers, late ranks, bad settings."""
import errno
import os
import queue
import random
import shutil
import socket
import tempfile
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from tests.dp_protocol.rank_process import BOUND_S, engine_loop
from tests.waiting import wait_for
from vllm_pd.dp import coordinator as coordinator_module
from vllm_pd.dp import rpc as rpc_module
from vllm_pd.dp.calls import CallRegisters, CallState
from vllm_pd.dp.coordinator import CoordinatorServer
from vllm_pd.dp.group import check, join
from vllm_pd.dp.interface import CallOutcome, GroupFailed, StepDecision, SyncSettings
from vllm_pd.dp.rpc import RpcMember
from vllm_pd.dp.shm import SharedPage, ShmMember
from vllm_pd.errors import ConfigError
from vllm_pd.rpc.sockets import SendResult

SETTINGS = SyncSettings(timeout_s=10.0, grace_s=5.0, join_s=BOUND_S)


class Door:
    """A coordinator and the means to join it."""

    def __init__(self, size, settings=SETTINGS):
        self.size, self.settings = size, settings
        self.public, secret = zmq.curve_keypair()
        self.server = CoordinatorServer(size, "127.0.0.1", settings, (self.public, secret))
        self.aborted = []
        self.members = {}

    def member(self, rank, wake=lambda: None):
        self.members[rank] = RpcMember(rank, self.size, self.server.address, self.public, self.settings, wake,
                                       self.aborted.append)
        return self.members[rank]

    def close(self):
        for member in self.members.values():
            member.close()
        self.server.close()


@pytest.fixture
def make_door():
    doors = []

    def door(*arguments):
        doors.append(Door(*arguments))
        return doors[-1]

    yield door
    for one in doors:
        one.close()


def test_b72_a_late_rank_reads_the_present_state(make_door):
    door = make_door(2)
    early = door.member(0)
    early.wait_joined()
    assert early.before_step(True, 2) is StepDecision.FORWARD
    late = door.member(1)
    late.wait_joined()
    wait_for(lambda: late.due)
    assert late.before_step(False) is StepDecision.DUMMY


def test_b73_a_rank_that_never_comes_fails_the_others(make_door):
    door = make_door(2, SyncSettings(timeout_s=3.0, join_s=0.5))
    woken = threading.Event()
    member = door.member(1, woken.set)
    assert woken.wait(BOUND_S)
    wait_for(lambda: member.due)
    with pytest.raises(GroupFailed, match=r"ranks \[0\] have not joined within 0.5 s"):
        member.before_step(True, 1)


def test_b73_a_loop_that_does_not_come_is_aborted(make_door):
    door = make_door(2, SyncSettings(timeout_s=3.0, join_s=0.5, grace_s=0.2))
    door.member(1)
    wait_for(lambda: door.aborted)
    assert isinstance(door.aborted[0], GroupFailed)


AWAY = SyncSettings(timeout_s=2.0, stall_s=2.0, grace_s=0.2)


def test_b73_rank_0_that_does_not_come_back_to_a_call_fails_the_others(make_door):
    """It lives, so its watch goes on; but whoever is ready for its call can't step, nor give the call up."""
    door = make_door(2, AWAY)
    for rank in range(2):
        door.member(rank).wait_joined()
        door.members[rank].hold(9)
    door.members[0].next_call()
    wait_for(lambda: door.members[1].due)
    door.members[1].next_call()
    assert not door.members[1].may_step
    wait_for(lambda: door.aborted)
    assert "rank 0 of 2" in str(door.aborted[0]) and "engine loop" in str(door.aborted[0])


def test_an_idle_loop_that_comes_by_may_let_a_call_wait_for_longer(make_door):
    """No rank is stuck: one has yet to hear of the call, and that is for the clock of the call."""
    door = make_door(2, AWAY)
    visits = []
    one = door.member(0, lambda: visits.append(one.due))
    door.member(1).wait_joined()
    one.wait_joined()
    one.hold(9)
    one.next_call()
    time.sleep(2 * AWAY.stall_s)
    assert visits and not door.aborted
    assert one.next_call() is None and one.give_up(9)


def test_b73_a_rank_that_is_shut_down_fails_who_needs_it(make_door):
    door = make_door(2)
    for rank in range(2):
        door.member(rank).wait_joined()
    door.members[1].close()
    time.sleep(0.3)
    one = door.members[0]
    one.before_step(True, 1)
    wait_for(lambda: one.due)
    with pytest.raises(GroupFailed, match="rank 1: it has been shut down"):
        one.before_step(True, 1)


def test_b73_a_watch_that_breaks_is_a_failure_and_not_a_silence(make_door, monkeypatch):
    door = make_door(1)
    member = door.member(0)
    member.wait_joined()
    monkeypatch.setattr(rpc_module, "decode", lambda frames: 1 / 0)
    with pytest.raises(GroupFailed, match="unexpected error in the thread that watches the group"):
        member.before_step(True, 1)  # a word that was on its way may have broken it already
        wait_for(lambda: member.due)
        member.before_step(False)


def test_b81_b82_noise_and_strangers_get_nothing(make_door):
    door = make_door(1)
    host, port = door.server.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(os.urandom(5000))
    context = zmq.Context()
    for key in (None, zmq.curve_keypair()[0]):
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        if key:
            stranger.curve_serverkey = key
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.connect(door.server.address)
        stranger.send(b"DP\x03whatever")
        assert not stranger.poll(300)
        stranger.close()
    context.term()
    assert door.server.dropped == 0
    door.member(0).wait_joined()


def test_b81_a_frame_that_is_none_is_dropped_and_counted(make_door):
    door = make_door(2)
    member = door.member(0)
    member.wait_joined()
    for frame in (b"", b"DP\x03" + os.urandom(40), rpc_module.encode(rpc_module.CoordinatorUpdate(1, False, False)),
                  rpc_module.encode(rpc_module.RankReport(9, member._participant.state()))):
        member._loop_socket.send(frame)
    wait_for(lambda: door.server.dropped == 4)
    member.before_step(True, 1)
    wait_for(lambda: not member._participant.unconfirmed)


class Weather:
    """Loses, doubles and delays what is sent. What is delayed comes after something later."""

    def __init__(self, seed):
        self._chance = random.Random(seed)
        self._late = {}
        self.lost = self.doubled = self.delayed = 0

    def send(self, good, socket_, *frames):
        luck = self._chance.random()
        if luck < 0.25:
            self.lost += 1
            return SendResult.SENT
        if luck < 0.4 and socket_ not in self._late:
            self.delayed += 1
            self._late[socket_] = frames
            return SendResult.SENT
        result = good(socket_, *frames)
        if luck > 0.8:
            self.doubled += 1
            good(socket_, *frames)
        if socket_ in self._late and luck > 0.6:
            good(socket_, *self._late.pop(socket_))
        return result


def test_b70_lost_doubled_and_late_messages_change_nothing(make_door, monkeypatch):
    # A rank must not be taken for dead because a quarter of all messages is lost; but beats are quick.
    door = make_door(3, SyncSettings(timeout_s=BOUND_S, stall_s=BOUND_S))
    for watch in (door.server, *map(door.member, range(3))):
        watch._beat_s = watch._liveness.beat_s = 0.2
    inboxes = [queue.Queue() for _ in range(3)]
    for rank, member in door.members.items():
        member.wait_joined()
        member._wake_engine = lambda inbox=inboxes[rank]: inbox.put(("wake",))
    weather = Weather(1)
    for module in (rpc_module, coordinator_module):
        monkeypatch.setattr(module, "send", lambda *a, good=module.send: weather.send(good, *a))
    barrier = threading.Barrier(3, timeout=BOUND_S)
    served = queue.Queue()
    threads = [threading.Thread(target=engine_loop, daemon=True, args=(door.members[rank], inboxes[rank], barrier.wait,
                                                                       served.put)) for rank in range(3)]
    for thread in threads:
        thread.start()
    chance = random.Random(2)
    for number in range(12):
        calls = inboxes if number % 3 == 0 else []
        for inbox in calls:
            inbox.put(("call", 1))
        inboxes[chance.randrange(3)].put(("request", chance.randint(1, 6)))
        reports = [served.get(timeout=BOUND_S) for _ in range(1 + len(calls))]
        assert len({report for report in reports if report[0] == "made"}) == (1 if calls else 0)
    for inbox in inboxes:
        inbox.put(("leave",))
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    assert len({member.counters.forwards for member in door.members.values()}) == 1
    assert weather.lost and weather.doubled and weather.delayed


@pytest.mark.parametrize("key, value", [("horizon", 0), ("timeout_s", 0.0), ("stall_s", -1.0), ("join_s", float("nan")),
                                        ("grace_s", 1e9)])
def test_b80_a_bad_setting_is_refused_by_name(key, value):
    with pytest.raises(ConfigError, match=key):
        check(SyncSettings(**{key: value}))


def test_b80_a_rank_beyond_the_group_is_refused():
    with pytest.raises(ConfigError, match="data_parallel_rank=2"):
        join(2, 2, "127.0.0.1", wake=lambda: None, exchange=lambda mine: [mine])


def test_b80_an_address_that_is_not_ours_is_refused_by_name():
    with pytest.raises(GroupFailed, match="data_parallel_master_ip='192.0.2.1'"):
        join(0, 1, "192.0.2.1", wake=lambda: None, exchange=lambda mine: [mine], shared_memory=False)


@pytest.mark.parametrize("key, ours, theirs", [("horizon", 8, 9), ("call_wait_s", 30.0, 0.0)])
def test_b80_ranks_with_different_settings_refuse_each_other(key, ours, theirs):
    def exchange(mine):
        others = mine.replace(*(msgspec.msgpack.encode(SyncSettings(**{key: value})) for value in (ours, theirs)))
        assert others != mine
        return [mine, others]

    settings = SyncSettings(**{key: ours})
    with pytest.raises(ConfigError, match=rf"dp_sync\.{key}={ours}.*rank 1 has {key}={theirs}.*the same"):
        join(0, 2, "127.0.0.1", wake=lambda: None, exchange=exchange, settings=settings)


@pytest.mark.parametrize("ours, theirs", [(True, False), (False, True)])
@pytest.mark.parametrize("cpu", ["x86_64", "aarch64"])
def test_b80_ranks_that_disagree_on_the_back_end_refuse_each_other(monkeypatch, ours, theirs, cpu):
    """Also on a CPU where all would use the network: it is what the user has set that is compared."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=cpu))
    word = {ours: msgspec.msgpack.encode(ours), theirs: msgspec.msgpack.encode(theirs)}

    def exchange(mine):
        assert mine.endswith(word[ours])
        return [mine, mine.removesuffix(word[ours]) + word[theirs]]

    with pytest.raises(ConfigError, match=rf"dp_sync\.shared_memory={ours}.*rank 1 has shared_memory={theirs}"):
        join(0, 2, "127.0.0.1", wake=lambda: None, exchange=exchange, settings=SETTINGS, shared_memory=ours)


def met(offered):
    """Two ranks on this machine. `offered(rank, message)`: what becomes of a rank's message. Returns their members,
    closed."""
    slots, barrier, members = [[None, None] for _ in range(3)], threading.Barrier(2), [None, None]

    def run(rank):
        rounds = iter(slots)

        def exchange(mine):
            slot = next(rounds)
            slot[rank] = offered(rank, mine)
            barrier.wait(BOUND_S)
            return list(slot)

        members[rank] = join(rank, 2, "127.0.0.1", wake=lambda: None, exchange=exchange, settings=SETTINGS)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    for member in reversed(members):
        member.close()
    return members


def test_ranks_that_do_not_share_memory_use_the_network():
    """One rank can't open the files: all take the network."""
    members = met(lambda rank, mine: mine if rank else mine.replace(b"vllm-pd-dp-", b"vllm-pd-no-"))
    assert [type(member) for member in members] == [RpcMember, RpcMember]


@pytest.mark.parametrize("cpu, backend", [("x86_64", ShmMember), ("aarch64", RpcMember)])
def test_b72_a_cpu_that_reorders_loads_uses_the_network(monkeypatch, cpu, backend):
    """A rank there could read an old step request beside a new word that its owner is ready for a call."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine=cpu))
    assert [type(member) for member in met(lambda rank, mine: mine)] == [backend, backend]


@pytest.mark.parametrize("missing", ["os.pidfd_open", "vllm_pd.dp.group.host_id"])
def test_b72_a_rank_that_cannot_watch_processes_uses_the_network(monkeypatch, missing):
    """Some builds of Python lack the call. In some sandboxes the id of the boot can't be read."""
    if missing == "os.pidfd_open":
        monkeypatch.delattr(missing)
    else:
        monkeypatch.setattr(missing, lambda: "")
    assert [type(member) for member in met(lambda rank, mine: mine)] == [RpcMember, RpcMember]


def test_calls_go_on_however_many_there_were():
    """The shared page has no room for all of a call's number."""
    folder = SharedPage.create(2)
    members = [ShmMember(SharedPage(folder, rank, 2), {}, SETTINGS, lambda: None, lambda error: None)
               for rank in range(2)]
    shutil.rmtree(folder)
    many = (1 << 24) - 2
    for member in members:
        call_state = CallState(leads=member.rank == 0, ready=many, registers=CallRegisters(many, 1, 0, many, 0, many))
        with member._lock:
            member._participant.call_state = call_state
            member._publish_call()
    for _ in range(5):
        for member in members:
            member.hold(9)
        ends = [member.next_call() for member in (*members, *members)]  # proposes, is ready, releases, makes
        assert ends == [None, None, (CallOutcome.MAKE, 9), (CallOutcome.MAKE, 9)]
    assert {member._participant.call_state.registers.released for member in members} == {many + 5}
    for member in members:
        member.close()


def test_b80_a_group_without_memory_for_its_page_uses_the_network(monkeypatch, tmp_path):
    """The first store to a page that has no memory ends the process by SIGBUS."""
    folder = SharedPage.create(64)
    assert 512 * os.stat(os.path.join(folder, "slots")).st_blocks >= 64 * 128
    shutil.rmtree(folder)

    def full(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os.path, "isdir", lambda path: False)  # no /dev/shm
    assert [type(member) for member in met(lambda rank, mine: mine)] == [RpcMember, RpcMember]
    assert not list(tmp_path.iterdir())


def test_the_board_holds_what_each_rank_writes(tmp_path):
    folder = SharedPage.create(2)
    boards = [SharedPage(folder, rank, 2) for rank in range(2)]
    with pytest.raises(OSError):
        SharedPage(str(tmp_path), 0, 2)
    for rank, board in enumerate(boards):
        board.write(1, 1 << 40 | rank)
    assert boards[0].column(1) == [1 << 40, 1 << 40 | 1]
    for _ in range(100_000 // 1000):
        for _ in range(1000):
            boards[0].wake_all()  # more than the FIFOs hold
    boards[1].clear_wakeup()
    for board in boards:
        board.close()
    shutil.rmtree(folder)
