# SPDX-License-Identifier: Apache-2.0
"""Engines as the protocol sees them: the real core, beside it a model of what the core can't see.

The model of a decode engine holds its blocks: who owns each, and whose KV lies in it. That of a prefill engine holds
its own blocks and every write that is under way. So a write to a block that has found another owner is seen when it
lands, a wrong answer when it is read, and a block that nobody owns when the engine is looked at.

Where the engines are on machines of their own (`Shape.far`), each rank of a decode engine has transfer agents, and a
write lands only while there is the one that it goes to.

An engine is a value: `World` copies it before each step. Every step returns letters, `(to, kind, content)`.
"""
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from explorer.snapshots import NOW
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import (
    Action,
    AddPeer,
    Cancelled,
    Connect,
    Disconnect,
    DropPeer,
    Fallback,
    FallbackReason,
    Prefill,
    Prefilled,
    Released,
    RenewTransport,
    RetireTransport,
    Timed,
    ToBroker,
    ToDecode,
    ToPrefill,
)
from vllm_pd.protocol.attempts import DecodeLimits
from vllm_pd.protocol.decode import DecodeProtocol
from vllm_pd.protocol.generations import Generations
from vllm_pd.protocol.jobs import PrefillLimits
from vllm_pd.protocol.moments import NEVER
from vllm_pd.protocol.prefill import PrefillProtocol
from vllm_pd.protocol.writes import AttemptWrites

BLOCK_SIZE = 4
BROKER = "broker"

# Few different durations, so that few different moments arise; in the order in which the real defaults stand.
DECODE_LIMITS = DecodeLimits(lease_s=6.0, deadline_s=12.0, claim_retry_s=2.0, ttl_s=4.0, cancel_retry_max_s=2.0)
PREFILL_LIMITS = PrefillLimits(peering_s=2.0, hello_retry_s=1.0, add_retry_s=4.0, add_retry_max_s=4.0, claim_wait_s=2.0,
                               ttl_s=4.0)

Letter = tuple[str, str, Any]


class Violation(Exception):
    """An invariant does not hold."""


def require(condition: object, text: str) -> None:
    """Raise Violation unless the condition holds."""
    if not condition:
        raise Violation(text)


def fingerprint(ranks: int) -> m.Fingerprint:
    """What all engines of a world agree on."""
    return m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", BLOCK_SIZE, 2, 2, 64, "hnd", tp=ranks)


def member(name: str, role: m.Role, ranks: int, far: bool = False) -> m.Member:
    """The registry entry of an engine, which is on a machine of its own where it is `far` from others."""
    return m.Member(name, role, f"tcp://{name}", fingerprint(ranks), host_id=name if far else "")


def generation_of(name: str) -> int:
    """That of the agents that a transport calls so."""
    return int(name.partition("~")[2] or 0)


class Stage(Enum):
    """Where a request is on its decode engine."""
    PARKED = "parked"  # its prompt is prefilled elsewhere
    WAITING = "waiting"  # it is to be prefilled here, when there are blocks
    RUNNING = "running"
    OVER = "over"


class Request:
    """One life of a request id: a client may use the id again afterwards. `tag` is its prompt, and its KV."""

    def __init__(self, request_id: str, life: int, tag: int):
        self.request_id = request_id
        self.life = life
        self.tag = tag
        self.stage = Stage.WAITING
        self.attempt: m.Attempt | None = None
        self.tries = 0
        self.avoid: tuple[str, ...] = ()
        self.blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Shape:
    """How big a world is, and what of the core is replaced in it."""
    ranks: int = 1
    requests: int = 1  # ids that each decode engine's clients use
    lives: int = 1  # how often a client uses one id
    blocks: int = 3  # of each decode engine
    prompt_blocks: int = 1
    prefill_blocks: int = 2  # of each prefill engine
    chunks: int = 1  # in which a prompt is computed, and sent
    attempts: int = 2
    decode_type: type[DecodeProtocol] = DecodeProtocol
    prefill_type: type[PrefillProtocol] = PrefillProtocol
    writes_type: type[AttemptWrites] = AttemptWrites
    frees_at_finish: bool = False
    sends_early: bool = False  # a chunk, before it is computed
    asks_once: bool = False  # for the lease, before the first chunk
    attempt_of: Callable[[str, str, int], m.Attempt] = m.Attempt
    names_come_again: bool = False
    far: bool = False
    first_is_all: bool = False  # of the ranks that destroy their agents
    generations_type: type[Generations] = Generations
    decode_limits: DecodeLimits = field(default=DECODE_LIMITS)
    prefill_limits: PrefillLimits = field(default=PREFILL_LIMITS)


