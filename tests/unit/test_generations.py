# SPDX-License-Identifier: Apache-2.0
"""B105-B107: an engine in doubt makes new transfer agents, and what came through the old ones has ended then."""

import msgspec
import pytest

from vllm_pd.peer.control import MessageSource
from vllm_pd.peer.degraded import DegradedReason
from vllm_pd.peer.protocol import PeerProtocol
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import (
    AddPeer,
    DropPeer,
    Fallback,
    FallbackReason,
    HoldEnd,
    HoldEnded,
    Prefill,
    ReadHold,
    Released,
    RenewTransport,
    RetireTransport,
    ToBroker,
    ToDecode,
    ToPrefill,
)
from vllm_pd.protocol.generations import (
    CALM_S,
    DOUBT_S,
    LOOK_S,
    MAX_FAILED_PAUSE_S,
    MAX_PAUSE_S,
    PAUSE_S,
    Generations,
    Phase,
    is_elsewhere,
)
from vllm_pd.protocol.hashes import token_digest
from vllm_pd.protocol.moments import NEVER
from vllm_pd.protocol.names import generation_name, incarnation_of
from vllm_pd.protocol.prefill import ASK_S
from vllm_pd.settings.engine import PDConfig

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
TOKENS = list(range(32))
LEASE_S = 9.0
SETTINGS = {"broker": "tcp://127.0.0.1:9", "lease_s": LEASE_S, "ttl_s": 3.0, "heartbeat_s": 1.0}


class OneHalf:
    """A half that doubts at `doubt`, and is busy with something while `busy`."""

    def __init__(self) -> None:
        self.doubt, self.busy, self.calls = NEVER, False, []

    def doubts_at(self) -> float:
        return self.doubt

    def is_busy(self, now: float) -> bool:
        return self.busy

    def renewed(self, now: float) -> list:
        self.calls.append("renewed")
        return []

    def close(self, now: float) -> list:
        self.calls.append("close")
        return []

    def retired(self, now: float) -> list:
        self.calls.append("retired")
        return []


@pytest.fixture
def half():
    return OneHalf()


@pytest.fixture
def ours():
    return Generations("d", b"0", LEASE_S)


def test_b105_without_a_doubt_nothing_is_made(ours, half):
    assert ours.handle_timeout(10.0, [half]) == [] and ours.next_timeout([half]) == NEVER


def test_b105_a_doubt_is_seen_when_it_is_due(ours, half):
    half.doubt = 12.0
    assert ours.handle_timeout(11.9, [half]) == [] and ours.next_timeout([half]) == 12.0
    assert ours.handle_timeout(12.0, [half]) == [RenewTransport("d~1")] and ours.phase is Phase.RENEWING
    assert ours.handle_timeout(13.0, [half]) == [], "once"
    assert (ours.current, ours.newest, ours.next_timeout([half])) == (0, 1, NEVER)


def test_b105_where_nothing_goes_on_the_old_agents_go_at_once(ours, half):
    half.doubt = 0.0
    ours.parted.add("p")
    ours.handle_timeout(10.0, [half])
    assert ours.renewed(10.1, b"1", [half]) == [RetireTransport()] and half.calls == ["renewed"]
    assert (ours.current, ours.oldest, ours.metadata, ours.parted) == (1, 0, b"1", set())
    assert ours.retired(10.2, True, [half]) == [] and half.calls == ["renewed", "retired"] and ours.oldest == 1
    assert ours.handle_timeout(10.2 + PAUSE_S / 2, [half]) == [], "not one after the other"
    assert ours.handle_timeout(10.2 + PAUSE_S, [half]) == [RenewTransport("d~2")]


def test_b105_what_goes_well_may_end_for_a_lease(ours, half):
    half.doubt, half.busy = 0.0, True
    ours.handle_timeout(10.0, [half])
    assert ours.renewed(10.0, b"1", [half]) == [] and ours.next_timeout([half]) == 10.0 + LOOK_S
    assert ours.handle_timeout(10.0 + LEASE_S - 0.1, [half]) == []
    assert ours.next_timeout([half]) == 10.0 + LEASE_S
    assert ours.handle_timeout(10.0 + LEASE_S, [half]) == [RetireTransport()] and half.calls == ["renewed", "close"]


