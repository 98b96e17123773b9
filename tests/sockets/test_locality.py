# SPDX-License-Identifier: Apache-2.0
"""Which addresses are of this machine, and what is left out of a registry that is read without keys."""
from __future__ import annotations

import socket

import msgspec
import psutil
import pytest

from vllm_pd.broker.members import MemberList
from vllm_pd.protocol import messages as m
from vllm_pd.rpc.locality import address_towards, is_elsewhere, is_here

MEMBER = m.Member("d", m.Role.DECODE, "tcp://127.0.0.1:1", m.Fingerprint(1, "", "", "", 1, 1, 1, 1, ""))


def own_addresses() -> list[str]:
    return [one.address for addresses in psutil.net_if_addrs().values() for one in addresses
            if one.family is socket.AF_INET]


def test_all_addresses_of_this_machine_are_here():
    hosts = [*own_addresses(), "127.0.0.1", "127.5.0.1", "[::1]", "localhost"]
    assert all(is_here(f"http://{host}:8000") for host in hosts)
    assert not any(map(is_elsewhere, [*own_addresses(), "a-name"]))


@pytest.mark.parametrize("url", [
    "http://203.0.113.7:8000", "http://[2001:db8::1]:8000", "http://0.0.0.0:8000", "http://a-name:8000", "http://:8000",
    "http://[x", "127.0.0.1:8000", ""])
def test_others_and_names_are_not(url):
    """A name may lead elsewhere when it is used."""
    assert not is_here(url)


def test_the_way_to_this_machine_is_this_machine():
    assert address_towards("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("key, url, is_listed", [
    ("http", "http://203.0.113.7:8000", False), ("http", "http://a-name:8000", False), ("http", "http://[x", False),
    ("http", "http://localhost:8000", True), ("http", "", True), ("address", "tcp://203.0.113.7:1", False),
    ("lifeline", "tcp://203.0.113.7:1", False), ("http", "http://:8000", False)])
def test_b110_a_list_without_keys_has_no_engine_of_another_machine(key, url, is_listed):
    """B110: a router would send its prompts, and the key of its API, wherever somebody says."""
    forged = msgspec.structs.replace(MEMBER, **{key: url})
    found = MemberList((forged, MEMBER), 3).on_this_machine()
    assert found == MemberList((forged, MEMBER) if is_listed else (MEMBER, ), 3, () if is_listed else (url, ))
