/* SPDX-License-Identifier: Apache-2.0
 *
 * The fence that is the receiver's own act (docs/protocol.md, Generations) once more, written from that page and apart
 * from vllm_pd.protocol and from the explorer, for spin:
 *
 *     spin -a generations.pml && cc -O2 -DSAFETY -o pan pan.c && ./pan -m100000
 *
 * A decode engine D of two ranks, each of which makes its new agent and destroys its old ones at its own moment, and
 * PEERS prefill engines, the last of which is on D's machine with -DHERE. ATTEMPTS attempts, the first of P 0, the
 * second of the last P, the third of P 0 again, share BLOCKS blocks: one that comes free is taken by the next attempt.
 *
 * The network forgets nothing: what was ever sent may arrive at any later moment, again and again, or never. Nothing
 * that is heard twice matters, so what would change nothing is no step. SILENCES=n: so often everything between D and a
 * P is lost from some moment on, for ever. Leases, deadlines and the 5 s of a Cancel end at any moment. A write ends
 * at any moment, or never, and lands as long as it has not ended and there is a way: from another machine through the
 * agent of the rank that it goes to, on this one without D's help.
 *
 * Budgets: SEEMS (an engine elsewhere that lives can't be reached), OTHERS (D is in doubt about something that is not
 * here), DRIFTS (a write fails, and may land later), ERRORS (one fails for certain), DEATHS, RANK_ERRORS (a rank can't
 * make its agent, or can't destroy it). No more than MOST renewals may come of them. Not in it: reads of holds and of
 * prefixes, pauses, P's generations but for what they do to its transport, and messages that only renew a lease.
 *
 * Each rule has a name; spin says which does not hold. Broken on purpose, one at a time: see BROKEN in
 * test_generations_spin.py.
 */
#ifndef PEERS
#define PEERS 1
#endif
#ifndef ATTEMPTS
#define ATTEMPTS 2
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#ifndef SEEMS
#define SEEMS 0
#endif
#ifndef OTHERS
#define OTHERS 0
#endif
#ifndef DRIFTS
#define DRIFTS 0
#endif
#ifndef ERRORS
#define ERRORS 0
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef SILENCES
#define SILENCES 0
#endif
#ifndef RANK_ERRORS
#define RANK_ERRORS 0
#endif
#ifndef MOST
#define MOST 3
#endif

#define RANKS 2
#define ALL 3          /* a bit for each rank */
#define NOBODY 255
#ifdef HERE
#define is_here(p) (p == PEERS - 1)
#else
#define is_here(p) false
#endif
#define peer(a) (a == 1 -> PEERS - 1 : 0)

/* The rules. Not part of the state: they are true until spin has found what it looks for. */
hidden byte no_write_lands_in_a_block_of_another = true;
hidden byte no_grant_in_a_dying_generation = true;
hidden byte no_healthy_write_is_cut_off_within_a_lease = true;
hidden byte no_transfer_begins_where_one_has_failed = true;
hidden byte no_job_begins_that_d_is_known_to_have_ended = true;
hidden byte renewals_are_bounded = true;
hidden byte all_fences_come_down = true;
hidden byte parted_ends = true;
hidden byte old_agents_end = true;
hidden byte what_may_land_is_forgotten_in_the_end = true;

/* D: attempts and blocks. */
#define UNBORN 0
#define QUEUED 1
#define GRANTED 2
#define ENDED 3        /* its fence is up */
#define OVER 4         /* its block is another's, or nobody's */
byte state[ATTEMPTS];
byte block[ATTEMPTS];
byte owner[BLOCKS];
byte generation[ATTEMPTS]; /* in which it was granted */
byte arrived[ATTEMPTS];    /* notices, by rank */
bool unproven[ATTEMPTS];   /* P has given it up, and something may land */
bool is_late[ATTEMPTS];    /* a Cancel is unanswered for 5 s, or P seems dead */
#define fenced(a) (state[a] == GRANTED || state[a] == ENDED)
#ifdef DOUBTS_END_WITH_ANY
bool is_forgotten[ATTEMPTS];
#define is_seen(a) is_forgotten[a]
#else
#define is_seen(a) false
#endif
#define in_doubt(a) (!is_seen(a) && state[a] == ENDED && !is_here(peer(a)) && (unproven[a] || is_late[a]))

