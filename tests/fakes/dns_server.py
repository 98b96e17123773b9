# SPDX-License-Identifier: Apache-2.0
"""A name server in the test's loop, over UDP and TCP at one port of the loopback."""
import asyncio
import random
from collections.abc import Iterator
from enum import Enum, auto

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from vllm_pd.rpc.ports import take_free

UDP_BYTES = 512  # of an answer to a question without EDNS


class Mood(Enum):
    """What the server does with a question."""
    ANSWER = auto()
    SILENT = auto()
    SERVFAIL = auto()
    NOISE = auto()  # bytes that are no answer
    NO_EDNS = auto()  # FORMERR to a question with EDNS, as from an old server
    CIRCLE = auto()  # a name that stands for another one, which stands for the first


class DnsServer(asyncio.DatagramProtocol):
    """`zone` has the records by name, without a dot at its end, and kind. A name without any is answered with NXDOMAIN.
    The sets of records in `turns` take turns there. `mood` may be changed at any time; `moods` has those of single
    names or kinds of questions. `few`: without EDNS, an answer has so many of the records, drawn at random, and does
    not say that there are more, as Consul's."""

    def __init__(self) -> None:
        self.zone: dict[tuple[str, str], list[str]] = {}
        self.turns: dict[tuple[str, str], Iterator[list[str]]] = {}
        self.mood = Mood.ANSWER
        self.moods: dict[str, Mood] = {}
        self.few: int | None = None
        self.asked: list[tuple[str, str]] = []
        self.over_tcp = 0
        self.port = take_free("127.0.0.1")
        self.address = f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> "DnsServer":
        self._udp, _ = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", self.port))
        self._tcp = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._udp.close()
        self._tcp.close()

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, who: tuple[str, int]) -> None:
        answer = self._answer(data)
        query = dns.message.from_wire(data)
        if answer is not None and len(answer) > (query.payload if query.edns >= 0 else UDP_BYTES):
            short = dns.message.make_response(query)
            short.flags |= dns.flags.TC
            answer = short.to_wire()
        if answer is not None:
            self._transport.sendto(answer, who)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            size = int.from_bytes(await reader.readexactly(2))
            answer = self._answer(await reader.readexactly(size))
            self.over_tcp += 1
            if answer is not None:
                writer.write(len(answer).to_bytes(2) + answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _answer(self, data: bytes) -> bytes | None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, kind = question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype)
        self.asked.append((name, kind))
        if (name, kind) in self.turns:
            self.zone[name, kind] = next(self.turns[name, kind])
        mood = self.moods.get(name, self.moods.get(kind, self.mood))
        response = dns.message.make_response(query)
        response.flags |= dns.flags.RA
        if mood is Mood.SILENT:
            return None
        if mood is Mood.NOISE:
            return b"\xff" * 40
        if mood is Mood.NO_EDNS and query.edns >= 0:
            response = dns.message.Message(query.id)
            response.flags |= dns.flags.QR
            response.set_rcode(dns.rcode.FORMERR)
        elif mood is Mood.SERVFAIL:
            response.set_rcode(dns.rcode.SERVFAIL)
        elif mood is Mood.CIRCLE:
            response.answer = [dns.rrset.from_text(f"{name}.", 5, "IN", "CNAME", "other.test."),
                               dns.rrset.from_text("other.test.", 5, "IN", "CNAME", f"{name}.")]
        elif records := self.zone.get((name, kind)):
            if self.few is not None and query.edns < 0:
                records = random.sample(records, min(self.few, len(records)))
            response.answer = [dns.rrset.from_text(f"{name}.", 5, "IN", kind, *records)]
        elif not any(known == name for known, _ in self.zone):
            response.set_rcode(dns.rcode.NXDOMAIN)
        return response.to_wire(max_size=65535)
