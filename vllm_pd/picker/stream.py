# SPDX-License-Identifier: Apache-2.0
"""One stream of ext_proc: one HTTP request from its head to the end of its answer.

The head comes first. If the gateway buffers bodies, it waits for an answer to the head before it sends the body, and
the engine is named in the answer to the body. If it streams them in full duplex, nothing is answered until the body has
ended; then the head, with the engine, and the body go back. A request without a body, and one whose body the gateway
does not show or sends on at once, gets its engine with the head.

The gateway itself may answer before the engine is picked, for example where a body exceeds its own buffer. Then nothing
is picked, and what comes is passed on to the end of the stream.

Then the answer comes by: its status is looked at, and all of it goes on unchanged. The pick ends with the stream,
whether the answer has ended, the client has gone or the gateway has died. So the load is right for the whole answer
only if the gateway keeps the stream open until then (docs/picker.md says how).
"""
import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import NamedTuple

from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from vllm_pd.picker import wire
from vllm_pd.picker.options import PickerOptions
from vllm_pd.picker.picking import EndpointPicker, Pick, PickRefused
from vllm_pd.picker.wire import BadMessage, StreamHead
from vllm_pd.router import responses
from vllm_pd.router.bodies import BodyBudget, BodyRefused, HeldBody

logger = logging.getLogger("vllm.pd.picker")

Read = Callable[[], Awaitable[ext_proc.ProcessingRequest | None]]
Write = Callable[[ext_proc.ProcessingResponse], Awaitable[None]]


class StreamEnded(Exception):
    """The gateway has ended the stream."""


class GatewayAnswered(Exception):
    """The gateway has answered the request itself, before the pick. `message`: the head of that answer."""

    def __init__(self, message: ext_proc.ProcessingRequest) -> None:
        super().__init__()
        self.message = message


class ReceivedBody(NamedTuple):
    """A request's body. `trailers`: the request has some, and their message has come."""
    data: bytes
    trailers: bool = False


