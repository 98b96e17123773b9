/* SPDX-License-Identifier: Apache-2.0
 *
 * The fence the other way round (docs/protocol.md, Prefill first and Generations): a decode engine D reads a prompt
 * that a prefill engine P holds. Written from that page and apart from vllm_pd.protocol and from the explorer, for
 * spin, as ../spin/generations.pml:
 *
 *     spin -a reads.pml && cc -O2 -DSAFETY -o pan pan.c && ./pan -m100000
 *
 * A P of two ranks, READERS decode engines of two ranks, the last of which is on P's machine with -DHERE. Rank r of
 * D reads from rank r of P. ATTEMPTS attempts, the first of D 0, the second of the last D, each at a hold of its
 * own, or with -DSAME at one. Both engines have generations, and each rank makes its new agent and destroys its old
 * ones at its own moment.
 *
 * What makes a read safe:
 *   1. A claimed hold ends by D's HoldDone, by D's death as a fact, or, of a D elsewhere, once all ranks of P have
 *      destroyed the agents of the generation that it is claimed in, and of all older ones. By then no read of it
 *      can bring a byte any more, and one that goes on fails; one that had ended well before is right.
 *   2. So it must be read in the generation that it is claimed in, as P knows it: D begins only by a grant of the
 *      generation of P that it knows, and P lets no late claim of an older generation take a newer one back.
 *   3. D says HoldDone when it uses nothing that the read still brings: all of its ranks' reads have ended, or the
 *      attempt has failed. One attempt has the hold, and nobody else can end it.
 *   4. D uses what all of its ranks have read well, of an attempt that has not ended meanwhile.
 *   5. D's own blocks are another's only when all ranks' reads have ended for certain; or, of one that failed and
 *      may land, when D has destroyed the newest agents that it may have gone through. P's death is a fact on one
 *      machine alone.
 *
 * The network forgets nothing: what was ever sent may arrive at any later moment, again and again, or never. Nothing
 * that is heard twice matters, so what would change nothing is no step. Deadlines, D's lease, `hold_s` and the 5 s
 * of a read that was stopped end at any moment. A read brings its bytes at any moment, as long as both ranks have
 * its agents; on one machine without P's help. Memory that is free counts as written: what is read of it is wrong.
 *
 * A rank of D does what it is asked in that order, and the ends of its reads are known before that it has destroyed
 * their agent. In which order ranks do it, and when, is open.
 *
 * Budgets: LAPSES (a D that lives is not heard for a lease, or seems dead), RENEWS (such a D claims again), OTHERS
 * (P is in doubt about something that is not here), OWN_OTHERS (so is D), DRIFTS (a read fails, and may land later),
 * ERRORS (one fails for certain), HANGS (one does not end), LOSSES (a HoldDone is lost), SILENCES (everything that
 * the two say is lost from some moment on, for ever), DEATHS (of a D), P_DEATHS, RANK_ERRORS (a rank can't make its
 * agent, or can't destroy it). With -DIN_TIME a read that was stopped ends within the 5 s. No more than MOST
 * renewals of an engine may come of them. Not in it: prompts that are not those of the hold, P's end, which engines
 * are parted, and which ones have met.
 *
 * Each rule has a name; spin says which does not hold. Broken on purpose, one at a time: see BROKEN in
 * test_reads_spin.py.
 */
#ifndef READERS
#define READERS 1
#endif
#ifndef ATTEMPTS
#define ATTEMPTS 1
#endif
#ifndef LAPSES
#define LAPSES 0
#endif
#ifndef RENEWS
#define RENEWS 0
#endif
#ifndef OTHERS
#define OTHERS 0
#endif
#ifndef OWN_OTHERS
#define OWN_OTHERS 0
#endif
#ifndef DRIFTS
#define DRIFTS 0
#endif
#ifndef ERRORS
#define ERRORS 0
#endif
#ifndef HANGS
#define HANGS 0
#endif
#ifndef LOSSES
#define LOSSES 0
#endif
#ifndef SILENCES
#define SILENCES 0
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef P_DEATHS
#define P_DEATHS 0
#endif
#ifndef RANK_ERRORS
#define RANK_ERRORS 0
#endif
#ifndef MOST
#define MOST (3 * ATTEMPTS)
#endif

