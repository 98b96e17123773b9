# SPDX-License-Identifier: Apache-2.0
"""B115: a job carries its salt, to nobody who would not read it, and every name of its prompt includes it."""
import msgspec
import pytest

from tests.unit.test_core_decode import BLOCK, TOKENS, attempt, member, side  # noqa: F401
from vllm_pd.broker.prompts import block_names
from vllm_pd.broker.registry import QueueLimits, Registry, may_take
from vllm_pd.peer.cluster import ClusterView
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import Prefill, ToBroker, ToDecode, ToPrefill
from vllm_pd.protocol.hashes import token_digest
from vllm_pd.protocol.jobs import JobState, PrefillLimits
from vllm_pd.protocol.prefill import PrefillProtocol
from vllm_pd.protocol.scope import (
    DIGEST_BYTES,
    MAX_SALT_BYTES,
    NO_SCOPE,
    SALT,
    PromptScope,
    adapter_scope,
    fits_salt,
)

SALTED = PromptScope("s")
READS = (SALT, )


def reading(name, scopes=READS):
    return msgspec.structs.replace(member(name, m.Role.PREFILL), scopes=scopes)


def job(scope=SALTED):
    return m.Job(attempt(1), "tcp://127.0.0.1:1", TOKENS, BLOCK, 60.0, scope=scope)


def test_names_of_two_scopes_differ():
    digests = [token_digest(TOKENS, scope) for scope in (NO_SCOPE, SALTED, PromptScope("t"))]
    assert len(set(digests)) == 3 and token_digest(TOKENS) == digests[0]
    long = msgspec.structs.replace(job(), token_ids=[5] * 400)
    names = [block_names(msgspec.structs.replace(long, scope=scope)) for scope in (NO_SCOPE, SALTED, PromptScope("t"))]
    assert len({tuple(one) for one in names}) == 3 and all(len(one) == 3 for one in names)


def test_no_tokens_have_the_digest_of_others_with_a_salt():
    """What is hashed of the latter is no whole number of tokens."""
    forged = [int.from_bytes(SALTED.digest[at:at + 4], "little") for at in range(0, 32, 4)]
    for tokens in (TOKENS + forged, forged + TOKENS):
        assert token_digest(tokens) != token_digest(TOKENS, SALTED)