class PickerStream:
    """See the module. `read` returns the next message, None at the end; `write` sends one."""

    def __init__(self, picker: EndpointPicker, budget: BodyBudget, options: PickerOptions, read: Read,
                 write: Write) -> None:
        self._picker = picker
        self._budget = budget
        self._options = options
        self._read = read
        self._unbounded_write = write

    async def serve(self) -> None:
        """Serve it to its end. Raises BadMessage, and TimeoutError where the gateway is too slow."""
        head: StreamHead | None = None
        pick: Pick | None = None
        early: ext_proc.ProcessingRequest | None = None
        try:
            with self._budget.hold() as held:
                try:
                    async with asyncio.timeout(self._options.body_timeout_s) as deadline:
                        head = wire.read_head(await self._next())
                        body = await self._body(head, held)
                        pick = await self._picker.pick(head.request, body.data)
                except TimeoutError:
                    if head is None or not deadline.expired():
                        raise
                    raise self._picker.refused(HTTPStatus.REQUEST_TIMEOUT, "the request did not arrive in "
                                               f"{self._options.body_timeout_s:g} s", "late",
                                               head.request.path) from None
                for answer in _picked(head, pick, body):
                    await self._write(answer)
                del body
            head = head.without_headers()  # for as long as the answer takes
            while True:
                await self._pass_on(head, pick, await self._next())
        except GatewayAnswered as answered:
            early = answered.message
        except PickRefused as refused:
            self._picker.count_refused(refused, head.request.path)
            await self._write(wire.refusal(refused.answer, refused.reason))
        except StreamEnded:
            pass
        finally:
            if pick is not None:
                self._picker.end(pick)
        if early is not None:  # not before the exception is gone, which holds the part of the body that has come
            await self._pass_on_unpicked(head.without_headers(), early)

    async def _body(self, head: StreamHead, held: HeldBody) -> ReceivedBody:
        """The request's whole body, or none where the engine is picked without it. Raises PickRefused for a request
        that no engine may get, and for a body that is too large."""
        self._picker.check(head.request)
        if not _waits_for_body(head):
            return ReceivedBody(b"")
        try:
            length = responses.find(head.request.headers, b"content-length")
            known = int(length) if length is not None and length.isdigit() and len(length) < 20 else None
            if known is not None:
                held.check_length(known)
            if head.request_mode in wire.WHOLE:  # the whole body comes in one message: room for it before that
                held.add(self._options.max_body_bytes if known is None else known)
                await self._write(wire.waiting_for_body())
            return await self._collect(head, held)
        except BodyRefused as refused:
            raise self._picker.refused(refused.status, str(refused), "body", head.request.path,
                                       None if refused.final else self._options.retry_after_s) from None

    async def _collect(self, head: StreamHead, held: HeldBody) -> ReceivedBody:
        parts = bytearray()
        while True:
            message = await self._next()
            kind = message.WhichOneof("request")
            if kind == "request_trailers" and head.request_mode == wire.DUPLEX:
                return ReceivedBody(bytes(parts), trailers=True)
            if kind == "request_trailers" and head.request_mode in wire.WHOLE:
                raise self._picker.refused(HTTPStatus.BAD_REQUEST, "the request has trailers but no body: send it "
                                           "without trailers", "trailers", head.request.path)
            if kind == "response_headers":
                raise GatewayAnswered(message)
            if kind != "request_body":
                raise BadMessage(f"{kind} came before the request's body had ended")
            body = message.request_body
            if head.request_mode in wire.WHOLE:  # it comes in one piece
                held.settle(len(body.body))
                return ReceivedBody(body.body)
            held.add(len(body.body))
            parts += body.body
            if body.end_of_stream or body.end_of_stream_without_message:
                return ReceivedBody(bytes(parts))

    async def _pass_on(self, head: StreamHead, pick: Pick, message: ext_proc.ProcessingRequest) -> None:
        """Answer a message that came after the pick."""
        kind = message.WhichOneof("request")
        if kind is None or kind == "request_headers" or kind == "request_body" and head.request_mode == wire.DUPLEX:
            raise BadMessage(f"{kind} came after the request had ended")
        if kind == "response_headers":
            headers = wire.read_headers(message.response_headers)
            self._picker.answered(pick, head.request, wire.read_status(headers), headers, wire.read_served(message))
        await self._answer_unchanged(head, message)

    async def _pass_on_unpicked(self, head: StreamHead, message: ext_proc.ProcessingRequest) -> None:
        """Pass on the gateway's own answer, which begins with `message`, until the stream ends."""
        self._picker.count_unpicked(head.request, wire.read_status(wire.read_headers(message.response_headers)))
        while True:
            kind = message.WhichOneof("request")
            if kind is None or kind == "request_headers":
                raise BadMessage(f"{kind} came after the gateway's own answer")
            # What was already under way of a request in full duplex gets no answer: nobody waits for it any more.
            if head.request_mode != wire.DUPLEX or kind not in ("request_body", "request_trailers"):
                await self._answer_unchanged(head, message)
            try:
                message = await self._next()
            except StreamEnded:
                return

    async def _answer_unchanged(self, head: StreamHead, message: ext_proc.ProcessingRequest) -> None:
        kind = message.WhichOneof("request")
        if kind == "response_body" and head.response_mode == wire.DUPLEX:
            body = message.response_body
            for chunk in wire.streamed_chunks(kind, body.body, last=body.end_of_stream):
                await self._write(chunk)
        else:
            await self._write(wire.unchanged(kind))

    async def _next(self) -> ext_proc.ProcessingRequest:
        message = await self._read()
        if message is None:
            raise StreamEnded
        return message

    async def _write(self, answer: ext_proc.ProcessingResponse) -> None:
        async with asyncio.timeout(self._options.write_timeout_s):
            await self._unbounded_write(answer)


def _waits_for_body(head: StreamHead) -> bool:
    return not head.ended and head.request_mode in (wire.DUPLEX, *wire.WHOLE)


def _picked(head: StreamHead, pick: Pick, body: ReceivedBody) -> Iterator[ext_proc.ProcessingResponse]:
    """The answers to all that has come of a request, with its engine."""
    if not _waits_for_body(head):
        yield wire.picked_headers(pick.endpoints)
    elif head.request_mode in wire.WHOLE:
        yield wire.picked_body(pick.endpoints)
    else:
        yield wire.picked_headers(pick.endpoints)
        if body.data or not body.trailers:
            yield from wire.streamed_chunks("request_body", body.data, last=not body.trailers)
        if body.trailers:
            yield wire.unchanged("request_trailers")
