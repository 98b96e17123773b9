# SPDX-License-Identifier: Apache-2.0
"""One run: bursts of requests with a blow in each, and clients that ask again when their engine is gone."""
import heapq
import itertools
import math
import time
from collections.abc import Callable, Sequence

from _chaos.blows import Blow, Episode, GivenBlow, PlannedBlow, PlannedRequest
from _chaos.fleet import ChaosFleet, EngineSlot, SlotHealth
from _chaos.load import ChaosRequest, RequestEnd
from _chaos.report import GaugeSample, RunRecord, SeenFallback, handed_over
from vllm_pd.protocol.messages import Role

EPISODE_S = 12.0  # the next episode begins after this time, even if requests are open
REQUEST_S = 60.0  # a request must end within this time, whatever happens
FELT_S = 5.0  # so long after the end of a blow a fallback has other causes, like a lost message


class ChaosRun:
    """Carries out a plan on a fleet whose engines are up. `record` has all that was seen."""

    def __init__(self, fleet: ChaosFleet, requests: Sequence[ChaosRequest], say: Callable[[str], None],
                 slow: float = 1.0) -> None:
        """`slow`: requests and episodes have so many times as long."""
        self._request_s, self._episode_s = slow * REQUEST_S, slow * EPISODE_S
        self.record = RunRecord(requests={request.number: request for request in requests})
        self._fleet = fleet
        self._say = say
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._homeless: list[ChaosRequest] = []
        fleet.on_message = self._on_message

    def carry_out(self, episodes: Sequence[Episode], limit_s: float = math.inf) -> None:
        """Carries out all episodes, or those that begin within `limit_s`. Returns when every request has ended, or its
        time is over, and all engines are up. Requests that were not asked are not in the record then."""
        before = self._take_counters()
        self.record.began_at = time.monotonic()
        for index, episode in enumerate(episodes):
            if time.monotonic() > self.record.began_at + limit_s:
                self._say(f"{limit_s:g} s are over after {index} episodes")
                break
            self._carry_out_one(index, episode)
            if (index + 1) % max(1, len(episodes) // 20) == 0:
                self._say(self._progress_line(index + 1, len(episodes)))
        self._until(lambda: not self._timers and not self._open(), self._request_s)
        self.record.ended_at = time.monotonic()
        self.record.requests = {number: one for number, one in self.record.requests.items() if one.asked_at}
        self._until(lambda: all(slot.health is SlotHealth.UP for slot in self._fleet.slots.values()), self._request_s)
        self.record.handed_over = handed_over(before, self._take_counters())

    def _take_counters(self) -> dict[str, dict[str, float]]:
        """The counters of all engines so far: as they are now, or the last of one that is dead."""
        for slot in self._fleet.slots.values():
            if slot.health is SlotHealth.UP:
                self.record.counters[slot.life_name] = self._fleet.ask(slot, "counters")
        return dict(self.record.counters)

    # Episodes.

    def _carry_out_one(self, index: int, episode: Episode) -> None:
        now = time.monotonic()
        for ask in episode.asks:
            self._at(now + ask.offset_s, lambda ask=ask: self._ask(ask))
        if episode.blow is not None:
            self._at(now + episode.blow.offset_s, lambda: self._strike(episode.blow))
        numbers = [ask.number for ask in episode.asks]
        requests = self.record.requests
        self._until(lambda: not self._timers and not any(requests[number].is_open for number in numbers),
                    self._episode_s)

    def _until(self, done: Callable[[], bool], limit_s: float) -> None:
        """Receives messages and runs timers until `done`, at most `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not done() and time.monotonic() < deadline:
            due = self._timers[0][0] if self._timers else deadline
            self._fleet.pump(min(due, deadline, time.monotonic() + 0.25) - time.monotonic())
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()
            if self._homeless:
                homeless, self._homeless = self._homeless, []
                for request in homeless:
                    self._put(request, 0.0)

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (when, next(self._order), action))

    def _open(self) -> list[ChaosRequest]:
        return [request for request in self.record.requests.values() if request.is_open and request.asked_at]

    # Clients.

    def _ask(self, ask: PlannedRequest) -> None:
        request = self.record.requests[ask.number]
        request.asked_at = time.monotonic()
        self._put(request, ask.pick)
        if ask.abort_s is not None:
            self._at(request.asked_at + ask.abort_s, lambda: self._abort(request))

    def _put(self, request: ChaosRequest, pick: float) -> None:
        """Sends a request to a decode engine that accepts connections; a stopped one does."""
        places = [slot for slot in self._fleet.slots.values()
                  if slot.role is not Role.PREFILL and slot.health in (SlotHealth.UP, SlotHealth.STOPPED)]
        if not places:
            self._homeless.append(request)
            return
        slot = places[int(pick * len(places))]
        request.place, request.tries = slot.name, request.tries + 1
        if slot.health is SlotHealth.STOPPED:
            self._felt(request, self._last_blow(slot.name))
        self._fleet.tell(slot, "add", requests=[[request.name, request.token_ids, request.max_tokens]])

    def _abort(self, request: ChaosRequest) -> None:
        if not request.is_open:
            return
        request.end, request.ended_at = RequestEnd.ABORTED, time.monotonic()
        slot = self._fleet.slots.get(request.place)
        if slot is not None and slot.health in (SlotHealth.UP, SlotHealth.STOPPED):
            self._fleet.tell(slot, "abort", ids=[request.name])

    # Messages of engines.

    def _on_message(self, slot: EngineSlot, kind: str, value) -> None:
        if kind == "end":
            self._on_end(slot, *value)
        elif kind == "fallback":
            self._on_fallback(slot, *value)
        elif kind == "gauges":
            self.record.samples.append(GaugeSample(slot.name, value["time"], value))
        elif kind == "ready":
            self.record.starts.append(time.monotonic() - slot.began_at)
        elif kind == "counters":
            self.record.counters[slot.life_name] = value

    def _on_end(self, slot: EngineSlot, name: str, token_ids: list[int], times: list[float]) -> None:
        request = self._find(name)
        if request is None or request.name != name or not request.is_open:
            return  # its abort came too late
        request.end, request.ended_at = RequestEnd.ANSWERED, times[-1]
        request.right = token_ids == request.expected
        request.token_times = times

    def _on_fallback(self, slot: EngineSlot, name: str, reason: str, peer: str, when: float) -> None:
        request, cause = self._find(name), self._cause(peer, when)
        if request is None:
            return
        self.record.fallbacks.append(SeenFallback(request.number, reason, when, cause))
        request.fallbacks.append(reason)
        self._felt(request, cause)

    def _find(self, name: str) -> ChaosRequest | None:
        """The request with this id. None: it is of an earlier run, which has it as unfinished."""
        return self.record.requests.get(int(name.split(".")[0]))

    def _cause(self, peer: str, when: float) -> GivenBlow | None:
        """The last blow to that prefill engine, if it can still have been the cause."""
        for struck in reversed(self.record.struck):
            if peer and struck.incarnation == peer and struck.at <= when:
                return struck if when <= struck.at + struck.pause_s + FELT_S else None
        return None

    def _felt(self, request: ChaosRequest, struck: GivenBlow | None) -> None:
        if struck is not None:
            request.hit_by.add(struck.number)
            struck.felt_by.add(request.number)

    def _last_blow(self, place: str) -> GivenBlow | None:
        return next((struck for struck in reversed(self.record.struck) if struck.place == place), None)

    # Blows.

    def _strike(self, planned: PlannedBlow) -> None:
        fleet, blow = self._fleet, planned.blow
        if blow in (Blow.KILL_BROKER, Blow.STOP_BROKER):
            if not fleet.broker.is_up:  # the last blow to it is not over
                self._at(time.monotonic() + 0.5, lambda: self._strike(planned))
                return
            self._note(planned, "broker", "")
            self._strike_broker(planned)
            return
        role = Role.PREFILL if blow in (Blow.KILL_P, Blow.STOP_P) else Role.DECODE
        of_role = [slot for slot in fleet.slots.values() if slot.role is role]
        spared = of_role[:1] if planned.spare_first and blow.is_kill else []
        eligible = [slot for slot in of_role if slot.health is SlotHealth.UP and slot not in spared]
        if role is Role.DECODE and blow.is_kill and sum(s.health is SlotHealth.UP for s in of_role) < 2:
            eligible = []  # one decode engine must be left for the clients
        if not eligible:
            self._at(time.monotonic() + 0.5, lambda: self._strike(planned))
            return
        slot = eligible[int(planned.pick * len(eligible))]
        mine = [request for request in self._open() if request.place == slot.name]
        struck = self._note(planned, slot.name, slot.incarnation)
        if role is Role.DECODE:
            for request in mine:
                self._felt(request, struck)
        if not blow.is_kill:
            fleet.stop(slot)
            self._at(time.monotonic() + planned.pause_s, lambda: fleet.go_on(slot))
            return
        fleet.kill(slot)
        for request in mine:
            if role is Role.DECODE and request.is_open:
                self._put(request, planned.pick)
        fleet.start(slot)

    def _strike_broker(self, planned: PlannedBlow) -> None:
        broker = self._fleet.broker
        if planned.blow is Blow.KILL_BROKER:
            broker.kill()
            self._at(time.monotonic() + planned.pause_s, broker.start)
        else:
            broker.stop()
            self._at(time.monotonic() + planned.pause_s, broker.go_on)

    def _note(self, planned: PlannedBlow, place: str, incarnation: str) -> GivenBlow:
        struck = GivenBlow(len(self.record.struck), planned.blow, place, incarnation, time.monotonic(), planned.pause_s)
        self.record.struck.append(struck)
        return struck

    def _progress_line(self, index: int, count: int) -> str:
        requests = [r for r in self.record.requests.values() if r.asked_at]
        return (f"episode {index}/{count}: {len(requests)} requests, {len(self._open())} open, "
                f"{sum(request.wrong for request in requests)} wrong, {len(self.record.struck)} blows, "
                f"{len(self.record.fallbacks)} fallbacks, {time.monotonic() - self.record.began_at:.0f} s")