def test_b105_what_has_ended_is_waited_for_no_longer(ours, half):
    half.doubt, half.busy = 0.0, True
    ours.handle_timeout(10.0, [half])
    ours.renewed(10.0, b"1", [half])
    half.busy = False
    assert ours.handle_timeout(10.3, [half]) == [RetireTransport()] and half.calls == ["renewed"]


def test_b105_a_rank_that_can_make_no_agent_is_asked_again_after_growing_pauses(ours, half):
    half.doubt, now, pause_s = 0.0, 10.0, PAUSE_S
    for _ in range(10):
        assert ours.handle_timeout(now, [half]) == [RenewTransport("d~1")]
        ours.not_renewed(now, "no memory")
        assert ours.problem == "no memory" and ours.handle_timeout(now + 0.9 * pause_s, [half]) == []
        now, pause_s = now + pause_s, min(2 * pause_s, MAX_FAILED_PAUSE_S)
    ours.handle_timeout(now, [half])
    ours.renewed(now, b"1", [half])
    assert ours.problem == "" and half.calls == ["renewed"]


def test_b105_doubt_after_doubt_makes_new_agents_ever_more_rarely_until_it_is_calm(ours, half):
    half.doubt, now, made = 0.0, 100.0, []
    while now < 400.0:
        if ours.handle_timeout(now, [half]):
            made.append(now)
            ours.renewed(now, b"", [half])
            ours.retired(now, True, [half])
        now += 0.5
    pauses = [later - one for one, later in zip(made, made[1:], strict=False)]
    assert pauses[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, MAX_PAUSE_S]
    half.doubt = now + CALM_S
    assert ours.handle_timeout(now + CALM_S, [half])
    ours.renewed(now + CALM_S, b"", [half])
    ours.retired(now + CALM_S, True, [half])
    assert ours.next_timeout([half]) == now + CALM_S + PAUSE_S


def test_b105_a_rank_that_can_t_destroy_its_agents_is_asked_again_and_nothing_counts_as_ended(ours, half):
    half.doubt = 0.0
    ours.handle_timeout(10.0, [half])
    ours.renewed(10.0, b"1", [half])
    assert ours.retired(10.0, False, [half]) == [] and (ours.oldest, half.calls) == (0, ["renewed"])
    assert ours.handle_timeout(10.0 + PAUSE_S / 2, [half]) == [] and ours.next_timeout([half]) == 10.0 + PAUSE_S
    assert ours.handle_timeout(10.0 + PAUSE_S, [half]) == [RetireTransport()]


def test_b105_words_of_ranks_that_were_not_asked_change_nothing(ours, half):
    assert ours.renewed(1.0, b"9", [half]) == ours.retired(1.0, True, [half]) == [] and half.calls == []
    ours.not_renewed(1.0, "what")
    assert (ours.phase, ours.problem, ours.metadata) == (Phase.STEADY, "", b"0")


@pytest.mark.parametrize(("here", "there", "elsewhere"), [
    ("a/pid:1/time:1", "b/pid:1/time:1", True), ("a/pid:1", "a/pid:2", False), ("", "b/pid:1", False),
    ("a/1", "", False), ("", "", False)])
def test_b105_elsewhere_is_who_has_booted_otherwise_as_far_as_is_known(here, there, elsewhere):
    us, them = (m.Member("x", m.Role.BOTH, "", FINGERPRINT, host_id=host) for host in (here, there))
    assert is_elsewhere(us, them) is elsewhere


@pytest.mark.parametrize("generation", [0, 1, 12])
def test_b105_a_generation_has_a_name_of_its_own(generation):
    name = generation_name("0123abcd", generation)
    assert incarnation_of(name) == "0123abcd" and (name == "0123abcd") is (generation == 0)


