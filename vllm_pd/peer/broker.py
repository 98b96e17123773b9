# SPDX-License-Identifier: Apache-2.0
"""What an engine hears from its broker and what it sends there by itself: the registry, loads, offers, heartbeats.

Sans-IO; each method holds the lock.
"""
from vllm_pd.errors import PeerMismatch
from vllm_pd.peer.core import PeerCore, Session, locked
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import ToBroker

RECONNECT_POLL_S = 0.1  # while the broker is away, or does not know this engine


class BrokerSession(Session):
    """The part of the `ControlSession` that is about the broker. `now` is by the clock of the core."""

    def __init__(self, core: PeerCore):
        super().__init__(core)
        self._asked_at = float("-inf")  # for what is missing of the registry
        self._is_refused = False  # by the broker, since it was last of use

    @locked
    def receive(self, sender: str, message: m.Message) -> None:
        """A message of the broker, whose process is `sender`."""
        now, credits = self._clock(), self._core.credits
        if isinstance(message, m.Refused):
            self._cluster.refused(now, str(PeerMismatch(message.key, message.theirs, message.ours)))
            self._is_refused, self._cluster.up = True, False  # it does nothing for this engine
            self.check(now)
            return
        length = self._cluster.queue_length if isinstance(message, m.Offer) else message.queue_length
        is_new = self._cluster.heard(now, sender, length)
        is_complete = not isinstance(message, m.Peers) or self._cluster.peers(message)
        self._is_refused &= not is_complete
        if not is_complete:
            self._cluster.up = not self._is_refused
            if self._is_refused or not is_new and now < self._asked_at + RECONNECT_POLL_S:
                return  # the next heartbeat asks; or it was asked just now
            self._asked_at = self._cluster.next_heartbeat = now
            self.heartbeat(now)  # before what is put again: a broker that does not know this engine drops that
            is_new |= not message.members and not message.gone  # it had forgotten this engine
        if is_new:
            credits.send_again(new_broker=True)
            if not isinstance(message, m.PutReply):
                self._do(self._decode.requeue(now))
        self._do(self._decode.broker_is(now, True))
        if isinstance(message, m.Heard):
            self._cluster.loads(message)
        elif isinstance(message, m.Peers) and is_complete:
            self.state.listed(self._cluster.listed())
            if self.member.role.prefills:
                self._do(self._prefill.members_are(now, self._cluster.members()))
        elif isinstance(message, m.PutReply):
            if message.refusal is m.PutRefusal.UNREGISTERED:
                self._cluster.next_heartbeat = now
            self._do(self._decode.put_reply(now, message))
        elif isinstance(message, m.Offer):
            credits.offered(message.serial)
            if self.member.role.prefills:
                self._do(self._prefill.offer(now, message.job))
            if message.job.attempt not in self._prefill.states():
                credits.send_again()  # it takes no place here: the broker need not wait for the next heartbeat

    @locked
    def heartbeat(self, now: float) -> None:
        """Register again, with all credits, where that is due."""
        cluster = self._cluster
        if self._core.credits.failed:
            self._core.credits.send_again()
        if now < cluster.next_heartbeat:
            return
        cluster.next_heartbeat = now + cluster.heartbeat_s
        if self._core.own_jobs is not None:
            self._core.own_jobs.heartbeat(self._decode.uncomputed())
        listed = {member.incarnation for member in cluster.members()}
        needed = self._decode.busy_peers() | self._prefill.peers().keys() | self._parted
        self._do(self._decode.reads.known_are(now, listed | needed))
        if not self.state.left:
            self._core.credits.send_again()
            self._core.outbox.append(ToBroker(m.Register(self.state.entry(), cluster.broker, cluster.version)))

    @locked
    def check(self, now: float) -> None:
        """A broker that has been silent for too long is away."""
        self._cluster.check(now)
        if not self._cluster.up:
            self._do(self._decode.broker_is(max(self._cluster.heard_at, now - self._core.ttl_s), False))
