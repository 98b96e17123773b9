# SPDX-License-Identifier: Apache-2.0
"""Where the sockets of an engine are, seen from here. An engine tells the addresses as it knows them; one that only its
own machine reaches may be somebody else's here."""
import asyncio
import ipaddress
import re
import socket

from vllm_pd.ports import take_free


def seen_from(host: str, address: str) -> str:
    """An engine that listens everywhere does so at `host`, where it was asked."""
    found = re.fullmatch(r"tcp://(.*):(\d+)", address)
    if found is None:
        return address
    told = found.group(1).strip("[]")
    if told == "*" or _is_everywhere(told):
        told = host
    return f"tcp://{f'[{told}]' if ':' in told else told}:{found.group(2)}"


def of_rank(address: str, rank: int) -> str:
    """Where the publisher of that data-parallel rank is, as vLLM moves it."""
    base, colon, port = address.rpartition(":")
    return f"{base}{colon}{int(port) + rank}" if rank and address.startswith("tcp://") and port.isdigit() else address


def listens(endpoint: str) -> bool:
    """Whether vLLM's publisher listens at this endpoint of its configuration; else it connects to it."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def lacks_port(endpoint: str) -> bool:
    """Whether it is TCP at whichever port is free."""
    return endpoint.startswith("tcp://") and endpoint.endswith(":0")


def with_port(endpoint: str) -> str:
    """The same, with a free port where it names none, so that others can be told of it."""
    return f"{endpoint[:-1]}{take_free('0.0.0.0')}" if lacks_port(endpoint) else endpoint


async def is_here(host: str, timeout_s: float) -> bool:
    """Whether `host` is this machine: whether one can listen at one of its addresses. Raises TimeoutError."""
    try:
        async with asyncio.timeout(timeout_s):
            found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _is_everywhere(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
