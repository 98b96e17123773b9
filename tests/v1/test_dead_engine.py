# SPDX-License-Identifier: Apache-2.0
"""B80: a server's call to an engine of ours that ends without an answer fails, and so does the server's start. The
client is vLLM's own, over sockets; what an engine says at its end is said here."""
import asyncio
import weakref
from types import SimpleNamespace

import pytest
import zmq.asyncio
from vllm.config import KVTransferConfig
from vllm.v1.engine import EngineCoreOutputs, UtilityOutput
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, BackgroundResources
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from vllm_pd.v1 import front
from vllm_pd.v1.settings import OWN_KEY

ENGINE, WAIT_S = b"\0\0", 20.0


class Client(AsyncMPClient):
    """One whose processes are not there, and the engine's sockets."""

    def __init__(self, is_ours: bool) -> None:
        context = zmq.asyncio.Context()
        self.input_socket, self.received = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        output, self.answers = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self.received.setsockopt(zmq.IDENTITY, ENGINE)
        for name, ours, theirs in (("in", self.input_socket, self.received), ("out", output, self.answers)):
            ours.bind(f"inproc://{name}")
            theirs.connect(f"inproc://{name}")
        self.resources = BackgroundResources(ctx=context, output_socket=output, input_socket=self.input_socket)
        self._finalizer = weakref.finalize(self, context.destroy, 0)
        self.encoder, self.decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        self.utility_results, self.outputs_queue = {}, asyncio.Queue()
        self.client_index, self.core_engine = 0, ENGINE
        extra = {OWN_KEY: {}} if is_ours else {}
        self.vllm_config = SimpleNamespace(kv_transfer_config=KVTransferConfig(
            kv_connector="PDConnector", kv_role="kv_both", kv_connector_extra_config=extra))

    async def call(self, dies: bool) -> object:
        """The first call of a server, to an engine that answers it, or dies."""
        await self.received.send(b"")
        await self.input_socket.recv_multipart()
        call = asyncio.ensure_future(self.reset_mm_cache_async())
        await self.received.recv_multipart()
        if dies:
            await self.answers.send(EngineCoreProc.ENGINE_CORE_DEAD)
        else:
            [call_id] = self.utility_results
            answer = EngineCoreOutputs(utility_output=UtilityOutput(call_id, result=UtilityResult("done")))
            await self.answers.send_multipart(MsgpackEncoder().encode(answer))
        try:
            return await asyncio.wait_for(call, WAIT_S)
        finally:
            self.resources.output_queue_task.cancel()
            self._finalizer()


@pytest.fixture(autouse=True)
def wrapped(monkeypatch):
    monkeypatch.setattr(front, "LOOK_S", 0.05)
    monkeypatch.setattr(Client, "_call_utility_async", front._ending_with_engine(AsyncMPClient._call_utility_async))


def run(is_ours: bool, dies: bool) -> object:
    async def in_loop() -> object:
        return await Client(is_ours).call(dies)

    return asyncio.run(in_loop())


def test_b80_a_call_to_an_engine_that_ends_fails():
    with pytest.raises(EngineDeadError):
        run(is_ours=True, dies=True)


@pytest.mark.parametrize("is_ours", [True, False])
def test_b91_a_call_that_is_answered_is_as_ever(is_ours):
    assert run(is_ours, dies=False) in ("done", None)


def test_b91_a_call_to_another_engine_stays_vllms_own(monkeypatch):
    """Which waits: if vLLM mends that, ours can go."""
    monkeypatch.setattr("tests.v1.test_dead_engine.WAIT_S", 2.0)
    with pytest.raises(TimeoutError):
        run(is_ours=False, dies=True)