/* D: generations. */
#define STEADY 0
#define RENEWING 1
#define CLOSING 2
#define RETIRING 3
byte phase, current, oldest;
byte first[RANKS], last[RANKS];  /* the agents that a rank has */
byte answered, refused;          /* of what the ranks were asked last, by rank */
bool lease_over;                 /* since the generation began to close */
bool doubt;                      /* about something that is not here */
bool parted[PEERS];              /* for D */
#define has_agent(r, g) (first[r] <= g && g <= last[r])

/* P. A claim is named by the generation of D that it is made in: P makes a second one only in a newer generation. */
#define IDLE 0
#define CLAIMING 1
#define RUNNING 2
#define STOPPING 3
#define UNPROVEN 4
#define GONE 5         /* no record of it */
byte job[ATTEMPTS];
byte claim[ATTEMPTS];
byte posted[ATTEMPTS], open[ATTEMPTS]; /* its writes, by rank: begun; not ended, as far as matters to memory */
byte target[ATTEMPTS];                 /* the generation that they go to */
bool has_failed[ATTEMPTS];             /* a write of it: no other begins */
byte heard[PEERS];                     /* the latest HelloReply; see hello_now */
byte broken[PEERS];                    /* by generation of D: a transfer has failed, and P's transport is the same */
byte apart[PEERS];                     /* what P knows of that */
bool dead[PEERS], silent[PEERS];

/* What was sent. HelloReply n says that D's generation is the half of n, rounded up, and its oldest one the half,
 * rounded down. */
byte claims[ATTEMPTS], denials[ATTEMPTS]; /* by generation */
bool grants[ATTEMPTS], cancels[ATTEMPTS];
bool stoppeds[ATTEMPTS], faileds[ATTEMPTS], failed_parted[ATTEMPTS], gave_ups[ATTEMPTS];
byte notices[ATTEMPTS];                   /* by rank */
#define hello_now (current + oldest)
#define generation_heard(p) ((heard[p] + 1) / 2)
#define oldest_heard(p) (heard[p] / 2)

byte seems, others, drifts, errors, deaths, silences, rank_errors; /* spent */

#define can_land(a, r) ((open[a] & (1 << r)) && (is_here(peer(a)) || has_agent(r, target[a])))
#define lands_wrong(a) ((can_land(a, 0) || can_land(a, 1)) && owner[block[a]] != a)
#define open_in(a) (fenced(a) && generation[a] < current)
#define is_waited_for(a) (open_in(a) && !in_doubt(a) && !unproven[a])
#define would_be_cut(a, r) (open_in(a) && state[a] == GRANTED && job[a] == RUNNING && (open[a] & (1 << r)))

/* For fewer states: what nobody will ever look at. */
inline tidy(a) {
    if
    :: state[a] == OVER && job[a] == GONE && !open[a] ->
        generation[a] = 0; grants[a] = false; cancels[a] = false; block[a] = 0
    :: else
    fi
}

/* Its block may be another's from now on. Nothing that comes for it has an effect at D any more. */
inline release(a) {
    state[a] = OVER;
    owner[block[a]] = NOBODY;
    arrived[a] = 0; unproven[a] = false; is_late[a] = false; claims[a] = 0;
    notices[a] = 0; stoppeds[a] = false; faileds[a] = false; failed_parted[a] = false; gave_ups[a] = false;
    tidy(a)
}

inline end_granted(a) {
    state[a] = ENDED;
    cancels[a] = true
}

inline forget(a) { /* P has no record any more; it answers a Cancel */
    job[a] = GONE;
    has_failed[a] = false; posted[a] = 0; denials[a] = 0; claim[a] = 0;
    target[a] = (open[a] -> target[a] : 0);
    tidy(a)
}

#define hears(p) (!silent[p] && !dead[p])
#define free_block (owner[0] == NOBODY || owner[BLOCKS - 1] == NOBODY)
#define stale(a) (claims[a] & ~denials[a] & ((1 << current) - 1)) /* claims of older generations */