class TwoMachines:
    """P and D with their real protocols. Messages arrive, but between who is `cut`. Events are kept by engine."""

    def __init__(self, same: bool = False, roles: tuple[m.Role, m.Role] = (m.Role.PREFILL, m.Role.DECODE)):
        self.now = 100.0
        self.cut = False
        self.lost: tuple[type, ...] = ()
        self.sent: list[m.Message] = []  # between the two, also what is lost
        members = [m.Member(name, role, f"tcp://127.0.0.1:{port}", FINGERPRINT, host_id="a" if same else name)
                   for name, role, port in (("p", roles[0], 1), ("d", roles[1], 2))]
        self.p, self.d = [PeerProtocol(PDConfig.parse(one.role.value, SETTINGS), one, one.incarnation.encode(),
                                       lambda: self.now) for one in members]
        self.listed = members
        self.events: dict[str, list] = {"p": [], "d": []}
        self.pump()

    def pump(self) -> None:
        for us in (self.p, self.d):
            us.control.receive(MessageSource.BROKER, "b", m.Peers("b", 1, self.listed, 0))
        moved = True
        while moved:
            moved = False
            for us, them in ((self.p, self.d), (self.d, self.p)):
                while (action := us.control.poll_transmit()) is not None:
                    moved = True
                    if isinstance(action, ToBroker):
                        if isinstance(action.message, m.Put) and "p" not in action.message.job.avoid:
                            self.p.control.receive(MessageSource.BROKER, "b", m.Offer(action.message.job, 1))
                    elif isinstance(action, ToDecode | ToPrefill):
                        self.sent.append(action.message)
                        if self.cut or isinstance(action.message, self.lost):
                            continue
                        source = MessageSource.PREFILL if isinstance(action, ToDecode) else MessageSource.DECODE
                        them.control.receive(source, us.member.incarnation, action.message)
                self.events[us.member.incarnation] += iter(us.poll_event, None)

    def passes(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.25)
            for us in (self.p, self.d):
                us.set_load(m.Load())
                us.control.handle_timeout()
            self.pump()

    def take(self, name: str, kind: type) -> list:
        found = [event for event in self.events[name] if isinstance(event, kind)]
        self.events[name] = [event for event in self.events[name] if not isinstance(event, kind)]
        return found

    def renew(self, us: PeerProtocol) -> None:
        """Its ranks make the agents that they are asked for."""
        [event] = self.take(us.member.incarnation, RenewTransport)
        us.transport.renewed(event.name, event.name.encode())
        self.pump()

    def retire(self, us: PeerProtocol) -> None:
        """They destroy the older ones."""
        assert self.take(us.member.incarnation, RetireTransport) == [RetireTransport()]
        us.transport.retired(True)
        self.pump()

    def granted(self) -> tuple[m.Attempt, Prefill]:
        """An attempt of D that P has the grant of."""
        attempt = self.d.decode.next_attempt("r")
        self.d.decode.submit(attempt, TOKENS, [4, 5], 0)
        self.p.prefill.set_credits(4)
        self.pump()
        [job] = self.take("p", Prefill)
        return attempt, job

    def reading(self) -> tuple[m.Attempt, m.Attempt, ReadHold]:
        """A hold of P, and the attempt of D that reads it."""
        hold = m.Attempt("p", "h", 7)
        assert self.p.prefill.hold(hold, token_digest(TOKENS), [1, 2])
        attempt = self.d.decode.next_attempt("r")
        self.d.decode.claim_hold(attempt, hold, token_digest(TOKENS), [4, 5], 0, 60.0)
        self.pump()
        [read] = self.take("d", ReadHold)
        return hold, attempt, read


@pytest.fixture
def far():
    return TwoMachines()


def test_b105_a_p_that_seems_dead_loses_its_job_at_once_and_its_fence_when_d_has_destroyed_its_agents(far):
    attempt, job = far.granted()
    assert job.peer == "d"
    far.cut = True
    far.d.deaths.lifeline_gone("p")
    far.passes(0.25)
    [end] = far.take("d", Fallback)
    assert (end.attempt, end.reason) == (attempt, FallbackReason.PEER)
    far.renew(far.d)
    assert far.take("d", Released) == [] and far.d.operators.counts()["decode_fenced"] == 1
    far.retire(far.d)
    assert far.take("d", Released) == [Released(attempt)] and far.d.operators.open_attempts() == []


