# SPDX-License-Identifier: Apache-2.0
"""A gateway as an endpoint picker sees it, by gRPC, and a picker before faulty engines. Needs the packages of the extra
`picker`."""
import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc

from tests.fakes.faulty_engine import QUICK, FaultyEngine
from vllm_pd.picker.options import PickerOptions
from vllm_pd.picker.server import PickerServer
from vllm_pd.router.policy import Policy, RoutingPolicyConfig
from vllm_pd.router.workers import WorkerState
from vllm_pd.rpc.ports import take_free

NAME = "x-gateway-destination-endpoint"
Mode = processing_mode_pb2.ProcessingMode
ASKED = b'{"model": "m", "prompt": "Hello"}'
WITHIN_S = 60.0


class PickerCall:
    """One stream of ext_proc."""

    def __init__(self, stub: external_processor_pb2_grpc.ExternalProcessorStub) -> None:
        self.call = stub.Process()

    async def head(self, path: str = "/v1/completions", method: str = "POST",
                   mode: int | None = Mode.FULL_DUPLEX_STREAMED,
                   ended: bool = False, subset: object = None, headers: tuple[tuple[str, str], ...] = (),
                   response_mode: int = Mode.NONE) -> None:
        message = ext_proc.ProcessingRequest()
        for name, value in ((":path", path), (":method", method), *headers):
            message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        message.request_headers.end_of_stream = ended
        if mode is not None:
            message.protocol_config.request_body_mode = mode
            message.protocol_config.response_body_mode = response_mode
        if subset is not None:
            message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({f"{NAME}-subset": subset})
        await self.send(message)

    async def body(self, data: bytes = ASKED, last: bool = True) -> None:
        message = ext_proc.ProcessingRequest()
        message.request_body.body, message.request_body.end_of_stream = data, last
        await self.send(message)

    async def response_head(self, status: int = 200, served: str | None = None,
                            headers: tuple[tuple[str, str], ...] = ()) -> ext_proc.ProcessingResponse:
        message = ext_proc.ProcessingRequest()
        for name, value in ((":status", str(status)), *headers):
            message.response_headers.headers.headers.add(key=name, raw_value=value.encode())
        if served is not None:
            message.metadata_context.filter_metadata["envoy.lb"].update({f"{NAME}-served": served})
        await self.send(message)
        return await self.read()

    async def send(self, message: ext_proc.ProcessingRequest) -> None:
        await asyncio.wait_for(self.call.write(message), WITHIN_S)

    async def read(self) -> ext_proc.ProcessingResponse | None:
        """The next answer; None at the end."""
        answer = await asyncio.wait_for(self.call.read(), WITHIN_S)
        return None if answer is grpc.aio.EOF else answer

    async def picked(self, **head: object) -> str:
        """The endpoints for a request of the head's kind with the usual body, which goes back unchanged."""
        data = head.pop("data", ASKED)
        await self.head(**head)
        if head.get("ended"):
            return destination(await self.read())
        mode = head.get("mode", Mode.FULL_DUPLEX_STREAMED)
        if mode == Mode.BUFFERED:
            answer = await self.read()
            assert answer.WhichOneof("response") == "request_headers", answer
            mutation = answer.request_headers.response.header_mutation
            assert not mutation.set_headers and list(mutation.remove_headers) == [NAME]
        await self.body(data)
        found = destination(await self.read())
        if mode in (Mode.FULL_DUPLEX_STREAMED, None):
            back = b""
            while True:
                chunk = (await self.read()).request_body.response.body_mutation.streamed_response
                back += chunk.body
                if chunk.end_of_stream:
                    break
            assert back == data
        return found

    async def refused(self, **head: object) -> tuple[int, bytes, dict[str, str]]:
        """(status, body, headers) of the answer in place of an engine; the stream then ends."""
        data = head.pop("data", ASKED)
        await self.head(**head)
        if head.get("ended") or head.get("mode") == Mode.BUFFERED:
            return await self.refusal()
        reading = asyncio.create_task(self.read())  # gRPC's client loses an answer after a write that came too late
        try:
            await self.body(data)
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):  # refused before its body
            return _refusal(await reading)
        refused = _refusal(await reading)
        assert await self.read() is None
        return refused

    async def refusal(self) -> tuple[int, bytes, dict[str, str]]:
        refused = _refusal(await self.read())
        assert await self.read() is None
        return refused

    async def end(self) -> None:
        """As a gateway whose client has its answer."""
        with contextlib.suppress(asyncio.InvalidStateError):
            await self.call.done_writing()
        while await self.read() is not None:
            pass