class DecodeEngine:
    """A decode engine: its side of the protocol, its requests and its blocks."""

    def __init__(self, name: str, shape: Shape):
        self.name = name
        self.shape = shape
        self._generations = shape.generations_type(name, b"d", shape.decode_limits.lease_s, NEVER)
        self.side = shape.decode_type(member(name, m.Role.DECODE, shape.ranks, shape.far), b"d", shape.decode_limits,
                                      self._generations)
        self.renewing = False  # the ranks are to make new agents
        self.to_destroy: frozenset[int] = frozenset()  # ranks that have still to destroy the older ones
        self.agents_from = (0, ) * shape.ranks  # the oldest agent of each rank
        self.number = 0
        self.lives: dict[str, int] = {f"r{index}": 0 for index in range(shape.requests)}
        self.requests: dict[str, Request] = {}
        self.free: set[int] = set(range(shape.blocks))
        self.quarantined: dict[m.Attempt, tuple[int, ...]] = {}
        self.kv: dict[tuple[int, int], int] = {}  # (block, rank): whose
        self.granted: dict[m.Attempt, tuple[str, int]] = {}
        self.expired_by_lease: frozenset[m.Attempt] = frozenset()
        self.died_of_age: frozenset[m.Attempt] = frozenset()  # without ever having been claimed

    # What can happen next.

    def inputs(self) -> list[tuple]:
        """What its clients and its ranks may do now."""
        found: list[tuple] = [("destroy", rank) for rank in self.to_destroy]
        found += [("renew", )] * self.renewing
        for request_id, life in self.lives.items():
            request = self.requests.get(request_id)
            if request is None or request.stage is Stage.OVER:
                if life < self.shape.lives and len(self.free) >= self.shape.prompt_blocks and self._name_is_free(
                        request_id):
                    found.append(("submit", request_id))
            else:
                found.append(("abort", request_id))
                if request.stage is Stage.RUNNING:
                    found.append(("finish", request_id))
        return found

    def _name_is_free(self, request_id: str) -> bool:
        """Where names come again, an engine would at least wait until the last bearer's blocks are free."""
        return not self.shape.names_come_again or not any(
            attempt.request_id == request_id for attempt in (*self.quarantined, *self.side.states()))

    # Clients.

    def submit(self, request_id: str) -> list[Letter]:
        """A client's request comes, and its prompt is to be prefilled elsewhere."""
        life = self.lives[request_id]
        self.lives[request_id] = life + 1
        tag = 1 + life + 10 * int(request_id[1:]) + 1000 * sum(map(ord, self.name))
        self.requests[request_id] = Request(request_id, life, tag)
        return self._try_remotely(self.requests[request_id])

    def abort(self, request_id: str) -> list[Letter]:
        """The client goes away."""
        request = self.requests[request_id]
        attempt, blocks = request.attempt, request.blocks
        self._end(request)
        if attempt is not None:
            self.quarantined[attempt] = blocks
            return self._do(self.side.abort(NOW, attempt))
        self._free(blocks)
        return self._settle([])

    def finish(self, request_id: str) -> list[Letter]:
        """The request has decoded all it wanted: it has read its KV to the end."""
        request = self.requests[request_id]
        self._check_kv(request)
        blocks = request.blocks
        self._end(request)
        self._free(blocks)
        return self._settle([])

    @staticmethod
    def _end(request: Request) -> None:
        request.stage, request.attempt, request.blocks = Stage.OVER, None, ()
        request.avoid, request.tries = (), 0

    # Peers, time, the transport.

    def deliver(self, sender: str, message: m.Message) -> list[Letter]:
        return self._do(self.side.receive(NOW, sender, message))

    def put_reply(self, reply: m.PutReply) -> list[Letter]:
        return self._do(self.side.put_reply(NOW, reply))

    def put_failed(self, attempt: m.Attempt) -> list[Letter]:
        return self._do(self.side.put_failed(NOW, attempt))

    def broker(self, up: bool) -> list[Letter]:
        return self._do(self.side.broker_is(NOW, up))

    def dead(self, peer: str) -> list[Letter]:
        """It is; or, on another machine, it can't be reached, which nobody takes for a fact."""
        return self._do((self.side.peer_seems_dead if self.shape.far else self.side.peer_dead)(NOW, peer))

    def tick(self) -> list[Letter]:
        return self._do(self.side.handle_timeout(NOW))

    def next_timeout(self) -> float | None:
        """When `tick` is next due; None where it is not."""
        due = self.side.next_timeout()
        if not self.shape.far:
            return due
        when = min(NEVER if due is None else due, self._generations.next_timeout([self.side]))
        return None if when == NEVER else when

    # Its ranks.

    def renew(self) -> list[Letter]:
        """All ranks have made new agents."""
        self.renewing = False
        return self._do(self._generations.renewed(NOW, b"d", [self.side]))

    def destroy(self, rank: int) -> list[Letter]:
        """A rank destroys its older agents."""
        self.to_destroy -= {rank}
        self.agents_from = tuple(self._generations.current if one == rank else oldest
                                 for one, oldest in enumerate(self.agents_from))
        is_done = self.shape.first_is_all or not self.to_destroy
        return self._do(self._generations.retired(NOW, True, [self.side]) if is_done else [])

    def can_land(self, generation: int, rank: int) -> bool:
        """Whether that rank has the agent that such a write goes to."""
        return generation >= self.agents_from[rank]

    def land(self, attempt: m.Attempt, rank: int, blocks: tuple[int, ...], tag: int) -> list[Letter]:
        """A peer's write reaches our memory, whatever that memory is used for by now."""
        table = self.table(attempt)
        require(table is not None and set(blocks) <= set(table), f"a write for {attempt} landed outside its fence")
        for block in blocks:
            self.kv[block, rank] = tag
        return []

    def notice(self, attempt: m.Attempt, rank: int) -> list[Letter]:
        """The transport's word that this rank's data is there."""
        return self._do(self.side.arrived(NOW, attempt, rank))

    # What the side answers.

    def _do(self, actions: list[Action]) -> list[Letter]:
        letters: list[Letter] = []
        again: list[Request] = []
        for action in actions:
            if isinstance(action, ToPrefill):
                if isinstance(action.message, m.Grant):
                    self._note_grant(action.peer, action.message)
                letters.append((action.peer, "deliver", (self.name, action.message)))
            elif isinstance(action, ToBroker):
                letters.append((BROKER, "deliver", (self.name, action.message)))
            elif isinstance(action, Prefilled):
                self._prefilled(action.attempt)
            elif isinstance(action, Fallback):
                again.append(self._fell_back(action))
            elif isinstance(action, Released):
                blocks = self.quarantined.pop(action.attempt, None)
                require(blocks is not None, f"{action.attempt} was released without having ended")
                self._free(blocks)
                self.granted.pop(action.attempt, None)
                self.expired_by_lease -= {action.attempt}
            elif isinstance(action, RenewTransport):
                self.renewing = True
            elif isinstance(action, RetireTransport):
                self.to_destroy = frozenset(range(self.shape.ranks))
            else:
                require(isinstance(action, Timed), f"{action} is nothing for a decode engine")
        for request in again:
            if (request.stage is Stage.WAITING and request.tries < self.shape.attempts and request.avoid
                    and len(self.free) >= self.shape.prompt_blocks):
                letters += self._try_remotely(request)
        if self.shape.far and (due := self._generations.handle_timeout(NOW, [self.side])):
            letters += self._do(due)
        return self._settle(letters)

    def _note_grant(self, peer: str, grant: m.Grant) -> None:
        attempt = grant.attempt
        holder = self.granted.setdefault(attempt, (peer, grant.claim))
        require(holder == (peer, grant.claim), f"{attempt} was granted twice")
        parked = self._parked(attempt)
        require(parked is not None, f"{attempt} was granted after its end")
        require(tuple(grant.block_ids) == parked.blocks, f"{attempt} was granted blocks that are not its own")

    def _prefilled(self, attempt: m.Attempt) -> None:
        request = self._parked(attempt)
        require(request is not None, f"{attempt} ended twice, or after its request")
        request.stage, request.attempt, request.avoid = Stage.RUNNING, None, ()
        self.granted.pop(attempt, None)
        self._check_kv(request)

    def _fell_back(self, event: Fallback) -> Request:
        attempt = event.attempt
        request = self._parked(attempt)
        require(request is not None, f"{attempt} ended twice, or after its request")
        require(attempt not in self.quarantined, f"two tables of blocks under the name {attempt}")
        self.quarantined[attempt], request.blocks = request.blocks, ()
        request.stage, request.attempt = Stage.WAITING, None
        request.avoid = (event.peer, ) if event.peer and event.reason.another_may_help else ()
        if event.reason is FallbackReason.LEASE:
            self.expired_by_lease |= {attempt}
        if event.reason is FallbackReason.DEADLINE and not event.peer:
            self.died_of_age |= {attempt}
        return request

    def _try_remotely(self, request: Request) -> list[Letter]:
        attempt = self.shape.attempt_of(self.name, request.request_id, self.number)
        self.number += 1
        request.tries += 1
        request.stage, request.attempt, request.blocks = Stage.PARKED, attempt, self._allocate()
        if self.shape.names_come_again:
            self.side._last_number = -1
        tokens = [request.tag] * (BLOCK_SIZE * self.shape.prompt_blocks)
        return self._do(self.side.submit(NOW, attempt, tokens, list(request.blocks), 0, request.avoid))

    def _settle(self, letters: list[Letter]) -> list[Letter]:
        """Prefill here what waits for it, as far as there are blocks."""
        for request in self.requests.values():
            if request.stage is Stage.WAITING and len(self.free) >= self.shape.prompt_blocks:
                request.blocks, request.stage = self._allocate(), Stage.RUNNING
                for block in request.blocks:
                    for rank in range(self.shape.ranks):
                        self.kv[block, rank] = request.tag
        return letters

    # Blocks.

    def _allocate(self) -> tuple[int, ...]:
        blocks = tuple(sorted(self.free)[:self.shape.prompt_blocks])
        self.free.difference_update(blocks)
        return blocks

    def _free(self, blocks: tuple[int, ...]) -> None:
        require(not self.free & set(blocks), "a block was freed twice")
        self.free.update(blocks)
        for block in blocks:
            for rank in range(self.shape.ranks):
                self.kv.pop((block, rank), None)  # what is left there is nobody's

    def _parked(self, attempt: m.Attempt) -> Request | None:
        return next((r for r in self.requests.values() if r.attempt == attempt and r.stage is Stage.PARKED), None)

    def table(self, attempt: m.Attempt) -> tuple[int, ...] | None:
        """The blocks set aside for this attempt; None where there are none (any more)."""
        parked = self._parked(attempt)
        return self.quarantined.get(attempt) if parked is None else parked.blocks

    def _check_kv(self, request: Request) -> None:
        for block in request.blocks:
            for rank in range(self.shape.ranks):
                require(self.kv.get((block, rank)) == request.tag,
                        f"request {request.request_id} of {self.name} reads KV that is not its own")

    def check(self) -> None:
        """B34: what holds after each step."""
        tables = [*self.quarantined.values(), *(r.blocks for r in self.requests.values())]
        held = [block for table in tables for block in table]
        require(sorted((*held, *self.free)) == list(range(self.shape.blocks)), "the sum of block references changed")
        states = self.side.states()
        for request in self.requests.values():
            if request.stage is Stage.RUNNING:
                self._check_kv(request)
            elif request.stage is Stage.PARKED:
                require(request.attempt in states and not states[request.attempt].ended,
                        f"{request.attempt} has ended, and nobody was told")
        for attempt in self.quarantined:
            require(attempt in states and states[attempt].ended, f"the blocks of {attempt} are never given back")

    def check_at_rest(self) -> None:
        """B20: all is over, nothing is held."""
        require(not self.side.states(), f"{self.name} still has open attempts: {self.side.states()}")
        require(not self.side.fenced() and self.next_timeout() is None, f"{self.name} still waits for something")
        require(not self._generations.parted, f"{self.name} is parted from others for good")
        require(len(self.free) == self.shape.blocks, f"{self.name} has lost blocks")
        require(all(r.stage is Stage.OVER for r in self.requests.values()), f"a request of {self.name} never ends")


