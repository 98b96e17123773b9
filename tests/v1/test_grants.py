# SPDX-License-Identifier: Apache-2.0
"""Which grants a decode engine with a two-sided transport opens and closes at its ranks: B20, B22, B25."""
import pytest

from tests.v1.simulated import Engine
from vllm_pd.protocol.actions import Prefilled
from vllm_pd.protocol.messages import Timings
from vllm_pd.transfer.requests import CloseGrant, OpenGrant, Write

PROMPT = list(range(1, 81))


@pytest.fixture
def engine(model_folder, in_flight):
    return Engine(model_folder, in_flight, transport="torch")


def park(engine, request_id="r"):
    engine.add(request_id, PROMPT)
    while not any(attempt.request_id == request_id for attempt in engine.protocol.jobs):
        engine.turn()
    return engine.attempt(request_id)


def closes(engine):
    return [request.key for request in engine.transfer.requests if isinstance(request, CloseGrant)]


def test_b22_a_grant_is_open_before_the_job_is_offered(engine):
    submit, seen = engine.protocol.submit, []
    engine.protocol.submit = lambda *arguments: (seen.extend(engine.transfer.requests), submit(*arguments))
    attempt = park(engine)
    assert seen == [OpenGrant(str(attempt), engine.grant(attempt))]


@pytest.mark.parametrize("how", ["prefilled", "failed", "aborted"])
def test_b22_b25_a_grant_is_closed_however_its_attempt_ends(engine, how):
    attempt = park(engine)
    if how == "aborted":
        engine.abort("r")
    elif how == "failed":
        engine.lost(attempt)
        engine.binding.look()
    else:
        engine.write(attempt)
        engine.tell(Prefilled(attempt, Timings()))
        engine.binding.look()
    assert str(attempt) in closes(engine)
    engine.transfer.end("another", ok=True)
    engine.binding.look()
    assert engine.protocol.closed == []
    engine.transfer.end(str(attempt))
    engine.binding.look()
    assert engine.protocol.closed == [attempt] and not engine.binding.remote_prefills._closing


def test_b22_a_rank_that_is_not_certain_releases_nothing(engine):
    attempt = park(engine)
    engine.abort("r")
    engine.transfer.end(str(attempt), ok=False)
    engine.binding.look()
    assert engine.protocol.closed == []


def test_a_write_names_the_attempt_as_its_grant(engine):
    attempt = engine.job(PROMPT)
    while not any(isinstance(request, Write) for request in engine.transfer.requests):
        engine.turn()
    write, = (request for request in engine.transfer.requests if isinstance(request, Write))
    assert write.grant == str(attempt)


def test_with_one_sided_writes_there_are_no_grants(model_folder):
    engine = Engine(model_folder)
    park(engine)
    engine.abort("r")
    assert not any(isinstance(request, OpenGrant | CloseGrant) for request in engine.transfer.requests)
