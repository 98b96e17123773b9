# SPDX-License-Identifier: Apache-2.0
"""A prefill engine dies or stands still at a chosen moment, or one of its transfers does; nobody notices but the clock.

One decode engine lives through all of it. Whatever happens to the prefill engine, the next test gets a new one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from _chaos.zygote import Zygote
from faults import Fault
from harness import DEBUG_STATE, PATIENT, BrokerProcess, EngineProcess, prompt

from tests.forked import state
from tests.waiting import wait_for

SENDING = "disagg.prefill_jobs.sending"
POOL = 256


@dataclass
class Stage:
    """A broker, one decode engine that sends everything away, and prefill engines that come and go."""
    zygote: Zygote
    broker: BrokerProcess
    mono: EngineProcess
    d: EngineProcess
    ps: list[EngineProcess] = field(default_factory=list)

    @property
    def p(self) -> EngineProcess:
        return self.ps[0]

    def engine(self, role: str | None, index: int, extra: dict, **llm) -> EngineProcess:
        return EngineProcess(self.zygote, role, index, self.broker.url, extra, num_gpu_blocks_override=POOL, **llm)

    def add_p(self, **llm) -> EngineProcess:
        """One more, that can be made to fail: `faulty` in its process."""
        p = self.engine("kv_producer", 1, PATIENT, **llm)
        self.ps.append(p)
        p.execute("import faults; driver.names['faulty'] = faults.install(disagg)")
        return p

    def fail_next(self, *faults: Fault) -> None:
        """What becomes of P's next transfers."""
        self.p.execute(f"import faults; faulty.faults = [faults.Fault(value) for value in {[f.value for f in faults]}]")

    def expected(self, *prompts: list[int]) -> list[list[int]]:
        return self.mono.tokens(list(prompts))

    def bury(self, p: EngineProcess) -> None:
        p.kill()
        self.ps.remove(p)

    def at_rest(self) -> None:
        for engine in (self.d, *self.ps):
            engine.at_rest()


@pytest.fixture(scope="module")
def whole_stage(zygote, mono_process, starting) -> Iterator[Stage]:
    broker = BrokerProcess()
    starting.callback(broker.stop)
    stage = Stage(zygote, broker, mono_process, None)
    stage.d = stage.engine("kv_consumer", 0, {**PATIENT, "max_local_prefill_tokens": 0})
    yield stage
    for process in (*stage.ps, stage.d, broker):
        process.stop()


@pytest.fixture
def stage(whole_stage: Stage) -> Iterator[Stage]:
    """At rest before and after each test (B20), with one prefill engine at the beginning."""
    if not whole_stage.ps:
        whole_stage.add_p()
    whole_stage.mono.ready()
    whole_stage.d.ready().wait_for(*whole_stage.ps)
    yield whole_stage
    for p in whole_stage.ps:
        p.thaw()
        p.do("hold", held=False)
    whole_stage.d.do("hold", held=False)
    try:
        whole_stage.at_rest()
    except AssertionError:
        whole_stage.d.do("abort_all")
        for p in list(whole_stage.ps):
            whole_stage.bury(p)
        raise


# Where P is when it is met. Each is called with the stage and a free path, and lets D submit "x" by the third argument.


def before_claim(stage: Stage, path: Path, submit: Callable[[], None]) -> None:
    stage.p.freeze()
    submit()
    stage.d.wait_until("disagg.agent.counts()['decode_queued'] == 1")


def after_claim(stage: Stage, path: Path, submit: Callable[[], None]) -> None:
    stage.p.do("hold", held=True)
    submit()
    stage.d.wait_until("disagg.agent.counts()['decode_granted'] == 1")


def mid_prefill(stage: Stage, path: Path, submit: Callable[[], None]) -> None:
    stage.p.execute(f"""
def execute_and_dwell(execute_model_req, execute=engine.model_executor.execute_model):
    if execute_model_req.seq_group_metadata_list:
        open({str(path)!r}, "w").close()
        time.sleep(600)
    return execute(execute_model_req)
engine.model_executor.execute_model = execute_and_dwell
""")
    submit()
    wait_for(path.exists, "P computes")


def mid_transfer(stage: Stage, path: Path, submit: Callable[[], None]) -> None:
    stage.fail_next(Fault.STALL)
    submit()
    stage.p.wait_until(SENDING)


def after_transfer_before_its_notice(stage: Stage, path: Path, submit: Callable[[], None]) -> None:
    stage.fail_next(Fault.STALL_AFTER_DATA)
    submit()
    stage.p.wait_until(f"{SENDING} and faulty.silent")