def test_b106_a_p_that_seemed_dead_and_lives_is_a_peer_as_before(far, caplog):
    attempt, _ = far.granted()
    far.d.deaths.lifeline_gone("p")
    assert far.d.decode.view().prefill_peers == 0
    far.passes(0.25)
    far.p.prefill.ended(attempt)
    far.pump()
    assert far.d.decode.view().prefill_peers == 1 and "seemed dead and lives" in caplog.text, "it has been heard"
    far.renew(far.d)
    far.retire(far.d)
    assert far.take("p", AddPeer)[-1] == AddPeer("d~1", b"d~1")
    _, job = far.granted()
    assert job.peer == "d~1"


def test_b106_one_that_is_not_heard_counts_again_after_a_while_if_it_is_listed(far):
    far.cut = True
    far.d.deaths.lifeline_gone("p")
    far.passes(2.5)
    assert far.d.decode.view().prefill_peers == 0
    far.passes(1.0)
    assert far.d.decode.view().prefill_peers == 1


def test_b106_on_one_machine_a_refusing_lifeline_is_a_death():
    near = TwoMachines(same=True)
    attempt, _ = near.granted()
    near.d.deaths.lifeline_gone("p")
    near.pump()
    assert near.take("d", Released) == [Released(attempt)] and near.take("d", RenewTransport) == []


def test_b106_a_write_that_failed_parts_the_two_for_a_moment(far):
    attempt, _ = far.granted()
    far.p.prefill.unproven(attempt, "broken")
    far.pump()
    assert far.d.operators.counts()["parted"] == far.p.operators.counts()["parted"] == 1
    far.passes(0.25)
    far.renew(far.d)
    far.retire(far.d)
    far.renew(far.p)
    far.retire(far.p)
    assert far.take("d", Released) == [Released(attempt)]
    for us in (far.d, far.p):
        assert us.operators.counts()["parted"] == 0 and us.operators.open_attempts() == []
    assert far.granted()[1].peer == "d~1"
    assert far.take("p", DropPeer) == [DropPeer("d")]


def test_b106_on_one_machine_the_two_go_on_and_the_blocks_stay_set_aside():
    near = TwoMachines(same=True)
    attempt, _ = near.granted()
    near.p.prefill.unproven(attempt, "broken")
    near.passes(0.5)
    for us in (near.d, near.p):
        near.renew(us)
        near.retire(us)
    assert near.take("d", Released) == [] and near.d.operators.unproven_attempts() == {attempt}
    assert near.p.operators.unproven_attempts() == {attempt}
    assert near.granted()[1].peer == "d~1"
    near.d.deaths.peer_dead("p")
    near.pump()
    assert Released(attempt) in near.take("d", Released)


def test_b107_a_p_that_does_not_answer_a_cancel_is_waited_for_a_few_seconds(far):
    attempt, _ = far.granted()
    far.cut = True
    far.d.decode.abort(attempt)
    far.passes(DOUBT_S - 0.5)
    assert far.take("d", RenewTransport) == []
    far.passes(1.0)
    far.renew(far.d)
    far.retire(far.d)
    assert far.take("d", Released) == [Released(attempt)]


def test_b105_a_healthy_write_of_another_attempt_may_end(far):
    one, _ = far.granted()
    two, job = far.granted()
    assert job.attempt == two
    far.p.prefill.unproven(one, "broken")
    far.pump()
    far.passes(0.25)
    far.renew(far.d)
    assert far.take("d", RetireTransport) == []
    far.d.decode.arrived(two, 0)
    far.passes(0.25)
    far.retire(far.d)
    assert far.take("d", Fallback)[0].attempt == one and far.take("d", Released) == [Released(one)]


def test_b105_one_that_is_not_over_after_a_lease_falls_back(far):
    one, _ = far.granted()
    two, _ = far.granted()
    far.p.prefill.unproven(one, "broken")
    far.pump()
    far.passes(0.25)
    far.renew(far.d)
    far.passes(LEASE_S - 0.5)
    assert far.take("d", RetireTransport) == [] and [end.attempt for end in far.take("d", Fallback)] == [one]
    far.passes(1.0)
    assert [(end.attempt, end.reason) for end in far.take("d", Fallback)] == [(two, FallbackReason.LEASE)]
    far.retire(far.d)
    assert {end.attempt for end in far.take("d", Released)} == {one, two}


