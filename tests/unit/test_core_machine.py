# SPDX-License-Identifier: Apache-2.0
"""Both sides of the protocol against each other, through a pool that loses, doubles and reorders messages.

The model beside them holds what is really so: which handles could still write, which notices were given, who is dead.
B34 (the protocol's part), B21, B22, B23, B25, B28, B29. Set VLLM_PD_EXAMPLES for a longer run.
"""
import os
from collections import Counter

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_pd.core import messages as m
from vllm_pd.core.decode import DecodeLimits, DecodeSide
from vllm_pd.core.events import (
    AddPeer,
    Cancelled,
    Connect,
    Disconnect,
    DropPeer,
    Fallback,
    Prefill,
    Prefilled,
    Released,
    Timed,
    ToBroker,
    ToDecode,
    ToPrefill,
)
from vllm_pd.core.prefill import JobState, PrefillLimits, PrefillSide

BLOCK = 16
RANKS = 2
FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", BLOCK, 2, 2, 64, "hnd", tp=RANKS)
LIMITS = DecodeLimits(lease_s=10.0, deadline_s=40.0, claim_retry_s=2.0, ttl_s=5.0)


def member(name, role):
    return m.Member(name, role, f"tcp://127.0.0.1:{1000 + len(name)}", FINGERPRINT)


class PEngine:
    """A prefill engine's model: a handle in `flying` can write until it has landed or was seen to stop."""

    def __init__(self, name):
        self.name = name
        self.side = PrefillSide(member(name, m.Role.PREFILL), b"p", PrefillLimits(max_jobs=8))
        self.alive = True
        self.peers = set()
        self.jobs = {}  # attempt -> ranks still to be posted
        self.flying = set()  # (attempt, rank)


class DEngine:
    """A decode engine's model."""

    def __init__(self, name):
        self.name = name
        self.side = DecodeSide(member(name, m.Role.DECODE), b"d", LIMITS)
        self.alive = True
        self.number = 0
        self.ends = Counter()
        self.released = Counter()
        self.prefilled = set()
        self.aborted = set()
        self.granted = {}  # attempt -> peer
        self.noticed = {}  # attempt -> ranks whose notice was given in