POINTS = [before_claim, after_claim, mid_prefill, mid_transfer, after_transfer_before_its_notice]


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.__name__)
def test_b21_p_killed(point, stage, tmp_path):
    """B21: the request ends with the right answer, another one that runs is not hurt, and no block of D stays aside:
    the death is a fact. The attempt has failed, so neither the lease nor the deadline was waited for."""
    tokens, other = prompt(150, f"b21 {point.__name__}"), prompt(60, f"b21 other {point.__name__}")
    [expected] = stage.expected(tokens)
    [expected_other] = stage.mono.tokens([other], max_tokens=200)
    companion = f"beside {point.__name__}"
    stage.d.add(other, companion, max_tokens=200)
    stage.d.wait_until(f"{companion!r} in driver.started")
    before = stage.d.counters()
    point(stage, tmp_path / "computing", lambda: stage.d.add(tokens, "x"))
    stage.bury(stage.p)
    x, others = stage.d.wait(["x", companion])
    assert x["outputs"][0]["token_ids"] == expected
    assert others["outputs"][0]["token_ids"] == expected_other
    counted = stage.d.counters().since(before)
    assert counted["attempts_total:failed"] == 1 and counted["attempts_total:done"] == 0
    stage.d.at_rest()
    stage.d.wait_for(stage.add_p())  # the engine lives, and so does what it does with others
    assert stage.d.tokens([prompt(80, f"b21 after {point.__name__}")]) == stage.expected(
        prompt(80, f"b21 after {point.__name__}"))
    assert stage.d.counters().since(before)["attempts_total:done"] == 1


def test_b21_another_p_takes_over(stage):
    """B21: with a second prefill engine the prompt is not prefilled on D at all."""
    tokens = prompt(150, "b21 two")
    stage.add_p()
    stage.d.wait_for(*stage.ps)
    before = stage.d.counters()
    for p in stage.ps:
        p.do("hold", held=True)
    stage.d.add(tokens, "x")
    stage.d.wait_until("disagg.agent.counts()['decode_granted'] == 1")
    [name] = stage.d.evaluate(f"[one['peer'] for one in {DEBUG_STATE}['decode'].values() if one['peer']]")
    [victim] = [p for p in stage.ps if p.incarnation() == name]
    stage.bury(victim)
    stage.p.do("hold", held=False)
    [x] = stage.d.wait(["x"])
    assert x["outputs"][0]["token_ids"] == stage.expected(tokens)[0]
    counted = stage.d.counters().since(before)
    assert counted["decisions_total:remote,length"] == 2
    assert counted["attempts_total:failed"] == counted["attempts_total:done"] == 1


