# SPDX-License-Identifier: Apache-2.0
"""A proxy in every control connection, which loses, doubles and delays messages.

It speaks no ZMQ: it forwards the bytes of each TCP connection over another one, so identities, reconnects and
high-water marks are those of the two ends. It reads the framing of ZMTP 3 (a greeting of 64 bytes, then frames) only to
know where a message begins and ends, and never touches the handshake. A delayed message is overtaken by those behind
it.

Engines get an address of the proxy as the broker's. In their messages to the broker a decode engine's address is
replaced by another address of the proxy, so that prefill engines also connect through it.
"""
import asyncio
import collections
import json
import random
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

import msgspec

from vllm_pd.protocol import messages as m
from vllm_pd.rpc import codec

HOST = "127.0.0.1"
GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4
Change = Callable[[bytes], Awaitable[bytes]]


class MessageFaults(msgspec.Struct, frozen=True):
    """Probabilities for each message, and the longest delay."""
    lost: float = 0.0
    doubled: float = 0.0
    delayed: float = 0.0
    delay_s: float = 0.5


class FaultProxy:
    """All listeners and connections. To be used in one event loop."""

    def __init__(self, seed: int) -> None:
        self.faults = MessageFaults()
        self.counters: collections.Counter[str] = collections.Counter()
        self._random = random.Random(f"proxy {seed}")
        self._servers: dict[str, asyncio.Server] = {}
        self._opening = asyncio.Lock()

    async def stand_before(self, address: str, change: Change | None = None) -> str:
        """The proxy's address for `address` (tcp://HOST:PORT), always the same. `change` may rewrite the messages of
        clients."""
        async with self._opening:
            if address not in self._servers:
                self._servers[address] = await asyncio.start_server(lambda *ends: self._serve(address, change, *ends),
                                                                    HOST, 0)
        return f"tcp://{HOST}:{self._servers[address].sockets[0].getsockname()[1]}"

    async def stand_before_broker(self, address: str) -> str:
        """The proxy's address for the broker; also stands before every decode engine that registers there."""
        return await self.stand_before(address, self._readdress)

    async def _readdress(self, body: bytes) -> bytes:
        """A message to the broker, with the proxy's address in place of the sender's."""
        try:
            sender, message = codec.decode([body])
        except codec.BadFrame:
            return body
        if isinstance(message, m.Register) and message.member.role.decodes:
            member = msgspec.structs.replace(message.member, address=await self.stand_before(message.member.address))
            return codec.encode(sender, msgspec.structs.replace(message, member=member))
        if isinstance(message, m.Put):
            job = msgspec.structs.replace(message.job, address=await self.stand_before(message.job.address))
            return codec.encode(sender, msgspec.structs.replace(message, job=job))
        return body

    async def _serve(self, address: str, change: Change | None, reader: asyncio.StreamReader,
                     writer: asyncio.StreamWriter) -> None:
        """Forwards one connection, until either end closes it."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        try:
            there, back = await asyncio.open_connection(host, int(port))
        except OSError:
            self.counters["unreachable"] += 1
            writer.close()
            return
        self.counters["connections"] += 1
        pumps = [asyncio.create_task(self._pump(reader, back, change)),
                 asyncio.create_task(self._pump(there, writer, None))]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for end in (writer, back):
            end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
                    change: Change | None) -> None:
        """Forwards one direction."""
        try:
            left = GREETING_BYTES
            while left:
                greeting = await reader.read(left)
                if not greeting:
                    return
                left -= len(greeting)
                writer.write(greeting)
            while True:
                frame, is_command = await _read_message(reader, change)
                if is_command:
                    writer.write(frame)
                else:
                    self._forward(writer, frame)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def _forward(self, writer: asyncio.StreamWriter, frame: bytes) -> None:
        """Forwards, loses, doubles or delays one message."""
        faults, draw = self.faults, self._random.random
        self.counters["messages"] += 1
        if draw() < faults.lost:
            self.counters["lost"] += 1
            return
        copies = 1
        if draw() < faults.doubled:
            self.counters["doubled"] += 1
            copies = 2
        for _ in range(copies):
            if draw() < faults.delayed:
                self.counters["delayed"] += 1
                delay_s = self._random.uniform(0, faults.delay_s)
                asyncio.get_running_loop().call_later(delay_s, _write_late, writer, frame)
            else:
                writer.write(frame)


def _write_late(writer: asyncio.StreamWriter, frame: bytes) -> None:
    if not writer.is_closing():
        writer.write(frame)


async def _read_message(reader: asyncio.StreamReader, change: Change | None) -> tuple[bytes, bool]:
    """The bytes of the next message, all its frames, or of the next command."""
    frames = b""
    while True:
        flags = (await reader.readexactly(1))[0]
        size = int.from_bytes(await reader.readexactly(8 if flags & LONG else 1), "big")
        body = await reader.readexactly(size)
        if change is not None and not flags & COMMAND:
            body = await change(body)
        frames += _frame(flags, body)
        if flags & COMMAND or not flags & MORE:
            return frames, bool(flags & COMMAND)


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) > 255:
        return bytes((flags | LONG, )) + len(body).to_bytes(8, "big") + body
    return bytes((flags & ~LONG, len(body))) + body


def serve(pipe: Connection, broker: str, seed: int) -> None:
    """The proxy's process. It first sends {"address": ...}, the proxy's for the broker. Then {"faults": {...}} changes
    the faults, and is answered by {"counters": ...}."""
    asyncio.run(_serve(pipe, broker, seed))


async def _serve(pipe: Connection, broker: str, seed: int) -> None:
    proxy = FaultProxy(seed)
    pipe.send_bytes(json.dumps({"address": await proxy.stand_before_broker(broker)}).encode())
    ended = asyncio.Event()

    def on_command() -> None:
        try:
            proxy.faults = msgspec.convert(json.loads(pipe.recv_bytes())["faults"], MessageFaults)
            pipe.send_bytes(json.dumps({"counters": proxy.counters}).encode())
        except (EOFError, OSError):
            ended.set()

    asyncio.get_running_loop().add_reader(pipe.fileno(), on_command)
    await ended.wait()
