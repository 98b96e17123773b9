# SPDX-License-Identifier: Apache-2.0
"""Which network devices UCX may use.

UCX listens on every device that it may use, and obeys everybody who reaches it: it has no keys. By default these are
all devices of the machine. Here they are the interface that has the address of `bind`, and, unless that is the
loopback, the machine's RDMA ports. Processes of one machine also meet in shared memory, and on one GPU by CUDA IPC; UCX
counts neither as a network device.

UCX takes names of interfaces, not addresses, and listens at the first address of each, of IPv4 unless `FAMILY` says
otherwise; it skips the link-local ones of IPv6. So an address that is not the first of its kind is refused: UCX would
listen somewhere else. UCX uses a bridge only with UCX_TCP_BRIDGE_ENABLE.

Where an operator has set UCX_NET_DEVICES, nothing here changes it.
"""
from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from vllm_pd.errors import ConfigError, TransferError

VARIABLE = "UCX_NET_DEVICES"
BRIDGES = "UCX_TCP_BRIDGE_ENABLE"
FAMILY = "UCX_TCP_AF_PRIO"
PORTS = "UCX_TCP_PORT_RANGE"
TRANSPORTS = "UCX_TLS"
MACHINE_WAYS = ("sm", "cuda_ipc", "rocm_ipc", "ze_ipc")  # of UCX, for processes of one machine
MACHINE_NAMES = ("all", "shm", "mm", "posix", "sysv", "xpmem", "cma", "knem", "cuda", "rocm", "ze")  # parts, and more
SYSTEM = Path("/sys/class")
CURE = f"or set {VARIABLE} to the devices that UCX shall use"
_lock = threading.Lock()  # variables belong to the process


def net_devices(host: str, system: Path = SYSTEM) -> dict[str, str]:
    """UCX's variables for an engine that listens at this address; none where an operator has chosen. Raises
    TransferError where UCX can't listen there."""
    if os.environ.get(VARIABLE):
        return {}
    address = ipaddress.ip_address(host)
    loopback = address.is_loopback
    interface, first = _interface("127.0.0.1" if loopback and address.version == 4 else host)
    family = {FAMILY: "inet6,inet"} if address.version == 6 else {}
    if not loopback and first != host:
        raise TransferError(f"UCX listens at {first}, the first address of {interface}, and not at {host} of `bind`: "
                            f"bind to {first}, give {host} an interface of its own, {CURE}")
    if loopback:
        return {VARIABLE: interface, **family}
    ports = sorted(f"{port.parent.parent.name}:{port.name}" for port in system.glob("infiniband/*/ports/*"))
    bridge = {BRIDGES: "y"} if (system / "net" / interface / "bridge").exists() else {}
    return {VARIABLE: ",".join([interface, *ports]), **bridge, **family}


def check_variables(system: Path = SYSTEM) -> None:
    """Raises ConfigError where an operator has given UCX devices of which this machine lacks one, or ports that are
    none: UCX ignores a device that it does not know, and takes ports modulo 65536."""
    names = os.environ.get(VARIABLE, "")
    known = {name for _, name in socket.if_nameindex()} | {path.name for path in system.glob("infiniband/*")}
    for name in (one.partition(":")[0] for one in names.removeprefix("^").split(",") if names):
        if re.fullmatch(r"[\w.-]+", name) and name not in known | {"all"}:  # else it is a pattern
            raise ConfigError(VARIABLE, names, f"this machine has no network device {name}: write names of interfaces "
                              "and RDMA ports, like eth0,mlx5_0:1, or unset it")
    ports = os.environ.get(PORTS, "")
    found = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", ports)
    if ports and not (found and int(found[1]) <= int(found[2] or found[1]) <= 65535):
        raise ConfigError(PORTS, ports, "there is no such port: write the first and the last one, like 30000-30999")


def check_network_only() -> None:
    """Raises ConfigError where an operator has given UCX a way that exists on one machine only (`only_network`)."""
    given = os.environ.get(TRANSPORTS, "")
    ways = set() if given.startswith("^") else {one.strip().partition(":")[0] for one in given.split(",")}
    if found := sorted(ways & {*MACHINE_WAYS, *MACHINE_NAMES}):
        raise ConfigError(TRANSPORTS, given, f"take {', '.join(found)} out of it, or unset it: the ranks of an engine "
                          "on several nodes must reach engines of their machine by network, like others")


def only_network() -> None:
    """From now on the agents of this process reach others of this machine by network, too, and are reached in no other
    way: what one of them writes or reads ends with either agent, as between machines (`protocol.generations`). Raises
    ConfigError."""
    check_network_only()
    given = os.environ.get(TRANSPORTS, "")
    if not given or given.startswith("^"):  # else it names what may be used
        left_out = dict.fromkeys([*filter(None, given.removeprefix("^").split(",")), *MACHINE_WAYS])
        os.environ[TRANSPORTS] = f"^{','.join(left_out)}"


def find_down() -> list[str]:
    """The interfaces that UCX's variable names and that are down at present: UCX does without them, and where it has no
    other there is no agent."""
    known = psutil.net_if_stats()
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name in known and not known[name].isup]


def _interface(host: str) -> tuple[str, str]:
    """The interface that has this address, and its first one of that kind, in the order of the kernel and of UCX."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    first: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        interface = name.partition(":")[0]  # "eth0:1" is a second address of eth0
        for address in addresses:
            if address.family != kind or "%" in address.address:  # a link-local one
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
