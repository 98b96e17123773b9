# SPDX-License-Identifier: Apache-2.0
"""The life cycle of what speaks for an engine: its protocol, its sockets, its lifeline and the control thread."""
import collections
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from vllm_pd.errors import ConfigError
from vllm_pd.peer.liveness import process
from vllm_pd.peer.liveness.lifeline import Lifeline
from vllm_pd.peer.operators import merged
from vllm_pd.peer.poster import MetaserverPoster
from vllm_pd.peer.protocol import PeerProtocol
from vllm_pd.peer.sockets import ControlSockets
from vllm_pd.peer.thread import ControlThread
from vllm_pd.protocol import messages as m
from vllm_pd.rpc.addresses import hosts_of, is_loopback

if TYPE_CHECKING:
    from vllm_pd.settings.engine import PDConfig

logger = logging.getLogger("vllm.pd")

CLOSE_S = 6.0  # several times what the thread waits at its end: for reads of others, for messages to leave, for NATS


class ControlAgent:
    """Built with the engine, `start`ed before its first step, `close`d after its last. The engine works with its
    `protocol`; it is woken by `wake`, called in the control thread. For `look` see ControlThread. After that thread has
    died (`error`) every request stays local."""

    def __init__(self, config: "PDConfig", member: m.Member, transfer_metadata: bytes, wake: Callable[[], None],
                 clock: Callable[[], float] = time.monotonic,
                 is_gone: Callable[[m.Member], bool] = process.is_gone, front: str | None = None,
                 look: Callable[[float, float], None] | None = None):
        self.protocol = PeerProtocol(config, member, transfer_metadata, clock)
        self._config = config
        self._metadata = transfer_metadata
        self._wake = wake
        self._look = look
        self._clock = clock
        self._is_gone = is_gone
        self._front = front
        self._lifeline: Lifeline | None = None
        self.thread: ControlThread | None = None
        self._socket_counters: m.Counters = collections.Counter()

    def start(self) -> None:
        """Bind, make the `protocol` of a member with addresses, and run. ConfigError where `bind`, `lifeline_port` or
        `broker` can't be used."""
        sockets = ControlSockets(self.member.incarnation, self._config, self._front)
        self._socket_counters = sockets.counters
        self._warn_of_loopback()
        try:
            self._lifeline = Lifeline(self.member.incarnation, hosts_of(self._config.bind)[0],
                                      self._config.lifeline_port)
        except OSError as error:
            sockets.close(0)
            raise ConfigError("lifeline_port", self._config.lifeline_port, f"{error}: write a free port, or 0"
                              ) from error
        member = msgspec.structs.replace(self.member, address=sockets.address, lifeline=self._lifeline.address,
                                         zone=self._config.zone or "")
        self.protocol = PeerProtocol(self._config, member, self._metadata, self._clock)
        poster = None
        if self._config.metaserver_urls:
            poster = MetaserverPoster(self._config.metaserver_urls, member.fingerprint,
                                      self.protocol.decode.unclaimable, self.protocol.decode.stop_posting)
            poster.start()
        self.thread = ControlThread(self.protocol, sockets, self._lifeline, self._wake, self._clock, self._is_gone,
                                    self._look, poster)
        self.thread.start()

    def _warn_of_loopback(self) -> None:
        broker = hosts_of(self._config.broker)
        if is_loopback(hosts_of(self._config.bind)[0]) and not all(map(is_loopback, broker)):
            logger.warning("bind=%s: engines of other hosts can't reach this one, and the broker is at %s: in a fleet "
                           "of several hosts write \"bind\": \"tcp://ADDRESS:0\", with this host's address",
                           self._config.bind, self._config.broker)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Leave the registry and end the thread. Open attempts are not waited for."""
        if self.thread is not None:
            self.thread.stop(timeout_s)

    def lifeline_fileno(self) -> int:
        """The lifeline's socket, for every other process of this engine that can write to a peer's memory: it holds it
        for as long as it can. After `start`."""
        return self._lifeline.fileno()

    def end_lifeline(self) -> None:
        """After `close`, once nothing of this engine can write to a peer's memory any more: the proof for its peers.
        Where this is never called, the end of the process is."""
        if self._lifeline is not None and not (self.thread is not None and self.thread.is_alive()):
            self._lifeline.close()

    @property
    def member(self) -> m.Member:
        """The registry entry as it was born; with addresses after `start`."""
        return self.protocol.member

    @property
    def error(self) -> BaseException | None:
        """What the thread died of; None while it lives."""
        return None if self.thread is None else self.thread.error

    def counts(self) -> dict[str, int]:
        """Gauges: jobs and attempts by state, peers, sockets."""
        sockets = self.thread.count_sockets() if self.thread is not None else 0
        return {**self.protocol.operators.counts(), "sockets": sockets}

    def dropped(self) -> dict[str, int]:
        """Counters of messages that changed nothing: malformed, late, duplicate, unknown, refused, unsent."""
        return self.protocol.operators.dropped() | merged(link=dict(self._socket_counters))  # the thread adds to it
