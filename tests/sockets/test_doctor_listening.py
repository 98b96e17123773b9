# SPDX-License-Identifier: Apache-2.0
"""B109, B42: `vllm-pd doctor` names what the engines of this host have open beyond the address of `bind`."""
from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import psutil
import pytest
import zmq

from tests.fakes.brokers import serving
from vllm_pd.broker.members import Access
from vllm_pd.ops import doctor, listening
from vllm_pd.ops.finding import Finding
from vllm_pd.ops.listening import Opener, Promise, check_listening, event_ports, find_opener, look
from vllm_pd.peer.liveness import process
from vllm_pd.protocol.messages import PROTOCOL, AddressesTried, Fingerprint, Member, Process, Register, Role
from vllm_pd.rpc import codec, sockets
from vllm_pd.rpc.addresses import is_loopback, url_of

FINGERPRINT = Fingerprint(PROTOCOL, "m", "float32", "auto", 16, 30, 3, 64, "ipex")
# Listens where its arguments say, prints the ports, and waits.
PROGRAM = """
import socket, sys
opened = [socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
          for host in sys.argv[1].split(",")]
print(*(one.getsockname()[1] for one in opened), flush=True)
sys.stdin.read()
"""
OWN = [one.address for addresses in psutil.net_if_addrs().values() for one in addresses
       if one.family == socket.AF_INET and not is_loopback(one.address)]