class Work:
    """A job on the prefill engine: where its KV lies here, where it goes, how much of it is computed, and which ranks
    have still to post the write that is due."""

    def __init__(self, prefill: Prefill, source: tuple[int, ...], shape: Shape):
        self.peer = prefill.peer
        self.tag = prefill.token_ids[0]
        self.source = source
        self.target = tuple(prefill.block_ids)
        self.computed = 0  # chunks
        self.writes = shape.writes_type(self.target)
        self.unsent = frozenset(range(shape.ranks))
        self.flying: frozenset[int] = frozenset()
        self.broken = False
        self.may_land = False  # a rank's write has failed, and lands later
        self.cancelled = False
        self.said = False  # the last word

    @property
    def may_post(self) -> bool:
        """Whether some rank may still post a write, as far as the protocol allows it."""
        return not self.broken and not self.cancelled and bool(self.unsent) and (
            self.writes.open is not None or not self.writes.is_closed)

    def settle(self, ranks: int) -> None:
        """End the write under way when no rank moves any of it, or will."""
        if self.flying or (self.unsent and not self.broken and not self.cancelled):
            return
        if self.writes.open is not None:
            self.writes.end(not self.broken, error="a transfer failed")
        if not self.writes.is_closed:
            self.unsent = frozenset(range(ranks))