class World(RuleBasedStateMachine):
    """Rules draw what happens next; `teardown` heals the network and looks for what is left."""

    def __init__(self):
        super().__init__()
        self.now = 100.0
        self.ps = {}
        self.ds = {}
        self.pool = []  # (to, sender, message)
        self.offers = []  # jobs at the queue, which may lose and double them
        self.notices = []  # (attempt, rank) that have landed
        self.seen = []  # messages delivered before

    @initialize()
    def build(self):
        self.ps = {name: PEngine(name) for name in ("p1", "p22")}
        self.ds = {name: DEngine(name) for name in ("d333", "d4444")}
        for p in self.ps.values():
            self.on_p(p, p.side.members_are(self.now, [self.ds["d333"].side.member]))
        self.settle()

    # What the sides answer.

    def on_d(self, d, actions):
        for action in actions:
            if isinstance(action, ToPrefill):
                if isinstance(action.message, m.Grant):
                    attempt = action.message.attempt
                    assert d.granted.setdefault(attempt, action.peer) == action.peer, "granted to two"
                    assert attempt not in d.ends, "granted after its end"
                self.pool.append((action.peer, d.name, action.message))
            elif isinstance(action, ToBroker):
                if isinstance(action.message, m.Put):
                    self.offers.append(action.message.job)
            elif isinstance(action, Prefilled):
                attempt = action.attempt
                assert attempt in d.granted and d.noticed.get(attempt) == set(range(RANKS)), "prefilled without proof"
                d.ends[attempt] += 1
                d.prefilled.add(attempt)
            elif isinstance(action, Fallback):
                d.ends[action.attempt] += 1
            elif isinstance(action, Released):
                assert d.ends[action.attempt] == 1 and action.attempt not in d.prefilled
                d.released[action.attempt] += 1
            elif isinstance(action, Timed):
                assert action.attempt in d.prefilled
            else:
                raise AssertionError(action)

    def on_p(self, p, actions):
        for action in actions:
            if isinstance(action, ToDecode):
                self.pool.append((action.peer, p.name, action.message))
            elif isinstance(action, AddPeer):
                assert action.incarnation not in p.peers, "added twice"
                p.peers.add(action.incarnation)
            elif isinstance(action, DropPeer):
                assert not any(a.incarnation == action.incarnation for a, _ in p.flying), "dropped while written to"
                p.peers.remove(action.incarnation)
            elif isinstance(action, Prefill):
                assert action.peer in p.peers, "prefill for a stranger"
                assert action.attempt not in p.jobs, "given twice"
                assert len(action.cached_block_ids) == action.cached_blocks
                p.jobs[action.attempt] = set(range(RANKS))
            elif isinstance(action, Cancelled):
                assert not p.side.may_write(self.now, action.attempt)
            else:
                assert isinstance(action, Connect | Disconnect), action

    def deliver(self, letter):
        to, sender, message = letter
        self.seen.append(letter)
        if to in self.ds and self.ds[to].alive:
            d = self.ds[to]
            self.on_d(d, d.side.receive(self.now, sender, message))
        elif to in self.ps and self.ps[to].alive:
            p = self.ps[to]
            self.on_p(p, p.side.receive(self.now, sender, message))

    def settle(self):
        """Everything arrives, in order, and so does what it brings about."""
        for _ in range(4):
            for letter in [self.pool.pop(0) for _ in range(len(self.pool))]:
                self.deliver(letter)

    def pick(self, data, things):
        return data.draw(st.sampled_from(sorted(things, key=str)))

    def living(self, engines):
        return [name for name, engine in engines.items() if engine.alive]

    # The network.

    @rule(data=st.data())
    @precondition(lambda self: self.pool)
    def arrive(self, data):
        self.deliver(self.pool.pop(data.draw(st.integers(0, len(self.pool) - 1))))

    @rule()
    @precondition(lambda self: self.pool)
    def arrive_in_order(self):
        for letter in [self.pool.pop(0) for _ in range(len(self.pool))]:
            self.deliver(letter)

    @rule(data=st.data())
    @precondition(lambda self: self.pool)
    def lose(self, data):
        self.pool.pop(data.draw(st.integers(0, len(self.pool) - 1)))

    @rule(data=st.data())
    @precondition(lambda self: self.seen)
    def arrive_again(self, data):
        self.deliver(self.seen[data.draw(st.integers(0, len(self.seen) - 1))])

    @rule(data=st.data(), keep=st.booleans())
    @precondition(lambda self: self.offers and self.living(self.ps))
    def offer(self, data, keep):
        index = data.draw(st.integers(0, len(self.offers) - 1))
        job = self.offers[index] if keep else self.offers.pop(index)
        p = self.ps[self.pick(data, self.living(self.ps))]
        self.on_p(p, p.side.offer(self.now, job))

    @rule(quietly=st.booleans())
    @precondition(lambda self: self.offers)
    def offer_last_to_all(self, quietly):
        """A job that the queue hands out more than once; mostly the network works."""
        for p in self.ps.values():
            if p.alive:
                self.on_p(p, p.side.offer(self.now, self.offers[-1]))
        if not quietly:
            self.settle()

    # Decode engines.

    @rule(data=st.data(), blocks=st.integers(1, 4))
    @precondition(lambda self: self.living(self.ds))
    def submit(self, data, blocks):
        d = self.ds[self.pick(data, self.living(self.ds))]
        d.number += 1
        attempt = m.Attempt(d.name, f"r{d.number % 2}", d.number)
        cached = data.draw(st.integers(0, blocks - 1))
        self.on_d(d, d.side.submit(self.now, attempt, list(range(blocks * BLOCK - 3)), list(range(blocks)), cached))

    @rule(data=st.data())
    @precondition(lambda self: any(d.alive and d.side.states() for d in self.ds.values()))
    def abort(self, data):
        d = self.ds[self.pick(data, [n for n in self.living(self.ds) if self.ds[n].side.states()])]
        attempt = self.pick(data, d.side.states())
        if not d.ends[attempt]:
            d.ends[attempt] += 1
            d.aborted.add(attempt)
        self.on_d(d, d.side.abort(self.now, attempt))

    @rule(data=st.data(), again=st.booleans())
    @precondition(lambda self: self.notices)
    def notice(self, data, again):
        index = data.draw(st.integers(0, len(self.notices) - 1))
        attempt, rank = self.notices[index] if again else self.notices.pop(index)
        self.give_notice(attempt, rank)

    def give_notice(self, attempt, rank):
        d = self.ds[attempt.incarnation]
        if d.alive:
            d.noticed.setdefault(attempt, set()).add(rank)
            self.on_d(d, d.side.arrived(self.now, attempt, rank))

    # Prefill engines.

    @rule(data=st.data())
    @precondition(lambda self: any(p.alive and any(p.jobs.values()) for p in self.ps.values()))
    def post(self, data):
        p = self.ps[self.pick(data, [n for n in self.living(self.ps) if any(self.ps[n].jobs.values())])]
        attempt = self.pick(data, [a for a, ranks in p.jobs.items() if ranks])
        if p.side.may_write(self.now, attempt):
            self.on_p(p, p.side.writing(self.now, attempt))
            p.flying.add((attempt, p.jobs[attempt].pop()))

    @rule()
    def post_all(self):
        for p in self.ps.values():
            for attempt, ranks in p.jobs.items() if p.alive else ():
                while ranks and p.side.may_write(self.now, attempt):
                    p.flying.add((attempt, ranks.pop()))

    @rule(data=st.data())
    @precondition(lambda self: any(p.alive and p.flying for p in self.ps.values()))
    def land(self, data):
        p = self.ps[self.pick(data, [n for n in self.living(self.ps) if self.ps[n].flying])]
        flight = self.pick(data, p.flying)
        p.flying.remove(flight)
        self.notices.append(flight)

    @rule(data=st.data(), word=st.sampled_from(["sent", "failed", "ended"]))
    @precondition(lambda self: any(p.alive and p.jobs for p in self.ps.values()))
    def end(self, data, word):
        p = self.ps[self.pick(data, [n for n in self.living(self.ps) if self.ps[n].jobs])]
        attempt = self.pick(data, p.jobs)
        if not any(a == attempt for a, _ in p.flying):
            self.say_end(p, attempt, word)

    def say_end(self, p, attempt, word):
        unsent = p.jobs.pop(attempt)
        if word == "failed":
            actions = p.side.failed(self.now, attempt, "no")
        elif word == "sent" and not unsent:
            actions = p.side.sent(self.now, attempt, m.Timings(bytes=1))
        else:
            actions = p.side.ended(self.now, attempt)
        self.on_p(p, actions)

    # Time and death.

    @rule(seconds=st.sampled_from([0.1, 0.6, 3.0, 5.5, 11.0, 41.0]))
    def wait(self, seconds):
        self.now += seconds
        self.tick()

    @rule(seconds=st.sampled_from([0.6, 3.0, 11.0]), data=st.data())
    def wait_stopped(self, seconds, data):
        """Time passes, but one engine does not get to run (B22)."""
        stopped = self.pick(data, [*self.ds, *self.ps])
        self.now += seconds
        self.tick(but=stopped)

    def tick(self, but=""):
        for d in self.ds.values():
            if d.alive and d.name != but:
                self.on_d(d, d.side.tick(self.now))
        for p in self.ps.values():
            if p.alive and p.name != but:
                self.on_p(p, p.side.tick(self.now))

    @rule(data=st.data())
    @precondition(lambda self: len(self.living(self.ps)) > 1)
    def kill_p(self, data):
        p = self.ps[self.pick(data, self.living(self.ps))]
        p.alive = False
        p.flying.clear()

    @rule(data=st.data())
    def see_dead_p(self, data):
        p = self.ps[self.pick(data, self.ps)]
        if not p.alive:
            for d in self.ds.values():
                if d.alive:
                    self.on_d(d, d.side.peer_dead(self.now, p.name))

    @rule(data=st.data())
    @precondition(lambda self: len(self.living(self.ds)) > 1)
    def kill_d(self, data):
        self.ds[self.pick(data, self.living(self.ds))].alive = False

    @rule(data=st.data())
    def lose_d(self, data):
        """P is told that a D is gone, rightly or (by a registry's silence) wrongly."""
        d = self.ds[self.pick(data, self.ds)]
        p = self.ps[self.pick(data, self.ps)]
        if p.alive:
            self.on_p(p, p.side.peer_lost(self.now, d.name))

    @rule(data=st.data())
    @precondition(lambda self: self.seen)
    def noise(self, data):
        """B29: what nobody asked for, or of an older claim, another sender, another attempt, changes no state."""
        to, sender, message = self.seen[data.draw(st.integers(0, len(self.seen) - 1))]
        if "claim" not in message.__struct_fields__ or isinstance(message, m.Claim):
            return
        kind = data.draw(st.sampled_from(["claim", "attempt", "sender"]))
        if kind == "claim":
            message = msgspec.structs.replace(message, claim=message.claim + 1_000_000)
        elif kind == "attempt":
            message = msgspec.structs.replace(message, attempt=msgspec.structs.replace(message.attempt, number=10**6))
        else:
            sender = "stranger"
        engine = (self.ds | self.ps)[to]
        before = (engine.side.states(), self.writable(), sum(engine.side.dropped.values()))
        actions = engine.side.receive(self.now, sender, message)
        after = (engine.side.states(), self.writable(), sum(engine.side.dropped.values()))
        assert after == (*before[:2], before[2] + 1)
        assert all(isinstance(a, ToPrefill | ToDecode) and isinstance(a.message, m.Cancel | m.Stopped) for a in actions)

    def writable(self):
        return {(p.name, a) for p in self.ps.values() for a in p.side.states() if p.side.may_write(self.now, a)}

    # What must always hold.

    @invariant()
    def nobody_writes_what_may_be_reused(self):
        for p in self.ps.values():
            if not p.alive:
                continue
            for attempt, _ in p.flying:
                d = self.ds[attempt.incarnation]
                assert not d.released[attempt] and attempt not in d.prefilled, "written while it may be reused"
            for attempt, unsent in p.jobs.items():
                d = self.ds[attempt.incarnation]
                if unsent and p.side.may_write(self.now, attempt):
                    assert not d.released[attempt] and attempt not in d.prefilled, "writable while it may be reused"

    @invariant()
    def ends_come_once(self):
        for d in self.ds.values():
            assert all(count == 1 for count in d.ends.values())
            assert all(count == 1 for count in d.released.values())
            open_now = set(d.side.states())
            for attempt, state in d.side.states().items():
                assert state.ended == bool(d.ends[attempt])
            for attempt, ended in d.ends.items():
                if ended and attempt not in open_now:
                    assert d.released[attempt] == (attempt not in d.prefilled)

    def teardown(self):
        """The network heals, the dead are seen to be dead, engines do as told: all must end, nothing stays."""
        if not self.ds:
            return
        for _ in range(60):
            for d in self.ds.values():
                for p in self.ps.values():
                    if not d.alive and p.alive:
                        self.on_p(p, p.side.peer_lost(self.now, d.name))
                    if d.alive and not p.alive:
                        self.on_d(d, d.side.peer_dead(self.now, p.name))
                    if d.alive and p.alive:
                        self.on_p(p, p.side.members_are(self.now, [x.side.member for x in self.ds.values() if x.alive]))
            self.offers.clear()
            self.settle()
            for p in self.ps.values():
                for flight in list(p.flying):
                    p.flying.remove(flight)
                    self.give_notice(*flight)
                for attempt in list(p.jobs) if p.alive else ():
                    if p.side.states().get(attempt) is not JobState.RUNNING:
                        self.say_end(p, attempt, "ended")
            self.now += 2.0
            self.tick()
        for d in self.ds.values():
            if d.alive:
                assert not d.side.states() and d.side.next_deadline() is None
                assert len(d.ends) == d.number
        for p in self.ps.values():
            if p.alive:
                assert not p.side.states()
                assert p.peers == set(self.living(self.ds))


TestWorld = World.TestCase
TestWorld.settings = settings(
    max_examples=int(os.environ.get("VLLM_PD_EXAMPLES", "50")), stateful_step_count=60, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large])