def test_b105_a_claim_of_an_older_generation_is_not_granted(far):
    far.cut = True
    far.d.deaths.lifeline_gone("p")
    attempt = far.d.decode.next_attempt("r")
    far.d._core.generations.parted.add("p")
    far.passes(0.25)
    far.renew(far.d)
    far.retire(far.d)
    far.d.decode.submit(attempt, TOKENS, [4, 5], 0)
    far.d.control.receive(MessageSource.PREFILL, "p", m.Claim(attempt, 1, 1, 0))
    sent = [action.message for action in iter(far.d.control.poll_transmit, None) if isinstance(action, ToPrefill)]
    assert sent[-1] == m.Deny(attempt, 1, m.DenyReason.UNPEERED) and far.d.operators.counts()["decode_fenced"] == 0
    far.d.control.receive(MessageSource.PREFILL, "p", m.Claim(attempt, 2, 1, 1))
    assert far.d.operators.counts()["decode_fenced"] == 1


def test_b105_a_d_that_seems_dead_reads_nothing_more_once_p_has_destroyed_its_agents(far):
    hold, attempt, read = far.reading()
    assert read.peer == "p"
    far.cut = True
    far.p.deaths.lifeline_gone("d")
    far.passes(0.25)
    far.renew(far.p)
    assert far.take("p", HoldEnded) == []
    far.retire(far.p)
    assert far.take("p", HoldEnded) == [HoldEnded(hold, HoldEnd.LOST)]


def test_b105_a_d_that_claims_nothing_for_a_lease_is_doubted(far):
    hold, *_ = far.reading()
    far.passes(2 * LEASE_S)
    assert far.take("p", RenewTransport) == [], "it claims it again and again"
    far.cut = True
    far.passes(LEASE_S + 0.5)
    far.renew(far.p)
    far.retire(far.p)
    assert far.take("p", HoldEnded) == [HoldEnded(hold, HoldEnd.LOST)]


def test_b105_on_one_machine_a_hold_stays_with_the_d_that_has_claimed_it():
    near = TwoMachines(same=True)
    near.reading()
    near.cut = True
    near.passes(3 * LEASE_S)
    assert near.take("p", RenewTransport) == [] == near.take("p", HoldEnded)


@pytest.mark.parametrize("same", [False, True])
def test_b107_an_own_read_that_failed_has_ended_with_the_agents_that_it_went_through(same):
    """On one machine, too: it is the reader that copies."""
    both = TwoMachines(same)
    hold, attempt, _ = both.reading()
    both.d.decode.read_ended(attempt, "broken", may_land=True)
    both.passes(0.25)
    assert both.take("d", Released) == [] and both.take("p", HoldEnded) == [HoldEnded(hold, HoldEnd.DONE)]
    both.renew(both.d)
    both.retire(both.d)
    assert both.take("d", Released) == [Released(attempt)] and both.d.operators.open_attempts() == []


def test_b107_an_own_read_that_does_not_end_is_waited_for_a_few_seconds(far):
    _, attempt, _ = far.reading()
    far.d.decode.abort(attempt)
    far.passes(DOUBT_S - 0.5)
    assert far.take("d", RenewTransport) == []
    far.passes(1.0)
    far.renew(far.d)
    assert far.take("d", RetireTransport) == [RetireTransport()], "nothing waits for it any more"
    far.d.decode.read_ended(attempt, "destroyed")
    far.d.transport.retired(True)
    far.pump()
    assert far.take("d", Released) == [Released(attempt)]
    far.passes(2.0)
    assert far.take("d", RenewTransport) == [] and far.d.operators.counts()["parted"] == 0


def test_b105_a_read_that_failed_while_agents_were_made_may_have_gone_through_the_new_ones(far):
    """So it has not ended with the older ones, but with the next."""
    _, attempt, _ = far.reading()
    far.d._core.generations.parted.add("x")
    far.passes(0.25)
    far.d.decode.read_ended(attempt, "broken", may_land=True)
    far.renew(far.d)
    far.retire(far.d)
    assert far.take("d", Released) == [] and attempt in far.d.operators.open_attempts()
    far.passes(PAUSE_S + 0.5)
    far.renew(far.d)
    far.retire(far.d)
    assert far.take("d", Released) == [Released(attempt)]