class Adrift(NamedTuple):
    """A write that has failed, and lands all the same, if the peer lives."""
    attempt: m.Attempt
    rank: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    generation: int


class PrefillEngine:
    """A prefill engine: its side of the protocol, its jobs, and the writes that it has under way."""

    def __init__(self, name: str, shape: Shape):
        self.name = name
        self.shape = shape
        self.side = shape.prefill_type(member(name, m.Role.PREFILL, shape.ranks, shape.far), b"p",
                                       shape.prefill_limits)
        self.peers: set[str] = set()
        self.unadded: frozenset[str] = frozenset()  # those that a rank could not add; the others write there
        self.work: dict[m.Attempt, Work] = {}
        self.free: set[int] = set(range(shape.prefill_blocks))
        self.kv: dict[int, int] = {}
        self.adrift: frozenset[Adrift] = frozenset()

    # What can happen next.

    def inputs(self) -> list[tuple]:
        """What the engine may do now."""
        found: list[tuple] = []
        for attempt, work in self.work.items():
            if work.said:
                continue
            if work.may_post and (work.writes.open is not None or work.writes.is_due):
                found += [("post", attempt, rank) for rank in work.unsent if self.may_write(attempt)]
            if work.writes.is_due and not self.may_write(attempt):
                found.append(("unleased", attempt))
            if work.computed < self.shape.chunks and not work.writes.is_closed:
                found.append(("compute", attempt))
            if work.writes.is_over:
                found.append(("say", attempt))
        return found

    def flights(self) -> list[tuple[m.Attempt, int]]:
        """Writes that may land or fail at any moment."""
        return [(attempt, rank) for attempt, work in self.work.items() for rank in work.flying]

    # The engine.

    def post(self, attempt: m.Attempt, rank: int) -> list[Letter]:
        """A rank posts its write, right after the lease was looked at."""
        work = self.work[attempt]
        write = work.writes.open or work.writes.begin()
        actions = self.side.writing(NOW, attempt) if write.is_last else []
        work.unsent -= {rank}
        work.flying |= {rank}
        letters = self._do(actions)
        return letters + self.broke(attempt, rank) if work.peer in self.unadded and rank == 0 else letters

    def may_write(self, attempt: m.Attempt) -> bool:
        """What is asked right before a write is posted."""
        work = self.work.get(attempt)
        return self.side.may_write(NOW, attempt) or (self.shape.asks_once and work is not None and work.may_post
                                                     and work.writes._number > 0)

    def unleased(self, attempt: m.Attempt) -> list[Letter]:
        """B22: the lease was found to be over when a write was due, before the protocol's timer says so."""
        self.work[attempt].writes.close("the lease ran out before the write")
        return []

    def landed(self, attempt: m.Attempt, rank: int) -> list[Letter]:
        """A write has arrived, and with it whatever its source holds at this moment."""
        work = self.work[attempt]
        write = work.writes.open
        tag = self._found(write.local_block_ids)
        letters = [(attempt.incarnation, "land", (attempt, rank, tuple(write.remote_block_ids), tag))]
        if write.is_last:
            letters.append((attempt.incarnation, "notice", (attempt, rank)))
        work.flying -= {rank}
        return letters + self._settle(attempt, work)

    def broke(self, attempt: m.Attempt, rank: int) -> list[Letter]:
        """B27: a write ends in an error; no byte of it moves any more."""
        work = self.work[attempt]
        work.flying -= {rank}
        work.broken = True
        letters = self._settle(attempt, work)
        work.broken = bool(work.writes.open)
        return letters

    def _settle(self, attempt: m.Attempt, work: Work) -> list[Letter]:
        """A rank's part of the write under way has ended; perhaps it was the last one."""
        work.settle(self.shape.ranks)
        over = work.may_land and work.writes.open is None
        letters = self._do(self.side.unproven(NOW, attempt, "a transfer failed")) if over else []
        self._forget_if_said(attempt)
        return letters

    def failed(self, attempt: m.Attempt, rank: int) -> list[Letter]:
        """A write ends in an error, and nobody knows whether more of it lands."""
        work = self.work[attempt]
        write = work.writes.open
        self.adrift |= {Adrift(attempt, rank, tuple(write.local_block_ids), tuple(write.remote_block_ids),
                               generation_of(work.peer))}
        work.may_land = True
        return self.broke(attempt, rank)

    def drifted(self, write: Adrift) -> list[Letter]:
        """It lands."""
        self.adrift -= {write}
        landing = write.attempt, write.rank, write.target, self._found(write.source)
        return [(write.attempt.incarnation, "land", landing)]

    def _found(self, block_ids: Iterable[int]) -> int:
        """Whose KV a write takes along."""
        tags = {self.kv.get(block) for block in block_ids}
        return tags.pop() if len(tags) == 1 else -1

    def compute(self, attempt: m.Attempt) -> list[Letter]:
        """The next chunk of a prompt is computed: its blocks may leave."""
        work, each = self.work[attempt], self.shape.prompt_blocks // self.shape.chunks
        chunk = work.source[work.computed * each:(work.computed + 1) * each]
        for block in chunk:
            self.kv[block] = work.tag
        work.computed += 1
        if not self.shape.sends_early:
            work.writes.add(chunk, work.computed == self.shape.chunks)
        return []

    def say(self, attempt: m.Attempt) -> list[Letter]:
        """No handle of the job can write any more: its blocks are freed, and D is told."""
        work = self.work[attempt]
        work.said = True
        self._forget_if_said(attempt)
        if work.cancelled:
            return self._do(self.side.ended(NOW, attempt))
        if work.writes.error:
            return self._do(self.side.failed(NOW, attempt, work.writes.error))
        return self._do(self.side.sent(NOW, attempt, m.Timings()))

    def _forget_if_said(self, attempt: m.Attempt) -> None:
        work = self.work[attempt]
        if work.said and not work.flying:
            del self.work[attempt]
            self._release(work)

    # Peers, time.

    def offer(self, job: m.Job) -> list[Letter]:
        return self._do(self.side.offer(NOW, job))

    def deliver(self, sender: str, message: m.Message) -> list[Letter]:
        return self._do(self.side.receive(NOW, sender, message))

    def members(self, *names: str) -> list[Letter]:
        """The registry lists these decode engines."""
        listed = [member(name, m.Role.DECODE, self.shape.ranks, self.shape.far) for name in names]
        return self._do(self.side.members_are(NOW, listed))

    def next_timeout(self) -> float | None:
        """When `tick` is next due; None where it is not."""
        return self.side.next_timeout()

    def generation(self, attempt: m.Attempt) -> int:
        """That of D in which this job is written."""
        return generation_of(self.work[attempt].peer)

    def reconnected(self) -> list[Letter]:
        """The connections to its peers were made anew."""
        return self._do(self.side._peering.introduce_again(NOW))

    def lost(self, peer: str) -> list[Letter]:
        return self._do(self.side.peer_lost(NOW, peer))

    def can_reach(self, peer: str) -> bool:
        """Whether all ranks have added it, as far as is known, and rank 0 has written nothing there."""
        return peer in self.peers - self.unadded and not any(
            work.peer == peer and 0 not in work.unsent for work in self.work.values())

    def unadd(self, peer: str) -> list[Letter]:
        """Rank 0 could not add it. The jobs of it are given back, as soon as nothing of them is under way."""
        self.unadded |= {peer}
        self.side.peer_unadded(NOW, peer)
        for work in self.work.values():
            if work.peer == peer:
                work.writes.close("the transport could not add it")
        return []

    def dead(self, peer: str) -> list[Letter]:
        """It is; or, on another machine, it can't be reached, which nobody takes for a fact."""
        if self.shape.far:
            return self._do(self.side.peer_seems_dead(NOW, peer))
        self.adrift = frozenset(write for write in self.adrift if write.attempt.incarnation != peer)
        return self._do(self.side.peer_dead(NOW, peer))

    def tick(self) -> list[Letter]:
        return self._do(self.side.handle_timeout(NOW))

    # What the side answers.

    def _do(self, actions: list[Action]) -> list[Letter]:
        letters: list[Letter] = []
        for action in actions:
            if isinstance(action, ToDecode):
                letters.append((action.peer, "deliver", (self.name, action.message)))
            elif isinstance(action, AddPeer):
                require(action.name not in self.peers, f"{action.name} was added twice")
                self.peers.add(action.name)
            elif isinstance(action, DropPeer):
                require(not any(w.peer == action.name and w.flying for w in self.work.values())
                        and (self.shape.far or not any(write.attempt.incarnation == action.name
                                                       for write in self.adrift)),
                        f"{action.name} was dropped while it was written to")
                self.peers.remove(action.name)
                self.unadded -= {action.name}
            elif isinstance(action, Prefill):
                letters += self._prefill(action)
            elif isinstance(action, Cancelled):
                if action.attempt in self.work:
                    work = self.work[action.attempt]
                    work.cancelled = True
                    work.writes.close()
                    work.settle(self.shape.ranks)
                else:
                    letters += self._do(self.side.ended(NOW, action.attempt))
            else:
                require(isinstance(action, Connect | Disconnect), f"{action} is nothing for a prefill engine")
        return letters

    def _prefill(self, event: Prefill) -> list[Letter]:
        require(event.peer in self.peers, f"{event.peer} is a stranger")
        require(event.attempt not in self.work, f"{event.attempt} was given twice")
        if len(self.free) < self.shape.prompt_blocks:
            return self._do(self.side.failed(NOW, event.attempt, "no room"))
        source = tuple(sorted(self.free)[:self.shape.prompt_blocks])
        self.free.difference_update(source)
        work = self.work[event.attempt] = Work(event, source, self.shape)
        self.compute(event.attempt)
        if self.shape.sends_early:
            work.writes.add(source, is_last=True)
        if self.shape.frees_at_finish:
            self._release(work)
        return []

    def _release(self, work: Work) -> None:
        self.free.update(work.source)  # the KV stays where it is until somebody takes the block

    def writable(self) -> Iterator[tuple[m.Attempt, tuple[int, ...], int, int]]:
        """Blocks of peers that a write is on its way to, or may be posted to now, by which rank, in which generation
        there."""
        for write in self.adrift:
            yield write.attempt, write.target, write.rank, write.generation
        for attempt, work in self.work.items():
            may_post = work.may_post and self.may_write(attempt)
            for rank in work.flying | (work.unsent if may_post else frozenset()):
                yield attempt, work.target, rank, generation_of(work.peer)

    def check(self) -> None:
        """What holds after each step."""
        held = [block for work in self.work.values() for block in work.source]
        require(self.shape.frees_at_finish
                or sorted((*held, *self.free)) == list(range(self.shape.prefill_blocks)), "P's references changed")
        require({attempt for attempt, work in self.work.items() if not work.said and not work.may_land}
                <= set(self.side.states()),
                "a job runs that the protocol knows nothing of")

    def check_at_rest(self) -> None:
        """B20: all is over, nothing is held."""
        require(not self.side.states(), f"{self.name} still has jobs: {self.side.states()}")
        require(not self.work and len(self.free) == self.shape.prefill_blocks, f"{self.name} has lost blocks")


def check_pair(d: DecodeEngine, p: PrefillEngine) -> None:
    """What holds between two engines: the fence, and that P's lease ends before D's."""
    for attempt, target, rank, generation in p.writable():
        if attempt.incarnation == d.name and d.can_land(generation, rank):
            table = d.table(attempt)
            require(table is not None and set(target) <= set(table),
                    f"{p.name} may write blocks of {attempt} that {d.name} may reuse")
    for attempt in p.side.states():
        if attempt.incarnation == d.name and p.may_write(attempt):
            require(attempt not in d.expired_by_lease, f"{p.name} may write {attempt} after {d.name} saw its lease end")
