/* SPDX-License-Identifier: Apache-2.0
 *
 * The step sync once more, written apart from vllm_pd/dp and from the explorer, for spin:
 *
 *     spin -a model.pml && cc -O2 -DSAFETY -o pan pan.c && ./pan -m100000
 *
 * -DN=ranks -DREQUESTS=n (-DSHORT: of one forward only) -DABORTS=n choose the size, -DLEAD=n how far ahead to ask, -DSHM the shared page instead of the coordinator,
 * and with it -DCALLS=n so many calls that all ranks make, each of which waits for all ranks or, with -DNO_WAIT, for none;
 * -DPOSTPONES=n how often rank 0 may postpone one, and -DSTOPS=1 has one rank stop for ever anywhere. -DSHM -DLEAVES lets ranks leave,
 * any or all of them, whenever they have no work; whoever has left gets no request. -DPARKS=n so many requests whose prompts a peer
 * prefills: it may resume them, in any rank's next turn, or never; they may end early while they are parked, and when they resume.
 * -DONE_SIDED, -DSENDER_EXCLUDED, -DEDGE_WAKE, -DLATCHED, -DCACHED_STOP, (with SHM) -DNO_BELL and -DLATE_STORE, and (with CALLS)
 * -DREADY_ASKS, -DNOT_FINAL, -DREAD_LAST, -DNO_CALL_WAKEUP, (with POSTPONES) -DSTAYS_READY and -DFORGETS, and (with STOPS) -DNO_DONE
 * break it, as do (with LEAVES) -DLEAVES_AT_ONCE, -DNO_LEAVE_WAKEUP and -DENDS_EARLY,
 * and (with PARKS) -DPARKED_STEPS, -DNO_RESUME_WAKEUP and -DABORT_UNASKS; spin must find that.
 *
 * Spin looks at every order of events. What it proves: there is no state in which nothing can happen, but that in which all
 * ranks wait at their queue without work, having begun equally many forwards, none beyond the horizon, and made all calls, each
 * after the same forward. With PARKS: no forward begins before any request had work, and all that resumed have ended.
 * With LEAVES: or all have left, and ended after equally many forwards. With STOPS: but that in which each other rank waits for nobody, or
 * the watching threads look, as there are steps to run, or a call waits for somebody or is not done everywhere: then they find out who is silent.
 */
#ifndef N
#define N 2
#endif
#ifndef REQUESTS
#define REQUESTS 2
#endif
#ifndef ABORTS
#define ABORTS 1
#endif
#ifndef LEAD
#define LEAD 1
#endif
#ifdef SENDER_EXCLUDED
#define HORIZON 1 /* the coordinator's, here */
#else
#define HORIZON LEAD
#endif

byte work[N];     /* forwards that the rank's requests still need */
byte begun[N];    /* forwards decided on */
byte inside[N];   /* forwards really begun: what the others' collectives wait for */
byte agreed[N];   /* as far as the rank knows */
bool asleep[N];   /* in queue.get() */
bool latch[N];    /* of the broken ones */
byte last;        /* the last forward begun with work */
bool inbox[N];    /* something is in the input queue; how much does not matter */

#ifdef PARKS
byte parked[N];   /* requests that wait for a peer */
byte heard[N];    /* forwards of those that resume, at which the rank's loop has not looked yet */
bool had_work;    /* any rank, ever */
#ifdef PARKED_STEPS
#define has_work(i) (work[i] > 0 || parked[i] > 0)
#endif
#endif
#ifndef PARKED_STEPS
#define has_work(i) (work[i] > 0)
#endif

