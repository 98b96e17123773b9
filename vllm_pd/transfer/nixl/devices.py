# SPDX-License-Identifier: Apache-2.0
"""Which network devices UCX may use.

UCX listens on every device that it may use, and obeys everybody who reaches it: it has no keys. By default these are
all devices of the machine. Here they are the interface that has the address of `bind`, and, unless that is the
loopback, the machine's RDMA ports. Processes of one machine also meet in shared memory, and on one GPU by CUDA IPC; UCX
counts neither as a network device.

UCX takes names of interfaces, not addresses, and listens at the first address of each. So an address that is not the
first of its interface is refused: UCX would listen somewhere else. UCX uses a bridge only with UCX_TCP_BRIDGE_ENABLE.

Where an operator has set UCX_NET_DEVICES, nothing here changes it.
"""
from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from vllm_pd.errors import TransferError

VARIABLE = "UCX_NET_DEVICES"
BRIDGES = "UCX_TCP_BRIDGE_ENABLE"
SYSTEM = Path("/sys/class")
CURE = f"or set {VARIABLE} to the devices that UCX shall use"
_lock = threading.Lock()  # variables belong to the process


def net_devices(host: str, system: Path = SYSTEM) -> dict[str, str]:
    """UCX's variables for an engine that listens at this IPv4 address; none where an operator has chosen. Raises
    TransferError where UCX can't listen there."""
    if os.environ.get(VARIABLE):
        return {}
    loopback = ipaddress.IPv4Address(host).is_loopback
    interface, first = _interface("127.0.0.1" if loopback else host)
    if not loopback and first != host:
        raise TransferError(f"UCX listens at {first}, the first address of {interface}, and not at {host} of `bind`: "
                            f"bind to {first}, give {host} an interface of its own, {CURE}")
    if loopback:
        return {VARIABLE: interface}
    ports = sorted(f"{port.parent.parent.name}:{port.name}" for port in system.glob("infiniband/*/ports/*"))
    bridge = {BRIDGES: "y"} if (system / "net" / interface / "bridge").exists() else {}
    return {VARIABLE: ",".join([interface, *ports]), **bridge}


def _interface(host: str) -> tuple[str, str]:
    """The interface that has this address, and its first IPv4 address, in the order of the kernel and of UCX."""
    first: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        interface = name.partition(":")[0]  # "eth0:1" is a second address of eth0
        for address in addresses:
            if address.family != socket.AF_INET:
                continue
            first.setdefault(interface, address.address)
            if address.address == host:
                return interface, first[interface]
    raise TransferError(f"no network interface of this machine has the address {host} of `bind`: write one of its own, "
                        f"{CURE}")


@contextlib.contextmanager
def only_devices_of(host: str) -> Iterator[str]:
    """Inside the `with` block UCX, which reads its variables when a backend is created, finds these devices. Gives them
    in words. Raises TransferError."""
    with _lock:
        found = {name: value for name, value in net_devices(host).items()
                 if name == VARIABLE or name not in os.environ}
        before = {name: os.environ.get(name) for name in found}
        os.environ.update(found)
        try:
            yield (" ".join(f"{name}={value}" for name, value in found.items())
                   or f"{VARIABLE}={os.environ[VARIABLE]}, as it was set")
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
