# SPDX-License-Identifier: Apache-2.0
"""The connection from a server to the control agent of an engine of it, which may be another process.

It is a socket of the file system that only this user can open. The messages are those of an operator; the agent also
sends its status unasked when it changes.
"""
from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import zmq.asyncio

from vllm_pd.errors import ControlError
from vllm_pd.protocol import messages as m
from vllm_pd.rpc import codec, sockets

logger = logging.getLogger("vllm.pd")

ANSWER_S = 5.0


@dataclass(frozen=True, eq=False)
class _JobAnswers:
    """What comes of one job of a client: that the engine has it, and why its prompt was not written."""
    taken: asyncio.Event
    ended: asyncio.Future[str]


class EngineConnection:
    """Belongs to the server's event loop. `on_status` is called with every status that the agent sends."""

    def __init__(self, address: str, on_status: Callable[[m.StatusReply], None]) -> None:
        self.last: m.StatusReply | None = None  # the last status that came
        self._name = f"front-{uuid.uuid4().hex}"
        self._on_status = on_status
        self._context = zmq.asyncio.Context()
        self._socket = sockets.client(self._context, address, only_connected=False)
        self._waiting: dict[asyncio.Future[m.StatusReply], Callable[[m.StatusReply], bool]] = {}  # for such a status
        self._asking = asyncio.Lock()
        self._jobs: dict[m.Attempt, list[_JobAnswers]] = {}  # what those wait for who have brought a job
        self._listener = asyncio.get_running_loop().create_task(self._listen())

    async def ask(self, message: m.Message, is_answer: Callable[[m.StatusReply], bool]) -> m.StatusReply:
        """Send a message, and return the first status for which `is_answer` holds or which names a problem. Raises
        ControlError where none comes within 5 s, earlier messages to this engine included. A `Drain` waits for none of
        them, as it is never refused: a problem is that of another message."""
        try:
            async with asyncio.timeout(ANSWER_S):
                if isinstance(message, m.Drain):
                    return await self._exchange(message, is_answer)
                async with self._asking:
                    return await self._exchange(message, lambda status: bool(status.problem) or is_answer(status))
        except TimeoutError:
            raise ControlError("the engine's control thread does not answer") from None

    async def run_job(self, job: m.Job) -> str:
        """Have the engine claim and do this job now, and wait for its end. Returns why the prompt was not written,
        empty where it was. Raises ControlError where the engine does not confirm the job within 5 s, or does not end it
        within the time that is left of it."""
        mine = _JobAnswers(asyncio.Event(), asyncio.get_running_loop().create_future())
        waiting = self._jobs.setdefault(job.attempt, [])
        waiting.append(mine)
        problem = "the engine's control thread does not answer"
        try:
            if self._socket.closed:
                raise ControlError("the server ends")
            async with asyncio.timeout(ANSWER_S):
                await self._socket.send(codec.encode(self._name, m.DirectJob(job)))
                await mine.taken.wait()
            problem = "the engine has not ended the job in time"
            async with asyncio.timeout(job.deadline_s + ANSWER_S):
                return await mine.ended
        except codec.BadFrame as fault:
            return f"the job is too large: {fault}"
        except TimeoutError:
            raise ControlError(problem) from None
        finally:
            waiting.remove(mine)
            if not waiting and self._jobs.get(job.attempt) is waiting:
                del self._jobs[job.attempt]

    def close(self) -> None:
        """Close the socket. Idempotent. Not left to the garbage collector, which may end a context before its sockets,
        and hang."""
        if not self._socket.closed:
            self._listener.cancel()
            self._socket.close(linger=0)
            self._context.term()

    async def _exchange(self, message: m.Message, is_answer: Callable[[m.StatusReply], bool]) -> m.StatusReply:
        if self._socket.closed:
            raise ControlError("the server ends")
        answer = asyncio.get_running_loop().create_future()
        self._waiting[answer] = is_answer
        try:
            await self._socket.send(codec.encode(self._name, message))
            return await answer
        finally:
            del self._waiting[answer]

    async def _listen(self) -> None:
        """The task that reads the agent's messages until `close`: a status for those that wait for such a one, what
        comes of a job for those that have brought it."""
        while True:
            try:
                _, message = codec.decode(await self._socket.recv_multipart())
            except codec.BadFrame as fault:
                logger.error("the engine's control thread can't be understood: %s", fault)
                continue
            if isinstance(message, m.StatusReply):
                self.last = message
                self._on_status(message)
                for answer, is_answer in self._waiting.items():
                    if not answer.done() and is_answer(message):
                        answer.set_result(message)
            elif isinstance(message, m.DirectJobTaken):
                for waiting in self._jobs.get(message.attempt, ()):
                    waiting.taken.set()
            elif isinstance(message, m.DirectJobEnd):
                for waiting in self._jobs.pop(message.attempt, ()):
                    waiting.taken.set()
                    if not waiting.ended.done():
                        waiting.ended.set_result(message.problem)
