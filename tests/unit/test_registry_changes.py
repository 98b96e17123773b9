# SPDX-License-Identifier: Apache-2.0
"""B111: the registry in many places, kept equal by its changes, whatever is lost, doubled or overtaken on the way; and
who counts as silent at a broker that is late."""
import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_pd.broker.changes import ChangeLog, RegistryView
from vllm_pd.broker.registry import GATHER_S, QueueLimits, Registry
from vllm_pd.peer.cluster import ClusterView
from vllm_pd.protocol import messages as m
from vllm_pd.rpc import codec

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
NAMES = [f"engine{number}" for number in range(5)]
TTL_S = 5.0


def member(name, draining=False, load=0):
    return m.Member(name, m.Role.BOTH, "tcp://127.0.0.1:1", FINGERPRINT, m.Load(load), draining=draining)


class Follower:
    """An engine that registers, and hears what is let through."""

    def __init__(self, name):
        self.member = member(name)
        self.cluster = ClusterView(self.member, 1.0, TTL_S)
        self.asks = False

    def heartbeat(self):
        self.asks = False
        return m.Register(self.member, self.cluster.broker, self.cluster.version)

    def hear(self, broker, message):
        self.cluster.heard(0.0, broker, 0)
        if isinstance(message, m.Peers):
            self.asks |= not self.cluster.peers(message)
        elif isinstance(message, m.Heard):
            self.cluster.loads(message)

    @property
    def known(self):
        """The registry as it is here, without the loads."""
        return {name: msgspec.structs.replace(one, load=m.Load())
                for name, one in self.cluster._registry.members.items()}


