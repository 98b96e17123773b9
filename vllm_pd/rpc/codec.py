# SPDX-License-Identifier: Apache-2.0
"""Frames: two bytes of magic, one of version, then a msgpack envelope.

The version stands outside the envelope so that an engine of another version is told apart from noise.
"""
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from vllm_pd.core import messages as m

MAX_FRAME_BYTES = 32 << 20
_MAGIC = b"PD"
_HEADER_BYTES = len(_MAGIC) + 1

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what decoding foreign bytes may raise

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(m.Envelope)


class FrameFault(StrEnum):
    """What is wrong with a frame; the label of its counter."""
    SHAPE = "shape"  # not one frame, or not ours
    SIZE = "size"
    VERSION = "version"
    CONTENT = "content"


class BadFrame(Exception):
    """A frame that is dropped. `theirs` is the sender's protocol version where that is what differs."""

    def __init__(self, fault: FrameFault, detail: str, theirs: int | None = None):
        super().__init__(detail)
        self.fault = fault
        self.theirs = theirs


def encode(sender: str, body: m.Message) -> bytes:
    """One frame. Raises BadFrame where it would be too large for its receiver."""
    frame = _MAGIC + bytes((m.PROTOCOL,)) + _encoder.encode(m.Envelope(sender, body))
    if len(frame) > MAX_FRAME_BYTES:
        raise BadFrame(FrameFault.SIZE, f"{len(frame)} bytes are more than {MAX_FRAME_BYTES}")
    return frame


def decode(frames: Sequence[bytes]) -> tuple[str, m.Message]:
    """(sender, message) of what a socket gave, without its routing id. Raises BadFrame for anything else."""
    if len(frames) != 1:
        raise BadFrame(FrameFault.SHAPE, f"{len(frames)} frames instead of one")
    frame = frames[0]
    if len(frame) > MAX_FRAME_BYTES:
        raise BadFrame(FrameFault.SIZE, f"{len(frame)} bytes are more than {MAX_FRAME_BYTES}")
    if len(frame) < _HEADER_BYTES or frame[:len(_MAGIC)] != _MAGIC:
        raise BadFrame(FrameFault.SHAPE, "not a frame of ours")
    version = frame[len(_MAGIC)]
    if version != m.PROTOCOL:
        raise BadFrame(FrameFault.VERSION, f"protocol {version}, ours is {m.PROTOCOL}", theirs=version)
    try:
        envelope = _decoder.decode(memoryview(frame)[_HEADER_BYTES:])
    except UNREADABLE as error:
        raise BadFrame(FrameFault.CONTENT, str(error)[:200]) from error
    return envelope.sender, envelope.body