#ifdef SHM
byte asked[N];    /* the page */
bool wakeup[N];
#ifdef LEAVES
bool has_left[N];     /* the page, in one word with asked */
bool leaving[N];  /* is to leave */
bool over[N];     /* all have left, as far as the rank knows */
bool ended[N];
#ifdef LEAVES_AT_ONCE
#define ends(i) has_left[i]
#else
#define ends(i) over[i]
#endif
#endif
#ifdef CALLS
byte ready[N];    /* the page: ready for which call, but rank 0's, which it keeps to itself; the rest is rank 0's to write */
byte proposed, dropped, released, final;
byte all_ready, saw_proposed[N], saw_dropped[N], saw_released[N], saw_final[N]; /* what each has read, rank 0 of the first */
byte coming[N];   /* calls in the input queue */
byte held[N], made[N], made_after[CALLS + 1];
bool promised[N];
#define open(i) (saw_proposed[i] > saw_released[i] && saw_proposed[i] > saw_dropped[i])
#define released_to(i) (promised[i] && saw_released[i] == ready[i])
#ifdef NOT_FINAL
#define last_step(i) agreed[i]
#else
#define last_step(i) (released_to(i) -> saw_final[i] : agreed[i])
#endif
#ifdef READY_ASKS
#define may_step(i) true
#else
#define may_step(i) (!promised[i] || begun[i] < last_step(i))
#endif
#ifdef STAYS_READY
#define off(i) false
#else
#define off(i) (!released_to(i) && saw_dropped[i] >= ready[i])
#endif
#define acts(i) (held[i] > 0 && (promised[i] -> released_to(i) && begun[i] >= last_step(i) || off(i) : \
                  (i == 0 -> !open(0) || all_ready >= saw_proposed[0] : open(i) && saw_proposed[i] > ready[i])))
#ifdef POSTPONES
byte postpones;
#endif
#ifdef STOPS
byte ended[N], finished[N]; /* the page: forwards ended; nothing more to do with calls up to this one */
bool stopped[N], resting[N], gone;
#ifdef NO_DONE
#define call_pending(i) false
#else
#define call_pending(i) (finished[i] < released)
#endif
#define may_stop(i) if :: atomic { !gone -> gone = true; stopped[i] = true } goto stop :: true fi;
#else
#define may_stop(i)
#endif
#else
#define last_step(i) agreed[i]
#define may_step(i) true
#define may_stop(i)
#endif
#else
#define last_step(i) agreed[i]
#define may_step(i) true
#define may_stop(i)
byte step;        /* the coordinator's */
chan reports = [6] of { byte, byte };
chan updates[N] = [6] of { byte };
#endif

inline put(i) {
    inbox[i] = true
}

inline wake(i) {
#ifdef EDGE_WAKE
    if
    :: asleep[i] -> put(i)
    :: else
    fi
#else
    put(i)
#endif
}

#ifdef SHM
inline refresh(i, j) {
#ifdef LEAVES
    over[i] = true;
#endif
    for (j : 0 .. N - 1) {
        if
        :: asked[j] > agreed[i] -> agreed[i] = asked[j]
        :: else
        fi
#ifdef LEAVES
        over[i] = over[i] && has_left[j];
#endif
    }
    j = 0
}
#else
inline refresh(i, j) { skip }
#endif

#ifdef CALLS
inline see_ready(i, j) {
    d_step {
        if
        :: i == 0 ->
            all_ready = ready[1];
            for (j : 1 .. N - 1) {
                all_ready = (ready[j] < all_ready -> ready[j] : all_ready)
            }
            j = 0
        :: else
        fi;
        saw_dropped[i] = dropped
    }
}

inline see_leader(i) {
    d_step {
        saw_proposed[i] = proposed;
        saw_released[i] = released;
        saw_final[i] = final
    }
}

inline see(i, j) {
#ifdef READ_LAST
    see_leader(i);
    d_step { refresh(i, j) }
    see_ready(i, j)
#else
    see_ready(i, j);
    d_step { refresh(i, j) }
    see_leader(i)
#endif
}
#else
inline see(i, j) {
    d_step { refresh(i, j) }
}
#endif