#define lives_apart(p) (apart[p] & (1 << generation_heard(p)))
#define has_been_ended(a) (!is_here(peer(a)) && claim[a] < oldest_heard(peer(a)))
#define has_grant(a) (hears(peer(a)) && job[a] == CLAIMING && grants[a] && generation[a] == claim[a])
#if defined(ONE_PARTED_FOR_ALL)
#define may_begin(a) (!lives_apart(peer(a)) && !has_been_ended(a))
#elif defined(BEGINS_WHAT_HAS_ENDED)
#define may_begin(a) (!(apart[peer(a)] & (1 << claim[a])) && !lives_apart(peer(a)))
#else
#define may_begin(a) (!(apart[peer(a)] & (1 << claim[a])) && !lives_apart(peer(a)) && !has_been_ended(a))
#endif
#define writes(a) (job[a] == RUNNING || job[a] == STOPPING)
#define may_post(a, r) (!dead[peer(a)] && job[a] == RUNNING && !has_failed[a] && !(posted[a] & (1 << r)))
#define may_end(a, r) (!dead[peer(a)] && writes(a) && (open[a] & (1 << r)) && has_agent(r, target[a]))
#define way_is_gone(a, r) ((open[a] & (1 << r)) && !has_agent(r, target[a]))

inline make_claim(a) {
    job[a] = CLAIMING;
    claim[a] = generation_heard(peer(a));
    claims[a] = (state[a] == OVER -> 0 : claims[a] | (1 << claim[a]))
}

/* A post to an agent that is gone, or where one has failed, fails for certain. */
inline post(a, r) {
    if
    :: has_agent(r, target[a]) && !(broken[peer(a)] & (1 << target[a])) ->
        posted[a] = posted[a] | (1 << r); open[a] = open[a] | (1 << r)
    :: else -> has_failed[a] = true
    fi
}

/* A write has failed, and what of the job is open may land. */
inline give_up(a) {
    broken[peer(a)] = broken[peer(a)] | (1 << target[a]);
    apart[peer(a)] = apart[peer(a)] | (1 << target[a]);
    if
    :: !is_here(peer(a)) && target[a] < oldest_heard(peer(a)) -> open[a] = 0; forget(a)
    :: else ->
        job[a] = UNPROVEN; posted[a] = 0; has_failed[a] = false;
        gave_ups[a] = state[a] != OVER
    fi
}

inline say_failed(a) {
    faileds[a] = state[a] != OVER;
    failed_parted[a] = faileds[a] && lives_apart(peer(a))
}

inline notice(a, r) {
    arrived[a] = arrived[a] | (1 << r);
    if
    :: arrived[a] == ALL -> release(a) /* it runs, and ends */
    :: else
    fi
}

inline hear(p, n) {
    heard[p] = n;
    for (a : 0 .. ATTEMPTS - 1) {
        if
#ifdef THE_NEW_IS_THE_END
        :: peer(a) == p && job[a] == UNPROVEN && !is_here(p) && target[a] < generation_heard(p) -> forget(a)
#else
        :: peer(a) == p && job[a] == UNPROVEN && !is_here(p) && target[a] < oldest_heard(p) -> open[a] = 0; forget(a)
#endif
        :: else
        fi
    }
    a = 0
}

#define CUT_CHECK(a) no_healthy_write_is_cut_off_within_a_lease = lease_over || !would_be_cut(a, r); \
        assert(no_healthy_write_is_cut_off_within_a_lease);

#if PEERS == 1
#define any_parted parted[0]
#else
#define any_parted (parted[0] || parted[1])
#endif
#if ATTEMPTS == 1
#define ANY(what) what(0)
#elif ATTEMPTS == 2
#define ANY(what) (what(0) || what(1))
#else
#define ANY(what) (what(0) || what(1) || what(2))
#endif
#if ATTEMPTS == 1
#define CUT_CHECKS CUT_CHECK(0)
#elif ATTEMPTS == 2
#define CUT_CHECKS CUT_CHECK(0) CUT_CHECK(1)
#else
#define CUT_CHECKS CUT_CHECK(0) CUT_CHECK(1) CUT_CHECK(2)
#endif
#define fenced_by_p(a) (peer(a) == p && fenced(a))
#define fenced_by_any ANY(fenced_by_p)
#define any_in_doubt ANY(in_doubt)
#define any_waited_for ANY(is_waited_for)
#define any_lands_wrong ANY(lands_wrong)

