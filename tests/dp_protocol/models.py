# SPDX-License-Identifier: Apache-2.0
"""What the explorer visits: the real `Participant` and `Coordinator`, and minimal models of an engine loop, its input
queue, the network or the shared page, and forwards as a barrier.

A rank is a tuple of its whole state, its messages included. So ranks can be sorted, and states that differ only in the
numbers of ranks are the same.
"""
from collections.abc import Callable, Iterator
from enum import IntEnum
from operator import gt
from typing import NamedTuple

from msgspec.structs import replace

from vllm_pd.dp.calls import CallAction, CallRegisters, CallState
from vllm_pd.dp.core import Coordinator, Lookahead, Participant, RankState
from vllm_pd.dp.interface import StepDecision


class At(IntEnum):
    """Where an engine loop is."""
    LOOP = 0  # about to decide
    WAKING = 1  # has requested by shared memory and has others yet to wake
    FORWARD = 2  # in a forward with work
    DUMMY = 3
    CHECK = 4  # will block unless there is work or it is due
    GET = 5  # in queue.get(): goes on when there is something in the queue
    ENDED = 6
    FAILED = 7
    DEAD = 8
    TURN = 9  # has read what there is to know about calls by shared memory
    CALL = 10  # in a call that all ranks make, and which waits for all
    STOPPED = 11  # lives, and does nothing ever again
    CLOSED = 12  # was shut down, or has left and waited long enough, and has said so


GONE = (At.DEAD, At.CLOSED)


class Rank(NamedTuple):
    """A rank and its messages. `queue`: something is in the input queue. `work`: forwards that its requests still need.
    `woken`: the watching thread has yet to wake the loop. `latch`: for broken variants. `coming`: calls that it has yet
    to receive. `made`: calls that it has made, and after which forward. `parked`: the forwards that each request will
    need whose prompt a peer prefills. `heard`: those of requests that resume, at which its loop has not looked yet."""
    participant: tuple
    at: At = At.LOOP
    queue: bool = False
    woken: bool = False
    work: int = 0
    paused: bool = False
    says: tuple = ()
    tells: tuple = ()
    known: tuple = (0, -1, 0, False, False, 0, 0, CallRegisters())
    here: bool = False
    latch: bool = False
    wakeups: int = 0  # the other ranks that it has yet to wake (shared memory)
    coming: tuple = ()
    made: tuple = ()
    parked: tuple = ()
    heard: int = 0


class Spare(NamedTuple):
    """How often each optional event may still happen."""
    requests: int = 0
    aborts: int = 0
    pauses: int = 0
    losses: int = 0
    doubles: int = 0
    crashes: int = 0
    calls: int = 0  # for all ranks
    lone_calls: int = 0  # for one
    stops: int = 0
    closes: int = 0
    parks: int = 0  # requests whose prompts a peer prefills
    postpones: int = 0  # of a call that all receive; unlimited, this could go on for ever


class State(NamedTuple):
    """Everything. `last`: the last forward that was begun with work."""
    ranks: tuple[Rank, ...]
    spare: Spare
    last: int = 0
    fault: bool = False


class Setting(NamedTuple):
    """What is explored. `tokens`: the forwards that a request may need. `hint`: what a rank passes for the remaining
    ones."""
    ranks: int
    spare: Spare
    tokens: tuple[int, ...] = (1, 2)
    lookahead: Lookahead = Lookahead(1, 1)
    hint: Callable[[int], int | None] = lambda work: work
    leaves: bool = False
    joined: bool = True  # from the beginning; otherwise any rank may join late
    names: tuple[int, ...] = (1,)  # of calls; those of one name come in order
    lone_names: tuple[int, ...] = (1,)  # of those for one rank; rank 0 may postpone these whenever they block others
    expire: bool = False  # whether calls may be given up
    collective: bool = True  # whether a call waits until all make it


def less(spare: Spare, what: str) -> Spare:
    """One time less."""
    return spare._replace(**{what: getattr(spare, what) - 1})


