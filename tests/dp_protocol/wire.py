# SPDX-License-Identifier: Apache-2.0
"""Two machines on one: network namespaces joined by a wire with delay and loss. Wants root and /dev/net/tun.

`tc netem` would do the same where the kernel has it; many small kernels have not. Here a process carries the IP packets
between two TUN devices, each of which is the only way out of its namespace. TCP, and whatever is above it, is the
kernel's own. The namespaces and devices end with the processes that use them.
"""
import ctypes
import fcntl
import heapq
import multiprocessing
import os
import random
import select
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
START_S = 30.0
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU_BYTES = 1500
_FORK = multiprocessing.get_context("fork")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Wire:
    """`spaces`: the two namespaces, as files. `relay`: the process that carries the packets; stop it to cut the wire.
    """
    spaces: tuple[str, str]
    relay: int

    def enter(self, side: int) -> None:
        """From now on this process, which has one thread, is on that machine: 0, with ADDRESSES[0], or 1."""
        with open(self.spaces[side], "rb") as space:
            _check(_libc.setns(space.fileno(), _CLONE_NEWNET))


def unavailable() -> str:
    """Why there can be no wire on this machine; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces want root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    if not all(map(shutil.which, ("ip", "unshare"))):
        return "there is no `ip`, or no `unshare`"
    if subprocess.run(["unshare", "-n", "true"], check=False).returncode:
        return "`unshare -n true` does not work"
    return ""


@contextmanager
def wire(delay_s: float, loss: float, seed: int = 0) -> Iterator[Wire]:
    """Each packet takes `delay_s` to the other side; that part of all, 0 to 1, gets lost. Raises OSError."""
    if reason := unavailable():
        raise OSError(f"no wire between two network namespaces: {reason}")
    ours, theirs = _FORK.Pipe()
    relay = _FORK.Process(target=_relay, args=(delay_s, loss, seed, theirs), daemon=True)
    relay.start()
    try:
        if not ours.poll(START_S):
            raise OSError(f"no wire between two network namespaces within {START_S:g} s")
        if isinstance(spaces := ours.recv(), str):
            raise OSError(f"no wire between two network namespaces: {spaces}")
        yield Wire(spaces, relay.pid)
    finally:
        relay.kill()
        relay.join()
        ours.close()
        theirs.close()


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _relay(delay_s: float, loss: float, seed: int, ready: Connection) -> None:
    try:
        ends = [_new_space(address) for address in ADDRESSES]
    except (OSError, subprocess.CalledProcessError) as error:
        ready.send(f"{error}")
        return
    ready.send(tuple(f"/proc/{os.getpid()}/fd/{space}" for space, _ in ends))
    devices = [device for _, device in ends]
    _carry(devices, delay_s, loss, random.Random(seed))


def _new_space(address: str) -> tuple[int, int]:
    """Descriptors of a new namespace with that address, and of the device through which its packets leave."""
    _check(_libc.unshare(_CLONE_NEWNET))
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"wire", _IFF_TUN | _IFF_NO_PI))
    for command in (f"addr add {address}/24 dev wire", "link set wire up", "link set lo up"):
        subprocess.run(["ip", *command.split()], check=True)
    return os.open("/proc/self/ns/net", os.O_RDONLY), device


def _carry(devices: list[int], delay_s: float, loss: float, chance: random.Random) -> None:
    """Until it is killed."""
    under_way: list[tuple[float, int, int, bytes]] = []  # when it arrives, its number, where, the packet
    number = 0
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for device in select.select(devices, [], [], wait_s)[0]:
            packet = os.read(device, 2 * _MTU_BYTES)
            number += 1
            if chance.random() >= loss:
                there = devices[1 - devices.index(device)]
                heapq.heappush(under_way, (time.monotonic() + delay_s, number, there, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            *_, there, packet = heapq.heappop(under_way)
            os.write(there, packet)