def test_b105_a_hold_is_claimed_and_read_in_p_s_present_generation(far):
    far.cut = True
    assert far.p.prefill.hold(m.Attempt("p", "h", 9), token_digest(TOKENS), [1, 2])
    far.p._core.generations.parted.add("x")
    far.passes(0.25)
    far.renew(far.p)
    far.retire(far.p)
    attempt = far.d.decode.next_attempt("r")
    far.d.decode.claim_hold(attempt, m.Attempt("p", "h", 9), token_digest(TOKENS), [4, 5], 0, 60.0)
    far.cut = False
    far.pump()
    assert far.take("d", ReadHold) == [], "D did not know"
    far.passes(1.0)
    [read] = far.take("d", ReadHold)
    assert (read.peer, read.metadata) == ("p~1", b"p~1")


def test_b105_a_read_of_a_prefix_that_failed_ends_with_p_s_own_agents(far):
    attempt, _ = far.granted()
    far.p.prefill.read_unproven(attempt, "broken")
    far.pump()
    assert far.p.prefill.may_land(attempt)
    far.passes(0.25)
    far.renew(far.p)
    assert far.p.prefill.may_land(attempt)
    far.retire(far.p)
    assert not far.p.prefill.may_land(attempt)
    far.renew(far.d)
    far.retire(far.d)
    assert far.take("d", Released) == [Released(attempt)] and far.p.operators.open_attempts() == []


def test_b105_an_engine_of_both_roles_writes_where_it_has_stopped_to_read():
    both = TwoMachines(roles=(m.Role.BOTH, m.Role.BOTH))
    _, attempt, _ = both.reading()
    both.d.decode.read_ended(attempt, "")
    both.take("d", DropPeer)
    both.d._core.do([DropPeer("p", was_read=True)])
    both.pump()
    assert both.take("d", DropPeer) == [], "its own jobs write there"
    both.d._core.do([DropPeer("p")])
    both.d._core.do([DropPeer("p", was_read=True)])
    both.pump()
    assert len(both.take("d", DropPeer)) == 2


def test_b105_a_rank_that_fails_is_told_in_the_log(far, caplog):
    far.granted()
    far.cut = True
    far.d.deaths.lifeline_gone("p")
    far.passes(0.25)
    [event] = far.take("d", RenewTransport)
    far.d.transport.not_renewed("rank 1: no memory")
    assert "no memory" in caplog.text and far.d.operators.counts()["generation"] == 0
    far.d.transport.renewed(event.name, b"late")
    assert far.d.operators.counts()["generation"] == 0, "nobody waits for it"
    far.passes(PAUSE_S + 0.25)
    far.renew(far.d)
    far.d.transport.retired(False, "rank 0: no")
    assert "can't destroy" in caplog.text and far.d.operators.counts()["decode_fenced"] == 1


def test_b107_an_engine_that_can_make_no_new_agents_works_with_nobody_until_it_can(far):
    """B107: whatever it has under way may hang, and it can't end it. More of that would cost more blocks."""
    far.granted()
    far.cut = True
    far.d.deaths.lifeline_gone("p")
    for _ in range(3):
        far.passes(MAX_PAUSE_S)
        assert far.take("d", RenewTransport)
        far.d.transport.not_renewed("fab0 is down")
        far.passes(0.25)
        degraded = far.d.operators.degraded()
        assert degraded.reason is DegradedReason.AGENTS
        assert degraded.detail.endswith("new transfer agents: fab0 is down")
        assert not far.d.state.hands_over and not far.d.state.takes_jobs
    far.passes(MAX_PAUSE_S)
    far.renew(far.d)
    far.passes(0.25)
    assert far.d.state.hands_over and far.d.state.agents_problem == ""