/* D's part of an attempt. */
proctype Attempt(byte a) {
end_attempt:
    do
    :: d_step { state[a] == UNBORN && free_block ->
        block[a] = (owner[0] == NOBODY -> 0 : BLOCKS - 1);
        owner[block[a]] = a;
        state[a] = QUEUED }
    :: d_step { state[a] == QUEUED -> release(a) } /* its deadline, or the client is gone */
    :: d_step { state[a] == GRANTED -> end_granted(a) } /* the same, or its lease */
    :: d_step { state[a] == ENDED && !is_here(peer(a)) && !unproven[a] && !is_late[a] -> is_late[a] = true }
    /* Claims: of the present generation only. */
    :: d_step { hears(peer(a)) && state[a] == QUEUED && !parted[peer(a)] && (claims[a] & (1 << current)) ->
        state[a] = GRANTED; generation[a] = current; grants[a] = true }
#ifdef GRANTS_DYING
    :: d_step { hears(peer(a)) && state[a] == QUEUED && !parted[peer(a)] && stale(a) ->
        state[a] = GRANTED; generation[a] = current - 1; grants[a] = true;
        no_grant_in_a_dying_generation = false;
        assert(no_grant_in_a_dying_generation) }
#else
    :: d_step { hears(peer(a)) && state[a] == QUEUED && stale(a) -> denials[a] = denials[a] | stale(a) }
#endif
    /* What brings the fence down. A notice comes through the agent that the write went to. */
    :: d_step { fenced(a) && (notices[a] & ~arrived[a] & 1) && has_agent(0, generation[a]) -> notice(a, 0) }
    :: d_step { fenced(a) && (notices[a] & ~arrived[a] & 2) && has_agent(1, generation[a]) -> notice(a, 1) }
    :: d_step { hears(peer(a)) && fenced(a) && stoppeds[a] -> release(a) }
    :: d_step { hears(peer(a)) && fenced(a) && faileds[a] ->
        parted[peer(a)] = parted[peer(a)] || failed_parted[a];
        release(a) }
    /* And what does not. */
    :: d_step { hears(peer(a)) && fenced(a) && gave_ups[a] && !unproven[a] ->
        unproven[a] = true; is_late[a] = false;
        parted[peer(a)] = parted[peer(a)] || generation[a] == current;
        state[a] = ENDED }
    od
}

/* P's part of it, and its writes. */
proctype Job(byte a) {
end_job:
    do
    :: d_step { !dead[peer(a)] && job[a] == IDLE && state[a] != UNBORN -> make_claim(a) }
    :: d_step { !dead[peer(a)] && (job[a] == IDLE || job[a] == CLAIMING) && state[a] != UNBORN -> forget(a) }
    :: d_step { hears(peer(a)) && job[a] == CLAIMING && (denials[a] & (1 << claim[a])) &&
                generation_heard(peer(a)) > claim[a] -> make_claim(a) }
    :: d_step { has_grant(a) && !may_begin(a) ->
        say_failed(a);
        forget(a) }
    :: d_step { has_grant(a) && may_begin(a) ->
        job[a] = RUNNING;
#ifdef WRITES_IN_THE_NEWEST
        target[a] = generation_heard(peer(a));
#else
        target[a] = claim[a];
#endif
        no_transfer_begins_where_one_has_failed = !(broken[peer(a)] & (1 << target[a]));
        assert(no_transfer_begins_where_one_has_failed);
        no_job_begins_that_d_is_known_to_have_ended = !has_been_ended(a);
        assert(no_job_begins_that_d_is_known_to_have_ended) }
    /* Its own lease, or D is lost. */
    :: d_step { !dead[peer(a)] && job[a] == RUNNING -> job[a] = STOPPING }
    /* Writes. */
    :: d_step { may_post(a, 0) -> post(a, 0) }
    :: d_step { may_post(a, 1) -> post(a, 1) }
    :: d_step { may_end(a, 0) -> open[a] = open[a] & ~1; notices[a] = (state[a] == OVER -> 0 : notices[a] | 1) }
    :: d_step { may_end(a, 1) -> open[a] = open[a] & ~2; notices[a] = (state[a] == OVER -> 0 : notices[a] | 2) }
    :: d_step { !dead[peer(a)] && job[a] == RUNNING && posted[a] == ALL && !open[a] && !has_failed[a] ->
        forget(a) } /* sent */
    :: d_step { !dead[peer(a)] && job[a] == RUNNING && has_failed[a] && !open[a] -> say_failed(a); forget(a) }
    :: d_step { !dead[peer(a)] && job[a] == STOPPING && !open[a] -> stoppeds[a] = state[a] != OVER; forget(a) }
    :: d_step { !dead[peer(a)] && writes(a) && !has_failed[a] && errors < ERRORS && (open[a] & 1) ->
        errors++; open[a] = open[a] & ~1; has_failed[a] = true }
    :: d_step { !dead[peer(a)] && writes(a) && !has_failed[a] && errors < ERRORS && (open[a] & 2) ->
        errors++; open[a] = open[a] & ~2; has_failed[a] = true }
    :: d_step { !dead[peer(a)] && writes(a) && drifts < DRIFTS && open[a] -> drifts++; give_up(a) }
    :: d_step { !dead[peer(a)] && writes(a) && (way_is_gone(a, 0) || way_is_gone(a, 1)) -> give_up(a) }
    /* A Cancel. */
    :: d_step { hears(peer(a)) && cancels[a] && job[a] == RUNNING -> job[a] = STOPPING }
    :: d_step { hears(peer(a)) && cancels[a] && job[a] == CLAIMING && claim[a] == generation[a] ->
        stoppeds[a] = state[a] != OVER; forget(a) }
    :: d_step { hears(peer(a)) && cancels[a] &&
                (job[a] == IDLE || job[a] == GONE || job[a] == CLAIMING && claim[a] != generation[a]) &&
                fenced(a) && !stoppeds[a] -> stoppeds[a] = true }
#ifdef STOPS_WHAT_MAY_LAND
    :: d_step { hears(peer(a)) && cancels[a] && job[a] == UNPROVEN && fenced(a) && !stoppeds[a] -> stoppeds[a] = true }
#else
    :: d_step { hears(peer(a)) && cancels[a] && job[a] == UNPROVEN && fenced(a) && !gave_ups[a] -> gave_ups[a] = true }
#endif
    od
}

