# SPDX-License-Identifier: Apache-2.0
"""A bad cable, as a program: what comes out of one TAP device goes into another, and back, but late, in another order,
twice, or not at all. It needs no netem, which many kernels lack. The kernel cuts what it passes here to the MTU of a
cable, so a frame is lost as on a real one.

    wire.py ONE OTHER WIRE      the names of the devices, which it makes; a `Wire` in JSON

It prints "ready", and ends with its standard input.
"""
from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME_BYTES, HEAD_BYTES = 1 << 16, 14
BATCH = 64
MOST_WAITING = 20_000  # frames; what comes then is lost


@dataclasses.dataclass(frozen=True)
class Wire:
    """How bad a cable is, in each direction. `loss`, `twice` and `late` are shares of the frames: those that are lost,
    those that arrive twice, and those that come up to `late_s` after the others, in another order. IP packets of more
    than `max_bytes` vanish, without an answer of ICMP."""
    delay_s: float = 0.0
    loss: float = 0.0
    twice: float = 0.0
    late: float = 0.0
    late_s: float = 0.03
    max_bytes: int | None = None

    def arrivals(self, frame: bytes) -> list[float]:
        """After how many seconds this frame arrives; twice, once, or not at all."""
        if random.random() < self.loss or self.max_bytes is not None and len(frame) - HEAD_BYTES > self.max_bytes:
            return []
        copies = 1 + (random.random() < self.twice)
        return [self.delay_s + (random.random() * self.late_s if random.random() < self.late else 0.0)
                for _ in range(copies)]


def open_tap(name: str) -> int:
    """Make the device. It ends with the descriptor that is returned."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return tap


def carry(taps: tuple[int, int], wire: Wire) -> None:
    """Carry frames between the two until the standard input ends."""
    waiting: list[tuple[float, int, int, bytes]] = []  # when it is due, its number, where it goes
    numbers = itertools.count()
    poller = select.poll()
    for descriptor in (sys.stdin.fileno(), *taps):
        poller.register(descriptor, select.POLLIN)
    while True:
        left_s = waiting[0][0] - time.monotonic() if waiting else 3600.0
        ready = {descriptor for descriptor, _ in poller.poll(max(0.0, left_s) * 1e3)}
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 1):
            return
        for tap, other in (taps, taps[::-1]):
            for frame in _read(tap) if tap in ready else ():
                now = time.monotonic()
                for after_s in wire.arrivals(frame) if len(waiting) < MOST_WAITING else ():
                    heapq.heappush(waiting, (now + after_s, next(numbers), other, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, tap, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # the device is full, or not up: the frame is lost
                os.write(tap, frame)


def _read(tap: int) -> list[bytes]:
    frames: list[bytes] = []
    with contextlib.suppress(OSError):  # no more at present, or it is not up yet
        while len(frames) < BATCH:
            frames.append(os.read(tap, FRAME_BYTES))
    return frames


def main() -> None:
    one, other, wire = sys.argv[1:]
    taps = open_tap(one), open_tap(other)
    print("ready", flush=True)
    carry(taps, Wire(**json.loads(wire)))


if __name__ == "__main__":
    main()