@pytest.mark.parametrize("problem", ["", "no memory"])
def test_b107_who_is_not_in_doubt_any_more_needs_no_new_agents(ours, half, problem):
    """B107: some ranks may have them all the same."""
    half.doubt = 0.0
    ours.handle_timeout(10.0, [half])
    ours.not_renewed(10.0, problem)
    assert ours.renewal_problem([half]) == problem
    half.doubt = NEVER
    assert ours.renewal_problem([half]) == "" and ours.problem == problem
    half.doubt = 40.0  # a lease that is renewed before, or a doubt in which nothing was tried yet
    assert ours.renewal_problem([half]) == ""
    ours.handle_timeout(40.0, [half])
    ours.not_renewed(40.0, problem)
    assert ours.renewal_problem([half]) == problem


def test_protocol_numbers_differ_from_those_of_engines_without_generations():
    assert m.PROTOCOL == 3
    reply = m.HelloReply(m.Member("d", m.Role.DECODE, "", FINGERPRINT), b"x")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=m.HelloReply) == reply


def test_b106_a_peer_that_was_dropped_is_not_taken_for_dead_by_a_late_answer(far):
    """The probe of its lifeline was under way. Taken for dead, it would never be heard again."""
    far.d.deaths.lifeline_gone("p3")
    assert far.d.control.receive(MessageSource.PREFILL, "p3", m.Hello(
        m.Member("p3", m.Role.PREFILL, "tcp://127.0.0.1:3", FINGERPRINT, host_id="p3"), b""))


def test_b106_p_keeps_a_d_whose_prefix_it_has_failed_to_read(far):
    """Until nothing of that lands any more it is to be seen whether D dies."""
    attempt, _ = far.granted()
    far.p.prefill.read_unproven(attempt, "broken")
    far.p._core.generations.parted.clear()
    far.p._core.do(far.p._core.prefill_half.peer_lost(far.now, "d"))
    far.pump()
    assert far.take("p", DropPeer) == [] and "d" in far.p.deaths.watched_peers().busy
    far.passes(0.25)
    far.renew(far.p)
    far.retire(far.p)
    assert far.take("p", DropPeer) == [DropPeer("d")]


def test_b105_what_outlived_a_renewal_on_this_machine_does_not_delay_the_next():
    near = TwoMachines(same=True)
    near.granted()
    near.cut = True
    for _ in range(2):
        near.d._core.generations.parted.add("x")
        near.passes(2 * PAUSE_S + 0.5)
        near.renew(near.d)
        if near.d.operators.counts()["generation"] == 1:
            near.passes(LEASE_S + 0.5)
        near.retire(near.d)
    assert near.d.operators.counts()["decode_fenced"] == 1


def test_b106_a_write_that_failed_in_a_generation_that_is_over_parts_nobody(far):
    attempt, _ = far.granted()
    far.d.deaths.lifeline_gone("p")
    far.passes(0.25)
    far.renew(far.d)
    far.retire(far.d)
    far.p.prefill.unproven(attempt, "broken")
    far.pump()
    for us in (far.p, far.d):
        assert us.operators.counts()["parted"] == 0 and us.operators.open_attempts() == []


def claims_unheard(far) -> m.Attempt:
    """D has granted this attempt, and P has not got the grant, so it asks on."""
    far.lost = (m.Grant, )
    attempt = far.d.decode.next_attempt("r")
    far.d.decode.submit(attempt, TOKENS, [6, 7], 0)
    far.pump()
    assert attempt in far.d.operators.open_attempts()
    return attempt


def test_b105_no_job_begins_in_a_generation_in_which_a_transfer_has_failed(far):
    """As the model tests/proof/spin/generations.pml has found."""
    one, _ = far.granted()
    two = claims_unheard(far)
    far.p.prefill.unproven(one, "broken")
    far.pump()
    far.passes(0.25)
    far.renew(far.d)
    assert far.p.operators.counts()["parted"] == 0, "P knows the new generation"
    assert far.take("d", RetireTransport) == [], "D waits for the other one"
    far.lost = ()
    far.passes(1.0)
    assert far.take("p", Prefill) == [], "it could not be written"
    assert [end.attempt for end in far.take("d", Fallback)] == [one, two]
    assert far.take("d", Released) == [Released(two)] and far.d.operators.counts()["parted"] == 0
    far.retire(far.d)
    assert far.granted()[1].peer == "d~1"


