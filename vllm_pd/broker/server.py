# SPDX-License-Identifier: Apache-2.0
"""The broker's process: one socket in front of a `Registry`.

It may be killed and restarted at any moment: engines register again with their next heartbeat, put their unclaimed jobs
again, and send their credits again.
"""
import collections
import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence

import zmq

from vllm_pd.broker.registry import OutgoingMessage, QueueLimits, Registry
from vllm_pd.errors import ConfigError
from vllm_pd.protocol import messages as m
from vllm_pd.rpc import codec, sockets
from vllm_pd.rpc.gate import Gate
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.owners import NameOwners
from vllm_pd.rpc.poller import SocketPoller, receive_batch

logger = logging.getLogger("vllm.pd")

WARNING_S = 60.0
BATCH_MESSAGES = 256  # libzmq gives them in turn from all connections
OPEN_TAGS = frozenset(kind.__struct_config__.tag for kind in (m.Register, m.ListMembers))  # what anybody may send
MAX_STRANGER_BYTES = 1 << 16  # of one of those from a sender that is not registered


class Broker:
    """Binds at once (ConfigError where it can't); `run` serves until `stop`. With keys, only those with the same keys
    can connect."""

    def __init__(self, bind: str, *, ttl_s: float = 5.0, limits: "QueueLimits | None" = None,
                 keys: Keys | None = None, clock: Callable[[], float] = time.monotonic):
        if keys is None and not sockets.is_local(bind):
            raise ConfigError("bind", bind, "bind to loopback, like tcp://127.0.0.1:5700, or give it keys")
        self.counters: m.Counters = collections.Counter()
        self._clock = clock
        self._context = zmq.Context()
        gate = None if keys is None else Gate(self._context, keys)
        try:
            self._socket = sockets.server(self._context, bind, keys, ends_when_silent=True)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError("bind", bind, f"{error}; choose a free address like tcp://127.0.0.1:5700") from error
        self.address = sockets.endpoint(self._socket)
        self._poller = SocketPoller(gate)
        self._poller.watch(self._socket)
        self._registry = Registry(uuid.uuid4().hex, limits or QueueLimits(ttl_s=ttl_s), local_only=keys is None)
        self._routes: dict[str, bytes] = {}
        self._encoded: tuple[m.Message | None, bytes | zmq.Frame | None] = (None, None)
        self._shared = sockets.SharedFrames()
        self._has_keys = keys is not None
        self._stopping = False
        self._quiet_until_s: dict[str, float] = {}
        self._owners = NameOwners(self._stands, clock)

    def run(self) -> None:
        """Serve until `stop`, then close the socket."""
        tick_s = self._registry.limits.tick_s
        next_tick = self._clock() + tick_s
        try:
            while not self._stopping:
                self._poller.wait(min(next_tick, self._registry.next_timeout()) - self._clock())
                for frames in receive_batch(self._socket, max(BATCH_MESSAGES, 2 * len(self._routes))):
                    self._on_frames(frames)
                now = self._clock()
                if now >= min(next_tick, self._registry.next_timeout()):
                    next_tick = now + tick_s
                    self._deliver(self._registry.handle_timeout(now))
                    self._prune_routes()
        finally:
            self._socket.close()
            self._poller.close()
            self._context.term()

    def stop(self) -> None:
        """End `run`. Safe from any thread and from a signal handler."""
        self._stopping = True
        self._poller.waker.set()

    def members(self) -> list[m.Member]:
        """The registered members. May be called from another thread; the list may then be outdated."""
        return self._registry.members()

    def queue_length(self) -> int:
        """Jobs that wait for a P."""
        return len(self._registry)

    def counts(self) -> dict[str, int]:
        """Counters of bad frames and odd messages."""
        return {**self.counters, **self._registry.counters}

    def _on_frames(self, frames: Sequence[bytes]) -> None:
        """A message, after the route of its connection, by which its sender is answered from now on. Bad ones are
        counted; one of another protocol version is answered with Refused. One for which `_is_refused` holds is not
        decoded."""
        route = frames[0]
        try:
            sender, tag = codec.peek(frames[1:])
            if self._is_refused(sender, tag, route, len(frames[1])):
                return
            _, message = codec.decode(frames[1:])
        except codec.BadFrame as fault:
            self.counters["frame_" + fault.fault.value] += 1
            if fault.theirs is not None:
                self._answer(route, m.Refused("protocol", str(m.PROTOCOL), str(fault.theirs)))
            return
        if not isinstance(message, m.TO_BROKER):
            self.counters["unexpected"] += 1
            return
        self._routes[sender] = route
        self._deliver(self._registry.receive(self._clock(), sender, message))

    def _is_refused(self, sender: str, tag: str, route: bytes, size_bytes: int) -> bool:
        """Whether a message is not even to be decoded. An engine that was registered, here or at a former broker
        process, sees by the answer that it has to register again."""
        if not self._has_keys and self._owners.is_anothers(sender, self._routes.get(sender), route):
            self.counters["name_taken"] += 1
            self._warn("name_taken", "something else uses the name of engine %s, whose connection stands", sender)
            return True
        if sender in self._registry or (tag in OPEN_TAGS and size_bytes <= MAX_STRANGER_BYTES):
            return False
        self.counters["unregistered"] += 1
        self._answer(route, self._registry.empty_update())
        return True

    def _answer(self, route: bytes, message: m.Message) -> sockets.SendResult:
        return sockets.send(self._socket, route, codec.encode(self._registry.incarnation, message))

    def _stands(self, name: str) -> bool:
        """Whether the connection that has this name stands. libzmq knows when a message is to go there."""
        heard = m.Heard(self._registry.incarnation, len(self._registry))
        return self._answer(self._routes[name], heard) is not sockets.SendResult.UNREACHABLE

    def _warn(self, kind: str, message: str, *arguments: object) -> None:
        """Once in WARNING_S for each kind: anybody may cause it."""
        if self._clock() >= self._quiet_until_s.get(kind, -math.inf):
            self._quiet_until_s[kind] = self._clock() + WARNING_S
            logger.warning(message + "; this is said once in %d s", *arguments, WARNING_S)

    def _deliver(self, messages: list[OutgoingMessage]) -> None:
        """Send these messages, and then those that follow from what could not be sent, until nothing is left. What is
        too large for a frame is dropped."""
        queue = collections.deque(messages)
        while queue:
            to, message = queue.popleft()
            if isinstance(message, m.Refused):
                self._warn(message.key, "engine %s is refused: %s: the broker has %s, it has %s", to, message.key,
                           message.ours, message.theirs)
            route = self._routes.get(to)
            result = sockets.SendResult.UNREACHABLE
            if route is not None:
                frame = self._encode(message)
                if frame is None:
                    continue
                result = sockets.send(self._socket, route, frame)
            if result is not sockets.SendResult.SENT:
                self.counters["undeliverable"] += 1
                gone = result is sockets.SendResult.UNREACHABLE
                queue.extend(self._registry.undeliverable(self._clock(), to, message, gone))

    def _encode(self, message: m.Message) -> "bytes | zmq.Frame | None":
        """Its frame; None, and counted, where it would be too large, as members may be too many for one. One update of
        the registry goes to all members, one after the other, and is encoded once."""
        if message is not self._encoded[0]:
            self._encoded = (message, None)
            try:
                frame = codec.encode(self._registry.incarnation, message)
                self._encoded = (message, self._shared.share(frame))
            except codec.BadFrame:
                self.counters["frame_too_large"] += 1
        return self._encoded[1]

    def _prune_routes(self) -> None:
        known = {member.incarnation for member in self._registry.members()}
        for name in [name for name in self._routes if name not in known]:
            del self._routes[name]