/* What concerns a pair. */
proctype Pair(byte p) {
    byte a;
end_pair:
    do
    :: d_step { !dead[p] && !silent[p] && heard[p] < hello_now -> hear(p, heard[p] + 1) }
    /* P's own new generation: its transport begins anew. */
    :: d_step { !dead[p] && lives_apart(p) -> apart[p] = 0; broken[p] = 0 }
#ifdef PARTED_IS_LIFTED
    :: d_step { apart[p] -> apart[p] = 0 } /* after a while */
#endif
    :: d_step { !is_here(p) && seems < SEEMS && fenced_by_any ->
        seems++;
#ifdef SEEMING_IS_DEATH
        for (a : 0 .. ATTEMPTS - 1) {
            if
            :: peer(a) == p && fenced(a) -> release(a)
            :: else
            fi
        }
#else
        for (a : 0 .. ATTEMPTS - 1) {
            if
            :: peer(a) == p && fenced(a) -> is_late[a] = !unproven[a]; end_granted(a)
            :: else
            fi
        }
#endif
        a = 0 }
    :: d_step { deaths < DEATHS && !dead[p] -> deaths++; dead[p] = true; apart[p] = 0; broken[p] = 0; heard[p] = 0;
        for (a : 0 .. ATTEMPTS - 1) {
            if
            :: peer(a) == p -> open[a] = 0; forget(a)
            :: else
            fi
        }
        a = 0 }
    /* On one machine that is a fact. */
    :: d_step { is_here(p) && dead[p] && (parted[p] || fenced_by_any) ->
        parted[p] = false;
        for (a : 0 .. ATTEMPTS - 1) {
            if
            :: peer(a) == p && fenced(a) -> release(a)
            :: else
            fi
        }
        a = 0 }
    :: d_step { silences < SILENCES && !silent[p] -> silences++; silent[p] = true }
    od
}

