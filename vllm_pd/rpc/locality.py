# SPDX-License-Identifier: Apache-2.0
"""Which addresses are of this machine. Without keys nobody connects to any other: who can reach the broker could name
one, and get prompts, KV and the key of an API sent there. A name is not looked up, for it may lead elsewhere later.
"""
from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import urlsplit

import psutil

from vllm_pd.protocol.messages import Member

_ADDRESS = re.compile(r"tcp://(127\.[0-9]+\.[0-9]+\.[0-9]+|\[::1\]):[0-9]+")


def is_here(url: str) -> bool:
    """Whether the host of this URL is an address that an interface of this machine has, or `localhost`."""
    try:
        host = urlsplit(url).hostname or ""
        ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        return False
    return not is_elsewhere(host)


def is_elsewhere(host: str) -> bool:
    """Whether this is an address that no interface of this machine has; False for a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return not address.is_loopback and str(address) not in _own_addresses()


def stays_on_loopback(member: Member) -> bool:
    """Whether other engines reach this one on their machine's loopback only: at addresses as engines write them, and in
    no other form, which ZeroMQ might read in another way."""
    return all(_ADDRESS.fullmatch(url) for url in (member.address, member.lifeline) if url)


def address_towards(host: str) -> str | None:
    """The IPv4 address of this machine by which it reaches that one; None without a route. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 1))
            return probe.getsockname()[0]
    except OSError:
        return None


def _own_addresses() -> set[str]:
    return {one.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for one in addresses}
