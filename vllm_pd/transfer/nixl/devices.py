# SPDX-License-Identifier: Apache-2.0
"""Which network devices UCX may use.

UCX listens on every device that it may use, and does what anybody says who reaches it: it has no keys. By default these
are all devices of the machine. Here they are the interface that has the address of `bind`, and, unless that is the
loopback, the machine's RDMA ports, which no plain TCP reaches. Processes of one machine also meet in shared memory, and
on one GPU by CUDA IPC; UCX counts neither as a network device.

An operator who sets UCX_NET_DEVICES chooses himself.
"""
from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

from vllm_pd.errors import TransferError

VARIABLE = "UCX_NET_DEVICES"
RDMA = Path("/sys/class/infiniband")


def net_devices(host: str, rdma: Path = RDMA) -> str:
    """The value of UCX_NET_DEVICES for an engine that listens at this IPv4 address. Raises TransferError where no
    interface of this machine has it."""
    named = {address.address: name.partition(":")[0]  # "eth0:1" is a second address of eth0
             for name, addresses in psutil.net_if_addrs().items() for address in addresses}
    loopback = ipaddress.IPv4Address(host).is_loopback
    interface = named.get("127.0.0.1" if loopback else host)
    if interface is None:
        raise TransferError(f"no network interface of this machine has the address {host} of `bind`: write one of its "
                            f"own, or set {VARIABLE}")
    ports = [] if loopback else sorted(f"{port.parent.parent.name}:{port.name}" for port in rdma.glob("*/ports/*"))
    return ",".join([interface, *ports])


@contextlib.contextmanager
def only_devices_of(host: str) -> Iterator[str]:
    """Inside the `with` block UCX, which reads its variables when a backend is created, finds these devices. Gives
    them. Raises TransferError."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        yield chosen
        return
    os.environ[VARIABLE] = net_devices(host)
    try:
        yield os.environ[VARIABLE]
    finally:
        del os.environ[VARIABLE]
