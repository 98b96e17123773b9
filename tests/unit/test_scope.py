# SPDX-License-Identifier: Apache-2.0
"""B115: a job carries its salt, to nobody who would not read it, and every name of its prompt includes it."""
import hashlib

import msgspec
import pytest

from tests.unit.test_core_decode import BLOCK, TOKENS, attempt, member, side  # noqa: F401
from vllm_pd.broker.prompts import block_names
from vllm_pd.broker.registry import QueueLimits, Registry, may_take
from vllm_pd.peer.cluster import ClusterView
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import Prefill, ToBroker, ToDecode, ToPrefill
from vllm_pd.protocol.attempts import DecodeLimits
from vllm_pd.protocol.hashes import token_digest
from vllm_pd.protocol.jobs import JobState, PrefillLimits
from vllm_pd.protocol.prefill import PrefillProtocol
from vllm_pd.protocol.scope import (
    DIGEST_BYTES,
    MAX_MEDIA_BYTES,
    MAX_MEDIA_ITEMS,
    MAX_SALT_BYTES,
    NO_SCOPE,
    SALT,
    MediaItem,
    PromptScope,
    adapter_scope,
    fits_salt,
    media_scope,
)

SALTED = PromptScope("s")
READS = (SALT, )
DATA = b"an image", b"another one"
MEDIA = PromptScope(media=tuple(MediaItem(hashlib.sha256(data).digest(), "image", at, 2, len(data))
                                for at, data in enumerate(DATA)), encoder="e")
IMAGES = media_scope("image", "e")


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
    assert scope == ["s", b"", [], ""]
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


# Media.


def changed(**fields):
    return PromptScope(media=(msgspec.structs.replace(MEDIA.media[0], **fields), MEDIA.media[1]), encoder="e")


def test_media_are_part_of_each_name_and_are_computed_by_whoever_lists_their_modality():
    others = [NO_SCOPE, MEDIA, PromptScope(media=MEDIA.media, encoder="f"), PromptScope(media=MEDIA.media[:1]),
              *(changed(**{name: value}) for name, value in (("digest", bytes(32)), ("modality", "video"),
                                                             ("offset", 7), ("length", 1), ("size", 1)))]
    assert len({token_digest(TOKENS, scope) for scope in others}) == len(others)
    assert MEDIA.is_read_by((SALT, IMAGES)) and not MEDIA.is_read_by((SALT, ))
    assert not MEDIA.is_read_by((media_scope("image", "f"), ))
    assert not changed(modality="video").is_read_by((IMAGES, )), "each modality is needed"


def test_a_scope_without_media_has_the_digest_that_it_always_had():
    assert SALTED.digest == hashlib.sha256(msgspec.msgpack.encode(["s"])).digest() and NO_SCOPE.digest == b""


@pytest.mark.parametrize("scope", [PromptScope(media=MEDIA.media[:1] * (MAX_MEDIA_ITEMS + 1)), changed(size=0),
                                   changed(size=MAX_MEDIA_BYTES + 1), changed(length=0), changed(modality=""),
                                   changed(modality="m" * 99), changed(digest=b""), changed(offset=-1)])
def test_media_of_a_stranger_that_no_job_has_are_not_decoded(scope):
    frame = msgspec.msgpack.encode(job(scope))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(frame, type=m.Job)


def claimed(p, scope=MEDIA, **fields):
    """A job that P has claimed. Returns the grant."""
    p.offer(0.0, job(scope))
    p.receive(0.1, "d", m.HelloReply(member("d", m.Role.DECODE), b"memory"))
    (claim, *_) = [one.message for one in p.handle_timeout(1.0) if isinstance(one, ToDecode)]
    return m.Grant(attempt(1), claim.claim, [5, 6, 9], 1, 10.0, **fields)


def test_media_come_with_the_grant():
    p = PrefillProtocol(reading("p", (IMAGES, )), b"", PrefillLimits())
    (event,) = p.receive(1.1, "d", claimed(p, media=DATA))
    assert isinstance(event, Prefill) and event.media == DATA and event.scope == MEDIA


def test_b113_the_token_behind_a_job_comes_with_the_grant(side):  # noqa: F811
    side.submit(0.0, attempt(1), TOKENS, [5, 6, 9], 1, next_token=77)
    (grant,) = side.receive(1.0, "p", m.Claim(attempt(1), 7))
    assert grant.message.next_token == 77
    p = PrefillProtocol(reading("p", (IMAGES, )), b"", PrefillLimits())
    (event,) = p.receive(1.1, "d", claimed(p, media=DATA, next_token=77))
    assert isinstance(event, Prefill) and event.next_token == 77


