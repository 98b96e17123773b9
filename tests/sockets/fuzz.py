# SPDX-License-Identifier: Apache-2.0
"""Bytes that no peer should send, and messages that none should send now (B81). One seed, one sequence."""
import math
import random
import typing
from collections.abc import Sequence
from enum import Enum
from typing import Any

import msgspec
import zmq
from msgspec import inspect

from vllm_pd.protocol import messages as m
from vllm_pd.rpc import codec

HEAD = b"PD" + bytes((m.PROTOCOL,))
EXTREMES = [0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**62 - 1, 2**62, 2**63 - 1, -2**63, 2**64 - 1, 0.0, -0.0, 1e-308, 1e308,
            math.nan, math.inf, -math.inf, "", "x", "\x00", "\ud7ff\U0010ffff", "ä" * 300, "x" * 1025, "x" * 5000, b"",
            b"\xff" * 9, True, False, None, [], {}, [[]], [None] * 3, {"a": 1}, {1: 2}, [[[[[[]]]]]], "NaN", "-1"]


class Words:
    """Well-formed messages whose fields come from small pools, so that they meet each other, or from anywhere."""

    def __init__(self, dice: random.Random, names: Sequence[str], members: Sequence[m.Member],
                 attempts: Sequence[m.Attempt]):
        self.dice = dice
        self.names = list(names)
        self.members = list(members)
        self.attempts = list(attempts)
        self._types: dict[type, inspect.Type] = {}

    def message(self, kind: type[m.WireMessage]) -> m.Message:
        """Of this kind, all else by chance."""
        if kind not in self._types:
            self._types[kind] = inspect.type_info(kind)
        return self._struct(self._types[kind])

    def _struct(self, info: inspect.StructType) -> Any:
        if info.cls is m.Attempt and self.attempts and self.dice.random() < 0.9:
            return self.dice.choice(self.attempts)
        if info.cls is m.Member and self.members and self.dice.random() < 0.95:
            return self.dice.choice(self.members)
        return info.cls(*(self._value(field.name, field.type) for field in info.fields))

    def _value(self, name: str, info: inspect.Type) -> Any:
        dice = self.dice
        if isinstance(info, inspect.StrType):
            if name in ("incarnation", "sender", "broker") and dice.random() < 0.98:
                return dice.choice(self.names)
            if name in ("address", "lifeline"):
                return dice.choice([*(one.address for one in self.members), "", "tcp://", "inproc://zeromq.zap.01",
                                    "ipc:///tmp/no", "tcp://127.0.0.1:1", "tcp://[::1", "x" * 200])
            return dice.choice(["", "x", "model", "ä" * 50, "\x00"])[:info.max_length or 4096].ljust(
                info.min_length or 0, "x")
        if isinstance(info, inspect.IntType):
            least, most = info.ge if info.ge is not None else 0, (info.lt - 1 if info.lt is not None else
                                                                   info.le if info.le is not None else 2**31 - 1)
            return dice.choice([least, least, min(least + 1, most), min(least + 2, most), most,
                                dice.randint(least, most)])
        if isinstance(info, inspect.FloatType):
            return dice.choice([0.0, 0.001, 0.5, 60.0, 1e9])
        if isinstance(info, inspect.BytesType):
            if name == "scope" and dice.random() < 0.98:
                return b""  # as of the jobs that these tests have
            return dice.randbytes(max(info.min_length or 0, dice.randrange(20)))
        if isinstance(info, inspect.BoolType):
            return dice.random() < 0.2
        if isinstance(info, inspect.NoneType):
            return None
        if isinstance(info, inspect.EnumType):
            return dice.choice(list(info.cls))
        if isinstance(info, inspect.UnionType):
            return self._value(name, dice.choice(info.types))
        if isinstance(info, (inspect.ListType, inspect.VarTupleType)):
            count = max(info.min_length or 0, dice.choice([0, 1, 2, 3, 3, 17]))
            kind = tuple if isinstance(info, inspect.VarTupleType) else list
            return kind(self._value(name, info.item_type) for _ in range(count))
        if isinstance(info, inspect.TupleType):
            return tuple(self._value(name, one) for one in info.item_types)
        if isinstance(info, inspect.DictType):
            return {self._value(name, info.key_type): self._value(name, info.value_type)
                    for _ in range(dice.randrange(3))}
        if isinstance(info, inspect.StructType):
            return self._struct(info)
        raise NotImplementedError(f"{name}: {info}")