proctype Rank(byte i) {
    byte j, target, enough;
    bool urgent, worked;
decide:
    skip;
#ifdef PARKS
    d_step {
        had_work = had_work || heard[i] > 0;
        work[i] = work[i] + heard[i];
        heard[i] = 0
    };
#endif
#ifdef LEAVES
    if
    :: atomic { leaving[i] && !has_left[i] && work[i] == 0 -> has_left[i] = true; asked[i] = agreed[i] }
#ifndef NO_LEAVE_WAKEUP
        for (j : 0 .. N - 1) {
            wakeup[j] = true
        }
        j = 0
#else
        skip
#endif
    :: else
    fi;
#endif
#ifdef CALLS
    may_stop(i)
    d_step { held[i] = held[i] + coming[i]; coming[i] = 0 }
    if
    :: held[i] == 0 -> goto begin
    :: else
    fi;
    see(i, j);
    if
    :: atomic { acts(i) && promised[i] && off(i) ->
        promised[i] = false
#ifdef FORGETS
        ; held[i]--
#endif
       }
        goto decide
    :: atomic { acts(i) && promised[i] && !off(i) ->
        promised[i] = false;
        held[i]--;
        made[i]++;
        if
        :: made_after[made[i]] == 0 -> made_after[made[i]] = begun[i] + 1
        :: else
        fi;
        assert(made_after[made[i]] == begun[i] + 1) }
        may_stop(i)
#ifdef NO_WAIT
        skip;
#elif N == 2
        (made[1 - i] >= made[i]);
#else
        (made[(i + 1) % 3] >= made[i] && made[(i + 2) % 3] >= made[i]);
#endif
        may_stop(i)
#ifdef STOPS
        finished[i] = ready[i];
#endif
        goto decide
#ifdef POSTPONES
    :: atomic { i == 0 && !promised[0] && open(0) && all_ready < saw_proposed[0] && postpones < POSTPONES ->
        postpones++; dropped = proposed; saw_dropped[0] = dropped }
#ifndef NO_CALL_WAKEUP
        for (j : 0 .. N - 1) {
            wakeup[j] = true
        }
        j = 0;
#endif
        goto decide
#endif
    :: atomic { acts(i) && !promised[i] ->
        if
        :: i == 0 && !open(0) -> proposed++; saw_proposed[0] = proposed
        :: i == 0 && open(0) ->
            final = agreed[0]; released = proposed; saw_final[0] = final; saw_released[0] = released;
            ready[0] = proposed; promised[0] = true
        :: else -> ready[i] = saw_proposed[i]; promised[i] = true
        fi }
#ifndef NO_CALL_WAKEUP
        for (j : 0 .. N - 1) {
            wakeup[j] = true
        }
        j = 0;
#endif
        goto decide
    :: else
    fi;
begin:
#endif
    see(i, j);
#ifdef LEAVES
    if
#ifdef ENDS_EARLY
    :: ends(i) ->
#else
    :: ends(i) && begun[i] == agreed[i] ->
#endif
        ended[i] = true; goto end_left
    :: else
    fi;
#endif
    atomic {
        target = 0;
        urgent = false;
        if
        :: has_work(i) && may_step(i) ->
            worked = true;
#ifdef SENDER_EXCLUDED
            enough = begun[i] + 1;
#else
            enough = begun[i] + 1 + (work[i] <= LEAD -> (work[i] > 0 -> work[i] - 1 : 0) : LEAD);
#endif
            urgent = begun[i] + 1 > agreed[i];
            if
#if defined(CALLS) && !defined(READY_ASKS)
            :: agreed[i] < enough && !promised[i] -> target = enough; agreed[i] = enough
#else
            :: agreed[i] < enough -> target = enough; agreed[i] = enough
#endif
            :: else
            fi;
            begun[i]++;
            last = (begun[i] > last -> begun[i] : last);
#if defined(LATCHED)
        :: work[i] == 0 && (begun[i] < agreed[i] || latch[i]) -> worked = false; begun[i]++
#elif defined(CACHED_STOP)
        :: work[i] == 0 && begun[i] < agreed[i] && !latch[i] -> worked = false; begun[i]++
#else
        :: !(has_work(i) && may_step(i)) && begun[i] < last_step(i) -> worked = false; begun[i]++
#endif
        :: else -> goto check
        fi;
#ifdef PARKS
        assert(had_work);
#endif
        assert(begun[i] <= last + HORIZON)
    }
#ifdef LATE_STORE
    inside[i] = begun[i];
#endif
#ifdef SHM
    if
    :: target > 0 -> asked[i] = target
    :: else
    fi;
#ifndef NO_WAKEUP
    if
    :: target > 0 && urgent ->
        for (j : 0 .. N - 1) {
            wakeup[j] = true
        }
        j = 0
    :: else
    fi;
#endif
#else
    if
#ifdef ONE_SIDED
    :: target > 0 -> reports!i, begun[i]
#else
    :: target > 0 -> reports!i, target
#endif
    :: else
    fi;
#endif
#ifndef LATE_STORE
    inside[i] = begun[i];
#endif
    may_stop(i)
    /* the forward: it ends when it has begun everywhere */
#if N == 2
    (inside[1 - i] >= begun[i]);
#elif N == 3
    (inside[(i + 1) % 3] >= begun[i] && inside[(i + 2) % 3] >= begun[i]);
#else
    (inside[(i + 1) % 4] >= begun[i] && inside[(i + 2) % 4] >= begun[i] && inside[(i + 3) % 4] >= begun[i]);
#endif
    d_step {
        if
        :: worked && work[i] > 0 -> work[i]--
        :: else
        fi;
#ifdef LATCHED
        latch[i] = begun[i] < agreed[i];
#endif
#ifdef CACHED_STOP
        latch[i] = begun[i] >= agreed[i];
#endif
        worked = false
#ifdef STOPS
        ; ended[i] = begun[i]
#endif
    };
    goto decide;
check:
    atomic {
        refresh(i, j);
#ifdef CALLS
        see_ready(i, j);
        see_leader(i);
#endif
        if
#ifndef EDGE_WAKE
#if defined(LATCHED)
        :: begun[i] < agreed[i] || latch[i] -> goto decide
#elif defined(CACHED_STOP)
        :: begun[i] < agreed[i] && !latch[i] -> goto decide
#else
        :: begun[i] < last_step(i) -> goto decide
#endif
#endif
#ifdef CALLS
        :: acts(i) || coming[i] > 0 -> goto decide
#endif
#ifdef LEAVES
        :: leaving[i] && !has_left[i] || ends(i) -> goto decide
#endif
#ifdef PARKS
        :: heard[i] > 0 -> goto decide
#endif
        :: has_work(i) && may_step(i) -> goto decide
        :: else
        fi
    }
#ifdef EDGE_WAKE
    asleep[i] = true; /* and only now does it hear */
#endif
#ifdef STOPS
    resting[i] = work[i] == 0 && !promised[i];
#endif
end_get:
#ifdef STOPS
    if
    :: atomic { !gone -> gone = true; stopped[i] = true } goto stop
    :: atomic { inbox[i] -> inbox[i] = false; resting[i] = false }
    fi;
#else
    atomic { inbox[i] -> inbox[i] = false }
#endif
    asleep[i] = false;
#ifdef EDGE_WAKE
    goto decide
#else
    goto check
#endif
#ifdef STOPS
stop:
    false
#endif
#ifdef LEAVES
end_left:
    false
#endif
}

