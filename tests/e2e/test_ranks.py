# SPDX-License-Identifier: Apache-2.0
"""An engine of two tensor-parallel ranks beside the pair of one: it prefills for D, and is prefilled for by P."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import DEBUG_STATE, PATIENT, RUNNING_JOBS, WAIT_S, EngineProcess, Pair, prompt

from tests.forked import freeze
from tests.waiting import wait_for

STOP_BEFORE_WRITE = """
jobs = disagg.prefill_jobs
take_requests = jobs.take_requests
def stop_first(progress):
    requests = take_requests(progress)
    if any(type(request).__name__ == "Write" for request in requests):
        jobs.take_requests = take_requests
        os.kill({pid}, 19)
        while open("/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)
    return requests
jobs.take_requests = stop_first
disagg.expects_steps = lambda: True  # or the engine would wait for that rank to end its loop
"""
LENGTHS = (16, 17, 31, 32, 33, 60, 120, 300)  # twice these is what D parks at most


@pytest.fixture(scope="module")
def two_process(zygote, pair_processes) -> Iterator[EngineProcess]:
    engine = EngineProcess(zygote, "kv_both", 0, pair_processes.broker.url,
                           {**PATIENT, "max_local_prefill_tokens": 0},
                           tensor_parallel_size=2)
    yield engine
    engine.stop()
    if pair_processes.p.process.poll() is None:
        pair_processes.d.wait_for(pair_processes.p)


@pytest.fixture
def two(two_process, pair_processes) -> Iterator[EngineProcess]:
    """The engine of two ranks, at rest before and after."""
    two_process.ready()
    pair_processes.p.ready()
    pair_processes.d.ready()
    pair_processes.d.wait_for(pair_processes.p, two_process)
    two_process.wait_for(pair_processes.p)
    yield two_process
    for engine in (two_process, pair_processes.d, pair_processes.p):
        if engine.process.poll() is None:
            engine.do("hold", held=False)
            engine.at_rest()


@pytest.fixture
def trio(two, pair_processes) -> Pair:
    """P and D of one rank each; `two` is there as well."""
    return pair_processes


def worker_pids(engine: EngineProcess) -> list[int]:
    """All processes that write, as the peers know them."""
    return engine.evaluate("[process.pid for process in disagg.agent.member.processes]")


def keep_away(d: EngineProcess, p: EngineProcess) -> None:
    """The next attempt of D is none of P's business; those that follow are."""
    d.execute("start = disagg.protocol.decode.submit\n"
              "def submit(attempt, token_ids, block_ids, cached_blocks, avoid, *rest, start=start):\n"
              "    del disagg.protocol.decode.submit\n"
              f"    start(attempt, token_ids, block_ids, cached_blocks, (*avoid, {p.incarnation()!r}), *rest)\n"
              "disagg.protocol.decode.submit = submit")


def takes_jobs(engine: EngineProcess, jobs: int) -> None:
    engine.execute(f"disagg.prefill_jobs._max_jobs = {jobs}; disagg.prefill_jobs.set_credits()")


def test_b40_b44_two_ranks_and_one_prefill_side_by_side(trio, two, mono):
    """B40, B1, B44: P with TP 2 and P with TP 1 serve one D at once; nothing hangs, and every token is mono's."""
    prompts = [prompt(length, f"side by side {n}") for n in range(2) for length in LENGTHS]
    takes_jobs(two, 2)
    takes_jobs(trio.p, 2)
    expected = mono.tokens(prompts)
    before = [engine.counters() for engine in (trio.d, trio.p, two)]
    for engine in (trio.p, two):
        engine.do("hold", held=True)
    names = trio.d.add_all(prompts)
    for engine in (trio.p, two):  # the queue has more than either may hold
        wait_for(lambda engine=engine: engine.evaluate(RUNNING_JOBS) >= 2, "it has jobs")
    for engine in (trio.p, two):
        engine.do("hold", held=False)
    assert [result["outputs"][0]["token_ids"] for result in trio.d.wait(names)] == expected
    for engine in (trio.d, trio.p, two):
        engine.at_rest()
    d, p, t = (engine.counters().since(start) for engine, start in zip((trio.d, trio.p, two), before, strict=True))
    assert d["attempts_total:done"] == d["agent:decode_granted"] == len(prompts)
    assert p["agent:prefill_sent"] >= 2 and t["agent:prefill_sent"] >= 2
    takes_jobs(trio.p, 8)
    takes_jobs(two, 8)


def test_b44_one_rank_prefills_for_two(trio, two, mono):
    """B44, B1: P with TP 1 writes half of the heads into each rank of a D with TP 2."""
    prompts = [prompt(length, "for two") for length in LENGTHS]
    before = two.counters()
    assert two.tokens(prompts) == mono.tokens(prompts)
    assert two.counters().since(before)["attempts_total:done"] == len(prompts)


def test_b28_only_one_of_two_ranks_arrives(trio, two, mono):
    """B28: D does not start; at its deadline it computes the prompt in other blocks; what comes late changes nothing.

    Rank 1 stands still from before its write until long after the deadline: its write then lands in blocks that D has
    fenced for it.
    """
    tokens = prompt(200, "half of it")
    (driver, other) = worker_pids(two)
    assert driver == two.process.pid
    keep_away(trio.d, trio.p)
    before = trio.d.counters()
    two.execute(STOP_BEFORE_WRITE.format(pid=other))
    name = trio.d.add(tokens)
    try:
        arrived = f"[known['arrived'] for known in {DEBUG_STATE}['decode'].values()]"
        trio.d.wait_until(f"any({arrived})")
        assert trio.d.evaluate(arrived) == [[0]]
        assert trio.d.stats()["remote_prefilling"] == 1 and trio.d.stats()["running"] == 0
        with trio.d.policy(attempts=1):
            trio.d.bring_forward("deadline")
            [result] = trio.d.wait([name])
        assert result["outputs"][0]["token_ids"] == mono.tokens([tokens])[0]
        assert trio.d.counters().since(before)["attempts_total:expired"] == 1
        assert trio.d.stats()["quarantined"] == 1, "rank 1 may still write"
        assert two.stats()["prefill_sending"] == 1, "rank 1 still reads"
    finally:
        os.kill(other, signal.SIGCONT)
    two.execute("del disagg.expects_steps")
    trio.d.at_rest()
    two.at_rest()
    assert trio.d.counters().since(before)["attempts_total:done"] == 0
    assert trio.d.tokens([tokens]) == mono.tokens([tokens])


def test_b30_b32_generate_on_a_prefill_engine_of_two_ranks_leaves_its_workers_free(trio, two):
    """B32: `LLM.generate` ends while a peer's job is still to be computed. Nobody steps after it, so the workers must
    wait for calls again, and not for steps. B30: the job is given back."""
    keep_away(trio.d, trio.p)
    before = two.counters()
    two.do("hold", held=True)
    name = trio.d.add(prompt(60, "a peer's"))
    trio.d.wait_until("disagg.agent.counts()['decode_granted'] == 1")
    with two.policy(max_local_prefill_tokens=100):  # or its own prompt would go to P
        # A step of 64 tokens has no room for the peer's prompt beside its own.
        two.execute("from vllm import SamplingParams\n"
                    "config = scheduler.scheduler_config\n"
                    "most, config.max_num_batched_tokens = config.max_num_batched_tokens, 64\n"
                    f"llm.generate({{'prompt_token_ids': {prompt(20, 'own')!r}}}, SamplingParams(max_tokens=1), "
                    "use_tqdm=False)\n"
                    "config.max_num_batched_tokens = most")
    assert two.counters().since(before)["agent:prefill_failed"] == 1, "or nothing is shown here"
    assert two.evaluate("engine.model_executor.parallel_worker_tasks is None")
    assert two.evaluate("llm.collective_rpc(lambda worker: worker.rank)") == [0, 1]
    trio.d.wait([name])
    two.do("hold", held=False)


def test_b32_workers_are_free_while_all_requests_wait_for_a_peer(trio, two):
    """B32: no step follows the last one of the engine's other requests until the peer is done."""
    trio.p.do("hold", held=True)
    with two.policy(max_local_prefill_tokens=100):
        parked, short = two.add_all([prompt(200, "parked"), prompt(20, "short")])
        two.wait([short])
    assert two.stats()["remote_prefilling"] == 1, "or nothing is shown here"
    assert two.evaluate("engine.model_executor.parallel_worker_tasks is None")
    assert two.evaluate("llm.collective_rpc(lambda worker: worker.rank)") == [0, 1]
    trio.p.do("hold", held=False)
    two.wait([parked])


def test_b21_an_engine_is_gone_when_its_last_rank_is(trio, two, mono):
    """B21, B22: rank 0 is killed while rank 1 stands still. D goes on elsewhere when the lease is over, but keeps the
    blocks that rank 1 may write until that process is gone as well; it goes by itself. (The last test: the engine is
    gone.)"""
    tokens = prompt(100, "gone")
    driver, other = worker_pids(two)
    keep_away(trio.d, trio.p)
    two.do("hold", held=True)
    name = trio.d.add(tokens)
    trio.d.wait_until("disagg.agent.counts()['decode_granted'] == 1")
    freeze(other)
    os.kill(driver, signal.SIGKILL)
    two.process.wait(WAIT_S)
    trio.d.bring_forward("lease_until")
    [result] = trio.d.wait([name])
    assert result["outputs"][0]["token_ids"] == mono.tokens([tokens])[0]
    assert trio.d.stats()["quarantined"] == 1
    os.kill(other, signal.SIGCONT)
    trio.d.wait_until("not scheduler.quarantined")
    assert not is_alive(other)
    trio.d.at_rest()


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return not re.search(r"State:\s+Z", status)