def test_b22_a_write_that_comes_after_all_is_over(stage):
    """B22: P is stopped between its look at the lease and the post of the write, for longer than the lease. D has long
    moved on; the late bytes land in quarantined blocks and in no others."""
    tokens, other = prompt(150, "b22"), prompt(100, "b22 other")
    [expected] = stage.expected(tokens)
    [expected_other] = stage.mono.tokens([other], max_tokens=300)
    stage.fail_next(Fault.STAND_STILL)
    before = stage.d.counters()
    stage.d.add(tokens, "x")
    wait_for(lambda: stands_still(stage.p), "P has not stopped")
    stage.d.bring_forward("lease_until")
    [x] = stage.d.wait(["x"])
    assert x["outputs"][0]["token_ids"] == expected
    assert stage.d.counters().since(before)["attempts_total:expired"] == 1
    stage.d.do("hold", held=True)  # it steps only while it is waited for: this one is then still at it
    stage.d.add(other, "beside b22", max_tokens=300, prompt_logprobs=0)
    stage.d.wait_until("'beside b22' in driver.started")
    aside = set(stage.d.evaluate("[block for table in scheduler.quarantined.values() "
                                 "for block in table.physical_block_ids]"))
    assert len(aside) == -(-len(tokens) // 16)
    assert stage.d.evaluate("[group.request_id for group in scheduler.running]") == ["beside b22"]
    was = checksums(stage.d)
    stage.p.thaw()
    stage.p.wait_until("not disagg.prefill_jobs._jobs and not disagg.transfer.live_handles()")
    now = checksums(stage.d)
    written = {block for block in range(POOL) if was[block] != now[block]}
    assert written == aside  # late, and where nobody is
    stage.d.do("hold", held=False)
    [others] = stage.d.wait(["beside b22"])
    assert others["outputs"][0]["token_ids"] == expected_other


def checksums(engine: EngineProcess) -> list[list[int]]:
    """Of each block's bytes, by layer, keys and values."""
    layers = "engine.model_executor.driver_worker.worker.kv_cache[0]"
    return engine.evaluate(f"(lambda torch: torch.cat([layer.view(2, {POOL}, -1).view(torch.int32).sum(-1) "
                           f"for layer in {layers}]).T.tolist())(__import__('torch'))")


def stands_still(engine: EngineProcess) -> bool:
    return state(Path(f"/proc/{engine.process.pid}")) == "T"


def test_b25_abort_while_a_write_hangs(stage):
    """B25: the blocks stay aside as long as the write might land, and the same id is served in others meanwhile."""
    tokens = prompt(120, "b25")
    expected = stage.expected(tokens)
    stage.fail_next(Fault.STALL)
    stage.d.add(tokens, "x")
    stage.p.wait_until(SENDING)
    stage.d.abort("x")
    [again] = stage.d.wait([stage.d.add(tokens, "x")])
    assert [again["outputs"][0]["token_ids"]] == expected
    assert stage.d.stats()["quarantined"] == 1
    stage.p.wait_until("disagg.transfer.live_handles() == 1")  # the one that hangs
    assert stage.d.stats()["quarantined"] == 1
    stage.p.execute("faulty.go_on()")
    stage.at_rest()
    assert stage.d.tokens([tokens]) == expected


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.ERROR_AFTER_DATA], ids=lambda fault: fault.value)
def test_b27_a_transfer_ends_in_err(fault, stage):
    """B27: its request goes another way, its handle is released, and D keeps its blocks until P is dead. The others of
    the same batch arrive, or are not posted any more."""
    prompts = [prompt(70 + number, f"b27 {fault.value}") for number in range(4)]
    expected = stage.expected(*prompts)
    before = stage.d.counters()
    stage.fail_next(fault)
    assert stage.d.tokens(prompts) == expected
    counted = stage.d.counters().since(before)
    assert counted["attempts_total:failed"] + counted["attempts_total:done"] == 4
    if fault is Fault.ERROR:  # else the notice may come before P's message: then all is well
        assert counted["attempts_total:failed"] >= 1 and stage.d.stats()["quarantined"] == 1
    assert stage.p.evaluate("disagg.transfer.live_handles()") == 0
    stage.bury(stage.p)
    stage.at_rest()
    assert stage.d.tokens([prompts[0] + prompt(40, "b27 more")]) == stage.expected(
        prompts[0] + prompt(40, "b27 more"))


def test_b30_a_prompt_larger_than_p(stage):
    """B30: P's pool has fewer blocks than the prompt needs: P says so at once, once, and lives."""
    stage.bury(stage.p)
    small = stage.engine("kv_producer", 1, PATIENT)
    stage.ps.append(small)
    small.ready()
    small.do("ballast", free_blocks=8)
    stage.d.wait_for(small)
    big, fitting = prompt(300, "b30"), prompt(60, "b30")
    before, served = stage.d.counters(), small.counters()
    try:
        small.execute("scheduler.block_manager.num_total_gpu_blocks = 8")
        assert stage.d.tokens([big]) == stage.expected(big)
    finally:
        small.execute(f"scheduler.block_manager.num_total_gpu_blocks = {POOL}")
        small.do("ballast", free_blocks=0)
    counted = stage.d.counters().since(before)
    assert counted["attempts_total:failed"] == counted["agent:decode_granted"] == 1
    assert small.counters().since(served)["agent:prefill_failed"] == 1
    assert stage.d.tokens([fitting]) == stage.expected(fitting)
    stage.at_rest()
    stage.bury(small)


def test_b30_a_token_that_p_does_not_have(stage):
    """B30: an id beyond the vocabulary in the job alone: P refuses the job and lives, D prefills what it was asked."""
    tokens = prompt(60, "b30 token")
    stage.d.execute("def submit(attempt, token_ids, *rest, start=disagg.protocol.decode.submit):\n"
                    "    start(attempt, [*token_ids[:-1], 2**31 - 1], *rest)\n"
                    "disagg.protocol.decode.submit = submit")
    before, served = stage.d.counters(), stage.p.counters()
    try:
        assert stage.d.tokens([tokens]) == stage.expected(tokens)
    finally:
        stage.d.execute("del disagg.protocol.decode.submit")
    counted = stage.d.counters().since(before)
    assert counted["attempts_total:failed"] == counted["agent:decode_granted"] == 1
    assert stage.p.counters().since(served)["agent:prefill_failed"] == 1
    after = prompt(61, "b30 token")
    assert stage.d.tokens([after]) == stage.expected(after)
    assert stage.d.counters().since(before)["attempts_total:done"] == 1
