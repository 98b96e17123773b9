# SPDX-License-Identifier: Apache-2.0
"""B103 on V1's real schedulers: a request says where its prompt is to be prefilled. B100: whom its job is posted to."""
import pytest
from vllm.sampling_params import SamplingParams

from tests.v1.simulated import BLOCK_SIZE, Engine
from tests.v1.test_hazards import PARKED, end, parked, prompt
from vllm_pd.protocol.actions import Released
from vllm_pd.protocol.metaserver import is_posted

SHORT, LONG = prompt(BLOCK_SIZE + 1), prompt(6 * BLOCK_SIZE)
THRESHOLD = 3 * BLOCK_SIZE
METASERVER = "http://127.0.0.1:9/v1/metaserver"


@pytest.fixture
def engine(model_folder, in_flight):
    return Engine(model_folder, in_flight, threshold=THRESHOLD)


def add(engine, request_id, tokens, place):
    engine.add(request_id, tokens, params=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True,
                                                         extra_args={"kv_transfer_params": {"pd": place}}))
    engine.run()


@pytest.fixture
def listing(model_folder, in_flight):
    """An engine that may post to METASERVER."""
    return Engine(model_folder, in_flight, threshold=THRESHOLD, metaservers=METASERVER)


def add_named(engine, request_id, tokens, **params):
    """A request as a proxy of the metaserver form sends it."""
    engine.add(request_id, tokens, params=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, extra_args={
        "kv_transfer_params": {"do_remote_decode": False, "do_remote_prefill": True, "metaserver": METASERVER,
                               **params}}))
    engine.run()


def counted(engine):
    return [tuple(call) for call in engine.counted() if call[0] in ("decision", "asked")]


def test_b103_a_prompt_that_asks_to_stay_waits_for_no_peer_that_computes_the_same(engine):
    attempt = parked(engine, "twin", tokens=6 * BLOCK_SIZE)
    add(engine, "a", engine.prompts["twin"], "local")
    assert "a" in engine.ended and engine.status("twin") is PARKED
    assert counted(engine)[1:] == [("decision", "local", "asked"), ("asked", "local", "local")]
    engine.prefilled("twin")
    end(engine)
    assert list(engine.protocol.jobs) == [attempt]


@pytest.mark.parametrize("tokens, decision", [(LONG, ("remote", "length")), (SHORT, ("local", "threshold"))],
                         ids=["long", "short"])
def test_b102_a_proxy_of_the_metaserver_form_gets_what_any_client_gets(engine, tokens, decision):
    """The URL is not used: an engine connects nowhere because a client says so."""
    add_named(engine, "a", tokens)
    assert not engine.protocol.posted
    if decision[0] == "remote":
        assert engine.status("a") is PARKED
        engine.prefilled("a")
    end(engine)
    assert counted(engine) == [("decision", *decision)]


def test_b100_a_job_goes_to_a_metaserver_that_is_listed(listing):
    add_named(listing, "cmpl-1-0-12345678", LONG)
    (attempt, (url, request_id)), = listing.protocol.posted.items()
    assert is_posted(attempt) and (url, request_id) == (METASERVER, "cmpl-1-0")
    assert listing.status("cmpl-1-0-12345678") is PARKED and list(listing.protocol.jobs) == [attempt]
    listing.prefilled("cmpl-1-0-12345678")
    end(listing)


def test_b100_what_the_policy_keeps_here_is_not_posted_and_what_asks_to_go_is(listing):
    add_named(listing, "a", SHORT)
    assert "a" in listing.ended and not listing.protocol.posted
    add_named(listing, "b", prompt(BLOCK_SIZE + 1), pd="remote")
    assert list(listing.protocol.posted) == list(listing.protocol.jobs)
    listing.prefilled("b")
    end(listing)


def test_b100_another_attempt_goes_through_the_broker(listing):
    add_named(listing, "a", LONG)
    first = listing.attempt("a")
    listing.lost(first, peer="")
    listing.run()
    second = listing.attempt("a")
    assert second != first and list(listing.protocol.posted) == [first] and second.request_id == "a"
    listing.tell(Released(first))
    listing.prefilled("a")
    end(listing)


def test_b100_a_metaserver_that_is_not_listed_is_said_once_with_its_key(listing, caplog):
    for name in ("a", "b"):
        add_named(listing, name, prompt(6 * BLOCK_SIZE), metaserver=METASERVER + "/../x")
        listing.prefilled(name)
    assert not listing.protocol.posted
    (said,) = [one.getMessage() for one in caplog.records if "metaserver" in one.getMessage()]
    assert METASERVER + "/../x" in said and "the key metaservers" in said
    end(listing)


@pytest.mark.parametrize("threshold", [0, "auto"])
@pytest.mark.parametrize("tokens", [1, 2, BLOCK_SIZE - 1])
def test_b2_less_than_a_block_stays_here_and_is_decided_about_once(model_folder, in_flight, tokens, threshold):
    """B2: D computes the last token again, so a peer's part of a block brings nothing, whatever the threshold."""
    engine = Engine(model_folder, in_flight, threshold=threshold)
    block, rest = prompt(BLOCK_SIZE), prompt(tokens)
    add(engine, "short", rest, "auto")
    add(engine, "block", block, "local")
    add(engine, "with a hit", block + rest, "auto")
    end(engine)
    assert not engine.protocol.jobs
    assert [call for call in counted(engine) if call[0] == "decision"] == [
        ("decision", "local", "threshold"), ("decision", "local", "asked"), ("decision", "local", "threshold")]


def test_b103_a_feature_that_keeps_it_here_is_counted(engine):
    engine.binding.remote_prefills._can_go_remote = lambda request: False
    add(engine, "a", SHORT, "remote")
    end(engine)
    assert not engine.protocol.jobs
    assert counted(engine) == [("decision", "local", "feature"), ("asked", "remote", "local")]


def test_b103_a_pure_prefill_engine_counts_who_asks_for_a_peer(model_folder, in_flight):
    engine = Engine(model_folder, in_flight, role="kv_producer")
    add(engine, "a", LONG, "remote")
    add(engine, "b", prompt(7 * BLOCK_SIZE), "auto")
    end(engine)
    assert counted(engine) == [("decision", "local", "role"), ("asked", "remote", "local")]
