# SPDX-License-Identifier: Apache-2.0
"""Frames: two bytes of magic, one of version, then a message in msgpack; those of the control sockets are envelopes.

The version stands outside the message, so that an engine of another version can be told from noise.
"""
from collections.abc import Sequence
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from vllm_pd.protocol import messages as m

MAX_FRAME_BYTES = 32 << 20
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what decoding foreign bytes may raise

T = TypeVar("T")


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


class Framing(Generic[T]):
    """The frames of one protocol. `type_` is that of its messages, `name` what the version is called in an error."""

    def __init__(self, magic: bytes, version: int, type_: type[T], name: str, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._header = magic + bytes((version,))
        self._magic = magic
        self._version = version
        self._name = name
        self._max_bytes = max_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(type_)

    def encode(self, message: T) -> bytes:
        """One frame, of any size."""
        return self._header + self._encoder.encode(message)

    def decode(self, frames: Sequence[bytes]) -> T:
        """The message of what a socket gave, without its routing id. Raises BadFrame for anything else."""
        try:
            return self._decoder.decode(self.content(frames))
        except UNREADABLE as error:
            raise BadFrame(FrameFault.CONTENT, str(error)[:200]) from error

    def content(self, frames: Sequence[bytes]) -> memoryview:
        """The message in msgpack, not decoded. Raises BadFrame where there is none."""
        if len(frames) != 1:
            raise BadFrame(FrameFault.SHAPE, f"{len(frames)} frames instead of one")
        frame = frames[0]
        self.require_size(frame)
        if len(frame) < len(self._header) or frame[:len(self._magic)] != self._magic:
            raise BadFrame(FrameFault.SHAPE, "not a frame of ours")
        version = frame[len(self._magic)]
        if version != self._version:
            raise BadFrame(FrameFault.VERSION, f"{self._name} {version}, ours is {self._version}", theirs=version)
        return memoryview(frame)[len(self._header):]

    def require_size(self, frame: bytes) -> None:
        """Raises BadFrame for one that is too large for its receiver."""
        if len(frame) > self._max_bytes:
            raise BadFrame(FrameFault.SIZE, f"{len(frame)} bytes are more than {self._max_bytes}")


_framing = Framing(b"PD", m.PROTOCOL, m.Envelope, "protocol")


def encode(sender: str, body: m.Message) -> bytes:
    """One frame. Raises BadFrame where it would be too large for its receiver."""
    frame = _framing.encode(m.Envelope(sender, body))
    _framing.require_size(frame)
    return frame


def decode(frames: Sequence[bytes]) -> tuple[str, m.Message]:
    """(sender, message) of what a socket gave, without its routing id. Raises BadFrame for anything else."""
    envelope = _framing.decode(frames)
    return envelope.sender, envelope.body


def peek(frames: Sequence[bytes]) -> tuple[str, str]:
    """(sender, tag of the message) of such a frame, in a short time whatever its size. Of what `encode` makes it raises
    BadFrame only where `decode` does too, but not everywhere."""
    content = _framing.content(frames)
    try:
        _require_array(content, 0)
        sender, end = _text(content, 1)
        _require_array(content, end)
        tag, _ = _text(content, end + 1)
    except (ValueError, IndexError) as error:  # UnicodeDecodeError is a ValueError
        raise BadFrame(FrameFault.CONTENT, f"no envelope: {error}") from error
    return sender, tag


def _require_array(content: memoryview, at: int) -> None:
    if content[at] & 0xF0 != 0x90:  # of at most 15 elements, as all envelopes and messages are
        raise ValueError("an array is missing")


def _text(content: memoryview, at: int) -> tuple[str, int]:
    """The msgpack string there, of at most `MAX_ID_CHARS`, and where it ends."""
    kind = content[at]
    size, begin = {0xD9: 1, 0xDA: 2}.get(kind, 0), at + 1
    if size:
        length, begin = int.from_bytes(content[begin:begin + size]), begin + size
    elif kind & 0xE0 == 0xA0:
        length = kind & 0x1F
    else:
        raise ValueError("a name is missing")
    end = begin + length
    text = str(content[begin:end], "utf-8")
    if end > len(content) or not 0 < len(text) <= m.MAX_ID_CHARS:
        raise ValueError("a name is cut off, empty or too long")
    return text, end