@pytest.mark.parametrize("salt, fits", [("", True), ("s" * MAX_SALT_BYTES, True), ("s" * (MAX_SALT_BYTES + 1), False),
                                        ("ä" * (MAX_SALT_BYTES // 2 + 1), False), ("\ud800", False)])
def test_a_salt_that_fits_can_be_sent(salt, fits):
    assert fits_salt(salt) is fits
    if fits:
        sent = msgspec.msgpack.encode(job(PromptScope(salt)))
        assert msgspec.msgpack.decode(sent, type=m.Job).scope.salt == salt


def test_a_longer_salt_of_a_stranger_is_not_decoded():
    frame = msgspec.msgpack.encode(job(PromptScope("s" * (MAX_SALT_BYTES + 1))))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(frame, type=m.Job)


def test_of_an_older_release_a_job_has_no_scope_and_an_engine_reads_none():
    *older, scope = msgspec.msgpack.decode(msgspec.msgpack.encode(job()))
    assert scope == ["s", b""]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(older), type=m.Job).scope == NO_SCOPE
    *older, scopes = msgspec.msgpack.decode(msgspec.msgpack.encode(reading("p")))
    assert scopes == [SALT]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(older), type=m.Member).scopes == ()


def test_an_adapter_is_part_of_each_name_and_is_listed_by_whoever_has_it():
    one, other = (PromptScope("s", bytes([number]) * DIGEST_BYTES) for number in (1, 2))
    assert len({token_digest(TOKENS, scope) for scope in (NO_SCOPE, SALTED, one, other)}) == 4
    assert one.is_read_by((SALT, adapter_scope(one.adapter)))
    assert not one.is_read_by((SALT, adapter_scope(other.adapter)))
    assert not one.is_read_by((adapter_scope(one.adapter), )), "its salt is to be read, too"


# D.


def test_d_grants_to_a_p_that_names_the_scope(side):  # noqa: F811
    (put,) = side.submit(0.0, attempt(1), TOKENS, [5, 6, 9], 1, scope=SALTED)
    assert put == ToBroker(m.Put(job()))
    (grant,) = side.receive(1.0, "p", m.Claim(attempt(1), 7, scope=SALTED.digest))
    assert isinstance(grant.message, m.Grant)


@pytest.mark.parametrize("theirs, claimed", [(SALTED, b""), (SALTED, PromptScope("t").digest),
                                             (NO_SCOPE, SALTED.digest)])
def test_d_grants_to_nobody_else_and_tries_another_p_at_once(side, theirs, claimed):  # noqa: F811
    """One of an older release, or a job that has lost its scope at an older broker."""
    side.submit(0.0, attempt(1), TOKENS, [5, 6, 9], 1, scope=theirs)
    deny = ToPrefill("p", m.Deny(attempt(1), 7, m.DenyReason.AVOIDED))
    assert side.receive(1.0, "p", m.Claim(attempt(1), 7, scope=claimed)) == [deny]
    assert side.next_timeout() == 1.0
    (put,) = side.handle_timeout(1.0)
    assert put.message.job.avoid == ("p", ) and put.message.job.scope == theirs
    (grant,) = side.receive(1.1, "q", m.Claim(attempt(1), 3, scope=theirs.digest))
    assert isinstance(grant.message, m.Grant)


# P.


def test_p_names_the_scope_in_its_claim_and_passes_it_on():
    p = PrefillProtocol(reading("p"), b"", PrefillLimits())
    p.offer(0.0, job())
    p.receive(0.1, "d", m.HelloReply(member("d", m.Role.DECODE), b"memory"))
    assert p.states() == {attempt(1): JobState.CLAIMING}
    (claim, *_) = [one.message for one in p.handle_timeout(1.0) if isinstance(one, ToDecode)]
    assert claim.scope == SALTED.digest
    (event,) = p.receive(1.1, "d", m.Grant(attempt(1), claim.claim, [5, 6, 9], 1, 10.0))
    assert isinstance(event, Prefill) and event.scope == SALTED


def test_p_takes_no_job_of_a_scope_that_it_does_not_read():
    p = PrefillProtocol(reading("p", ()), b"", PrefillLimits())
    assert p.offer(0.0, job()) == [] and p.states() == {} and p.dropped["offer_scope"] == 1
    p.scopes = READS
    p.offer(0.0, job())
    assert p.states(), "it reads it now"


# The broker and the list of engines.


def test_the_broker_offers_a_job_to_those_that_read_its_scope():
    d = member("d", m.Role.DECODE)
    assert may_take(reading("p"), job(), d) and not may_take(reading("p", ()), job(), d)
    assert may_take(reading("p", ()), job(NO_SCOPE), d)
    registry = Registry("b", QueueLimits())
    for one in (d, reading("old", ()), reading("new")):
        registry.receive(0.0, one.incarnation, m.Register(one))
        registry.receive(0.0, one.incarnation, m.Credit(4, 0))
    offers = [(to, one) for to, one in registry.receive(0.1, "d", m.Put(job())) if isinstance(one, m.Offer)]
    assert [(to, one.job.scope) for to, one in offers] == [("new", SALTED)]


def test_d_counts_those_that_read_its_scope():
    cluster = ClusterView(member("d", m.Role.DECODE), 1.0, 5.0)
    cluster.heard(0.0, "b", 0)
    cluster.peers(m.Peers("b", 1, [reading("old", ()), reading("new")], 0))
    assert cluster.unable(SALTED) == ["old"] and cluster.unable(NO_SCOPE) == []
    greeted = ["old", "new"]
    views = [cluster.view(0.0, 0, greeted, cluster.unable(scope)) for scope in (SALTED, NO_SCOPE)]
    assert [view.prefill_peers for view in views] == [1, 2]