#define RANKS 2
#define ALL 3          /* a bit for each rank */
#ifdef HERE
#define is_here(d) (d == READERS - 1)
#else
#define is_here(d) false
#endif
#define engine(a) (a == 1 -> READERS - 1 : 0)
#ifdef SAME
#define HOLDS 1
#define wanted(a) 0
#else
#define HOLDS ATTEMPTS
#define wanted(a) a
#endif
#define one(a, r) (2 * a + r)  /* a rank's part of an attempt, or a rank of a D */

/* The rules. Not part of the state: they are true until spin has found what it looks for. */
hidden byte no_read_of_reused_blocks_is_used = true;
hidden byte no_read_is_used_in_part = true;
hidden byte no_read_lands_in_a_block_of_another = true;
hidden byte no_grant_in_a_dying_generation = true;
hidden byte no_healthy_read_is_cut_off_within_a_lease = true;
hidden byte renewals_are_bounded = true;
hidden byte each_hold_ends = true;
hidden byte each_read_ends = true;
hidden byte old_agents_end = true;

/* Generations: of P at ENGINES - 1, of D d at d. */
#define ENGINES (READERS + 1)
#define P READERS
#define STEADY 0
#define RENEWING 1
#define CLOSING 2
#define RETIRING 3
byte phase[ENGINES], current[ENGINES], oldest[ENGINES];
byte first[2 * ENGINES], last[2 * ENGINES];  /* the agents that a rank has */
byte answered[ENGINES], refused[ENGINES];    /* of what the ranks were asked last, by rank */
bool lease_over[ENGINES];                    /* since the generation began to close */
bool problem[ENGINES];                       /* the last renewal has failed */
bool doubt[ENGINES];                         /* about something that is not here */
bool dead[ENGINES];
#define has_agent(e, r, g) (first[one(e, r)] <= g && g <= last[one(e, r)])

/* P. A hold that nobody holds any more is FREE, and its blocks may be another's. */
#define HELD 0
#define CLAIMED 1
#define FREE 2
byte hold[HOLDS];
byte reader[HOLDS];          /* the attempt that has claimed it */
byte claimed_in[HOLDS];      /* generation of P */
bool closed[HOLDS];
bool lapsed[HOLDS];          /* its D, elsewhere, has not claimed it again for a lease, or seems dead */
bool in_time[HOLDS];         /* it has, whatever P makes of it */

/* D. */
#define UNBORN 0
#define CLAIMING 1
#define READING 2
#define STOPPING 3
#define GONE 4               /* no record of it, and its blocks are another's */
byte state[ATTEMPTS];
byte target[ATTEMPTS];       /* generation of P that it reads in */
byte own[ATTEMPTS];          /* generation of D: see 5 */
bool unproven[ATTEMPTS];
bool late[ATTEMPTS];         /* its ranks have not ended it for 5 s since it was stopped */
bool behind[ATTEMPTS];       /* its ranks are to make new agents first */
byte known[READERS];         /* generation of P, as D knows it */

/* Reads, by attempt and rank. */
#define NONE 0
#define OPEN 1
#define STUCK 2              /* open, and will not end by itself */
#define RIGHT 3
#define WRONG 4
#define FAILED 5             /* for certain */
#define DRIFTING 6           /* failed, and may land */
byte part[2 * ATTEMPTS];
byte through[2 * ATTEMPTS];  /* generation of D of its agent */
#define is_open(a, r) (part[one(a, r)] == OPEN || part[one(a, r)] == STUCK)
#define has_ended(a, r) (part[one(a, r)] >= RIGHT)

/* What was sent. A Hello says P's generation. */
byte claims[ATTEMPTS], grants[ATTEMPTS]; /* by generation of P */
bool denials[ATTEMPTS], dones[ATTEMPTS];
bool silent[READERS];

