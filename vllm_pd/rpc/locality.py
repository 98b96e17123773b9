# SPDX-License-Identifier: Apache-2.0
"""Which addresses are of this machine. Without keys nobody connects to any other: who can reach the broker could name
one, and get prompts, KV and the key of an API sent there. A name in such a URL is not looked up, for it may lead
elsewhere later.
"""
from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import urlsplit

import psutil

from vllm_pd.errors import ConfigError
from vllm_pd.protocol.messages import Member

_ADDRESS = re.compile(r"tcp://(127\.[0-9]+\.[0-9]+\.[0-9]+|\[::1\]):[0-9]+")
_PREFERENCES, _NO_TEMPORARY = 72, 2  # IPV6_ADDR_PREFERENCES, IPV6_PREFER_SRC_PUBLIC of Linux: one that does not expire


def is_own(host: str) -> bool:
    """Whether this is an address of the loopback, or one that an interface of this machine has, in this network
    namespace. Raises ValueError for a name, OSError where that is not known."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return address.is_loopback or any(str(address) == one.address.partition("%")[0]
                                      for addresses in psutil.net_if_addrs().values() for one in addresses)


def is_here(url: str) -> bool:
    """Whether the host of this URL is an address of this machine, or `localhost`."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or is_own(host)
    except ValueError:
        return False


def stays_on_loopback(member: Member) -> bool:
    """Whether other engines reach this one on their machine's loopback only: at addresses as engines write them, and in
    no other form, which ZeroMQ might read in another way."""
    return all(_ADDRESS.fullmatch(url) for url in (member.address, member.lifeline) if url)


def resolve(key: str, value: str, host: str) -> list[str]:
    """The addresses that this name, or address, stands for, those of IPv4 first. Raises ConfigError naming `key` and
    `value` where there is none. Looking a name up may take seconds."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # a label of the name may be empty, or too long
        raise ConfigError(key, value, f"{host} has no address ({getattr(error, 'strerror', None) or error}): write a "
                          "name that this machine can look up, or an address") from error
    return [where[0] for family, *_, where in sorted(found, key=lambda one: one[0] != socket.AF_INET)]


def needs_ipv6(host: str | None) -> bool:
    """Whether this is an address of IPv6, or a name that has only such ones now. libzmq needs an option for them."""
    try:
        return host is not None and all(":" in address for address in resolve("", "", host))
    except ConfigError:
        return False


def address_towards(host: str) -> str | None:
    """The address of this machine by which it reaches that one; None without a route. Sends nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, _PREFERENCES, _NO_TEMPORARY)
            probe.connect((host, 1))
            return probe.getsockname()[0]
    except OSError:
        return None