def _refusal(answer: ext_proc.ProcessingResponse) -> tuple[int, bytes, dict[str, str]]:
    assert answer.WhichOneof("response") == "immediate_response", answer
    refused = answer.immediate_response
    return (refused.status.code, refused.body,
            {one.header.key: one.header.raw_value.decode() for one in refused.headers.set_headers})


def destination(answer: ext_proc.ProcessingResponse) -> str:
    """The endpoints that an answer names, in the header and in metadata alike, over whatever the header was."""
    kind = answer.WhichOneof("response")
    assert kind in ("request_headers", "request_body"), answer
    response = getattr(answer, kind).response
    [option] = response.header_mutation.set_headers
    assert option.append_action == option.OVERWRITE_IF_EXISTS_OR_ADD and option.header.key == NAME
    found = option.header.raw_value.decode()
    assert answer.dynamic_metadata["envoy.lb"][NAME] == found
    return found


class Picking:
    """A picker that is reached by gRPC, and a gateway's connection to it."""

    def __init__(self, server: PickerServer, channel: grpc.aio.Channel) -> None:
        self.server, self.channel = server, channel
        self._stub = external_processor_pb2_grpc.ExternalProcessorStub(channel)

    def call(self) -> PickerCall:
        return PickerCall(self._stub)

    async def picked(self, **head: object) -> str:
        """Of a request whose stream ends at once."""
        call = self.call()
        found = await call.picked(**head)
        await call.end()
        return found

    async def refused(self, **head: object) -> tuple[int, bytes, dict[str, str]]:
        return await self.call().refused(**head)

    def worker(self, engine: FaultyEngine):
        return self.server.workers.get(engine.url)

    def open(self) -> list[int]:
        return [len(worker.in_flight) for worker in self.server.workers]

    def count(self, name: str, **labels: str) -> float:
        return self.server.metrics.registry.get_sample_value(name, labels) or 0.0

    async def until(self, condition: Callable[[], bool], within_s: float = WITHIN_S) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                await asyncio.sleep(0.01)


def endpoint(engine: FaultyEngine) -> str:
    return f"127.0.0.1:{engine.port}"


@contextlib.asynccontextmanager
async def picking(count: int, policy: Policy = Policy.ROUND_ROBIN, up: bool = True,
                  make: Callable[[], FaultyEngine] = FaultyEngine,
                  credentials: grpc.ChannelCredentials | None = None,
                  **options) -> AsyncIterator[tuple[Picking, list[FaultyEngine]]]:
    """A picker over so many engines, all up unless `up` is False; leak-checked in the end."""
    engines = [make() for _ in range(count)]
    for engine in engines:
        await engine.start()
    settings = {**QUICK, "workers": tuple(engine.url for engine in engines), "port": take_free("127.0.0.1"),
                "metrics_port": 0, **options}
    server = PickerServer(PickerOptions(**settings), RoutingPolicyConfig(policy=policy))
    await server.start()
    at = f"127.0.0.1:{settings['port']}"
    try:
        async with (grpc.aio.insecure_channel(at) if credentials is None else
                    grpc.aio.secure_channel(at, credentials)) as channel:
            found = Picking(server, channel)
            if up:
                await found.until(lambda: all(one.state is WorkerState.UP for one in server.workers))
            yield found, engines
        await found.until(lambda: not any(found.open()) and not server._open)
        assert server._bodies.held_bytes == 0
    finally:
        await server.close()
        for engine in engines:
            await engine.stop()
