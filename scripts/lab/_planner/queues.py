# SPDX-License-Identifier: Apache-2.0
"""The queues of `_planner.fleet`, compiled: everything that happens until the next look."""
import numba
import numpy

NEVER = numpy.inf
PREFILL, DECODE, OFF = 0, 1, 2
ENGINE = numpy.dtype([("role", "i8"), ("goal", "i8"), ("ready", "f8"), ("job", "i8"), ("job_end", "f8"), ("made", "f8"),
                      ("at", "f8"), ("end", "f8"), ("count", "i8")])
TOTALS = numpy.dtype([("next", "i8"), ("taken", "i8"), ("head", "i8"), ("tail", "i8"), ("arrived", "f8"),
                      ("prompt_tokens", "f8"), ("answers", "f8"), ("answer_tokens", "f8"),
                      ("first", "f8"), ("late", "f8"), ("arrived_tokens", "f8"), ("slow", "f8")])


@numba.njit(cache=False)
def advance(engines, seats, requests, fifo, totals, good, until, speed, base, slope, ttft, itl):
    """All events before `until`. `engines`: ENGINE; `seats`: of each engine (request, made at its end); `requests`:
    (time, prompt tokens, answer tokens, first token at); `fifo`: prefilled requests in their order."""
    t = totals[0]
    while True:
        now, kind, who = until, -1, -1
        if t.next < len(requests) and requests[t.next, 0] < now:
            now, kind = requests[t.next, 0], 0
        for i in range(len(engines)):
            e = engines[i]
            if e.job_end < now:
                now, kind, who = e.job_end, 1, i
            if e.end < now:
                now, kind, who = e.end, 2, i
            if e.role != e.goal and e.job < 0 and e.count == 0 and e.ready < now:
                now, kind, who = e.ready, 3, i
        if kind < 0:
            return
        if kind == 0:
            t.arrived_tokens += requests[t.next, 1]
            t.next += 1
            t.arrived += 1
        elif kind == 1:
            e = engines[who]
            fifo[t.tail] = e.job
            t.tail += 1
            t.prompt_tokens += requests[e.job, 1]
            e.job, e.job_end = -1, NEVER
            e.ready = max(e.ready, now)
        elif kind == 2:
            e = engines[who]
            e.made += (now - e.at) / (base + slope * e.count)
            e.at = now
            least = 0
            for k in range(e.count):
                if seats[who, k, 1] < seats[who, least, 1]:
                    least = k
            one = int(seats[who, least, 0])
            e.count -= 1
            seats[who, least, 0], seats[who, least, 1] = seats[who, e.count, 0], seats[who, e.count, 1]
            t.answers += 1
            t.answer_tokens += requests[one, 2]
            slow = (now - requests[one, 3]) / requests[one, 2] > itl
            t.slow += slow
            good[one] = requests[one, 3] - requests[one, 0] <= ttft and not slow
            plan_end(engines, seats, who, base, slope)
            e.ready = max(e.ready, now)
        else:
            engines[who].role = engines[who].goal
        give(engines, seats, requests, fifo, totals, now, speed, base, slope, ttft)


@numba.njit(cache=False)
def plan_end(engines, seats, who, base, slope):
    """When the next of its requests ends."""
    e = engines[who]
    e.end = NEVER
    if e.count:
        least = seats[who, 0, 1]
        for k in range(1, e.count):
            least = min(least, seats[who, k, 1])
        e.end = e.at + max(0.0, least - e.made) * (base + slope * e.count)


@numba.njit(cache=False)
def give(engines, seats, requests, fifo, totals, now, speed, base, slope, ttft):
    """Prompts to free prefill engines, and prefilled requests to the decode engine with the fewest."""
    t = totals[0]
    for i in range(len(engines)):
        e = engines[i]
        if e.role == 0 and e.goal == 0 and e.job < 0 and t.taken < t.next:
            e.job = t.taken
            e.job_end = now + requests[t.taken, 1] / speed
            t.taken += 1
    while t.head < t.tail:
        best = -1
        for i in range(len(engines)):
            e = engines[i]
            if (e.role == 1 and e.goal == 1 and e.count < seats.shape[1]
                    and (best < 0 or e.count < engines[best].count)):
                best = i
        if best < 0:
            return
        one = fifo[t.head]
        t.head += 1
        e = engines[best]
        if e.count:
            e.made += (now - e.at) / (base + slope * e.count)
        e.at = now
        requests[one, 3] = now
        seats[best, e.count, 0], seats[best, e.count, 1] = one, e.made + requests[one, 2]
        e.count += 1
        plan_end(engines, seats, best, base, slope)
        t.first += 1
        t.late += now - requests[one, 0] > ttft