byte lapses, renews, others, own_others, drifts, errors, hangs, losses, silences, deaths, p_deaths, rank_errors;

#define talks(d) (!silent[d] && !dead[d] && !dead[P])
#define has_claimed(a) (hold[wanted(a)] == CLAIMED && reader[wanted(a)] == a)
#define has_way(a, r) (!dead[P] && (is_here(engine(a)) || has_agent(P, r, target[a])) && \
                       has_agent(engine(a), r, through[one(a, r)]))
#define can_land(a, r) (!dead[P] && (is_open(a, r) || part[one(a, r)] == DRIFTING) && \
                        has_agent(engine(a), r, through[one(a, r)]))
#define lands_wrong(a) (state[a] == GONE && (can_land(a, 0) || can_land(a, 1)))
#define newest(d) (current[d] + ((phase[d] == RENEWING || problem[d]) -> 1 : 0))
#define in_doubt(a) (state[a] == STOPPING && (unproven[a] || late[a]))
#define is_waited_for(a) (own[a] < current[engine(a)] && (state[a] == READING || \
                                                          state[a] == STOPPING && !unproven[a] && !late[a]))
#define is_doubted(h) (hold[h] == CLAIMED && !is_here(engine(reader[h])) && lapsed[h])
#define is_closing(h) (hold[h] == CLAIMED && claimed_in[h] < current[P])
#define is_kept_open(h) (is_closing(h) && !(is_doubted(h)))
/* P's rank destroys the agent of a read that goes well. */
#define would_be_cut(a, r) (state[a] == READING && is_open(a, r) && target[a] < current[P] && has_claimed(a) && \
                            in_time[wanted(a)] && !is_here(engine(a)))

#if ATTEMPTS == 1
#define ANY(what) what(0)
#else
#define ANY(what) (what(0) || what(1))
#endif
#if HOLDS == 1
#define ANY_HOLD(what) what(0)
#else
#define ANY_HOLD(what) (what(0) || what(1))
#endif
#define doubted_by_d(a) (engine(a) == d && in_doubt(a))
#define unproven_at_d(a) (engine(a) == d && unproven[a])
#define waited_for_by_d(a) (engine(a) == d && is_waited_for(a))
#define comes_first(a) (engine(a) == e && part[one(a, r)] == NONE && !behind[a] && \
                        (phase[e] == RENEWING || own[a] < current[e]) && (state[a] == READING || state[a] == STOPPING))
#define unheard_by_d(a) (engine(a) == d && is_read(a) && all_ended(a))
#define cut_by_r(a) would_be_cut(a, r)

/* Its blocks may be another's from now on. Nothing that comes about it has an effect at P any more. */
inline free(h) {
    hold[h] = FREE;
    reader[h] = 0; claimed_in[h] = 0; closed[h] = false; lapsed[h] = false; in_time[h] = false;
    for (i : 0 .. ATTEMPTS - 1) {
        if
        :: wanted(i) == h -> claims[i] = 0; dones[i] = false
        :: else
        fi
    }
    i = 0
}

/* P grants the claim of this generation of it. */
inline grant(a, g) {
    hold[wanted(a)] = CLAIMED;
    reader[wanted(a)] = a;
    grants[a] = (state[a] == CLAIMING -> grants[a] | (1 << (g)) : 0);
    claimed_in[wanted(a)] = g;
    lapsed[wanted(a)] = false;
    in_time[wanted(a)] = true
}

inline claim(a) {
    state[a] = CLAIMING;
    claims[a] = (hold[wanted(a)] == FREE -> 0 : claims[a] | (1 << known[engine(a)]))
}

inline begin(a) {
    state[a] = READING;
    target[a] = known[engine(a)];
    own[a] = current[engine(a)];
    behind[a] = phase[engine(a)] == RENEWING
}

inline say_done(a) {
    dones[a] = hold[wanted(a)] != FREE
}

