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
from vllm_pd.rpc.poller import SocketPoller, receive_batch

logger = logging.getLogger("vllm.pd")

TICK_S = 0.5
WARNING_S = 60.0
PROBE_S = 1.0
BATCH_MESSAGES = 256


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
            self._socket = sockets.server(self._context, bind, keys)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError("bind", bind, f"{error}; choose a free address like tcp://127.0.0.1:5700") from error
        self.address = sockets.endpoint(self._socket)
        self._poller = SocketPoller(gate)
        self._poller.watch(self._socket)
        self._registry = Registry(uuid.uuid4().hex, limits or QueueLimits(ttl_s=ttl_s), local_only=keys is None)
        self._routes: dict[str, bytes] = {}
        self._has_keys = keys is not None
        self._stopping = False
        self._slept = False
        self._quiet_until_s: dict[str, float] = {}
        self._probed_s: dict[str, float] = {}  # when the connection that has a name was last looked at

    def run(self) -> None:
        """Serve until `stop`, then close the socket."""
        next_tick = self._clock() + TICK_S
        try:
            while not self._stopping:
                self._poller.wait(next_tick - self._clock())
                for frames in receive_batch(self._socket, BATCH_MESSAGES):
                    self._on_frames(frames)
                if self._clock() >= next_tick:
                    next_tick = self._tick(next_tick)
        finally:
            self._socket.close()
            self._poller.close()
            self._context.term()

    def _tick(self, due_s: float) -> float:
        """Do what is due by time; returns when that is to be done again. Do not expire members right after this process
        was suspended: no heartbeat was received meanwhile, so they get the time for one, once."""
        now = self._clock()
        ttl_s = self._registry.limits.ttl_s
        self._slept = not self._slept and now - due_s > ttl_s / 4
        if self._slept:
            self.counters["slept"] += 1
            return now + ttl_s / 2
        self._deliver(self._registry.handle_timeout(now))
        self._prune_routes()
        return now + TICK_S

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
        route = frames[0]
        try:
            sender, message = codec.decode(frames[1:])
        except codec.BadFrame as fault:
            self.counters["frame_" + fault.fault.value] += 1
            if fault.theirs is not None:
                refused = m.Refused("protocol", str(m.PROTOCOL), str(fault.theirs))
                sockets.send(self._socket, route, codec.encode(self._registry.incarnation, refused))
            return
        if not isinstance(message, m.TO_BROKER):
            self.counters["unexpected"] += 1
            return
        if self._is_anothers(sender, route):
            self.counters["name_taken"] += 1
            self._warn("name_taken", "something else uses the name of engine %s, whose connection stands", sender)
            return
        self._routes[sender] = route
        self._deliver(self._registry.receive(self._clock(), sender, message))

    def _is_anothers(self, name: str, route: bytes) -> bool:
        """Whether another connection that stands has used this name. libzmq knows when a message is to go there."""
        known = self._routes.get(name, route)
        if known == route or self._has_keys:
            return False  # who has the keys is trusted with names
        if self._clock() - self._probed_s.get(name, -math.inf) < PROBE_S:
            return True
        self._probed_s[name] = self._clock()
        heard = codec.encode(self._registry.incarnation, m.Heard(self._registry.incarnation, len(self._registry)))
        return sockets.send(self._socket, known, heard) is not sockets.SendResult.UNREACHABLE

    def _warn(self, kind: str, message: str, *arguments: object) -> None:
        """Once in WARNING_S for each kind: anybody may cause it."""
        if self._clock() >= self._quiet_until_s.get(kind, -math.inf):
            self._quiet_until_s[kind] = self._clock() + WARNING_S
            logger.warning(message + "; this is said once in %d s", *arguments, WARNING_S)

    def _deliver(self, messages: list[OutgoingMessage]) -> None:
        queue = collections.deque(messages)
        while queue:
            to, message = queue.popleft()
            if isinstance(message, m.Refused):
                self._warn(message.key, "engine %s is refused: %s: the broker has %s, it has %s", to, message.key,
                           message.ours, message.theirs)
            route = self._routes.get(to)
            result = sockets.SendResult.UNREACHABLE
            if route is not None:
                try:
                    frame = codec.encode(self._registry.incarnation, message)
                except codec.BadFrame:  # members may be too many and too large for one
                    self.counters["frame_too_large"] += 1
                    continue
                result = sockets.send(self._socket, route, frame)
            if result is not sockets.SendResult.SENT:
                self.counters["undeliverable"] += 1
                gone = result is sockets.SendResult.UNREACHABLE
                queue.extend(self._registry.undeliverable(self._clock(), to, message, gone))

    def _prune_routes(self) -> None:
        known = {member.incarnation for member in self._registry.members()}
        for name in [name for name in self._routes if name not in known]:
            del self._routes[name]
            self._probed_s.pop(name, None)
