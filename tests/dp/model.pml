/* SPDX-License-Identifier: Apache-2.0
 *
 * The step sync once more, written apart from vllm_pd/dp and from the explorer, for spin:
 *
 *     spin -a model.pml && cc -O2 -DSAFETY -o pan pan.c && ./pan -m100000
 *
 * -DN=ranks -DREQUESTS=n -DABORTS=n choose the size, -DLEAD=n how far ahead to ask, -DSHM the shared page instead of the coordinator.
 * -DONE_SIDED, -DSENDER_EXCLUDED, -DEDGE_WAKE, -DLATCHED, -DCACHED_STOP and (with SHM) -DNO_BELL and -DLATE_STORE
 * break it; spin must find that.
 *
 * Spin looks at every order of events. What it proves: there is no state in which nothing can happen, but that in which all
 * ranks wait at their queue without work, having begun equally many forwards, none beyond the horizon.
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

#ifdef SHM
byte asked[N];    /* the page */
bool bell[N];
#else
byte step;        /* the coordinator's */
chan say = [6] of { byte, byte };
chan told[N] = [6] of { byte };
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
    for (j : 0 .. N - 1) {
        if
        :: asked[j] > agreed[i] -> agreed[i] = asked[j]
        :: else
        fi
    }
    j = 0
}
#else
inline refresh(i, j) { skip }
#endif

proctype Rank(byte i) {
    byte j, target, enough;
    bool urgent, worked;
decide:
    skip;
    d_step { refresh(i, j) }
    atomic {
        target = 0;
        urgent = false;
        if
        :: work[i] > 0 ->
            worked = true;
#ifdef SENDER_EXCLUDED
            enough = begun[i] + 1;
#else
            enough = begun[i] + 1 + (work[i] - 1 < LEAD -> work[i] - 1 : LEAD);
#endif
            urgent = begun[i] + 1 > agreed[i];
            if
            :: agreed[i] < enough -> target = enough; agreed[i] = enough
            :: else
            fi;
            begun[i]++;
            last = (begun[i] > last -> begun[i] : last);
#if defined(LATCHED)
        :: work[i] == 0 && (begun[i] < agreed[i] || latch[i]) -> worked = false; begun[i]++
#elif defined(CACHED_STOP)
        :: work[i] == 0 && begun[i] < agreed[i] && !latch[i] -> worked = false; begun[i]++
#else
        :: work[i] == 0 && begun[i] < agreed[i] -> worked = false; begun[i]++
#endif
        :: else -> goto check
        fi;
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
#ifndef NO_BELL
    if
    :: target > 0 && urgent ->
        for (j : 0 .. N - 1) {
            bell[j] = true
        }
        j = 0
    :: else
    fi;
#endif
#else
    if
#ifdef ONE_SIDED
    :: target > 0 -> say!i, begun[i]
#else
    :: target > 0 -> say!i, target
#endif
    :: else
    fi;
#endif
#ifndef LATE_STORE
    inside[i] = begun[i];
#endif
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
    };
    goto decide;
check:
    atomic {
        refresh(i, j);
        if
#ifndef EDGE_WAKE
#if defined(LATCHED)
        :: begun[i] < agreed[i] || latch[i] -> goto decide
#elif defined(CACHED_STOP)
        :: begun[i] < agreed[i] && !latch[i] -> goto decide
#else
        :: begun[i] < agreed[i] -> goto decide
#endif
#endif
        :: work[i] > 0 -> goto decide
        :: else
        fi
    }
#ifdef EDGE_WAKE
    asleep[i] = true; /* and only now does it hear */
#endif
end_get:
    atomic { inbox[i] -> inbox[i] = false }
    asleep[i] = false;
#ifdef EDGE_WAKE
    goto decide
#else
    goto check
#endif
}

#ifdef SHM
proctype Watch(byte i) {
end_watch:
    do
    :: atomic { bell[i] -> bell[i] = false }
       wake(i)
    od
}
#else
proctype Watch(byte i) {
    byte step_told;
end_watch:
    do
    :: told[i]?step_told ->
        atomic {
            if
            :: agreed[i] < step_told -> agreed[i] = step_told
            :: else
            fi
#ifdef LATCHED
            ; latch[i] = true
#endif
        }
        atomic { wake(i) }
    :: atomic { len(told[i]) > 1 -> told[i]?step_told; told[i]!step_told } /* overtaken by a later one */
    od
}

proctype Coordinator() {
    byte i, j, wanted;
end_serve:
    do
    :: atomic {
        say?i, wanted ->
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
                :: else -> told[j]!step
                fi
            }
        :: else
        fi;
        i = 0; j = 0; wanted = 0
       }
    :: atomic { len(say) > 1 -> say?i, wanted; say!i, wanted; i = 0; wanted = 0 }
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
            :: work[i] = work[i] + 1
            :: work[i] = work[i] + 2
            fi;
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

proctype Monitor() {
    byte j;
end_monitor:
    timeout ->
        for (j : 0 .. N - 1) {
            assert(work[j] == 0 && !inbox[j]);
            assert(begun[j] == begun[0] && begun[j] == agreed[j])
        }
}

init {
    byte i;
    atomic {
        for (i : 0 .. N - 1) {
            run Rank(i);
            run Watch(i)
        }
#ifndef SHM
        run Coordinator();
#endif
        run Requests();
        run Monitor();
        i = 0
    }
}
