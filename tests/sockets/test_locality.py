# SPDX-License-Identifier: Apache-2.0
"""Which addresses are of this machine, and what is left out of a registry that is read without keys."""
from __future__ import annotations

import errno
import re
import socket

import msgspec
import psutil
import pytest

from vllm_pd.broker.members import MemberList
from vllm_pd.errors import ConfigError
from vllm_pd.model.checks import check_meeting
from vllm_pd.protocol import messages as m
from vllm_pd.rpc.addresses import url_of
from vllm_pd.rpc.locality import address_towards, is_here, is_own, needs_ipv6, resolve

MEMBER = m.Member("d", m.Role.DECODE, "tcp://127.0.0.1:1", m.Fingerprint(1, "", "", "", 1, 1, 1, 1, ""))


def own_addresses() -> list[str]:
    return [one.address for addresses in psutil.net_if_addrs().values() for one in addresses
            if one.family in (socket.AF_INET, socket.AF_INET6) and "%" not in one.address]


def test_all_addresses_of_this_machine_are_here():
    hosts = [*own_addresses(), "127.0.0.1", "127.5.0.1", "::1"]
    assert all(map(is_own, hosts)) and not any(map(is_own, ["203.0.113.7", "2001:db8::1", "0.0.0.0", "::"]))
    assert all(is_here(url_of(host, 8000, "http")) for host in [*hosts, "localhost"])


@pytest.mark.parametrize("url", [
    "http://203.0.113.7:8000", "http://[2001:db8::1]:8000", "http://0.0.0.0:8000", "http://a-name:8000", "http://:8000",
    "http://[x", "127.0.0.1:8000", ""])
def test_others_and_names_are_not(url):
    """A name may lead elsewhere when it is used."""
    assert not is_here(url)


def test_the_way_to_this_machine_is_this_machine():
    assert [address_towards(host) for host in own_addresses()] == own_addresses()


def test_b80_without_a_route_there_is_no_way(monkeypatch):
    def connect(*_: object) -> None:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "socket", type("Socket", (socket.socket, ), {"connect": connect}))
    assert address_towards("203.0.113.7") is None and address_towards("2001:db8::1") is None


def test_b80_a_name_that_is_unknown():
    for name in ("no-such-host.invalid", "a..b", "a" * 64):
        with pytest.raises(ConfigError, match=f"broker='tcp://{name}:1'.*{name} has no address.*that this machine can"):
            resolve("broker", f"tcp://{name}:1", name)
    assert resolve("broker", "", "localhost") and not needs_ipv6("localhost") and not needs_ipv6("no-such-host.invalid")
    assert needs_ipv6("::1") and not needs_ipv6("127.0.0.1")


def test_of_a_name_the_addresses_of_ipv4_count(monkeypatch):
    found = [(socket.AF_INET6, 1, 6, "", ("fd00::5", 0, 0, 0)), (socket.AF_INET, 1, 6, "", ("10.0.0.5", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert resolve("broker", "", "a-name") == ["10.0.0.5", "fd00::5"] and not needs_ipv6("a-name")
    del found[1]
    assert resolve("broker", "", "a-name") == ["fd00::5"] and needs_ipv6("a-name")


NAMES = {"own.lab": ["203.0.113.7", *own_addresses()[-1:]], "other.lab": ["203.0.113.7", "2001:db8::1"],
         "local.lab": ["127.0.1.1"]}


@pytest.fixture
def names(monkeypatch):
    real = socket.getaddrinfo

    def look_up(host, *rest, **more):
        return [one for address in NAMES.get(host, [host]) for one in real(address, *rest, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


LOOPBACKS = ["tcp://127.0.0.1:0", "tcp://127.0.1.1:0", "tcp://[::1]:5702"]


@pytest.mark.parametrize("bind", LOOPBACKS)
@pytest.mark.parametrize("broker, host", [
    ("tcp://203.0.113.7:5700", "203.0.113.7"), ("tcp://[2001:db8::1]:5700", "2001:db8::1"),
    ("tcp://other.lab:5700", "other.lab"), ("nats://127.0.0.1:4222,nats://other.lab:4222", "other.lab"),
    ("tls://no-such.invalid:4222,tls://203.0.113.7:4222", "203.0.113.7")])
def test_b80_a_broker_on_another_machine_needs_an_address_that_others_reach(names, bind, broker, host):
    """B80: engines there would connect to their own loopback."""
    with pytest.raises(ConfigError, match=re.escape(f"bind='{bind}' can't be used: the broker is at {host}, on another"
                                                    " machine") + ".*an address of its own: write \"auto\""):
        check_meeting(bind, broker)
    check_meeting("tcp://10.0.0.5:0", broker)


def test_b80_a_broker_of_this_machine_may_have_any_of_its_addresses(names):
    for host in [*own_addresses(), "own.lab", "local.lab", "localhost"]:
        for bind in LOOPBACKS:
            check_meeting(bind, url_of(host, 5700))


def test_b80_a_broker_with_an_unknown_name():
    for bind in ("tcp://127.0.0.1:0", "tcp://10.0.0.5:0"):
        with pytest.raises(ConfigError, match="broker='nats://no.invalid:1,nats://a.invalid:1'.*no.invalid has no"):
            check_meeting(bind, "nats://no.invalid:1,nats://a.invalid:1")
        check_meeting(bind, "nats://no.invalid:1,nats://127.0.0.1:1")


@pytest.mark.parametrize("key, url, is_listed", [
    ("http", "http://203.0.113.7:8000", False), ("http", "http://a-name:8000", False), ("http", "http://[x", False),
    ("http", "http://localhost:8000", True), ("http", "", True), ("address", "tcp://203.0.113.7:1", False),
    ("lifeline", "tcp://203.0.113.7:1", False), ("http", "http://:8000", False)])
def test_b110_a_list_without_keys_has_no_engine_of_another_machine(key, url, is_listed):
    """B110: a router would send its prompts, and the key of its API, wherever somebody says."""
    forged = msgspec.structs.replace(MEMBER, **{key: url})
    found = MemberList((forged, MEMBER), 3).on_this_machine()
    assert found == MemberList((forged, MEMBER) if is_listed else (MEMBER, ), 3, () if is_listed else (url, ))
