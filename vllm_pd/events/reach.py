# SPDX-License-Identifier: Apache-2.0
"""The addresses of an engine's sockets, as seen from this machine. An engine reports them as it knows them. An address
that only the engine's own machine can reach may belong to another engine here."""
import asyncio
import ipaddress
import re
import socket

from vllm_pd.peer.liveness.process import is_own_address
from vllm_pd.rpc.ports import take_free


def seen_from(host: str, address: str) -> str:
    """The address to connect to: `host`, where the engine was asked, in place of a wildcard."""
    found = re.fullmatch(r"tcp://(.*):(\d+)", address)
    if found is None:
        return address
    reported = found.group(1).strip("[]")
    if reported == "*" or _is_wildcard(reported):
        reported = host
    return f"tcp://{f'[{reported}]' if ':' in reported else reported}:{found.group(2)}"


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


async def is_here(host: str, timeout_s: float) -> bool:
    """Whether `host` is this machine, which means that one of its addresses is this machine's. Raises TimeoutError."""
    try:
        async with asyncio.timeout(timeout_s):
            found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        if isinstance(error, TimeoutError):
            raise
        return False
    return any(_is_own(family, address) for family, _, _, _, address in found)


def _is_own(family: int, address: tuple) -> bool:
    try:
        return is_own_address(family, address)
    except OSError:
        return False


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