class LoopModel:
    """The engine loop, as interface.py has it, and the barrier. The backends are below."""
    name_first = False  # whether rank 0 is not like the others

    def __init__(self, setting: Setting):
        self.setting = setting
        self.calls = setting.spare.calls + setting.spare.lone_calls > 0
        self.name_first = self.calls
        self.horizon = setting.lookahead.lead + setting.lookahead.stride - 1

    def first(self) -> State:
        """Nobody has joined."""
        ranks = [Rank(astuple(Participant(call_state=CallState(leads=self.calls and rank == 0))))
                 for rank in range(self.setting.ranks)]
        return self.sorted(State(tuple(map(self.join, ranks)), self.setting.spare))

    def join(self, rank: Rank) -> Rank:
        """What a rank does first."""
        return rank

    def after(self, state: State) -> Iterator[tuple[str, State]]:
        """See Model."""
        seen = set()
        for index, rank in enumerate(state.ranks):
            alike = (rank, index == 0) if self.name_first else rank
            if alike in seen:  # an equal rank does the same
                continue
            seen.add(alike)
            if rank.at in (At.DEAD, At.STOPPED, At.CLOSED):
                continue
            for what, after in self.of(state, index, rank):
                yield f"{index} {what}", self.sorted(after)

    def sorted(self, state: State) -> State:
        """The representative of all equal states."""
        ranks = state.ranks
        if self.name_first:
            return state._replace(ranks=(ranks[0], *sorted(ranks[1:])))
        return state._replace(ranks=tuple(sorted(ranks)))

    def of(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        """What may happen at one rank."""
        if rank.at is not At.FAILED and rank.at is not At.ENDED:
            yield from self.from_outside(state, index, rank)
            yield from self.loop(state, index, rank)
        if state.spare.crashes:
            yield "crashes", self.crash(state, index, rank)
        if state.spare.closes and rank.at not in (At.FAILED, At.ENDED):
            yield "is shut down", self.crash(state, index, rank, At.CLOSED, "closes")
        if state.spare.stops and rank.at is not At.ENDED:
            stopped = rank._replace(at=At.STOPPED, made=self.made(rank))
            yield "stops", put(state, index, stopped, spare=less(state.spare, "stops"))

    def from_outside(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        """Requests come and go."""
        spare = state.spare
        left = Participant(*rank.participant).left
        if spare.requests and not left:
            for tokens in self.setting.tokens:
                after = rank._replace(work=rank.work + tokens, queue=True)
                yield f"gets a request of {tokens}", put(state, index, after, spare=less(spare, "requests"))
        yield from self.from_peers(state, index, rank)
        if spare.aborts and rank.work:  # or ends early
            yield "aborts", put(state, index, rank._replace(work=0, queue=True), spare=less(spare, "aborts"))
        if spare.pauses and not rank.paused and not left:
            yield "pauses", put(state, index, rank._replace(paused=True, queue=True), spare=less(spare, "pauses"))
        if rank.paused:
            yield "resumes", put(state, index, rank._replace(paused=False, queue=True))
        for name in self.setting.lone_names if spare.lone_calls else ():
            yield f"is to be called {name}", put(state, index, rank._replace(coming=(*rank.coming, name)),
                                                 spare=less(spare, "lone_calls"))
        for name in self.setting.names if spare.calls and not index else ():
            ranks = tuple(other._replace(coming=(*other.coming, name)) for other in state.ranks)
            yield f"all are to be called {name}", State(ranks, less(spare, "calls"), state.last, state.fault)
        if rank.at in (At.LOOP, At.CHECK, At.GET) and not rank.wakeups:
            yield from self.utility(state, index, rank)

    def from_peers(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        """A prompt goes to a peer, which lets this rank alone know when its KV is there: no front end and no other rank
        sees that. The client may leave before, or after it until the loop has looked."""
        spare = state.spare
        if spare.parks and not Participant(*rank.participant).left:
            for tokens in self.setting.tokens:
                yield f"parks one of {tokens}", put(state, index, self.parks(rank, tokens), spare=less(spare, "parks"))
        for tokens in set(rank.parked):
            after = rank._replace(parked=without(rank.parked, tokens))
            yield f"hears that one of {tokens} resumes", put(state, index, self.hears(after, tokens))
            if spare.aborts:
                yield f"aborts a parked one of {tokens}", put(state, index, after._replace(queue=True),
                                                              spare=less(spare, "aborts"))
        if spare.aborts and rank.heard:
            yield "aborts one that resumes", put(state, index, rank._replace(heard=0, queue=True),
                                                 spare=less(spare, "aborts"))

    def parks(self, rank: Rank, tokens: int) -> Rank:
        """The rank gets such a request."""
        return rank._replace(parked=tuple(sorted((*rank.parked, tokens))), queue=True)

    def hears(self, rank: Rank, tokens: int) -> Rank:
        """The KV of one is there. That goes through the queue of the loop."""
        return rank._replace(heard=rank.heard + tokens, queue=True)

    def looked(self, rank: Rank) -> Rank:
        """The loop has looked at what has come from peers: that is work from now on."""
        return rank._replace(work=rank.work + rank.heard, heard=0)

    def utility(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        """The loop finds a call in its queue, or one that has waited, or has blocked others, for too long."""
        at = At.LOOP if rank.at is At.LOOP else At.CHECK
        for name in set(rank.coming):
            participant = Participant(*rank.participant)
            participant.hold(name)
            yield f"is called {name}", put(state, index, rank._replace(
                coming=without(rank.coming, name), participant=astuple(participant), at=at))
        for name in set(Participant(*rank.participant).call_state.held) if self.setting.expire else ():
            participant = Participant(*rank.participant)
            if participant.give_up(name):
                given_up = rank._replace(participant=astuple(participant), at=at)
                yield f"gives {name} up", put(state, index, self.published(state, given_up))
        yield from self.postpone(state, index, rank._replace(at=at))

    def postpone(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        """Rank 0 has let a call block others for too long: because not all will ever be ready, or too early, before
        they have received it; the latter only as often as `Spare` allows."""
        participant = Participant(*rank.participant)
        if not participant.postpone():
            return
        rank = rank._replace(participant=astuple(participant))
        after = put(state, index, self.published(state, rank))
        if participant.call_state.registers.name in self.setting.lone_names and not self.setting.expire:
            yield "postpones a call that not all receive", after
        elif state.spare.postpones:
            yield "postpones a call", after._replace(spare=less(state.spare, "postpones"))

    def loop(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        """One move of the engine loop."""
        if rank.at in (At.LOOP, At.CHECK) and rank.heard:
            yield "looks", put(state, index, self.looked(rank))
            return
        match rank.at:
            case At.LOOP:
                if self.setting.leaves and not Participant(*rank.participant).left and not (rank.work or rank.parked):
                    yield "leaves", self.leave(state, index, rank)
                if Participant(*rank.participant).call_state.held:
                    yield from self.turn(state, index, rank)
                else:
                    yield from self.decide(state, index, rank)
            case At.CALL:
                if not self.setting.collective or all(len(other.made) >= len(rank.made) for other in state.ranks):
                    participant = Participant(*rank.participant)
                    participant.made()
                    back = rank._replace(participant=astuple(participant), at=At.LOOP)
                    yield "has made a call", put(state, index, back)
            case At.FORWARD | At.DUMMY:
                step = rank.participant[0]
                if all(other.participant[0] >= step for other in state.ranks):
                    yield "ends a forward", put(state, index, self.ended(rank))
            case At.CHECK:
                go_on = self.works(rank) or self.due(state, rank)
                yield "checks", put(state, index, rank._replace(at=At.LOOP if go_on else At.GET))
            case At.GET if rank.queue:
                yield "takes from its queue", put(state, index, rank._replace(queue=False, at=At.CHECK))

    def works(self, rank: Rank) -> bool:
        """Whether there is something to schedule."""
        return rank.work > 0 and not rank.paused and Participant(*rank.participant).may_step

    def due(self, state: State, rank: Rank) -> bool:
        """`GroupMember.due`."""
        return Participant(*rank.participant).due

    def ended(self, rank: Rank) -> Rank:
        """A forward has ended."""
        participant = Participant(*rank.participant)
        participant.end()
        work = rank.work - 1 if rank.at is At.FORWARD and rank.work else rank.work
        return rank._replace(participant=astuple(participant), work=work, at=At.LOOP)

    def begin(self, state: State, rank: Rank) -> tuple[Rank, StepDecision, int | None, bool, int]:
        """`before_step`: the rank, the decision, what it asks for, whether urgently, the last forward with work."""
        participant = Participant(*rank.participant)
        work = self.works(rank)
        decision, request = participant.begin(work, self.setting.hint(rank.work), self.setting.lookahead)
        at = {StepDecision.FORWARD: At.FORWARD, StepDecision.DUMMY: At.DUMMY, StepDecision.IDLE: At.CHECK,
              StepDecision.END: At.ENDED}[decision]
        last = max(state.last, participant.local) if decision is StepDecision.FORWARD and rank.work else state.last
        rank = rank._replace(participant=astuple(participant), at=at)
        return rank, decision, request.step if request else None, bool(request and request.urgent), last

    def decide(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        """A backend's `before_step`."""
        raise NotImplementedError

    def turn(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        """A backend's `next_call`, before a step."""
        raise NotImplementedError

    def advanced(self, state: State, rank: Rank) -> tuple[str, Rank] | None:
        """What the rank does about calls, if anything."""
        participant = Participant(*rank.participant)
        advanced = participant.advance()
        if advanced is None:
            return None
        action, name = advanced
        rank = rank._replace(participant=astuple(participant), at=At.LOOP)
        if action is CallAction.MAKE:
            rank = rank._replace(at=At.CALL, made=(*rank.made, (name, participant.local)))
        elif action is not CallAction.RESUME:
            rank = self.published(state, rank)
        return f"does {action.name} {name}", rank

    def published(self, state: State, rank: Rank) -> Rank:
        """A backend's `_publish_call`."""
        raise NotImplementedError

    def leave(self, state: State, index: int, rank: Rank) -> State:
        """A backend's `leave`."""
        raise NotImplementedError

    def crash(self, state: State, index: int, rank: Rank, at: At = At.DEAD, spare: str = "crashes") -> State:
        """The process is gone, with all that was on its way to it."""
        dead = Rank(rank.participant, at, known=rank.known, here=rank.here, made=self.made(rank))
        return put(state, index, dead, spare=less(state.spare, spare))

    def made(self, rank: Rank) -> tuple:
        """The calls in which the others need not wait for it."""
        return rank.made[:-1] if rank.at is At.CALL else rank.made

    def at_rest(self, rank: Rank) -> bool:
        """Whether a rank waits for nobody; a call that it alone holds it gives up by its own clock."""
        return rank.at is At.GET and not rank.work and not Participant(*rank.participant).call_state.promised

    def done(self, rank: Rank, step: int, released: int) -> bool:
        """Whether a rank has ended all forwards and calls."""
        return rank.participant[1] >= step and Participant(*rank.participant).done >= released

    def check(self, state: State) -> str | None:
        """See Model."""
        local = [rank.participant[0] for rank in state.ranks]
        if max(local) - min(local) > 1:
            return f"one rank is more than a forward ahead: {local}"
        if max(local) > state.last + self.horizon:
            return f"forward {max(local)} is beyond the horizon of {self.horizon} after {state.last}"
        if max(local) and not state.last:
            return f"a group that has only parked requests makes a forward: {local}"
        longest = max((rank.made for rank in state.ranks), key=len)
        if any(rank.made != longest[:len(rank.made)] for rank in state.ranks):
            return f"calls are not made alike: {[rank.made for rank in state.ranks]}"
        return None

    def check_end(self, state: State) -> str | None:
        """See Model."""
        living = [rank for rank in state.ranks if rank.at not in GONE]
        if len(living) < len(state.ranks):
            if not self.setting.spare.crashes + self.setting.spare.closes:
                return f"a rank has ended before all had left: {[rank.at.name for rank in state.ranks]}"
            if all(rank.at in (At.FAILED, At.ENDED) for rank in living):
                return None
            return f"a rank hangs, or goes on, after another's end: {[rank.at.name for rank in state.ranks]}"
        if any(rank.at is At.STOPPED for rank in living):
            if all(rank.at in (At.STOPPED, At.FAILED, At.ENDED) or self.at_rest(rank) for rank in living):
                return None
            return f"a rank hangs beside one that is stopped: {[rank.at.name for rank in state.ranks]}"
        if len({rank.participant[0] for rank in state.ranks}) > 1:
            return f"unequal numbers of forwards: {[rank.participant[0] for rank in state.ranks]}"
        rest = At.ENDED if all(Participant(*rank.participant).left for rank in state.ranks) else At.GET
        if any(rank.at is not rest for rank in state.ranks):
            return f"a rank hangs: {[rank.at.name for rank in state.ranks]}"
        if any(rank.work or rank.heard or rank.parked for rank in state.ranks):
            return "a request was not served"
        made = {len(rank.made) for rank in state.ranks}
        if len(made) > 1 or not self.setting.expire and made != {self.setting.spare.calls}:
            return f"a call was not made by all, or not at all: {[rank.made for rank in state.ranks]}"
        held = {name for rank in state.ranks if rank.at is not At.ENDED
                for name in Participant(*rank.participant).call_state.held}
        if held - (set() if self.setting.expire else set(self.setting.lone_names)):
            return "a call waits for ever"
        return None


class RpcModel(LoopModel):
    """Ranks and a coordinator in the first one's process, over a network that delays, reorders, loses and doubles."""
    drops = True  # messages that change nothing

    def __init__(self, setting: Setting):
        super().__init__(setting)
        self.name_first = self.calls or setting.spare.crashes + setting.spare.closes > 0
        self.lossy = setting.spare.losses > 0
        self._tidy: dict[Rank, Rank] = {}

    def sorted(self, state: State) -> State:
        tidy = self._tidy
        for rank in state.ranks:
            if rank not in tidy:  # as a rule only one has changed
                tidied = tidy[rank] = self.tidied(rank)
                tidy[tidied] = tidied
        return super().sorted(state._replace(ranks=tuple([tidy[rank] for rank in state.ranks])))

    def tidied(self, rank: Rank) -> Rank:
        """Without values that no rule uses, so that more states are equal. The numbers of ended forwards and calls are
        in a rank's reports only for the watch, and confirmations matter only if messages are lost. A message that
        changes nothing now never will, because all numbers only grow, so it is dropped."""
        (local, ended, agreed, confirmed, left, left_confirmed, over, call_state, confirmed_registers, confirmed_ready,
         calling) = rank.participant
        says = tuple((asked, known if self.lossy else -1, 0, *left_over, ready, 0, calls, answer)
                     for asked, known, _, *left_over, ready, _, calls, answer in rank.says)
        known = rank.known if self.lossy else (rank.known[0], -1, 0, rank.known[3], False, *rank.known[5:])
        if not self.lossy:
            confirmed, confirmed_registers, confirmed_ready = agreed, call_state.registers, call_state.ready
        if self.drops:
            says = tuple(said for said in says if said[-1] or any(map(gt, said[:-2], known)) or not rank.here
                         or known[-1].merged(said[-2]) != known[-1])
        tells = tuple(told for told in rank.tells if not self.drops or told == "fault" or told[-1] or told[0] > agreed
                      or told[0] > confirmed or told[1] > over or told[2] > left_confirmed or told[4] > confirmed_ready
                      or confirmed_registers.merged(told[3]) != confirmed_registers)
        participant = (local, ended, agreed, confirmed, left, left_confirmed, over, call_state, confirmed_registers,
                       confirmed_ready, calling)
        return rank._replace(participant=participant, known=known, says=says, tells=tells)

    def join(self, rank: Rank) -> Rank:
        if not self.setting.joined:
            return say(rank, answer=True)
        participant = astuple(replace(Participant(*rank.participant), confirmed=0))
        return rank._replace(here=True, known=(0, 0, 0, False, False, 0, 0, CallRegisters()), participant=participant)

    def turn(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        advanced = self.advanced(state, rank)
        if advanced is None:
            yield from self.decide(state, index, rank)
        else:
            yield advanced[0], put(state, index, advanced[1])

    def published(self, state: State, rank: Rank) -> Rank:
        return say(rank)

    def decide(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        rank, decision, asked, _, last = self.begin(state, rank)
        if asked is not None:
            rank = say(rank)
        yield decision.value, put(state, index, rank, last=last)

    def leave(self, state: State, index: int, rank: Rank) -> State:
        participant = Participant(*rank.participant)
        participant.leave()
        return put(state, index, say(rank._replace(participant=astuple(participant))))

    def of(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        yield from super().of(state, index, rank)
        spare = state.spare
        coordinator_lives = state.ranks[0].at not in GONE or not self.name_first
        if rank.woken:
            yield "is woken", put(state, index, self.wake_loop(rank))
        if rank.at is At.FAILED:
            return
        if coordinator_lives:
            for message in set(rank.says):
                rest = without(rank.says, message)
                yield "is heard", self.heard(put(state, index, rank._replace(says=rest)), index, message)
                if spare.doubles:
                    doubled = put(state, index, rank, spare=less(spare, "doubles"))
                    yield "is heard, twice", self.heard(doubled, index, message)
                if spare.losses:
                    yield "is lost", put(state, index, rank._replace(says=rest), spare=less(spare, "losses"))
        for message in set(rank.tells):
            rest = without(rank.tells, message)
            yield f"is told {message}", put(state, index, self.told(rank._replace(tells=rest), message))
            if spare.doubles:
                doubled = put(state, index, self.told(rank, message), spare=less(spare, "doubles"))
                yield f"is told {message}, twice", doubled
            if spare.losses:
                yield f"loses {message}", put(state, index, rank._replace(tells=rest), spare=less(spare, "losses"))
        yield from self.timers(state, index, rank, coordinator_lives)

    def timers(self, state: State, index: int, rank: Rank, coordinator_lives: bool) -> Iterator[tuple[str, State]]:
        """What is sent again after a beat if no equivalent message is in flight, and how deaths are found."""
        participant = Participant(*rank.participant)
        if not coordinator_lives:
            if rank.at is not At.ENDED:
                yield "notices that the coordinator is dead", put(state, index, fail(rank))
            return
        coordinator = coordinator_of(state)
        missed = any(self.misses(coordinator, other) for other in state.ranks)
        if missed and not state.fault and index == 0:
            ranks = tuple(one if one.at in GONE else tell(one, "fault") for one in state.ranks)
            yield "finds a rank gone", state._replace(ranks=ranks, fault=True)
        silent = self.lossy and not rank.says and not rank.tells
        if silent and participant.unconfirmed:
            yield "says it again", put(state, index, say(rank, answer=True))
        elif silent and index in coordinator_of(state).outdated_ranks():
            yield "is told again", put(state, index, tell(rank, (*self.news(state, rank), True)))

    def misses(self, coordinator: Coordinator, rank: Rank) -> bool:
        """Whether a rank is gone, and has not done its part before."""
        done = coordinator.over and self.done(rank, coordinator.step, coordinator.registers.released)
        return rank.at in GONE and not done

    def news(self, state: State, rank: Rank) -> tuple:
        """The coordinator's update for a rank."""
        coordinator = coordinator_of(state)
        return coordinator.step, coordinator.over, rank.known[3], coordinator.registers, rank.known[5]

    def heard(self, state: State, index: int, said: tuple) -> State:
        """The coordinator receives a report, sends every change to all ranks, and answers."""
        *known, answer = said
        coordinator = coordinator_of(state)
        before = (coordinator.step, coordinator.over, coordinator.registers)
        coordinator.receive(index, self.as_heard(RankState(*known)))
        news = (coordinator.step, coordinator.over, coordinator.registers)
        ranks = tuple(rank._replace(known=astuple(known), here=here)
                      for rank, known, here in zip(state.ranks, coordinator.states, coordinator.joined, strict=True))
        outdated_ranks = coordinator.outdated_ranks()
        state = state._replace(ranks=ranks)
        out = []
        for other, rank in enumerate(ranks):
            tells = before != news and other in outdated_ranks and self.tells(other, index) or answer and other == index
            tells = tells and rank.at not in GONE
            out.append(tell(rank, (*news[:2], rank.known[3], news[2], rank.known[5], False)) if tells else rank)
        return state._replace(ranks=tuple(out))

    def tells(self, to: int, because_of: int) -> bool:
        """Whether the coordinator sends a rank what another (or the same) has requested."""
        return True

    def as_heard(self, known: RankState) -> RankState:
        """What the coordinator makes of a report."""
        return known

    def told(self, rank: Rank, message: tuple | str) -> Rank:
        """A rank receives an update."""
        if message == "fault":
            return rank if rank.at is At.ENDED else fail(rank)
        *news, answer = message
        participant = Participant(*rank.participant)
        due = participant.update(*news)
        rank = rank._replace(participant=astuple(participant), woken=rank.woken or due)
        return say(rank) if answer else rank

    def wake_loop(self, rank: Rank) -> Rank:
        """The watching thread puts a wakeup into the queue."""
        return rank._replace(woken=False, queue=rank.queue or rank.at is not At.ENDED)


class ShmModel(LoopModel):
    """Ranks that share a page. `known` are the words in a rank's slot, `wakeups` says how many others it has yet to
    wake, and `woken` that it has been woken itself, so that the watching thread will look."""

    def decide(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        yield "reads", put(state, index, self.refreshed(state, rank)._replace(at=At.WAKING, wakeups=-1))

    def loop(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        if rank.at is At.TURN and not rank.wakeups:
            advanced = self.advanced(state, rank)
            if advanced is None:
                yield from self.decide(state, index, rank)
            else:
                yield advanced[0], put(state, index, advanced[1])
            return
        if rank.at is At.WAKING:  # between the read and the write others may write
            rank, decision, asked, urgent, last = self.begin(state, rank)
            rank = rank._replace(wakeups=0)
            if asked is not None:
                wakeups = len(state.ranks) - 1 if self.wakes(urgent) else 0
                rank = rank._replace(known=(asked, *rank.known[1:]), wakeups=wakeups)
            yield decision.value, put(state, index, rank, last=last)
            return
        if rank.wakeups:
            return  # wakes them first: see `of`
        yield from super().loop(state, index, rank)

    def turn(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        yield "reads about calls", put(state, index, self.refreshed(state, rank)._replace(at=At.TURN))

    def published(self, state: State, rank: Rank) -> Rank:
        calls = Participant(*rank.participant).call_state
        return rank._replace(known=(*rank.known[:2], calls.ready, calls.registers), wakeups=len(state.ranks) - 1)

    def wakes(self, urgent: bool) -> bool:
        """Whether a step request wakes the others."""
        return urgent

    def of(self, state: State, index: int, rank: Rank) -> Iterator[tuple[str, State]]:
        yield from super().of(state, index, rank)
        if rank.wakeups > 0:  # in fact one after another, but each may be seen arbitrarily late
            ranks = [other._replace(woken=True) if number != index and other.at not in GONE else other
                     for number, other in enumerate(state.ranks)]
            ranks[index] = rank._replace(wakeups=0)
            yield "has woken all", state._replace(ranks=tuple(ranks))
        if rank.at in (At.FAILED, At.ENDED):
            return
        if rank.woken:
            refreshed = self.refreshed(state, rank)
            due = Participant(*refreshed.participant).due
            yield "is woken by another", put(state, index, refreshed._replace(woken=False, queue=rank.queue or due))
        if any(other.at in GONE and not self.may_be_gone(state, other) for other in state.ranks):
            yield "finds a rank gone", put(state, index, fail(rank))
        if any(other.at is At.STOPPED for other in state.ranks) and self.watched(state):
            yield "finds a rank silent", put(state, index, fail(rank))

    def watched(self, state: State) -> bool:
        """Whether the watching threads beat: there are steps to run, or a call waits or is under way."""
        calls, step = state.ranks[0].known[3], max(rank.known[0] for rank in state.ranks)
        return calls.open or not all(self.done(rank, step, calls.released) for rank in state.ranks)

    def crash(self, state: State, index: int, rank: Rank, at: At = At.DEAD, spare: str = "crashes") -> State:
        after = super().crash(state, index, rank, at, spare)  # a death wakes the watching threads
        return after._replace(ranks=tuple(one if one.at in GONE else one._replace(woken=True) for one in after.ranks))

    def may_be_gone(self, state: State, rank: Rank) -> bool:
        """Whether the group does not need it any more: all have left, it has ended all forwards and calls, and it must
        decide about none."""
        calls, step = state.ranks[0].known[3], max(other.known[0] for other in state.ranks)
        if Participant(*rank.participant).call_state.leads and calls.open:
            return False
        return all(other.known[1] for other in state.ranks) and self.done(rank, step, calls.released)

    def refreshed(self, state: State, rank: Rank) -> Rank:
        """What a rank reads."""
        participant = Participant(*rank.participant)
        calls = replace(state.ranks[0].known[3], ready=min(other.known[2] for other in state.ranks[1:]))
        participant.update(max(other.known[0] for other in state.ranks), all(other.known[1] for other in state.ranks),
                         registers=calls if self.calls else None)
        return rank._replace(participant=astuple(participant))

    def due(self, state: State, rank: Rank) -> bool:
        return Participant(*self.refreshed(state, rank).participant).due

    def join(self, rank: Rank) -> Rank:
        return rank._replace(known=(0, False, 0, CallRegisters()))

    def leave(self, state: State, index: int, rank: Rank) -> State:
        participant = Participant(*rank.participant)
        participant.leave()
        known = (participant.agreed, True, *rank.known[2:])
        return put(state, index, rank._replace(participant=astuple(participant), known=known,
                                               wakeups=len(state.ranks) - 1))


def astuple(struct: Participant | RankState) -> tuple:
    """A struct's fields."""
    return tuple(getattr(struct, name) for name in struct.__struct_fields__)


def put(state: State, index: int, rank: Rank, **changes: object) -> State:
    """The state with another rank in that place."""
    ranks = state.ranks
    return state._replace(ranks=(*ranks[:index], rank, *ranks[index + 1:]), **changes)


def say(rank: Rank, answer: bool = False) -> Rank:
    """The rank sends a report, and may ask for an answer."""
    said = (*astuple(Participant(*rank.participant).state()), answer)
    return rank._replace(says=tuple(sorted((*rank.says, said))))


def tell(rank: Rank, message: tuple | str) -> Rank:
    """A message to the rank is in flight."""
    return rank._replace(tells=tuple(sorted((*rank.tells, message), key=repr)))


def without(messages: tuple, one: object) -> tuple:
    """One less of it."""
    at = messages.index(one)
    return messages[:at] + messages[at + 1:]


def fail(rank: Rank) -> Rank:
    """The group has failed for this rank: it raises, or its process is ended."""
    return Rank(rank.participant, At.FAILED, known=rank.known, here=rank.here)


def coordinator_of(state: State) -> Coordinator:
    """The coordinator. Its step is the highest that any rank has reported."""
    known = [RankState(*rank.known) for rank in state.ranks]
    calls = CallRegisters(ready=min(one.ready for one in known[1:]))
    for one in known:
        calls = calls.merged(one.registers)
    return Coordinator(known, [rank.here for rank in state.ranks], max(one.asked for one in known), calls)
