# SPDX-License-Identifier: Apache-2.0
"""B100, the pure part of the metaserver form: its messages, which jobs are posted, which are taken past the queue."""
import base64
import json

import msgspec
import pytest

from tests.unit.test_peer_protocol import CONFIG, FINGERPRINT, US, Clock, events, from_broker
from vllm_pd.frontend.metaserver import without_metaserver
from vllm_pd.peer.control import MessageSource
from vllm_pd.peer.direct_jobs import NOT_CLAIMED, DirectJobs
from vllm_pd.peer.posted_jobs import ANSWER_S
from vllm_pd.peer.protocol import PeerProtocol
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import Fallback, FallbackReason, PostJob, Prefill, Prefilled, Released, StopPost, ToBroker
from vllm_pd.protocol.jobs import JobState
from vllm_pd.protocol.metaserver import (
    carried_job,
    external_id,
    is_posted,
    named_metaserver,
    post_params,
    posted_name,
    request_of,
)

URL = "http://127.0.0.1:9000/v1/metaserver"
SECRET = "0123456789abcdef" * 2
P = m.Member("p", m.Role.PREFILL, "tcp://127.0.0.1:2", FINGERPRINT)
D = m.Member("d", m.Role.DECODE, "tcp://127.0.0.1:3", FINGERPRINT)
TOKENS = list(range(40))
ID = "cmpl-1-0-12345678"


def job(name=None, address=D.address, incarnation="d"):
    return m.Job(m.Attempt(incarnation, name or posted_name(ID, SECRET), 3), address, TOKENS, 16, 60.0)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def engine(clock):
    """An engine of both roles in a registry with one of each, which P has greeted."""
    protocol = PeerProtocol(CONFIG, US, b"memory", clock)
    from_broker(protocol, m.Peers("b", 1, [US, P, D], 0))
    assert protocol.control.receive(MessageSource.PREFILL, "p", m.Hello(P, b"memory"))
    transmitted(protocol)
    return protocol


def transmitted(protocol):
    return list(iter(protocol.control.poll_transmit, None))


def about_jobs(protocol):
    return [action for action in transmitted(protocol) if isinstance(action, PostJob | StopPost) or (
        isinstance(action, ToBroker) and isinstance(action.message, m.Put | m.Withdraw))]


def posted(protocol):
    attempt = protocol.decode.next_attempt(posted_name(ID, SECRET))
    protocol.decode.post_job(attempt, URL, "cmpl-1-0")
    protocol.decode.submit(attempt, TOKENS, [4, 5, 6], 1)
    return attempt


def granted(protocol):
    attempt = posted(protocol)
    protocol.control.receive(MessageSource.PREFILL, "p", m.Claim(attempt, 7))
    assert protocol.operators.debug_state()["decode"][attempt]["peer"] == "p"
    return attempt


# The messages.


def test_b100_what_is_posted_has_the_fields_of_the_form_and_the_job_and_no_block():
    params = post_params(job(), "cmpl-1-0", FINGERPRINT)
    carried = params.pop("pd_job")
    assert params == {"request_id": "cmpl-1-0", "do_remote_decode": True, "do_remote_prefill": False, "token_ids": [],
                      "remote_block_ids": [], "remote_block_size": 16, "remote_engine_id": "d",
                      "remote_host": "127.0.0.1", "remote_port": 3, "remote_tp_size": 1, "remote_pcp_size": 1,
                      "remote_dcp_size": 1, "remote_cached_tokens": 16}
    assert carried_job(carried) == job()


@pytest.mark.parametrize("value", [
    7, {"job": 1}, "", "?", "AAAA", base64.b64encode(b"\x91" * 100_000).decode(), "\ud800", "ä" * 10,
    base64.b64encode(msgspec.msgpack.encode(job(ID))).decode(),
    base64.b64encode(msgspec.msgpack.encode(job("posted-" + ID))).decode()],
    ids=["a number", "an object", "empty", "no base64", "no job", "deep", "surrogate", "not ASCII", "not posted",
         "no secret"])
def test_b100_what_carries_no_posted_job_is_refused(value):
    with pytest.raises(ValueError):
        carried_job(value)


@pytest.mark.parametrize("request_id, outside", [
    ("cmpl-1-0-12345678", "cmpl-1-0"), ("chatcmpl-a-deadbeef", "chatcmpl-a"), ("a", None),
    ("chatcmpl-0a1b2c3d-0123-0123-0123-0123456789ab", None), ("cmpl-1-0-1234567g", None)])
