# SPDX-License-Identifier: Apache-2.0
"""The hosts and the faults between them are what the other tests take them for."""
import subprocess
import sys
import time

import psutil
import pytest

from tests.hosts.rack import Host, Rack
from tests.hosts.wire import Wire
from tests.waiting import wait_for

PORT = 8000
TRY_S = 1.0
# Says how a connection to ADDRESS PORT, its arguments, goes.
CONNECT = f"""import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), {TRY_S}).close()
    print("open")
except ConnectionRefusedError:
    print("refused")
except OSError:
    print("silent")"""
# Listens at ARGUMENT:PORT, and keeps all connections open.
LISTEN = f"""import socket, sys
listener, accepted = socket.create_server((sys.argv[1], {PORT})), []
while True:
    accepted.append(listener.accept())"""


@pytest.fixture
def pair(rack: Rack) -> tuple[Host, Host]:
    """A host where something listens, and one that connects to it."""
    server, client = rack.host("server"), rack.host("client")
    server.start([sys.executable, "-c", LISTEN, server.ip], subprocess.DEVNULL, server.folder / "log")
    wait_for(lambda: attempt(client, server) == "open", timeout_s=30.0)
    return server, client


def attempt(one: Host, other: Host, port: int = PORT) -> str:
    return one.run(sys.executable, "-c", CONNECT, other.ip, str(port)).strip()


def test_hosts_are_other_machines(pair):
    server, client = pair
    for what in (["cat", "/proc/sys/kernel/random/boot_id"], ["readlink", "/proc/self/ns/pid"], ["hostname"]):
        assert len({server.run(*what), client.run(*what), subprocess.check_output(what, text=True)}) == 3
    assert server.listening() == {server.ip} and client.listening() == set()
    assert str(server.pid) not in server.run("ls", "/proc").split()
    assert set(server.run("ls", "/sys/class/net").split()) == {"lo", "eth0"}
    server.sysctl("ipv4/tcp_retries2", 6)
    assert server.run("cat", "/proc/sys/net/ipv4/tcp_retries2").strip() == "6"
    assert client.run("cat", "/proc/sys/net/ipv4/tcp_retries2").strip() != "6"


def test_a_cut_is_silent_and_between_the_two_only(rack, pair):
    server, client = pair
    third = rack.host("third")
    rack.cut(server, client)
    assert attempt(client, server) == "silent" and attempt(third, server) == "open"
    rack.heal()
    wait_for(lambda: attempt(client, server) == "open", timeout_s=30.0)
    rack.cut(server, client, one_way=True)
    assert attempt(client, server) == "silent"
    rack.heal()
    rack.cut(server, third, one_way=True)
    wait_for(lambda: attempt(client, server) == "open", timeout_s=30.0)


def test_a_firewall_refuses_one_host(rack, pair):
    server, client = pair
    third = rack.host("third")
    server.reject(client)
    assert attempt(client, server) == "refused" and attempt(third, server) == "open"
    server.accept()
    assert attempt(client, server) == "open"


def test_a_firewall_drops_what_comes_to_another_port(pair):
    server, client = pair
    server.open_only("22, 8001-8009")
    assert attempt(client, server) == "silent"
    server.accept()
    server.open_only(f"22, {PORT}")
    assert attempt(client, server) == "open" and attempt(server, client) == "refused"


def test_a_cable_of_their_own_has_its_rate(pair):
    server, client = pair
    server.connect(client, "fab0", "10.80.0", "4mbit")
    begin = time.monotonic()
    server.start([sys.executable, "-c", f"import socket; s = socket.create_server(('10.80.0.1', {PORT})); "
                  "s.accept()[0].sendall(bytes(500_000))"], subprocess.DEVNULL, server.folder / "log")
    wait_for(lambda: "10.80.0.1" in server.listening(), timeout_s=30.0)
    received = client.run(sys.executable, "-c", f"import socket; s = socket.create_connection(('10.80.0.1', {PORT})); "
                          "print(sum(map(len, iter(lambda: s.recv(65536), b''))))")
    assert received.strip() == "500000" and time.monotonic() - begin > 0.8


def test_a_bad_wire_loses_and_delays_what_one_host_sends_and_gets(rack, pair):
    server, client = pair
    third = rack.host("third")
    rack.spoil(client, Wire(loss=1.0))
    assert attempt(client, server) == "silent" and attempt(third, server) == "open"
    rack.heal()
    wait_for(lambda: attempt(client, server) == "open", timeout_s=30.0)
    rack.spoil(client, Wire(delay_s=0.6 * TRY_S))
    assert attempt(client, server) == "silent", "there and back takes longer than it waits"
    rack.heal()
    rack.spoil(client, Wire(delay_s=0.1 * TRY_S, twice=0.5, late=0.5))
    assert attempt(client, server) == "open"


def test_what_a_bad_wire_does_to_a_frame():
    assert Wire().arrivals(bytes(1514)) == [0.0]
    assert Wire(max_bytes=1300).arrivals(bytes(1315)) == [] and Wire(max_bytes=1300).arrivals(bytes(1314)) == [0.0]
    assert Wire(twice=1.0, delay_s=0.1).arrivals(b"") == [0.1, 0.1]
    many = [Wire(loss=0.2, late=0.5).arrivals(b"") for _ in range(2000)]
    assert 1500 < sum(map(bool, many)) < 1700 and len(set(map(tuple, many))) > 500


def test_an_address_and_a_link_that_are_gone_for_a_while(pair):
    server, client = pair
    former = server.ip
    server.readdress()
    assert attempt(client, server) == "silent"
    server.readdress("10.79.0.99")
    assert server.ip == "10.79.0.99" and attempt(client, server) == "refused", "it listens at the former one"
    server.readdress(former)
    assert attempt(client, server) == "open"
    server.switch_off()
    assert attempt(client, server) == "silent"
    server.switch_on()
    wait_for(lambda: attempt(client, server) == "open", timeout_s=30.0)
    assert server.ip6 in server.run("ip", "-6", "addr", "show", "dev", "eth0")


def test_a_host_without_power_says_nothing(pair):
    server, client = pair
    waiting = client.start([sys.executable, "-c", "import socket; "
                             f"s = socket.create_connection(('{server.ip}', {PORT})); print('open', flush=True); "
                             "s.settimeout(3.0); s.recv(1)"], subprocess.PIPE, client.folder / "log", text=True)
    assert waiting.stdout.readline() == "open\n"
    inside = psutil.Process(server.pid)
    server.power_off()
    assert not inside.is_running()
    assert attempt(client, server) == "silent"
    assert waiting.wait(30.0) and "timed out" in (client.folder / "log").read_text()


def test_nothing_is_left_over(tmp_path):
    before = set(psutil.net_if_addrs())
    with pytest.raises(ZeroDivisionError), Rack(tmp_path) as rack:
        first = psutil.Process(rack.host("one").pid)
        program = psutil.Process(rack.host("other").start(["sleep", "600"], subprocess.DEVNULL, tmp_path / "log").pid)
        assert first.is_running() and program.is_running()
        raise ZeroDivisionError
    assert not first.is_running() and not program.is_running() and set(psutil.net_if_addrs()) == before
