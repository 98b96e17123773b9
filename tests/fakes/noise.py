# SPDX-License-Identifier: Apache-2.0
"""What a socket of ours must survive (B81)."""

import random

import zmq


def send_noise(socket: zmq.Socket, dice: random.Random, good: list[bytes], odd: list[bytes], count: int) -> None:
    """Send `count` messages: random bytes, `good` frames cut short or with a bit turned, too many frames, and `odd`
    ones, which are well-formed and do not belong there."""
    for _ in range(count):
        kind = dice.randrange(5)
        if kind == 0:
            socket.send(dice.randbytes(dice.randrange(200)))
        elif kind == 1:
            frame = dice.choice(good)
            socket.send(frame[:dice.randrange(len(frame))])
        elif kind == 2:
            frame = bytearray(dice.choice(good))
            frame[dice.randrange(len(frame))] ^= 1 << dice.randrange(8)
            socket.send(bytes(frame))
        elif kind == 3:
            socket.send_multipart([dice.randbytes(3)] * dice.randrange(2, 9))
        else:
            socket.send(dice.choice(odd))