/* D has no record of it any more. */
inline end(a) {
    state[a] = GONE;
    own[a] = 0; unproven[a] = false; late[a] = false; behind[a] = false; grants[a] = 0; denials[a] = false;
    for (i : 0 .. RANKS - 1) {
        if
        :: can_land(a, i)
        :: else -> part[one(a, i)] = NONE; through[one(a, i)] = 0
        fi
    }
    i = 0;
    target[a] = ((part[one(a, 0)] || part[one(a, 1)]) -> target[a] : 0)
}

inline stop(a) {
    state[a] = STOPPING;
    denials[a] = false;
#ifdef RELEASES_EARLY
    end(a)
#endif
}

/* All of its ranks' reads have ended for certain. */
inline ended(a) {
    if
    :: state[a] == READING && part[one(a, 0)] != FAILED && part[one(a, 1)] != FAILED ->
        no_read_of_reused_blocks_is_used = part[one(a, 0)] != WRONG && part[one(a, 1)] != WRONG;
        assert(no_read_of_reused_blocks_is_used);
        no_read_is_used_in_part = part[one(a, 0)] == RIGHT && part[one(a, 1)] == RIGHT;
        assert(no_read_is_used_in_part)
    :: else
    fi;
    say_done(a);
    end(a)
}

#ifdef TAKES_ONE_RANK_FOR_ALL
#define all_ended(a) (has_ended(a, 0) && has_ended(a, 1) || \
                      state[a] == READING && (part[one(a, 0)] == RIGHT || part[one(a, 1)] == RIGHT))
#else
#define all_ended(a) (has_ended(a, 0) && has_ended(a, 1))
#endif
#define any_drifts(a) (part[one(a, 0)] == DRIFTING || part[one(a, 1)] == DRIFTING)
#define is_read(a) (!dead[engine(a)] && !unproven[a] && (state[a] == READING || state[a] == STOPPING))

/* D's part of an attempt. */
proctype Attempt(byte a) {
    byte i;
end_attempt:
    do
    :: d_step { !dead[engine(a)] && state[a] == UNBORN -> claim(a) }
    :: d_step { state[a] == CLAIMING && hold[wanted(a)] != FREE && !(claims[a] & (1 << known[engine(a)])) -> claim(a) }
    /* An abort, its lease or its deadline; or P seems dead. */
    :: d_step { state[a] == CLAIMING -> say_done(a); end(a) }
    :: d_step { state[a] == READING -> stop(a) }
#ifdef SEEMING_ENDS_READS
    :: d_step { state[a] == STOPPING && !is_here(engine(a)) -> ended(a) }
#endif
#ifndef IN_TIME
    :: d_step { state[a] == STOPPING && !unproven[a] && !late[a] -> late[a] = true }
#endif
    /* P's answers. */
    :: d_step { talks(engine(a)) && state[a] == CLAIMING && (grants[a] & (1 << known[engine(a)])) ->
        begin(a) }
#ifdef READS_IN_THE_NEWEST
    :: d_step { talks(engine(a)) && state[a] == CLAIMING && grants[a] -> begin(a) }
#endif
    :: d_step { talks(engine(a)) && state[a] == CLAIMING && denials[a] -> end(a) } /* it may be another's */
    :: d_step { talks(engine(a)) && state[a] == READING && denials[a] -> stop(a) }
    /* The ends of its ranks' reads. */
#ifdef TRUSTS_ERRORS
    :: d_step { is_read(a) && all_ended(a) && any_drifts(a) -> say_done(a); end(a) }
#else
    :: d_step { is_read(a) && all_ended(a) && any_drifts(a) ->
        if
        :: state[a] == READING -> stop(a)
        :: else
        fi;
        unproven[a] = true; late[a] = false;
#ifndef KEEPS_ITS_GENERATION
#ifdef FORGETS_A_RANK_THAT_IS_AHEAD
        own[a] = current[engine(a)];
#else
        own[a] = newest(engine(a));
#endif
#endif
        say_done(a) }
#endif
    :: d_step { is_read(a) && all_ended(a) && !any_drifts(a) -> ended(a) }
    /* P's question, where D uses nothing of it any more. */
#ifndef NEVER_ASKS
    :: d_step { talks(engine(a)) && has_claimed(a) && !dones[a] && (state[a] == GONE || unproven[a]) -> say_done(a) }
#endif
    :: d_step { losses < LOSSES && dones[a] -> losses++; dones[a] = false }
    od
}