@pytest.mark.parametrize("media", [(), DATA[:1], (*DATA, b"more"), DATA[::-1]])
def test_other_media_than_those_of_the_job_end_it(media):
    p = PrefillProtocol(reading("p", (IMAGES, )), b"", PrefillLimits())
    (failed,) = p.receive(1.1, "d", claimed(p, media=media))
    assert isinstance(failed.message, m.Failed) and "media" in failed.message.reason
    assert p.dropped["grant_bad"] == 1 and p.states() == {}


def test_p_takes_no_more_media_than_it_may_have_at_once():
    p = PrefillProtocol(reading("p", (IMAGES, )), b"", PrefillLimits(max_media_bytes=MEDIA.media_bytes))
    p.offer(0.0, job(MEDIA))
    p.offer(0.0, msgspec.structs.replace(job(changed(size=1)), attempt=attempt(2)))
    p.offer(0.0, msgspec.structs.replace(job(NO_SCOPE), attempt=attempt(3)))
    assert set(p.states()) == {attempt(1), attempt(3)} and p.dropped["offer_media"] == 1
    p.handle_timeout(99.0)  # nobody has answered
    p.offer(99.0, msgspec.structs.replace(job(changed(size=1)), attempt=attempt(2)))
    assert attempt(2) in p.states()
    most = PromptScope(media=(msgspec.structs.replace(MEDIA.media[0], size=MAX_MEDIA_BYTES), ) * 2, encoder="e")
    p = PrefillProtocol(reading("p", (IMAGES, )), b"", PrefillLimits())
    p.offer(0.0, job(most))
    assert p.states() == {} and p.dropped["offer_media"] == 1, "no frame has so much"


def test_d_sends_media_with_its_grant_and_not_with_each_repetition(side):  # noqa: F811
    (put,) = side.submit(0.0, attempt(1), TOKENS, [5, 6, 9], 1, scope=MEDIA, media=DATA)
    assert not any(data in msgspec.msgpack.encode(put.message) for data in DATA), "the broker sees none"
    claim = m.Claim(attempt(1), 7, scope=MEDIA.digest)
    (grant,) = side.receive(1.0, "p", claim)
    assert grant.message.media == DATA
    retry_s = DecodeLimits().claim_retry_s
    assert side.receive(1.0 + retry_s / 2, "p", claim) == [], "it is under way"
    assert side.receive(1.0 + retry_s, "p", claim) == [grant]
    assert side.receive(1.0 + 2 * retry_s, "p", claim) == [grant]
    assert side.receive(1.0 + 3 * retry_s, "p", claim) == [], "all may be in the queue to P"


def test_media_of_d_count_until_their_p_has_answered(side):  # noqa: F811
    """Of one that has ended they may be in the queue to P."""
    total = sum(map(len, DATA))
    side.submit(0.0, attempt(1), TOKENS, [5, 6, 9], 1, scope=MEDIA, media=DATA)
    side.submit(0.0, attempt(2), TOKENS, [7, 8, 10], 1, scope=MEDIA, media=DATA)
    assert side.media_bytes() == 2 * total
    side.abort(0.1, attempt(2))
    assert side.media_bytes() == total, "nobody had it"
    side.receive(1.0, "p", m.Claim(attempt(1), 7, scope=MEDIA.digest))
    side.abort(1.1, attempt(1))
    assert side.media_bytes() == total
    assert side.receive(1.2, "p", m.Claim(attempt(1), 7, scope=MEDIA.digest))[0].message.reason is m.DenyReason.ENDED
    side.receive(1.3, "p", m.Stopped(attempt(1), 7))
    assert side.media_bytes() == 0


def test_media_of_an_attempt_that_p_has_given_up_are_in_no_queue(side):  # noqa: F811
    """Though its writes may still land, until the two have begun anew."""
    side.submit(0.0, attempt(1), TOKENS, [5, 6, 9], 1, scope=MEDIA, media=DATA)
    side.receive(1.0, "p", m.Claim(attempt(1), 7, scope=MEDIA.digest))
    side.receive(1.1, "p", m.GaveUp(attempt(1), 7, "no reason"))
    assert side.media_bytes() == 0 and side.fenced()


def test_media_of_an_attempt_that_is_done_are_forgotten(side):  # noqa: F811
    side.submit(0.0, attempt(1), TOKENS, [5, 6, 9], 1, scope=MEDIA, media=DATA)
    side.receive(1.0, "p", m.Claim(attempt(1), 7, scope=MEDIA.digest))
    side.arrived(2.0, attempt(1), 0)
    assert side.media_bytes() == 0 and side.awaited_timings() == 1
    assert not any(record.media for record in side._done.values())