/* D's generations. */
proctype Generations() {
    byte a;
end_generations:
    do
    :: d_step { others < OTHERS && !doubt -> others++; doubt = true }
    :: d_step { phase == STEADY && (doubt || any_parted || any_in_doubt) ->
        renewals_are_bounded = current < MOST;
        assert(renewals_are_bounded);
        doubt = false;
        phase = RENEWING; answered = 0; refused = 0 }
    :: d_step { phase == RENEWING && answered == ALL && refused -> phase = STEADY; answered = 0; refused = 0 }
    :: d_step { phase == RENEWING && answered == ALL && !refused ->
        phase = CLOSING; answered = 0; lease_over = false;
        current++;
#ifndef PARTED_STAYS
        for (a : 0 .. PEERS - 1) {
            parted[a] = false
        }
#endif
#ifdef RENEWAL_IS_THE_END
        for (a : 0 .. ATTEMPTS - 1) {
            if
            :: open_in(a) && !is_here(peer(a)) -> release(a)
            :: else
            fi
        }
#endif
        a = 0 }
    :: d_step { phase == CLOSING && !lease_over -> lease_over = true }
#ifdef NO_CLOSING
    :: d_step { phase == CLOSING ->
#else
    :: d_step { phase == CLOSING && (lease_over || !any_waited_for) ->
#endif
        for (a : 0 .. ATTEMPTS - 1) {
            if
            :: lease_over && open_in(a) && state[a] == GRANTED -> end_granted(a)
            :: else
            fi
        }
        a = 0;
        phase = RETIRING }
#ifdef ONE_RANK_IS_ALL
    :: d_step { phase == RETIRING && answered ->
#else
    :: d_step { phase == RETIRING && answered == ALL ->
#endif
        if
#ifdef ERROR_IS_AN_END
        :: false -> skip
#else
        :: refused -> phase = CLOSING; lease_over = true
#endif
        :: else ->
            phase = STEADY; lease_over = false;
            oldest = current;
            for (a : 0 .. ATTEMPTS - 1) {
                if
#ifdef HERE_TOO
                :: fenced(a) && generation[a] < oldest -> release(a)
#elif defined(ALL_DOUBTS_AT_ONCE)
                :: fenced(a) && (generation[a] < oldest || in_doubt(a)) && !is_here(peer(a)) -> release(a)
#else
                :: fenced(a) && generation[a] < oldest && !is_here(peer(a)) -> release(a)
#endif
#ifdef DOUBTS_END_WITH_ANY
                :: in_doubt(a) && generation[a] == oldest -> is_forgotten[a] = true
#endif
                :: else
                fi
            }
        fi;
        answered = 0; refused = 0; a = 0 }
    od
}

/* What D's ranks are asked. */
proctype Rank(byte r) {
end_rank:
    do
    :: d_step { phase == RENEWING && !(answered & (1 << r)) -> last[r] = current + 1; answered = answered | (1 << r) }
    :: d_step { phase == RETIRING && !(answered & (1 << r)) ->
        CUT_CHECKS
        first[r] = current; answered = answered | (1 << r) }
    :: d_step { rank_errors < RANK_ERRORS && (phase == RENEWING || phase == RETIRING) && !(answered & (1 << r)) ->
#ifndef NEVER_CAN
        rank_errors++;
#endif
        answered = answered | (1 << r); refused = refused | (1 << r) }
#if defined(ONE_RANK_IS_ALL) || defined(ERROR_IS_AN_END)
    :: d_step { first[r] < oldest -> first[r] = oldest } /* too late */
#endif
    od
}

/* Memory: what lands finds the block its own. */
proctype Memory() {
end_memory:
    atomic { any_lands_wrong ->
        no_write_lands_in_a_block_of_another = false;
        assert(no_write_lands_in_a_block_of_another) }
}

/* Where nothing can happen any more. */
proctype Monitor() {
    byte a, p;
end_monitor:
    atomic { timeout ->
    for (a : 0 .. ATTEMPTS - 1) {
        p = peer(a);
        /* Of a P on D's machine one stays up that only its word or its death brings down. */
        all_fences_come_down = all_fences_come_down &&
            (!fenced(a) || is_here(p) && !dead[p] && (silent[p] || job[a] == UNPROVEN));
        what_may_land_is_forgotten_in_the_end = what_may_land_is_forgotten_in_the_end &&
            (job[a] != UNPROVEN || silent[p] || is_here(p))
    }
    for (p : 0 .. PEERS - 1) {
        parted_ends = parted_ends && !parted[p] && !lives_apart(p)
    }
    old_agents_end = phase == STEADY && oldest == current && first[0] == current && first[1] == current;
    assert(all_fences_come_down);
    assert(parted_ends);
    assert(old_agents_end);
    assert(what_may_land_is_forgotten_in_the_end) }
end_rest:
    false
}

init {
    byte a;
    atomic {
        for (a : 0 .. BLOCKS - 1) {
            owner[a] = NOBODY
        }
        for (a : 0 .. ATTEMPTS - 1) {
            run Attempt(a);
            run Job(a)
        }
        for (a : 0 .. PEERS - 1) {
            run Pair(a)
        }
        run Generations();
        run Rank(0);
        run Rank(1);
        run Memory();
        run Monitor();
        a = 0
    }
}
