# SPDX-License-Identifier: Apache-2.0
"""Which addresses are of this machine, and what is left out of a registry that is read without keys."""
from __future__ import annotations

import socket

import msgspec
import psutil
import pytest

from vllm_pd.broker.members import MemberList
from vllm_pd.protocol import messages as m
from vllm_pd.rpc import locality
from vllm_pd.rpc.locality import address_towards, is_elsewhere, is_here

MEMBER = m.Member("d", m.Role.DECODE, "tcp://127.0.0.1:1", m.Fingerprint(1, "", "", "", 1, 1, 1, 1, ""))


def own_addresses() -> list[str]:
    return [one.address for addresses in psutil.net_if_addrs().values() for one in addresses
            if one.family is socket.AF_INET]


def test_all_addresses_of_this_machine_are_here():
    assert all(map(is_here, [*own_addresses(), "127.0.0.1", "127.5.0.1", "::1", "localhost"]))
    assert not any(map(is_elsewhere, [*own_addresses(), "a-name"]))


@pytest.mark.parametrize("host", ["203.0.113.7", "2001:db8::1", "0.0.0.0", "no-such-name.invalid", "a" * 300, ""])
def test_others_are_not(host):
    assert not is_here(host)


def test_a_name_is_here_if_all_that_it_leads_to_is(monkeypatch):
    for led_to, here in ((["127.0.0.1"], True), (["127.0.0.1", "203.0.113.7"], False), ([], False)):
        locality._leads_here.cache_clear()
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, led_to=led_to: [(0, 0, 0, "", (ip, 0)) for ip in led_to])
        assert is_here("name") is here
    locality._leads_here.cache_clear()


def test_the_way_to_this_machine_is_this_machine():
    assert address_towards("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("key, url, is_listed", [
    ("http", "http://203.0.113.7:8000", False), ("http", "http://no-such-name.invalid:8000", False),
    ("http", "http://localhost:8000", True), ("http", "", True), ("address", "tcp://203.0.113.7:1", False),
    ("lifeline", "tcp://203.0.113.7:1", False), ("http", "http://:8000", False)])
def test_b110_a_list_without_keys_has_no_engine_of_another_machine(key, url, is_listed):
    """B110: a router would send its prompts, and the key of its API, wherever somebody says."""
    forged = msgspec.structs.replace(MEMBER, **{key: url})
    found = MemberList((forged, MEMBER), 3).on_this_machine()
    assert found == MemberList((forged, MEMBER) if is_listed else (MEMBER, ), 3, () if is_listed else (url, ))