#define may_begin(a, r) (!behind[a] || phase[engine(a)] != RENEWING || (answered[engine(a)] & (1 << r)))

/* D's ranks. */
proctype Read(byte a, r) {
end_read:
    do
    :: d_step { (state[a] == READING || state[a] == STOPPING) && part[one(a, r)] == NONE &&
                (is_here(engine(a)) || has_agent(P, r, target[a])) && may_begin(a, r) ->
        part[one(a, r)] = OPEN; through[one(a, r)] = last[one(engine(a), r)] }
    :: d_step { part[one(a, r)] == NONE && (state[a] == STOPPING ||
                state[a] == READING && !is_here(engine(a)) && !has_agent(P, r, target[a])) -> part[one(a, r)] = FAILED }
    :: d_step { part[one(a, r)] == OPEN && has_way(a, r) ->
        part[one(a, r)] = (hold[wanted(a)] == FREE -> WRONG : RIGHT) }
    :: d_step { part[one(a, r)] == OPEN && !has_way(a, r) -> part[one(a, r)] = DRIFTING }
    :: d_step { part[one(a, r)] == OPEN && drifts < DRIFTS -> drifts++; part[one(a, r)] = DRIFTING }
    :: d_step { part[one(a, r)] == OPEN && errors < ERRORS -> errors++; part[one(a, r)] = FAILED }
    :: d_step { part[one(a, r)] == OPEN && hangs < HANGS -> hangs++; part[one(a, r)] = STUCK }
    od
}

/* P's part of an attempt. */
proctype Claim(byte a) {
    byte i;
end_claim:
    do
    :: d_step { talks(engine(a)) && hold[wanted(a)] == HELD && (claims[a] & (1 << current[P])) -> grant(a, current[P]) }
#ifdef GRANTS_DYING
    :: d_step { talks(engine(a)) && hold[wanted(a)] == HELD && current[P] && (claims[a] & (1 << (current[P] - 1))) ->
        grant(a, current[P] - 1);
        no_grant_in_a_dying_generation = false;
        assert(no_grant_in_a_dying_generation) }
#endif
    /* D has learned of newer ones, and reads nothing in the older ones. */
    :: d_step { talks(engine(a)) && has_claimed(a) && !closed[wanted(a)] &&
                (claims[a] & (2 << claimed_in[wanted(a)])) -> grant(a, claimed_in[wanted(a)] + 1) }
    :: d_step { talks(engine(a)) && has_claimed(a) && !closed[wanted(a)] &&
                claimed_in[wanted(a)] < current[P] && (claims[a] & (1 << current[P])) -> grant(a, current[P]) }
#ifdef CLAIMS_BACK
    :: d_step { talks(engine(a)) && has_claimed(a) && !closed[wanted(a)] && claimed_in[wanted(a)] &&
                (claims[a] & (1 << (claimed_in[wanted(a)] - 1))) -> grant(a, claimed_in[wanted(a)] - 1) }
#endif
    :: d_step { talks(engine(a)) && has_claimed(a) && !closed[wanted(a)] && lapsed[wanted(a)] && !in_time[wanted(a)] &&
                renews < RENEWS ->
        renews++; in_time[wanted(a)] = phase[P] != RETIRING || !is_closing(wanted(a)); /* else too late */
#ifndef IGNORES_RENEWALS
        lapsed[wanted(a)] = false
#endif
        }
#ifdef GRANTS_TWICE
    :: d_step { talks(engine(a)) && state[a] == CLAIMING && hold[wanted(a)] == CLAIMED && reader[wanted(a)] != a &&
                (claims[a] & (1 << current[P])) -> grants[a] = grants[a] | (1 << current[P]) }
#else
    :: d_step { talks(engine(a)) && state[a] == CLAIMING && hold[wanted(a)] == CLAIMED && reader[wanted(a)] != a &&
                !denials[a] -> denials[a] = true }
#endif
    :: d_step { talks(engine(a)) && state[a] == CLAIMING && hold[wanted(a)] == FREE && !denials[a] ->
        denials[a] = true }
#ifdef DONE_OF_ANYBODY
    :: d_step { talks(engine(a)) && dones[a] && hold[wanted(a)] != FREE -> free(wanted(a)) }
#else
    :: d_step { talks(engine(a)) && dones[a] && (hold[wanted(a)] == HELD || has_claimed(a)) -> free(wanted(a)) }
#endif
    od
}

