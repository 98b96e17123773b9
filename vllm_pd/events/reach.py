# SPDX-License-Identifier: Apache-2.0
"""The addresses of an engine's sockets, as seen from this machine. An engine reports them as it knows them. An address
that only the engine's own machine can reach may belong to another engine here."""
import asyncio
import ipaddress
import re
import socket

from vllm_pd.rpc.addresses import url_of
from vllm_pd.rpc.locality import is_own
from vllm_pd.rpc.ports import take_free


def seen_from(host: str, address: str) -> str:
    """The address to connect to: `host`, where the engine was asked, in place of a wildcard."""
    found = re.fullmatch(r"tcp://(.*):(\d+)", address)
    if found is None:
        return address
    reported = found.group(1).strip("[]")
    if reported == "*" or _is_wildcard(reported):
        reported = host
    return url_of(reported, int(found.group(2)))


def of_rank(address: str, rank: int) -> str:
    """The address of a data-parallel rank's publisher: vLLM adds the rank to the port."""
    base, colon, port = address.rpartition(":")
    return f"{base}{colon}{int(port) + rank}" if rank and address.startswith("tcp://") and port.isdigit() else address


def listens(endpoint: str) -> bool:
    """Whether vLLM's publisher listens at this configured endpoint; otherwise it connects to it."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def lacks_port(endpoint: str) -> bool:
    """Whether the endpoint is TCP with port 0, which means any free port."""
    return endpoint.startswith("tcp://") and endpoint.endswith(":0")


def with_port(endpoint: str) -> str:
    """The endpoint with a free port in place of port 0, so that the port is known before it is bound."""
    return f"{endpoint[:-1]}{take_free('0.0.0.0')}" if lacks_port(endpoint) else endpoint


async def looked_up(address: str, timeout_s: float) -> str:
    """The address with one of its host's in place of a name, which libzmq would look up in its own way, and only for
    IPv4. Raises OSError for an unknown name, TimeoutError."""
    found = re.fullmatch(r"tcp://([^\[\]:]+):(\d+)", address)
    if found is None:
        return address
    return url_of((await _addresses(found.group(1), timeout_s))[0], int(found.group(2)))


async def is_here(host: str, timeout_s: float) -> bool:
    """Whether `host` is this machine, which means that one of its addresses is this machine's. Raises TimeoutError."""
    try:
        return any(map(is_own, await _addresses(host, timeout_s)))
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise
        return False


async def _addresses(host: str, timeout_s: float) -> list[str]:
    """Those of IPv4 first."""
    async with asyncio.timeout(timeout_s):
        found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    return [where[0] for family, *_, where in sorted(found, key=lambda one: one[0] != socket.AF_INET)]


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