class Fleet(RuleBasedStateMachine):
    """Engines come, change, fall silent and go; the broker ends and comes back. Between it and each engine any message
    may be lost, doubled, or overtake others."""

    def __init__(self):
        super().__init__()
        self.now, self.lives = 0.0, 0
        self.followers = {}
        self.way = []  # (receiver, broker, message)
        self.restart()

    @rule()
    def restart(self):
        self.lives += 1
        self.registry = Registry(f"b{self.lives}", QueueLimits(ttl_s=TTL_S))
        self.registry._log = ChangeLog(most=4)  # so that some have to get the whole

    def send(self, letters):
        self.way += [(to, self.registry.incarnation, message) for to, message in letters]

    @rule(name=st.sampled_from(NAMES), draining=st.booleans(), load=st.integers(0, 3))
    def heartbeat(self, name, draining, load):
        follower = self.followers.setdefault(name, Follower(name))
        follower.member = member(name, draining, load)
        self.send(self.registry.receive(self.now, name, follower.heartbeat()))

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name):
        if self.followers.pop(name, None) is not None:
            self.send(self.registry.receive(self.now, name, m.Leave()))

    @rule(seconds=st.sampled_from([GATHER_S, 0.5, 0.9, 30.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.send(self.registry.handle_timeout(self.now))

    @rule(place=st.integers(0, 30), stays=st.booleans())
    def deliver(self, place, stays):
        if self.way:
            to, broker, message = self.way[place % len(self.way)]
            if not stays:
                del self.way[place % len(self.way)]
            if to in self.followers:
                self.followers[to].hear(broker, message)

    @rule(place=st.integers(0, 30))
    def lose(self, place):
        if self.way:
            del self.way[place % len(self.way)]

    @invariant()
    def a_view_in_the_present_version_is_the_registry(self):
        for follower in self.followers.values():
            cluster = follower.cluster
            if (cluster.broker, cluster.version) == (self.registry.incarnation, self.registry.version):
                assert follower.known == self.in_registry

    @property
    def in_registry(self):
        return {one.incarnation: msgspec.structs.replace(one, load=m.Load()) for one in self.registry.members()}

    def teardown(self):
        """All that is under way comes, then each engine has two heartbeats, and one more where it asks."""
        while self.way:
            self.deliver(len(self.way) - 1, False)
        for _ in range(2):
            for name, follower in self.followers.items():
                self.send(self.registry.receive(self.now, name, follower.heartbeat()))
            self.now += GATHER_S
            self.send(self.registry.handle_timeout(self.now))
            while self.way:
                self.deliver(0, False)
                for name, follower in self.followers.items():
                    if follower.asks:
                        self.send(self.registry.receive(self.now, name, follower.heartbeat()))
        for follower in self.followers.values():
            assert follower.known == self.in_registry


TestB111Fleet = Fleet.TestCase
TestB111Fleet.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def registered(count):
    registry = Registry("b", QueueLimits(ttl_s=TTL_S))
    for number in range(count):
        registry.receive(0.0, f"e{number}", m.Register(member(f"e{number}")))
    registry.handle_timeout(GATHER_S)
    return registry


def sent_bytes(letters):
    return sum(len(codec.encode("b", message)) for _, message in letters)


@pytest.mark.parametrize("count", [10, 100, 500])
def test_b111_a_change_is_one_entry_to_each_member(count):
    registry = registered(count)
    entry_bytes = len(codec.encode("b", m.Register(member("e0"))))
    for message in (m.Register(member("e3", draining=True), "b", registry.version), m.Leave()):
        assert all(not isinstance(one, m.Peers) for _, one in registry.receive(1.0, "e3", message))
        assert registry.next_timeout() == 1.0 + GATHER_S
        letters = registry.handle_timeout(1.0 + GATHER_S)
        assert {to for to, _ in letters} == {one.incarnation for one in registry.members()}
        assert len({id(update) for _, update in letters}) == 1, "encoded once for all"
        assert sent_bytes(letters) < count * 2 * entry_bytes
    joined = registry.receive(2.0, "new", m.Register(member("new"))) + registry.handle_timeout(2.0 + GATHER_S)
    assert sent_bytes(joined) < count * 3 * entry_bytes, "the whole registry to the new one, one entry to each other"


def test_b111_changes_are_gathered():
    registry = registered(3)
    known = registry.version
    for number in range(10):
        registry.receive(1.0 + number / 200, f"n{number}", m.Register(member(f"n{number}")))
        registry.receive(1.0 + number / 200, "e1", m.Register(member("e1", draining=bool(number % 2))))
    registry.receive(1.06, "n0", m.Leave())
    assert registry.handle_timeout(1.09) == []
    letters = registry.handle_timeout(1.1)
    assert sorted(to for to, _ in letters) == sorted(one.incarnation for one in registry.members())
    update = letters[0][1]
    assert (update.since, update.version, update.gone) == (known, registry.version, ["n0"])
    assert sorted(one.incarnation for one in update.members) == ["e1", *(f"n{number}" for number in range(1, 10))]
    assert registry.handle_timeout(1.3) == [] and registry.next_timeout() == float("inf")


def test_b111_one_that_missed_an_update_gets_what_is_missing_and_no_more():
    registry = registered(100)
    follower = Follower("e0")
    ((_, whole), ) = registry.receive(1.0, "e0", follower.heartbeat())
    assert whole.since == 0 and len(whole.members) == 100
    follower.hear("b", whole)
    for now, name in ((2.0, "e5"), (3.0, "e6")):
        registry.receive(now, name, m.Leave())
        update = dict(registry.handle_timeout(now + GATHER_S))["e0"]  # the first one is lost
    follower.hear("b", update)
    assert follower.asks and "e6" in follower.known
    ((_, answer), ) = registry.receive(4.0, "e0", follower.heartbeat())
    assert (answer.members, sorted(answer.gone)) == ([], ["e5", "e6"])
    follower.hear("b", answer)
    assert not follower.asks and len(follower.known) == 98
    follower.hear("b", update)  # late, or once more
    assert isinstance(registry.receive(5.0, "e0", follower.heartbeat())[0][1], m.Heard)


def test_b111_the_log_forgets_the_oldest_changes_and_knows_it():
    log = ChangeLog(most=2)
    for name in "abca":
        log.note(name)
    assert log.version == 5 and log.since(5) == []
    assert log.since(4) == ["a"] and log.since(3) == ["a", "c"] and log.since(2) is None
    assert log.since(0) is None and log.since(6) is None


def test_b111_a_reader_gets_the_changes_since_its_last_reading():
    registry, view = registered(50), RegistryView()

    def read():
        ((_, update), ) = registry.receive(1.0, "caller", m.ListMembers(view.broker, view.version))
        view.follow(update.broker)
        assert view.apply(update) and list(view.members) == [one.incarnation for one in registry.members()]
        return len(update.members)

    assert (read(), read()) == (50, 0)
    registry.receive(1.0, "e7", m.Leave())
    registry.receive(1.0, "new", m.Register(member("new")))
    assert read() == 1
    registry = registered(3)
    registry.incarnation = "restarted"
    assert read() == 3


# Silence.


def test_b111_a_heartbeat_is_not_late_while_the_broker_is():
    """It was suspended, or takes long for a pass: until it has looked often enough, everybody is there."""
    registry = registered(3)
    for look in range(1, 4):
        registry.handle_timeout(look * 100.0)
        assert len(registry.members()) == 3
    registry.receive(350.0, "e1", m.Credit(0, 0))  # anything shows that it lives
    registry.handle_timeout(400.0)
    assert [one.incarnation for one in registry.members()] == ["e1"]
    assert registry.counters["late"] == 4


def test_b111_silence_is_counted_in_full_by_a_broker_that_listens():
    registry = registered(2)
    now = GATHER_S
    while registry.members():
        now = round(now + 0.5, 3)
        registry.handle_timeout(now)
    assert TTL_S <= now <= TTL_S + 0.5 and not registry.counters["late"]