#ifdef SHM
proctype Watch(byte i) {
end_watch:
    do
    :: atomic { wakeup[i] -> wakeup[i] = false }
       wake(i)
    od
}
#else
proctype Watch(byte i) {
    byte new_step;
end_watch:
    do
    :: updates[i]?new_step ->
        atomic {
            if
            :: agreed[i] < new_step -> agreed[i] = new_step
            :: else
            fi
#ifdef LATCHED
            ; latch[i] = true
#endif
        }
        atomic { wake(i) }
    :: atomic { len(updates[i]) > 1 -> updates[i]?new_step; updates[i]!new_step } /* overtaken by a later one */
    od
}

proctype Coordinator() {
    byte i, j, wanted;
end_serve:
    do
    :: atomic {
        reports?i, wanted ->
#ifdef SENDER_EXCLUDED
        wanted = wanted + HORIZON;
#endif
        if
        :: wanted > step ->
            step = wanted;
            for (j : 0 .. N - 1) {
                if
#ifdef SENDER_EXCLUDED
                :: j == i
#endif
                :: else -> updates[j]!step
                fi
            }
        :: else
        fi;
        i = 0; j = 0; wanted = 0
       }
    :: atomic { len(reports) > 1 -> reports?i, wanted; reports!i, wanted; i = 0; wanted = 0 }
    od
}
#endif

