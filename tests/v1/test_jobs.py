# SPDX-License-Identifier: Apache-2.0
"""A V1 engine as a prefill engine: jobs of peers as internal requests, on the real scheduler (B1, B5, B25, B30)."""
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from tests.v1.simulated import BLOCK_SIZE, PEER, Engine, WrongRead
from tests.v1.test_hazards import prompt
from tests.v1.test_load import reader
from vllm_pd.decisions.prefix import PrefixReads
from vllm_pd.errors import PDError
from vllm_pd.protocol.actions import Cancelled, DropPeer, Prefill
from vllm_pd.protocol.messages import Attempt
from vllm_pd.transfer.requests import CancelTransfer, Read, Write


@pytest.fixture
def engine(model_folder, in_flight):
    return Engine(model_folder, in_flight, role="kv_producer", prefix_reads="always")


def end(engine: Engine) -> None:
    engine.run()
    engine.check_answers()
    engine.check_at_rest()


@pytest.mark.parametrize("tokens", [100, 300])
def test_b1_the_last_write_is_posted_with_the_output_of_its_last_step_and_reported_without_another(engine, tokens):
    """Not before, while the KV is not written, though steps are scheduled ahead; and not later."""
    one, turns, posted = prompt(tokens), [], []
    execute = engine.transfer.execute

    def checked_execute(requests):
        for write in requests:
            if isinstance(write, Write):
                engine.check_sent_write(write, one)
                if write.key == write.grant:
                    posted.append((write.after_step, len(turns)))
        execute(requests)

    engine.transfer.execute = checked_execute
    engine.binding.prefill_jobs.prefix_cost.wanted = PrefixReads.NEVER
    engine.add("a", prompt(30), 60)  # a client whose steps go on
    engine.turn()
    attempt = engine.job(one)
    last = None
    while not posted:
        turns.append(engine.turn())
        for step, work in engine.begun_steps:
            for request_id, start, count, block_ids, *_ in work:
                if request_id == f"pd-{attempt}" and start + count == tokens:
                    last = step.kv_connector_metadata.step
                    blocks = -(-tokens // BLOCK_SIZE)
                    early = Write(str(attempt), "", block_ids[:blocks], list(range(100, 100 + blocks)), [])
                    with pytest.raises(WrongRead):  # the guard sees a write that is posted now
                        engine.check_sent_write(early, one)
        assert len(turns) < 50
    assert posted == [(last or posted[0][0], len(turns) - 1)] and posted[0][0] == engine.binding._processed_step
    assert len(engine.begun_steps) == engine.in_flight - 1
    before = engine.steps
    engine.transfer.end(str(attempt))
    assert engine.protocol.calls == [("sent", attempt)] and engine.steps == before
    end(engine)


def test_b97_a_job_is_batched_with_clients_and_seen_by_none(engine):
    engine.add("a", prompt(20), 6, params=SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    engine.wanted["a"] = 6
    attempt = engine.job(prompt(100))
    engine.turn()
    stats = engine.scheduler.make_stats()
    assert stats.num_running_reqs + stats.num_waiting_reqs == 1
    engine.run()
    engine.transfer.end(engine.sent(attempt).key)
    end(engine)
    assert set(engine.outputs) == {"a"}


def test_b97_v1s_waiting_figures_do_not_count_jobs(model_folder, in_flight):
    """B97: not those that read their prefix from a peer. A client's parked prompt counts."""
    engine = Engine(model_folder, in_flight, prefix_reads="always")

    def waiting() -> tuple[int, int, int]:
        stats = engine.scheduler.make_stats()
        fetching = stats.num_kv_fetch_reqs_by_stage
        assert fetching["waiting_to_start"] == fetching["completed_waiting"] == 0
        return stats.num_waiting_reqs, stats.num_skipped_waiting_reqs, fetching["in_progress"]

    engine.job(prompt(100), 3)
    engine.turn()
    assert [one.status for one in engine.scheduler.requests.values()] == [RequestStatus.WAITING_FOR_REMOTE_KVS]
    assert waiting() == (0, 0, 0)
    engine.add("a", prompt(100))
    engine.turn()
    assert waiting() == (0, 1, 1)


def test_b97_v1s_prefix_figures_do_not_count_jobs(engine):
    """B97: neither those of the prefix cache nor those of what came from a peer."""
    one, other, seen, make = prompt(100), prompt(101), [], engine.scheduler.make_stats
    engine.scheduler.make_stats = lambda *values, **more: seen.append(make(*values, **more)) or seen[-1]

    def counted(name: str) -> tuple[int, int, int]:
        found = [getattr(stats, name) for stats in seen]
        return tuple(sum(getattr(one, key) for one in found) for key in ("requests", "queries", "hits"))

    for number, (tokens, cached) in enumerate([(one, 0), (one, 0), (other, 6)]):
        engine.job(tokens, cached, number)
        engine.run()
    engine.fill(other, True)
    engine.run()
    assert len(seen) > 2 and counted("prefix_cache_stats") == counted("connector_prefix_cache_stats") == (0, 0, 0)
    engine.add("a", one)
    engine.add("b", one)
    engine.run()
    assert counted("prefix_cache_stats") == (2, 200, 2 * 6 * BLOCK_SIZE)
    assert counted("connector_prefix_cache_stats") == (2, 2 * (100 - 6 * BLOCK_SIZE), 0)


@pytest.mark.parametrize("priority", [0, -5, 7])
def test_b98_a_job_has_its_requests_priority(engine, priority):
    attempt = Attempt("peer", "r", 1)
    engine.tell(Prefill(attempt, prompt(600), list(range(100, 138)), 0, [], "peer", priority))
    engine.turn()
    assert [request.priority for request in engine.scheduler.requests.values()] == [priority]
    engine.run()
    engine.transfer.end(engine.sent(attempt).key)
    end(engine)


def quarantined_blocks(engine):
    """As the gauge says."""
    engine.binding._metrics_due = 0.0
    engine.binding._update_metrics()
    return engine.gauge("quarantined_blocks")


def test_b34_a_read_that_failed_and_may_land_keeps_its_blocks_until_the_peer_is_dead(engine):
    """B34: the job is given up, and the engine goes on with others."""
    attempt = engine.job(prompt(100), cached_blocks=4)
    engine.run()
    engine.transfer.end(engine.transfer.requests[-1].key, False, "failed", may_land=True)
    engine.run()
    assert engine.protocol.calls[0] == ("read_unproven", attempt) and len(engine.binding.fence) == 1
    assert not engine.scheduler.requests and not engine.scheduler.has_requests()
    assert quarantined_blocks(engine) == 4 and engine.gauge("parked_blocks") == 0
    load = reader(engine)()
    assert (load.quarantined, load.quarantined_blocks, load.sending) == (1, 4, 0), "as the gauge says"
    other = engine.job(prompt(50), number=1)
    engine.run()
    engine.transfer.end(engine.sent(other).key)
    engine.run()
    assert len(engine.binding.fence) == 1 and engine.pool.get_num_free_blocks() < engine.free_at_start
    engine.protocol.dead.add(PEER)
    engine.tell(DropPeer(PEER))
    engine.run()
    assert quarantined_blocks(engine) == 0
    end(engine)


def test_b20_jobs_of_a_peer_that_is_stopped_take_no_place_of_others(engine):
    """Their writes end when it goes on, or dies."""
    stopped = [engine.job(prompt(33), number=number) for number in range(8)]
    engine.run()
    assert engine.protocol.credits == 0
    engine.tell(*map(Cancelled, stopped))
    engine.run()
    assert engine.protocol.credits == 8 and len(engine.binding.fence) == 8
    large = engine.job(prompt(900), number=20)
    engine.run()
    assert engine.protocol.calls == [("failed", large)], "beside what they hold it would wait for ever"
    other = engine.job(prompt(100), number=21)
    engine.run()
    engine.transfer.end(engine.sent(other).key)
    assert ("sent", other) in engine.protocol.calls
    for one in stopped:
        engine.transfer.end(engine.sent(one).key, False)
    end(engine)


def test_b96_a_paused_engine_takes_no_jobs(engine):
    engine.access.takes_requests = False
    attempt = engine.job(prompt(100))
    engine.run()
    assert engine.protocol.calls == [("failed", attempt)] and engine.protocol.credits == 0
    end(engine)


@pytest.mark.parametrize("turns", [0, 2])
def test_b96_a_reset_in_an_engine_that_is_not_paused_gives_no_job_back(engine, turns):
    asked = prompt(300)
    attempt = engine.job(asked)
    for _ in range(turns):
        engine.turn()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    engine.check_sent(attempt, asked)
    engine.transfer.end(str(attempt))
    assert ("sent", attempt) in engine.protocol.calls
    end(engine)


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("is_reset", [True, False])
def test_b96_a_job_that_reads_its_beginning_is_given_back_by_a_pause(engine, state, ok, is_reset):
    """B96: after the read it would wait until the engine goes on, and its D with it. D hears when nothing moves."""
    asked = prompt(100)
    attempt = engine.job(asked, 4)
    while not any(isinstance(one, Read) for one in engine.transfer.requests):
        engine.turn()
    engine.scheduler.set_pause_state(state)
    [read] = (one for one in engine.transfer.requests if isinstance(one, Read))
    assert CancelTransfer(read.key) in engine.transfer.requests and engine.protocol.calls == []
    engine.fill(asked, ok)
    assert engine.protocol.calls == [("failed", attempt)]
    if is_reset:
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    end(engine)
    assert engine.tokens_computed == 0


@pytest.mark.parametrize("turns", [1, 2, 4])
def test_b96_a_job_that_is_computed_is_given_back_by_a_reset_in_a_pause(engine, turns):
    """B96: the pause lets it go on, the reset does not."""
    attempt = engine.job(prompt(800))
    for _ in range(turns):
        engine.turn()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert not engine.protocol.calls
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert [one for one in engine.protocol.calls if attempt in one] == [("failed", attempt)]
    assert not engine.scheduler.requests
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    end(engine)


def test_b25_b96_a_job_that_was_cancelled_while_it_reads_is_answered_after_its_read_also_in_a_pause(engine):
    attempt = engine.job(prompt(100), 4)
    while not any(isinstance(one, Read) for one in engine.transfer.requests):
        engine.turn()
    engine.tell(Cancelled(attempt))
    engine.run()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert not engine.protocol.calls
    engine.fill(prompt(100), False)
    assert engine.protocol.calls == [("ended", attempt)]
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    end(engine)


@pytest.mark.parametrize("turns", [0, 1, 2, 4])
@pytest.mark.parametrize("cached", [0, 4])
def test_b96_an_engine_with_other_weights_gives_all_jobs_back(engine, turns, cached, monkeypatch):
    """B96: whatever it computes from now on is not what its peers asked for. What it has computed is sent."""
    monkeypatch.setattr("vllm_pd.v1.binding.FENCES_S", 0.01)
    computed = engine.job(prompt(100), number=1)
    engine.run()
    attempt = engine.job(prompt(800), cached, number=2)
    for _ in range(turns):
        engine.turn()
    engine.binding.weights_replaced()
    before = engine.tokens_computed
    late = engine.job(prompt(100), number=3)
    for read in [one for one in engine.transfer.requests if isinstance(one, Read)]:
        engine.transfer.end(read.key, False)
    engine.transfer.end(str(computed))
    end(engine)
    assert [call for call in engine.protocol.calls if computed in call] == [("sent", computed)]
    assert ("failed", attempt) in engine.protocol.calls and ("failed", late) in engine.protocol.calls
    assert ("sent", attempt) not in engine.protocol.calls
    assert engine.tokens_computed - before <= 128 * engine.in_flight, "steps that were in flight"


def test_b96_weights_stay_as_they_are_where_a_job_can_not_be_given_back(engine, monkeypatch):
    """B96: it would be computed with other weights than its decode engine takes them for. The others are given back."""
    attempts = [engine.job(prompt(300), number=number) for number in (1, 2)]
    engine.turn()
    jobs = engine.binding.prefill_jobs
    stop = jobs._stop_writes
    monkeypatch.setattr(jobs, "_stop_writes", lambda job, *rest: (
        1 / 0 if job.prefill.attempt == attempts[0] else stop(job, *rest)))
    with pytest.raises(PDError, match="weights stay as they are"):
        engine.binding.weights_replaced()
    assert engine.protocol.calls[-1] == ("failed", attempts[1])


@pytest.mark.parametrize("turns", [0, 1, 3])
@pytest.mark.parametrize("cached", [0, 4])
def test_b96_all_requests_are_aborted_as_a_pause_does(engine, turns, cached):
    attempt = engine.job(prompt(600), cached)
    engine.access.take_wake()
    engine.scheduler.has_requests()
    engine.binding.before_schedule()
    for _ in range(turns):
        engine.turn()
    assert engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED) == []
    engine.run()
    reads = [one for one in engine.transfer.requests if isinstance(one, Read)]
    assert (("failed", attempt) in engine.protocol.calls) is not bool(reads), "it is told when nothing moves any more"
    for one in reads:
        engine.transfer.end(one.key, False)
    engine.run()
    assert ("failed", attempt) in engine.protocol.calls
    end(engine)


def test_b31_jobs_never_wait_for_this_engines_own_parked_requests(model_folder, in_flight):
    engine = Engine(model_folder, in_flight, blocks=20)
    engine.add("a", prompt(200))
    engine.run()
    attempt = engine.job(prompt(200))
    engine.run()
    assert engine.protocol.calls == [("failed", attempt)]
    engine.prefilled("a")
    end(engine)