Start = Callable[..., tuple[Member, list[int]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that listens at these addresses. Returns an engine's entry for it, and its ports."""
    with contextlib.ExitStack() as ends:
        def run(*hosts: str, arguments: tuple[str, ...] = (), bind: str = "127.0.0.1",
                **environment: str) -> tuple[Member, list[int]]:
            program = ends.enter_context(subprocess.Popen(
                [sys.executable, "-c", PROGRAM, ",".join(hosts), *arguments], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}))
            ports = [int(port) for port in program.stdout.readline().split()]
            member = msgspec.structs.replace(
                process.local_member(Role.PREFILL, FINGERPRINT), address=url_of(bind, ports[0]),
                processes=(Process(program.pid, process.start_time(program.pid)), ))
            return member, ports

        yield run


def silent(addresses: object, timeout_s: float) -> dict[str, AddressesTried]:
    """The engine does not answer."""
    return {}


def judged(member: Member, ask: listening.Ask = silent) -> list[Finding]:
    return list(check_listening([member], ask))


def test_an_engine_that_stays_at_bind_is_fine(start: Start):
    member, _ = start("127.0.0.1", "127.0.0.9")
    [found] = judged(member)
    assert found.ok and not found.hint and "2 sockets at 127.0.0.1" in found.fact


def test_torch_s_store_is_named_and_no_fault(start: Start):
    member, ports = start("127.0.0.1", "::")
    [found] = judged(member)
    assert found.ok and found.lines[0].startswith("-- ")
    assert (f"process {member.processes[0].pid} at [::]:{ports[1]}, beyond 127.0.0.1: {Opener.STORE}" in found.fact
            and "Ports" in found.hint)


@pytest.mark.skipif(not OWN, reason="this machine has no address beyond the loopback")
class TestAnAddressOfThisMachine:
    """The second socket is at an address beyond that of `bind`."""

    @pytest.fixture(autouse=True)
    def unnamed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """That address is neither this machine's name nor its route."""
        monkeypatch.setattr(listening, "_named_addresses", tuple)
        monkeypatch.setattr(listening, "address_towards", lambda host: None)

    def test_what_nobody_knows_is_a_fault(self, start: Start):
        member, ports = start("127.0.0.1", OWN[0])
        [found] = judged(member)
        assert not found.ok and f"{OWN[0]}:{ports[1]}" in found.fact and str(Opener.UNKNOWN) in found.fact
        assert str(member.processes[0].pid) in found.fact and "Ports" in found.cure

    def test_the_kv_transport_is_a_fault_and_its_cure_is_ucx_s(self, start: Start):
        member, ports = start("127.0.0.1", OWN[0])
        asked = []

        def ask(addresses: dict[str, tuple[str, ...]], timeout_s: float) -> dict[str, AddressesTried]:
            asked.append(addresses)
            return {member.incarnation: AddressesTried(listens=(url_of(OWN[0], ports[1]), ))}

        [found] = judged(member, ask)
        assert not found.ok and str(Opener.KV) in found.fact and "set UCX_NET_DEVICES" in found.cure
        assert asked == [{member.incarnation: ()}]

    def test_the_kv_transport_where_the_operator_has_it(self, start: Start):
        member, ports = start("127.0.0.1", OWN[0], UCX_NET_DEVICES="eth7")
        [found] = judged(member)
        assert found.ok and not found.hint and f"{OWN[0]}:{ports[1]}: {Opener.DEVICES}" in found.fact

    def test_gloo_at_the_address_of_this_machine_s_name(self, start: Start, monkeypatch: pytest.MonkeyPatch):
        member, ports = start("127.0.0.1", OWN[0])
        monkeypatch.setattr(listening, "_named_addresses", lambda: (OWN[0], ))
        [found] = judged(member)
        assert found.ok and str(Opener.GLOO) in found.fact and found.hint

    @pytest.mark.parametrize("environment", [{"VLLM_HOST_IP": OWN[0] if OWN else ""}, {"GLOO_SOCKET_IFNAME": next(
        (name for name, found in psutil.net_if_addrs().items() if OWN and OWN[0] in [one.address for one in found]),
        "")}], ids=["vllm", "gloo"])
    def test_or_where_the_environment_has_it(self, start: Start, environment: dict[str, str]):
        member, _ = start("127.0.0.1", OWN[0], **environment)
        [found] = judged(member)
        assert found.ok and str(Opener.GLOO) in found.fact

    def test_everything_is_at_bind(self, start: Start):
        member, _ = start(OWN[0], OWN[0], bind=OWN[0])
        [found] = judged(member)
        assert found.ok and not found.hint and f"2 sockets at {OWN[0]}" in found.fact


def test_the_http_server_and_kv_events_are_known_by_the_command_line(start: Start):
    """Here the engine's process is its server too."""
    member, ports = start("127.0.0.1", "0.0.0.0", "::", arguments=("--port", "1"))
    server = msgspec.structs.replace(member, http=url_of("127.0.0.1", ports[1], "http"))
    [found] = judged(server)
    assert f"[::]:{ports[2]}" in found.fact and str(ports[1]) not in found.fact, "the other one is the registry's"
    pids, command = listening._processes(server)
    assert pids == [member.processes[0].pid] and command[-2:] == ["--port", "1"]


def test_the_environment_of_a_process_that_has_written_over_it_is_its_parent_s(monkeypatch: pytest.MonkeyPatch):
    """As setproctitle does, which vLLM's processes use."""
    environs = {os.getpid(): {}, os.getppid(): {"UCX_NET_DEVICES": "eth7"}}
    monkeypatch.setattr(psutil.Process, "environ", lambda self: environs.get(self.pid, {"UCX_NET_DEVICES": ""}))
    assert listening.promise_of([os.getpid()], "127.0.0.1").devices_chosen
    environs[os.getpid()] = {"HOME": "/"}
    assert not listening.promise_of([os.getpid()], "127.0.0.1").devices_chosen


def test_a_child_is_looked_at_and_a_dead_engine_is_not(start: Start):
    _, ports = start("::")  # a child of this process
    here = msgspec.structs.replace(process.local_member(Role.DECODE, FINGERPRINT), address="tcp://127.0.0.1:1")
    assert any(f"[::]:{ports[0]}" in found.fact for found in judged(here))
    own = here.processes[0]
    gone = msgspec.structs.replace(here, processes=(Process(own.pid, own.start_time + 1), ))
    assert judged(gone) == []


def test_an_engine_in_a_container_of_this_machine_is_not_looked_at():
    here = process.local_member(Role.DECODE, FINGERPRINT)
    boot = here.host_id.partition("/")[0]
    [found] = judged(msgspec.structs.replace(here, host_id=f"{boot}/pid:[1]"))
    assert found.ok and "in that container" in found.hint
    assert judged(msgspec.structs.replace(here, host_id="another boot/pid:[1]")) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process wants root")
def test_a_process_of_another_user_is_named(start: Start):
    member, _ = start("127.0.0.1", "::")

    def ask_as_nobody(pipe: object) -> None:
        os.setgid(65534)
        os.setuid(65534)
        pipe.send(judged(member))

    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=ask_as_nobody, args=(theirs, ))
    child.start()
    assert ours.poll(60)
    [found] = ours.recv()
    child.join(60)
    assert found.ok and f"process {member.processes[0].pid} is of root" in found.fact and "as root" in found.hint


