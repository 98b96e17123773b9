# SPDX-License-Identifier: Apache-2.0
"""Which addresses are of this machine. Without keys nobody connects to any other: who can reach the broker could name
one, and get prompts, KV and the key of an API sent there.
"""
from __future__ import annotations

import functools
import ipaddress
import socket
import time
from urllib.parse import urlsplit

import psutil

from vllm_pd.protocol.messages import Member

REMEMBERED_S = 60.0


def is_here(host: str) -> bool:
    """Whether this address, or all that this name leads to, is of an interface of this machine. May ask a name server,
    and remembers its answer for up to REMEMBERED_S."""
    try:
        return not is_elsewhere(str(ipaddress.ip_address(host)))
    except ValueError:
        return _leads_here(host, time.monotonic() // REMEMBERED_S)


def is_elsewhere(host: str) -> bool:
    """Whether this is an address that no interface of this machine has; False for a name, which is not looked up."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return not address.is_loopback and str(address) not in _own_addresses()


def stays_on_loopback(member: Member) -> bool:
    """Whether other engines reach this one on their machine's loopback only."""
    return all(_is_on_loopback(url) for url in (member.address, member.lifeline) if url)


def _is_on_loopback(url: str) -> bool:
    try:
        return ipaddress.ip_address(urlsplit(url).hostname or "").is_loopback
    except ValueError:
        return False


def address_towards(host: str) -> str | None:
    """The IPv4 address of this machine by which it reaches that one; None without a route. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 1))
            return probe.getsockname()[0]
    except OSError:
        return None


@functools.lru_cache(maxsize=256)
def _leads_here(name: str, period: float) -> bool:
    try:
        found = {where[0] for *_, where in socket.getaddrinfo(name, None)}
    except (OSError, UnicodeError):
        return False
    return bool(found) and not any(map(is_elsewhere, found))


def _own_addresses() -> set[str]:
    return {one.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for one in addresses}