def test_b105_after_an_own_renewal_p_goes_on_in_the_same_generation_of_d(far):
    one, _ = far.granted()
    two = claims_unheard(far)
    far.lost = (m.Grant, m.GaveUp)
    far.p.prefill.unproven(one, "broken")
    far.passes(0.25)
    far.renew(far.p)
    far.lost = ()
    far.passes(1.0)
    assert [(job.attempt, job.peer) for job in far.take("p", Prefill)] == [(two, "d")]


def test_b105_no_job_begins_in_a_generation_that_d_has_ended(far):
    attempt = claims_unheard(far)
    grant = next(one for one in far.sent if isinstance(one, m.Grant))
    far.lost = (m.Grant, m.Cancel, m.Deny)
    far.d.deaths.lifeline_gone("p")
    far.passes(0.25)
    far.renew(far.d)
    far.retire(far.d)
    assert far.take("d", Released) == [Released(attempt)]
    far.p.control.receive(MessageSource.DECODE, "d", grant)
    far.pump()
    assert far.take("p", Prefill) == [] and far.p.operators.open_attempts() == []


def test_b106_a_p_that_has_not_heard_of_the_new_generation_parts_nobody_in_it(far):
    one, _ = far.granted()
    two = claims_unheard(far)
    far.p.prefill.unproven(one, "broken")
    far.pump()
    far.passes(0.25)
    far.lost = (m.HelloReply, )
    far.renew(far.d)
    far.passes(1.0)
    assert [one.parted for one in far.sent if isinstance(one, m.Failed)] == [True]
    assert two in [end.attempt for end in far.take("d", Fallback)] and far.d.operators.counts()["parted"] == 0


def end_generation_unheard(far) -> None:
    """D has ended its generation, and P does not hear it."""
    far.lost = (m.HelloReply, )
    far.retire(far.d)
    far.passes(1.0)
    assert far.p.operators.open_attempts(), "else nothing was lost"
    far.lost = ()


def test_b106_p_asks_a_d_whether_it_has_ended_the_generation_of_what_may_land_once_for_all_jobs(far):
    for attempt in [far.granted()[0] for _ in range(3)]:
        far.p.prefill.unproven(attempt, "broken")
    far.pump()
    far.passes(0.25)
    far.renew(far.d)
    far.passes(1.0)
    before = len(far.sent)
    far.passes(ASK_S)
    assert sum(isinstance(one, m.Hello) for one in far.sent[before:]) == 1
    end_generation_unheard(far)
    far.passes(ASK_S + 0.5)
    assert far.p.operators.open_attempts() == []


def test_b106_p_asks_on_when_it_has_met_a_d_anew_that_it_had_dropped(far):
    attempt, _ = far.granted()
    far.p.prefill.unproven(attempt, "broken")
    far.pump()
    far.passes(0.25)
    far.renew(far.d)
    both, far.cut, far.listed = far.listed, True, far.listed[:1]
    far.passes(3 * ASK_S)
    assert not far.p.deaths.watched_peers().introduced, "P has dropped D"
    far.cut, far.listed = False, both
    far.passes(1.0)
    end_generation_unheard(far)
    far.passes(ASK_S + 0.5)
    assert far.p.operators.open_attempts() == []


def test_b105_a_two_sided_transport_is_never_in_doubt(half):
    ours = Generations("d", b"0", LEASE_S, can_renew=False)
    half.doubt = 0.0
    assert ours.handle_timeout(10.0, [half]) == [] and ours.next_timeout([half]) == NEVER


def test_b105_a_read_may_go_through_agents_that_some_ranks_have_made_and_others_could_not(ours, half):
    half.doubt = 0.0
    ours.handle_timeout(10.0, [half])
    ours.not_renewed(10.0, "rank 1: no")
    assert (ours.phase, ours.current, ours.newest) == (Phase.STEADY, 0, 1)


def test_b105_a_d_claims_a_hold_as_often_as_its_p_wants(far):
    far.d._core.decode_half.reads.lease_s = 10 * LEASE_S
    far.reading()
    far.passes(3 * LEASE_S)
    assert far.take("p", RenewTransport) == []