def test_doctor_says_it_of_the_engines_of_a_broker(start: Start):
    """In one of its lines, and only for this host; `--from` is about the paths alone."""
    member, ports = start("127.0.0.1", "::")
    with serving(ttl_s=600.0) as broker, zmq.Context() as context, \
            sockets.client(context, broker.address, only_connected=False) as engine:
        sockets.send(engine, codec.encode(member.incarnation, Register(member)))
        assert engine.poll(60_000)
        found = [one for one in doctor.check_peers(broker.address, Access(), here=True) if one.check == "listens"]
        assert [f"[::]:{ports[1]}" in one.fact for one in found] == [True]
        assert "listens" not in [one.check for one in doctor.check_peers(broker.address)]


@pytest.mark.parametrize("url, opener", [
    ("tcp://127.0.0.1:1", None), ("tcp://[::1]:1", None), ("tcp://10.0.0.6:1", None),
    ("tcp://[::ffff:10.0.0.6]:1", None), ("tcp://0.0.0.0:8000", Opener.HTTP), ("tcp://[::]:5557", Opener.EVENTS),
    ("tcp://10.0.0.7:30000", Opener.KV), ("tcp://0.0.0.0:40000", Opener.STORE), ("tcp://[::]:40000", Opener.STORE),
    ("tcp://10.0.0.7:40000", Opener.GLOO), ("tcp://10.0.0.8:40000", Opener.UNKNOWN)])
def test_b109_who_listens_there(url: str, opener: Opener | None):
    promise = Promise("10.0.0.6", frozenset({8000}), frozenset({5557}), frozenset({"tcp://10.0.0.7:30000"}),
                      own=frozenset({"10.0.0.7"}))
    assert find_opener(url, promise) is opener


@pytest.mark.parametrize("command, ports", [
    ([], set()), (["--kv-events-config", "{"], set()), (["--kv-events-config"], set()),
    (["--kv-events-config=[]"], set()), (["--kv-events-config", json.dumps({"endpoint": "ipc:///x"})], set()),
    (["--kv-events-config", json.dumps({"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://10.0.0.6:6557"})],
     {5557, 6557}),
    (["--kv-events-config=" + json.dumps({"endpoint": "tcp://[::]:5557"}), "--data-parallel-size", "2"], {5557, 5558})])
def test_the_ports_of_kv_events_in_a_command_line(command: list[str], ports: set[int]):
    assert event_ports(["vllm", "serve", *command]) == ports


def test_sockets_that_two_processes_share_are_one():
    """EngineCore's lifeline is in its ranks' processes too."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60, ))
        child.start()
        try:
            seen = look([os.getpid(), child.pid])
        finally:
            child.kill()
            child.join(60)
        assert seen.sockets[url_of(*server.getsockname())] == [os.getpid(), child.pid]