def test_b100_the_proxy_gets_the_id_that_it_knows(request_id, outside):
    assert external_id(request_id) == (outside or request_id)


def test_b100_only_a_name_with_a_secret_is_a_posted_one():
    assert is_posted(job().attempt) and request_of(job().attempt) == ID
    for name in (ID, "posted-", f"posted-{SECRET[:-1]}-r", f"cmpl-posted-{SECRET}-r", f"posted-{SECRET.upper()}-r"):
        assert not is_posted(m.Attempt("d", name, 1)) and request_of(m.Attempt("d", name, 1)) == name, name


@pytest.mark.parametrize("params, found", [
    ({"do_remote_prefill": True, "metaserver": URL}, URL), ({"do_remote_prefill": False, "metaserver": URL}, None),
    ({"metaserver": URL}, None), ({"do_remote_prefill": 1, "metaserver": URL}, None), ([URL], None), (None, None),
    ({"do_remote_prefill": True, "metaserver": [URL]}, None), ({"do_remote_prefill": True}, None)])
def test_b100_a_request_names_a_metaserver(params, found):
    assert named_metaserver({"kv_transfer_params": params}) == found
    assert named_metaserver(params) is None


# The server of D.

NAMING = {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": URL}


def naming(**fields):
    """The body of a request as a proxy sends it."""
    return json.dumps({"model": "m", "kv_transfer_params": NAMING, "prompt": [1, 2], **fields}).encode()


@pytest.mark.parametrize("fields", [{"n": 2}, {"n": "2"}, {"n": 2.0}, {"n": " 2.0"}, {"prompt": ["a", "b"]},
                                    {"prompt": [[1, 2], [3]]}, {"messages": [], "n": 3, "prompt": None}], ids=str)
def test_b100_a_request_for_several_answers_names_no_metaserver_and_loses_nothing_else(fields):
    body = naming(**fields, seed=2**63 - 1, temperature=1e-3, stop=["\u00e4\n"])
    changed = json.loads(without_metaserver(body))
    assert changed.pop("kv_transfer_params") == {"do_remote_decode": False, "do_remote_prefill": True}
    wanted = json.loads(body)
    del wanted["kv_transfer_params"]
    assert changed == wanted


@pytest.mark.parametrize("body", [
    naming(n=2, temperature=float("nan")), naming(n=2, temperature=1).replace(b": 1,", b": 1e999,"),
    naming(n=2, user="\ud800"), naming(n=2).replace(b"metaserver", b"meta\\u0073erver"),
    naming(n=2).decode().encode("utf-16")], ids=["NaN", "1e999", "surrogate", "escaped", "UTF-16"])
def test_b100_what_vllm_reads_of_a_body_is_what_counts(body):
    changed = json.loads(without_metaserver(body))
    wanted = json.loads(body)
    assert wanted["kv_transfer_params"].pop("metaserver") and repr(changed.pop("kv_transfer_params")) == repr(
        wanted.pop("kv_transfer_params"))
    assert repr(sorted(changed.items())) == repr(sorted(wanted.items()))


@pytest.mark.parametrize("body", [
    naming(), naming(n=1), naming(n=None), naming(n="1"), naming(n=True), naming(n=2.5), naming(n="two"),
    naming(n=[2]), naming(prompt="metaserver"), naming(prompt=["a"]),
    naming(prompt=[[1, 2]]), naming(prompt=[]), naming(prompt=[["a"], 1]), naming(prompt=None),
    naming(n=2, kv_transfer_params=None), naming(n=2, kv_transfer_params={}), naming(n=2, kv_transfer_params=[URL]),
    naming(n=2, prompt="metaserver", kv_transfer_params={"pd": "local"}), naming(n=2)[:-1], b"metaserver", b"[]", b"",
    b'["metaserver"]', naming(n=float("nan")),
    b'{"n":2,"kv_transfer_params":{"metaserver":' + b"[" * 100_000], ids=lambda body: str(body[:150]))
def test_b100_every_other_body_stays_as_it_is(body):
    assert without_metaserver(body) is None


# D.


def test_b100_the_job_is_posted_once_and_never_queued(engine, clock):
    attempt = posted(engine)
    (post,) = about_jobs(engine)
    assert (post.url, post.request_id, post.job.attempt, post.job.cached_tokens) == (URL, "cmpl-1-0", attempt, 16)
    clock.now = CONFIG.claim_retry_s + 0.1
    from_broker(engine, m.Heard("b", 0))
    engine.control.handle_timeout()  # it would be put again
    from_broker(engine, m.Heard("another", 0))
    assert about_jobs(engine) == []
    other = engine.decode.next_attempt("r")
    engine.decode.submit(other, TOKENS, [7, 8, 9], 1)
    assert [action.message.job.attempt for action in about_jobs(engine)] == [other], "what is not posted is queued"


def test_b100_a_posted_job_is_claimed_granted_and_done_as_any(engine):
    attempt = granted(engine)
    engine.decode.unclaimable(attempt, "the metaserver has answered")  # which comes late, or after the claim
    assert events(engine) == []
    engine.decode.arrived(attempt, 0)
    (done,) = events(engine)
    assert isinstance(done, Prefilled) and engine.operators.open_attempts() == [] and not len(engine._core.posted)
    stops = [action for action in transmitted(engine) if isinstance(action, StopPost)]
    assert stops == [StopPost(attempt, ANSWER_S)], "it is about to be answered"


def test_b100_a_post_that_fails_ends_the_attempt_and_another_engine_may_help(engine):
    attempt = posted(engine)
    engine.decode.unclaimable(attempt, "it can't be reached")
    fallback, released = events(engine)
    assert (fallback.reason, fallback.detail) == (FallbackReason.PEER, "it can't be reached")
    assert fallback.reason.another_may_help and released == Released(attempt)
    assert about_jobs(engine)[1:] == [StopPost(attempt)]
    assert engine.operators.open_attempts() == [] and not len(engine._core.posted)
    engine.control.receive(MessageSource.PREFILL, "p", m.Claim(attempt, 7))
    assert [action.message.reason for action in transmitted(engine)] == [m.DenyReason.UNKNOWN], "P comes late"


@pytest.mark.parametrize("end", ["abort", "abort without a broker", "deadline", "broker"])
def test_b100_every_end_of_a_posted_attempt_stops_the_post_once_and_leaves_nothing(engine, clock, end):
    attempt = posted(engine)
    if end == "abort":
        engine.decode.abort(attempt)
    else:
        clock.now = CONFIG.attempt_deadline_s + 1
        if end == "deadline":
            from_broker(engine, m.Heard("b", 0))
        if end == "abort without a broker":
            engine._core.decode_half.broker_is(clock.now, False)
            engine.decode.abort(attempt)
        engine.control.handle_timeout()
    assert Released(attempt) in events(engine)
    assert engine.operators.open_attempts() == [] and not len(engine._core.posted)
    assert about_jobs(engine)[1:] == [StopPost(attempt)]


@pytest.mark.parametrize("end", ["failed", "lease", "dead", "aborted"])
def test_b100_the_post_of_a_claimed_job_ends_with_its_attempt(engine, clock, end):
    """Its metaserver may never answer, and P may write still."""
    attempt = granted(engine)
    about_jobs(engine)
    if end == "failed":
        engine.control.receive(MessageSource.PREFILL, "p", m.Failed(attempt, 7, "no room"))
    elif end == "lease":
        clock.now = CONFIG.lease_s + 0.1
        engine.control.handle_timeout()
        assert engine.operators.open_attempts() == [attempt]
    elif end == "dead":
        engine.deaths.peer_dead("p")
    else:
        engine.decode.abort(attempt)
        assert about_jobs(engine) == [], "P stops, and its answer ends it"
        engine.control.receive(MessageSource.PREFILL, "p", m.Stopped(attempt, 7))
    assert about_jobs(engine) == [StopPost(attempt)]
    if end == "lease":
        engine.control.receive(MessageSource.PREFILL, "p", m.Stopped(attempt, 7))
        assert about_jobs(engine) == []
    assert engine.operators.open_attempts() == [] and not len(engine._core.posted)


def test_b100_nothing_of_a_posted_attempt_is_left_after_the_end_of_the_thread(engine):
    attempt = posted(engine)
    engine.control.shut("over")
    assert Released(attempt) in events(engine) and not len(engine._core.posted)


def test_b100_once_nothing_can_be_posted_jobs_are_queued(engine):
    engine.decode.stop_posting()
    attempt = posted(engine)
    assert [action.message.job.attempt for action in about_jobs(engine)] == [attempt] and not len(engine._core.posted)


def test_b100_a_second_prefill_engine_is_denied(engine):
    attempt = granted(engine)
    transmitted(engine)
    engine.control.receive(MessageSource.PREFILL, "p", m.Claim(attempt, 8))
    assert [action.message.reason for action in transmitted(engine)] == [m.DenyReason.TAKEN]


# P.


@pytest.fixture
def producer(clock):
    """A prefill engine that has no credit left, in a registry with D, which has answered."""
    us = msgspec.structs.replace(US, role=m.Role.PREFILL)
    protocol = PeerProtocol(CONFIG, us, b"memory", clock)
    from_broker(protocol, m.Peers("b", 1, [us, D, P], 0))
    protocol.control.receive(MessageSource.DECODE, "d", m.HelloReply(D, b"memory"))
    transmitted(protocol)
    return protocol


def test_b100_a_job_that_a_client_brings_is_claimed_at_once(producer):
    assert producer.prefill.take_job(job()) == ""
    (claim,) = [action.message for action in transmitted(producer) if hasattr(action, "peer")]
    assert isinstance(claim, m.Claim) and claim.attempt == job().attempt
    producer.control.receive(MessageSource.DECODE, "d", m.Grant(claim.attempt, claim.claim, [4, 5, 6], 1, 30.0))
    assert [type(event) for event in events(producer)][-1] is Prefill


def test_b100_the_same_job_twice_is_one_job(producer):
    assert producer.prefill.take_job(job()) == producer.prefill.take_job(job()) == ""
    claims = [action for action in transmitted(producer) if hasattr(action, "peer")]
    assert len(claims) == 1 and list(producer._core.prefill_half.states().values()) == [JobState.CLAIMING]


@pytest.mark.parametrize("changed, said", [
    ({"address": "tcp://10.0.0.5:22"}, "no such decode engine"), ({"incarnation": "made-up"}, "no such decode engine"),
    ({"incarnation": "us", "address": US.address}, "no such decode engine"),
    ({"incarnation": "p", "address": P.address}, "no such decode engine")],
    ids=["address", "incarnation", "own", "of a prefill engine"])
def test_b100_a_client_makes_an_engine_connect_to_nobody(producer, changed, said):
    assert said in producer.prefill.take_job(job(**changed))
    assert transmitted(producer) == [] and producer.operators.open_attempts() == []


def test_b100_an_engine_that_drains_is_paused_or_only_decodes_takes_no_job(producer, engine):
    producer.prefill.set_credits(0, is_paused=True)
    assert "is paused" in producer.prefill.take_job(job())
    producer.operators.drain()
    assert "drains" in producer.prefill.take_job(job())
    engine.operators.set_role(m.Role.DECODE)
    assert "only decodes" in engine.prefill.take_job(job())
    assert producer.operators.open_attempts() == engine.operators.open_attempts() == []


@pytest.mark.parametrize("last, problem", [
    (m.Sent(job().attempt, 1, m.Timings()), ""), (m.Failed(job().attempt, 1, "too long"), "too long"),
    (m.GaveUp(job().attempt, 1, "it may land"), "it may land"),
    (m.Stopped(job().attempt, 1), "its decode engine gave it up"), (None, NOT_CLAIMED)])
def test_b100_each_client_learns_the_end_of_its_job_once(last, problem):
    jobs, attempt = DirectJobs(), job().attempt
    jobs.add(attempt, "one")
    jobs.add(attempt, "two")
    jobs.add(attempt, "two")
    jobs.transmitted(m.Claim(attempt, 1))
    assert jobs.poll({attempt}) == []
    if last is not None:
        jobs.transmitted(last)
        jobs.transmitted(m.Sent(m.Attempt("d", "other", 9), 1, m.Timings()))
    assert jobs.poll({attempt}) == []
    end = m.DirectJobEnd(attempt, problem)
    assert sorted(jobs.poll(set())) == [("one", end), ("two", end)]
    assert jobs.poll(set()) == [] and len(jobs) == 0 and not jobs._problems


def test_b100_a_fallback_without_a_claim_names_no_peer(engine):
    posted(engine)
    engine.decode.unclaimable(next(iter(engine.operators.open_attempts())), "why")
    assert [event.peer for event in events(engine) if isinstance(event, Fallback)] == [""]