proctype Requests() {
    byte i, left = REQUESTS, aborts = ABORTS;
    do
    :: left > 0 ->
        select(i : 0 .. N - 1);
        atomic {
            if
#ifdef LEAVES
            :: has_left[i] -> skip
            :: !has_left[i] -> work[i] = work[i] + 1
#else
            :: work[i] = work[i] + 1
#endif
#ifndef SHORT
#ifdef LEAVES
            :: !has_left[i] -> work[i] = work[i] + 2
#else
            :: work[i] = work[i] + 2
#endif
#endif
            fi;
#ifdef PARKS
            had_work = true;
#endif
            put(i);
            left--
        }
    :: left < REQUESTS && aborts > 0 -> /* or ends early */
        select(i : 0 .. N - 1);
        atomic { work[i] = 0; put(i); aborts-- }
    :: left == 0 -> break
    od;
    i = 0
}

#ifdef PARKS
inline prefilled(j) {
    parked[j]--;
    if
    :: heard[j]++
    :: heard[j] = heard[j] + 2
    :: skip /* it has ended early */
    fi;
#ifndef NO_RESUME_WAKEUP
    put(j)
#endif
}

inline ends_early(j) { /* one that resumes, or has resumed */
    heard[j] = 0;
    work[j] = 0;
#ifdef ABORT_UNASKS
    agreed[j] = begun[j];
#endif
    put(j)
}

proctype Peer() {
    byte left = PARKS, aborts = PARKS, i;
end_peer:
    do
    :: left > 0 -> select(i : 0 .. N - 1); atomic { parked[i]++; put(i); left-- }
    :: atomic { parked[0] > 0 -> prefilled(0) }
    :: atomic { parked[1] > 0 -> prefilled(1) }
    :: atomic { aborts > 0 && heard[0] + work[0] > 0 -> aborts--; ends_early(0) }
    :: atomic { aborts > 0 && heard[1] + work[1] > 0 -> aborts--; ends_early(1) }
#if N > 2
    :: atomic { parked[2] > 0 -> prefilled(2) }
    :: atomic { aborts > 0 && heard[2] + work[2] > 0 -> aborts--; ends_early(2) }
#endif
    :: left == 0 -> break /* or is gone, and nobody resumes what is parked */
    od
}
#endif

#ifdef LEAVES
proctype Leaver(byte i) {
    if
    :: atomic { leaving[i] = true; put(i) }
    :: true
    fi
}
#endif

#ifdef CALLS
proctype Caller(byte i) { /* tells a rank of all calls, in its own time */
    byte left = CALLS;
    do
    :: left > 0 -> atomic { coming[i]++; put(i); left-- }
    :: else -> break
    od
}
#endif

proctype Monitor() {
    byte j;
end_monitor:
    timeout ->
#ifdef STOPS
        bool watched = proposed > released && proposed > dropped;
        for (j : 0 .. N - 1) {
            watched = watched || call_pending(j) || ended[j] < asked[0] || ended[j] < asked[1]
        }
        for (j : 0 .. N - 1) {
            assert(stopped[j] || resting[j] || watched)
        }
#else
#ifdef LEAVES
        bool all_left = true;
        for (j : 0 .. N - 1) {
            all_left = all_left && has_left[j]
        }
        for (j : 0 .. N - 1) {
            assert(ended[j] == all_left);
            assert(work[j] == 0 && (ended[j] || !inbox[j]));
            assert(begun[j] == begun[0] && begun[j] == agreed[j])
        }
#else
        for (j : 0 .. N - 1) {
            assert(work[j] == 0 && !inbox[j]);
#ifdef PARKS
            assert(heard[j] == 0);
#endif
#ifdef CALLS
            assert(made[j] == CALLS && coming[j] + held[j] == 0);
#endif
            assert(begun[j] == begun[0] && begun[j] == agreed[j])
        }
#endif
#endif
}

init {
    byte i;
    atomic {
        for (i : 0 .. N - 1) {
            run Rank(i);
            run Watch(i)
#ifdef CALLS
            ; run Caller(i)
#endif
#ifdef LEAVES
            ; run Leaver(i)
#endif
        }
#ifndef SHM
        run Coordinator();
#endif
        run Requests();
#ifdef PARKS
        run Peer();
#endif
        run Monitor();
        i = 0
    }
}