#define is_mute(a) (silent[engine(a)] || dead[engine(a)] || state[a] == STOPPING || state[a] == GONE)

/* P's holds, and time. */
proctype Hold(byte h) {
    byte i;
end_hold:
    do
    :: d_step { hold[h] == HELD -> free(h) } /* `hold_s` */
    /* On one machine a death is a fact. */
    :: d_step { hold[h] == CLAIMED && dead[engine(reader[h])] && is_here(engine(reader[h])) -> free(h) }
#ifndef NO_LEASE
    :: d_step { hold[h] == CLAIMED && !lapsed[h] && !is_here(engine(reader[h])) && is_mute(reader[h]) ->
        lapsed[h] = true; in_time[h] = false }
#endif
    :: d_step { hold[h] == CLAIMED && !lapsed[h] && !is_here(engine(reader[h])) && !is_mute(reader[h]) &&
                lapses < LAPSES -> lapses++; lapsed[h] = true; in_time[h] = false }
#ifdef SILENCE_IS_DEATH
    :: d_step { is_doubted(h) -> free(h) }
#endif
    od
}

/* What concerns a pair. */
proctype Pair(byte d) {
    byte a, i;
end_pair:
    do
    :: d_step { talks(d) && known[d] < current[P] -> known[d]++ }
    :: d_step { silences < SILENCES && !silent[d] -> silences++; silent[d] = true }
    :: d_step { deaths < DEATHS && !dead[d] -> deaths++; dead[d] = true; phase[d] = STEADY; answered[d] = 0;
        refused[d] = 0; doubt[d] = false; problem[d] = false; lease_over[d] = false; known[d] = 0;
        for (a : 0 .. ATTEMPTS - 1) {
            if
            :: engine(a) == d -> part[one(a, 0)] = NONE; part[one(a, 1)] = NONE; end(a)
            :: else
            fi
        }
        a = 0 }
    /* P's death is a fact here. */
    :: d_step { dead[P] && is_here(d) && ANY(unproven_at_d) ->
        for (a : 0 .. ATTEMPTS - 1) {
            if
            :: engine(a) == d && unproven[a] -> end(a)
            :: else
            fi
        }
        a = 0 }
    od
}

proctype Death() {
    byte h, i;
end_death:
    do
    :: d_step { p_deaths < P_DEATHS -> p_deaths++; dead[P] = true; phase[P] = STEADY; answered[P] = 0; refused[P] = 0;
        doubt[P] = false; problem[P] = false; lease_over[P] = false;
        for (h : 0 .. HOLDS - 1) {
            if
            :: hold[h] != FREE -> free(h)
            :: else
            fi
        }
        h = 0 }
    od
}

inline follow(e) {
    for (i : 0 .. ATTEMPTS - 1) {
        behind[i] = behind[i] && engine(i) != e
    }
    i = 0
}

/* What an engine's ranks have answered when they were to make their new agents. */
#define RENEWALS(e) \
    :: d_step { phase[e] == RENEWING && answered[e] == ALL && refused[e] -> \
        phase[e] = STEADY; problem[e] = e != P; answered[e] = 0; refused[e] = 0; \
        follow(e) } \
    :: d_step { phase[e] == CLOSING && !lease_over[e] -> lease_over[e] = true }