class Fuzzer:
    """Frames for a socket that expects messages of `kinds`. The name in a field of `owners` is mostly the sender's."""

    def __init__(self, words: Words, kinds: Sequence[type[m.WireMessage]], odd: Sequence[type[m.WireMessage]] = (), *,
                 good: float = 0.5, owners: Sequence[str] = ("member",)):
        self.words = words
        self.dice = words.dice
        self.kinds = list(kinds)
        self.odd = list(odd)
        self._good = good
        self._owners = owners

    def sender(self) -> str:
        """Somebody, mostly one who is known."""
        return self.dice.choice(self.words.names)

    def frames(self) -> list[bytes]:
        """The next message: well-formed with the chance `good`, else anything."""
        dice = self.dice
        chance = dice.random()
        if chance < self._good:
            return [self.valid()]
        kind = dice.randrange(6)
        if kind == 0:
            return [dice.randbytes(dice.randrange(60))]
        if kind == 1:
            return [HEAD + dice.randbytes(dice.randrange(60))]
        if kind == 2:
            frame = self.valid()
            return [frame[:dice.randrange(len(frame))]]
        if kind == 3:
            frame = bytearray(self.valid())
            for _ in range(dice.choice([1, 1, 2, 8])):
                frame[dice.randrange(len(frame))] ^= 1 << dice.randrange(8)
            return [bytes(frame)]
        if kind == 4 and dice.random() < 0.2:
            return [self.valid()] * dice.choice([2, 3, 9]) if dice.random() < 0.5 else [b""] * dice.randrange(1, 4)
        return [self.mutated()]

    def valid(self) -> bytes:
        """A message that is one, from somebody, now."""
        kinds = self.odd if self.odd and self.dice.random() < 0.05 else self.kinds
        message = self.words.message(self.dice.choice(kinds))
        sender = self.sender()
        for owner in self._owners:  # mostly the one who may speak of that
            owned = getattr(message, owner, None) if owner in message.__struct_fields__ else None
            if owned is not None and self.dice.random() < 0.6:
                sender = owned.incarnation
        if isinstance(message, m.Put) and self.dice.random() < 0.8:
            sender = message.job.attempt.incarnation
        return codec.encode(sender, message)

    def mutated(self) -> bytes:
        """One with another value, or another shape, somewhere inside."""
        message = self.words.message(self.dice.choice(self.kinds))
        tree = [self.sender(), plain(message)]
        for _ in range(self.dice.choice([1, 1, 1, 2, 5])):
            tree = self._mutate(tree)
        try:
            return HEAD + msgspec.msgpack.encode(tree)
        except (msgspec.MsgspecError, OverflowError, UnicodeEncodeError):
            return HEAD + b"\xc1"

    def _mutate(self, tree: Any) -> Any:
        dice = self.dice
        if not isinstance(tree, list) or not tree or dice.random() < 0.15:
            if isinstance(tree, list) and tree and dice.random() < 0.5:
                return self._reshape(tree)
            return dice.choice(EXTREMES)
        tree = list(tree)
        index = dice.randrange(len(tree))
        tree[index] = self._mutate(tree[index])
        return tree

    def _reshape(self, items: list) -> list:
        dice, items = self.dice, list(items)
        change = dice.randrange(5)
        if change == 0:
            del items[dice.randrange(len(items))]
        elif change == 1:
            items.insert(dice.randrange(len(items) + 1), dice.choice(EXTREMES))
        elif change == 2:
            dice.shuffle(items)
        elif change == 3:
            items *= 3
        else:
            items.append(items)  # nested below
            items[-1] = list(items[:-1])
        return items


def plain(value: Any) -> Any:
    """A struct as lists, as it is on the wire."""
    if isinstance(value, msgspec.Struct):
        head = [type(value).__struct_config__.tag] if isinstance(value, m.WireMessage) else []
        return head + [plain(getattr(value, name)) for name in value.__struct_fields__]
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value.value if isinstance(value, Enum) else value


def payloads(dice: random.Random, good: Sequence[bytes], count: int) -> typing.Iterator[bytes]:
    """What a decoder of its own is given: noise, and good ones cut, bent and grown."""
    for _ in range(count):
        data = bytearray(dice.choice(good))
        kind = dice.randrange(5)
        if kind == 0:
            data = bytearray(dice.randbytes(dice.randrange(50)))
        elif kind == 1:
            del data[dice.randrange(len(data) + 1):]
        elif kind == 2:
            data += dice.randbytes(dice.randrange(9))
        elif kind == 3 and data:
            for _ in range(dice.choice([1, 2, 6])):
                data[dice.randrange(len(data))] = dice.randrange(256)
        yield bytes(data)


def drain(*sockets: zmq.Socket) -> int:
    """Take what has been answered; how much that was."""
    count = 0
    for socket in sockets:
        while socket.poll(0):
            socket.recv_multipart()
            count += 1
    return count