inline renew(e) {
    renewals_are_bounded = current[e] < MOST;
    assert(renewals_are_bounded);
    doubt[e] = false;
    phase[e] = RENEWING; answered[e] = 0; refused[e] = 0
}

inline renewed(e) {
    phase[e] = CLOSING; answered[e] = 0; lease_over[e] = false; problem[e] = false;
    current[e]++;
    follow(e)
}

/* P's generations. */
proctype Holder() {
    byte h, i;
end_holder:
    do
    RENEWALS(P)
    :: d_step { others < OTHERS && !dead[P] && !doubt[P] -> others++; doubt[P] = true }
    :: d_step { phase[P] == STEADY && !dead[P] && (doubt[P] || ANY_HOLD(is_doubted)) -> renew(P) }
    :: d_step { phase[P] == RENEWING && answered[P] == ALL && !refused[P] ->
        renewed(P);
#ifdef RENEWAL_IS_THE_END
        for (h : 0 .. HOLDS - 1) {
            if
            :: is_closing(h) && !is_here(engine(reader[h])) -> free(h)
            :: else
            fi
        }
        h = 0
#endif
        }
#ifdef NO_CLOSING
    :: d_step { phase[P] == CLOSING ->
#else
    :: d_step { phase[P] == CLOSING && (lease_over[P] || !ANY_HOLD(is_kept_open)) ->
#endif
        for (h : 0 .. HOLDS - 1) {
            if
            :: lease_over[P] && is_closing(h) ->
                closed[h] = true;
                denials[reader[h]] = state[reader[h]] == CLAIMING || state[reader[h]] == READING
            :: else
            fi
        }
        h = 0;
        phase[P] = RETIRING }
#ifdef ONE_RANK_IS_ALL
    :: d_step { phase[P] == RETIRING && answered[P] ->
#else
    :: d_step { phase[P] == RETIRING && answered[P] == ALL ->
#endif
        if
#if defined(ERROR_IS_AN_END)
        :: false -> skip
#elif defined(ASKS_ONCE)
        :: refused[P] -> phase[P] = STEADY; lease_over[P] = false
#else
        :: refused[P] -> phase[P] = CLOSING; lease_over[P] = true
#endif
        :: else ->
            phase[P] = STEADY; lease_over[P] = false;
            oldest[P] = current[P];
            for (h : 0 .. HOLDS - 1) {
                if
#if defined(HERE_TOO)
                :: is_closing(h) ->
#elif defined(KEEPS_WHAT_IT_DOUBTS)
                :: false ->
#elif defined(FREES_ALL_DOUBTED)
                :: (is_closing(h) || is_doubted(h)) && !is_here(engine(reader[h])) ->
#else
                :: is_closing(h) && !is_here(engine(reader[h])) ->
#endif
                    denials[reader[h]] = state[reader[h]] == CLAIMING || state[reader[h]] == READING;
                    free(h)
                :: else
                fi
            }
        fi;
        answered[P] = 0; refused[P] = 0; h = 0 }
    od
}

/* Those of a D. */
proctype Reader(byte d) {
    byte a, i;
end_reader:
    do
    RENEWALS(d)
    :: d_step { own_others < OWN_OTHERS && !dead[d] && !doubt[d] -> own_others++; doubt[d] = true }
#ifdef NO_OWN_DOUBT
    :: d_step { phase[d] == STEADY && !dead[d] && doubt[d] -> renew(d) }
#else
    :: d_step { phase[d] == STEADY && !dead[d] && (doubt[d] || ANY(doubted_by_d)) -> renew(d) }
#endif
    :: d_step { phase[d] == RENEWING && answered[d] == ALL && !refused[d] -> renewed(d) }
    :: d_step { phase[d] == CLOSING && (lease_over[d] || !ANY(waited_for_by_d)) -> phase[d] = RETIRING }
    :: d_step { phase[d] == RETIRING && answered[d] == ALL && !ANY(unheard_by_d) ->
        if
#ifdef OWN_ERROR_IS_AN_END
        :: false -> skip
#else
        :: refused[d] -> phase[d] = CLOSING; lease_over[d] = true
#endif
        :: else ->
            phase[d] = STEADY; lease_over[d] = false;
            oldest[d] = current[d];
            for (a : 0 .. ATTEMPTS - 1) {
                if
                :: engine(a) == d && unproven[a] && own[a] < oldest[d] -> end(a)
                :: else
                fi
            }
        fi;
        answered[d] = 0; refused[d] = 0; a = 0 }
    od
}

/* What an engine's ranks are asked. A rank of D ends its reads before it destroys their agent. */
proctype Rank(byte e, r) {
    byte a;
end_rank:
    do
    :: d_step { phase[e] == RENEWING && !(answered[e] & (1 << r)) && !ANY(comes_first) ->
        last[one(e, r)] = current[e] + 1; answered[e] = answered[e] | (1 << r) }
    :: d_step { phase[e] == RETIRING && !(answered[e] & (1 << r)) && !ANY(comes_first) ->
        if
        :: e == P ->
            no_healthy_read_is_cut_off_within_a_lease = lease_over[P] || !ANY(cut_by_r);
            assert(no_healthy_read_is_cut_off_within_a_lease)
        :: else ->
            for (a : 0 .. ATTEMPTS - 1) {
                if
                :: engine(a) == e && is_open(a, r) && through[one(a, r)] < current[e] -> part[one(a, r)] = FAILED
                :: else
                fi
            }
            a = 0
        fi;
        first[one(e, r)] = current[e]; answered[e] = answered[e] | (1 << r) }
    :: d_step { rank_errors < RANK_ERRORS && (phase[e] == RENEWING || phase[e] == RETIRING) &&
                !(answered[e] & (1 << r)) && !ANY(comes_first) ->
#ifndef NEVER_CAN
        rank_errors++;
#endif
        answered[e] = answered[e] | (1 << r); refused[e] = refused[e] | (1 << r) }
#if defined(ONE_RANK_IS_ALL) || defined(ERROR_IS_AN_END) || defined(OWN_ERROR_IS_AN_END)
    :: d_step { first[one(e, r)] < oldest[e] -> first[one(e, r)] = oldest[e] } /* too late */
#endif
    od
}

/* D's memory: what lands finds the block its own. */
proctype Memory() {
end_memory:
    atomic { ANY(lands_wrong) ->
        no_read_lands_in_a_block_of_another = false;
        assert(no_read_lands_in_a_block_of_another) }
}

/* Where nothing can happen any more. */
proctype Monitor() {
    byte a;
end_monitor:
    atomic { timeout ->
    for (a : 0 .. HOLDS - 1) {
        /* Of a D on P's machine one stays that only D's message or its death ends. */
        each_hold_ends = each_hold_ends &&
            (hold[a] == FREE || hold[a] == CLAIMED && is_here(engine(reader[a])) && silent[engine(reader[a])])
    }
    for (a : 0 .. ATTEMPTS - 1) {
        each_read_ends = each_read_ends && state[a] == GONE
    }
    for (a : 0 .. ENGINES - 1) {
        old_agents_end = old_agents_end && (dead[a] || phase[a] == STEADY && oldest[a] == current[a] &&
                                            first[one(a, 0)] == current[a] && first[one(a, 1)] == current[a])
    }
    assert(each_hold_ends);
    assert(each_read_ends);
    assert(old_agents_end) }
end_rest:
    false
}

init {
    byte a;
    atomic {
        for (a : 0 .. ATTEMPTS - 1) {
            run Attempt(a);
            run Claim(a);
            run Read(a, 0);
            run Read(a, 1)
        }
        for (a : 0 .. HOLDS - 1) {
            run Hold(a)
        }
        for (a : 0 .. READERS - 1) {
            run Pair(a);
            run Reader(a)
        }
        for (a : 0 .. ENGINES - 1) {
            run Rank(a, 0);
            run Rank(a, 1)
        }
        run Death();
        run Holder();
        run Memory();
        run Monitor();
        a = 0
    }
}
