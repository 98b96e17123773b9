# SPDX-License-Identifier: Apache-2.0
"""B115 on V1's real schedulers: prompts with LoRA adapters go remote, and nobody takes one adapter for another. A slot
of the simulated memory depends on the files of the adapter as they were at the first step with it: the workers may read
them again at any step. Real engines: tests/v1_engines/test_real_adapters.py.
"""
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import RequestStatus

from tests.adapters import write_stub
from tests.v1 import simulated
from tests.v1.simulated import BLOCK_SIZE, Engine, ScopedTokens, WrongRead, seed_of
from tests.v1.test_hazards import PARKED, end, prompt
from tests.v1.test_holds import ASKS, HOLD, finish
from tests.v1.test_scopes import sampling
from vllm_pd.handover.jobs import JobStage
from vllm_pd.protocol.actions import Cancelled
from vllm_pd.protocol.holds import hold_params
from vllm_pd.protocol.scope import NO_SCOPE, NOBODYS, PromptScope, adapter_scope
from vllm_pd.transfer.requests import Read
from vllm_pd.v1 import prefill as prefill_module
from vllm_pd.v1.adapter_files import AdapterReader
from vllm_pd.v1.adapters import AdapterBook
from vllm_pd.v1.decode import ParkedRequests
from vllm_pd.v1.prefill import InternalRequests
from vllm_pd.v1.scheduler import HandoverScheduling

BATCH = 128  # tokens
LONG = 600  # tokens, of several steps


class Turns:
    """The reader's threads are the test's: a look that is asked for is taken at once, unless `hang`."""

    def __init__(self, monkeypatch):
        self.hang = False
        monkeypatch.setattr(AdapterReader, "start", lambda reader: None)
        ask = AdapterReader.ask

        def asked(reader):
            ask(reader)
            if not self.hang:
                reader.turn()

        monkeypatch.setattr(AdapterReader, "ask", asked)


@pytest.fixture(autouse=True)
def turns(monkeypatch):
    return Turns(monkeypatch)


@pytest.fixture
def d(model_folder, in_flight):
    return Engine(model_folder, in_flight, role="kv_consumer", max_loras=2)


@pytest.fixture
def p(model_folder, in_flight):
    return Engine(model_folder, in_flight, role="kv_producer", max_loras=3)


@pytest.fixture
def narrow(model_folder, in_flight):
    """A P with room for one adapter in a batch, and three in memory."""
    return Engine(model_folder, in_flight, role="kv_producer", max_loras=1, max_cpu_loras=3)


@pytest.fixture
def loras(tmp_path):
    return [LoRARequest(name, number, str(write_stub(tmp_path / name, name)))
            for number, name in enumerate(("one", "two", "three"), 1)]


def load(engine, *loras) -> list[PromptScope]:
    """As the front end does. Returns the scopes of these."""
    for one in loras:
        assert engine.binding.adapters.load(one, lambda request: True)
    engine.binding.adapters.look()
    engine.run()
    return [PromptScope("", engine.binding.adapters.digest(one)) for one in loras]


def change(lora, content="other files") -> None:
    time.sleep(0.02)  # times of files go by the clock's ticks
    write_stub(Path(lora.lora_path), content)


def look(engine) -> None:
    """The thread's look that is due every second."""
    engine.binding.adapters._reader.turn()


def check(engine, attempt, tokens, scope) -> None:
    """The job's last write was posted, and sends what is right."""
    engine.check_sent(attempt, ScopedTokens(tokens, seed_of(scope.salt, scope.adapter)))
    engine.transfer.end(str(attempt))


def compute(engine, tokens, number, scope) -> int:
    """A job of a peer, whose blocks are checked. Returns how many tokens were computed."""
    before = engine.tokens_computed
    attempt = engine.job(tokens, number=number, scope=scope)
    engine.run()
    check(engine, attempt, tokens, scope)
    return engine.tokens_computed - before


# The decode engine.


def test_b115_a_job_carries_the_adapter_of_its_request(d, loras):
    scopes = [NO_SCOPE, *load(d, *loras[:2])]
    one = prompt(100)
    for name, lora in zip("abc", (None, *loras[:2]), strict=True):
        d.add(name, one, lora_request=lora)
    d.run()
    assert [d.protocol.scopes[d.attempt(name)] for name in "abc"] == scopes, "none waits for another"
    for name in "abc":
        d.prefilled(name)
    end(d)


def stays(engine) -> bool:
    end(engine)
    return not engine.protocol.jobs and ["decision", "local", "feature"] in engine.counted()


def test_b115_what_the_front_end_has_not_loaded_stays_on_d(d, loras):
    d.add("a", prompt(100), lora_request=loras[0])
    assert stays(d)
    load(d, loras[0])
    d.add("b", prompt(100), lora_request=loras[0])
    assert stays(d), "nobody knows since when its blocks are in the prefix cache"


def test_b115_prompts_of_changed_files_stay_on_d(d, loras):
    load(d, loras[0])
    change(loras[0])
    look(d)
    d.add("a", prompt(100), lora_request=loras[0])
    assert stays(d)


def test_b115_files_that_can_t_be_looked_at_keep_a_prompt_on_d_for_a_while(d, loras, monkeypatch):
    def stale(folder):
        raise OSError("stale file handle")

    load(d, loras[0])
    with monkeypatch.context() as patch:
        patch.setattr(d.binding.adapters._reader, "look", stale)
        look(d)
    d.add("a", prompt(100), lora_request=loras[0])
    assert stays(d)
    look(d)
    d.add("b", prompt(100), lora_request=loras[0])
    d.run()
    assert d.status("b") is PARKED
    d.prefilled("b")
    end(d)


def changed_since_the_decision(d, lora, monkeypatch):
    """Returns the scopes of the job of a request that was decided about before its adapter's files changed."""
    commit = ParkedRequests.commit

    def late(handover, request, decision):
        change(lora)
        look(d)
        return commit(handover, request, decision)

    monkeypatch.setattr(ParkedRequests, "commit", late)
    d.add("a", prompt(100), lora_request=lora)
    d.run()
    return [d.protocol.scopes[attempt] for attempt in d.protocol.jobs]


def test_b115_a_job_has_the_scope_by_which_it_was_decided(d, loras, monkeypatch):
    (scope,) = load(d, loras[0])
    assert changed_since_the_decision(d, loras[0], monkeypatch) == [scope]
    d.lost(d.attempt("a"))
    d.run()
    assert len(d.protocol.jobs) == 1, "it can't go remote any more"


def test_b115_an_adapter_without_a_digest_is_never_the_base_model(d, loras):
    request = d.add("a", prompt(100), lora_request=loras[0])
    assert d.binding.remote_prefills._scope(request) == PromptScope("", NOBODYS) != NO_SCOPE
    assert stays(d)


# The prefill engine.


def test_b115_jobs_of_two_adapters_share_no_block_on_p(p, loras):
    """Nor with the base model; those of one adapter do, and with P's own client of it."""
    one, scopes = prompt(100), [NO_SCOPE, *load(p, *loras)]
    listed = [adapter_scope(scope.adapter) for scope in scopes[1:]]
    assert p.protocol.listed_scopes == ("salt", *reversed(listed))
    p.add("client", one, lora_request=loras[0])
    p.run()
    rest = 100 - 6 * BLOCK_SIZE
    computed = [compute(p, one, number, scope) for number, scope in enumerate(scopes * 2)]
    assert computed == [100, rest, 100, 100] + [rest] * 4
    assert not set(p.binding.adapters._keys) - {1, 2, 3}, "nothing was loaded for a job"
    finish(p)


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
def test_b115_an_engine_that_decodes_offers_no_adapter(model_folder, in_flight, loras, role):
    engine = Engine(model_folder, in_flight, role=role, max_loras=2)
    (scope,) = load(engine, loras[0])
    assert scope.adapter and engine.protocol.listed_scopes == ()


def test_b115_p_refuses_an_adapter_that_it_does_not_have(p, d, loras):
    load(p, loras[0])
    (scope,) = load(d, loras[1])
    attempt = p.job(prompt(100), scope=scope)
    p.run()
    assert p.protocol.calls == [("failed", attempt)] and not p.tokens_computed
    finish(p)


def test_b115_p_keeps_no_prompt_with_an_adapter_and_d_claims_none(model_folder, p, d, loras):
    load(p, loras[0])
    load(d, loras[0])
    tokens = prompt(5 * BLOCK_SIZE)
    p.add("a", tokens, params=sampling(ASKS), lora_request=loras[0])
    p.run()
    assert not p.protocol.held and p.params.get("a") is None
    d.add("a", tokens, params=sampling(hold_params(HOLD)), lora_request=loras[0])
    d.run()
    assert not d.protocol.claimed and len(d.protocol.jobs) == 1
    d.prefilled("a")
    end(d)


def test_b115_no_prefix_of_a_prompt_with_an_adapter_is_read(model_folder, in_flight, loras):
    p = Engine(model_folder, in_flight, role="kv_producer", max_loras=1, prefix_reads="always")
    (scope,) = load(p, loras[0])
    tokens = prompt(100)
    attempt = p.job(tokens, cached_blocks=3, scope=scope)
    p.run()
    assert not any(isinstance(one, Read) for one in p.transfer.requests)
    check(p, attempt, tokens, scope)
    finish(p)


# The end of a job.


def computed(p, lora, turns, tokens=LONG):
    """A job that is computed, and waits for a look. Returns it, its prompt and its scope."""
    (scope,) = load(p, lora)
    turns.hang = True
    one = prompt(tokens)
    attempt = p.job(one, scope=scope)
    p.run()
    assert p.binding.prefill_jobs.find(attempt) is JobStage.CHECKING
    assert attempt not in [one for _, one in p.protocol.calls] and not p.last_writes()
    return attempt, one, scope


def test_b115_a_job_ends_when_the_files_were_seen_unchanged(p, loras, turns):
    attempt, tokens, scope = computed(p, loras[0], turns)
    assert compute(p, prompt(100), 7, NO_SCOPE) == 100, "others go on"
    assert p.access.due is not None
    look(p)
    p.run()
    check(p, attempt, tokens, scope)
    finish(p)


def test_b115_a_look_that_began_before_the_end_of_the_job_is_not_enough(p, loras, turns):
    (scope,) = load(p, loras[0])
    turns.hang = True
    attempt = p.job(prompt(LONG), scope=scope)
    while p.binding.prefill_jobs.find(attempt) is not JobStage.CHECKING:
        look(p)
        p.turn()
    p.run()
    assert not p.last_writes()
    change(loras[0])
    look(p)
    p.run()
    assert p.protocol.calls[-1] == ("failed", attempt) and not p.last_writes()
    finish(p)


@pytest.mark.parametrize("when", ["before it begins", "while it is computed", "when it is computed"])
def test_b115_a_job_whose_files_change_is_lost(p, loras, turns, when):
    (scope,) = load(p, loras[0])
    p.ends_chunks = False  # they may send what is wrong
    if when == "before it begins":
        change(loras[0])
    attempt = p.job(prompt(LONG), scope=scope)
    if when == "while it is computed":
        p.turn()
        p.turn()
        change(loras[0])
    if when == "when it is computed":
        turns.hang = True
        p.run()
        change(loras[0])
        look(p)
    p.run()
    for key in list(p.transfer.open_writes):
        p.transfer.end(key)
    p.run()
    assert p.protocol.calls == [("failed", attempt)] and not p.last_writes()
    assert p.protocol.listed_scopes == ("salt", ), "it is not offered any more"
    finish(p)


def test_b115_a_file_system_that_hangs_ends_the_job(p, loras, turns, monkeypatch):
    attempt, _, _ = computed(p, loras[0], turns)
    assert p.binding.prefill_jobs.checks_due == p.access.due
    monkeypatch.setattr(prefill_module, "CHECK_S", 0.0)
    p.access.wake()  # as the timer does
    p.run()
    assert p.protocol.calls == [("failed", attempt)]
    finish(p)


def test_b115_each_job_waits_for_its_look_as_long_as_it_may(p, loras, turns, monkeypatch):
    """Two that are computed one after the other: the end of the first one's time sets a timer for the second's."""
    later = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later[0], time=time.time)
    monkeypatch.setattr(prefill_module, "time", clock)
    p.binding.adapters._reader.clock = clock.monotonic
    first, _, scope = computed(p, loras[0], turns)
    later[0], tokens = 3.0, prompt(LONG)
    second = p.job(tokens, number=9, scope=scope)
    p.run()
    p.access.due, later[0] = None, 5.5
    p.access.wake()
    p.run()
    assert p.protocol.calls == [("failed", first)]
    assert p.access.due == p.binding.prefill_jobs.checks_due is not None
    look(p)
    p.run()
    check(p, second, tokens, scope)
    finish(p)


@pytest.mark.parametrize("chunk", [True, False])
def test_b115_a_job_may_be_cancelled_before_it_was_checked(p, loras, turns, chunk):
    p.ends_chunks = not chunk
    attempt, _, _ = computed(p, loras[0], turns)
    assert bool(p.transfer.open_writes) is chunk
    p.tell(Cancelled(attempt))
    p.run()
    if chunk:
        p.transfer.end(*p.transfer.open_writes, ok=False)
        p.run()
    assert p.protocol.calls == [("ended", attempt)]
    look(p)
    finish(p)


def test_b115_a_write_that_fails_before_the_check_fails_the_job(p, loras, turns):
    p.ends_chunks = False
    attempt, _, _ = computed(p, loras[0], turns)
    p.transfer.end(*p.transfer.open_writes, ok=False)
    p.run()
    look(p)
    p.run()
    assert p.protocol.calls == [("failed", attempt)] and not p.last_writes()
    finish(p)


# Adapters in a batch.


def test_b115_jobs_of_more_adapters_than_fit_wait_and_hold_up_no_other(narrow, loras):
    """Two adapters and the base model, with max_loras=1: all are sent, and the base model's does not wait."""
    scopes = [*load(narrow, *loras[:2]), NO_SCOPE]
    prompts = [prompt(LONG) for _ in scopes]
    attempts = [narrow.job(tokens, number=number, scope=scope)
                for number, (tokens, scope) in enumerate(zip(prompts, scopes, strict=True))]
    narrow.turn()
    assert narrow.binding.prefill_jobs.find(attempts[1]) is JobStage.QUEUED
    narrow.run()
    for attempt, tokens, scope in zip(attempts, prompts, scopes, strict=True):
        check(narrow, attempt, tokens, scope)
    order = [one.key for one in narrow.last_writes()]
    assert order.index(str(attempts[1])) == 2, "it was passed"
    finish(narrow)


def running_client(engine, lora, tokens=120):
    engine.add("client", prompt(20), tokens, lora_request=lora)
    for _ in range(4):
        engine.turn()
    assert engine.status("client") is RequestStatus.RUNNING


def test_b115_a_job_that_waits_long_for_others_adapters_is_given_back(narrow, loras, monkeypatch):
    scopes = load(narrow, *loras[:2])
    running_client(narrow, loras[0])
    attempt = narrow.job(prompt(100), scope=scopes[1])
    tokens = prompt(100)
    other = narrow.job(tokens, number=1)
    for _ in range(12):
        narrow.turn()
    check(narrow, other, tokens, NO_SCOPE)
    assert narrow.binding.prefill_jobs.find(attempt) is JobStage.QUEUED
    monkeypatch.setattr(prefill_module, "UNFIT_S", 0.0)
    narrow.turn()
    narrow.turn()
    assert ("failed", attempt) in narrow.protocol.calls and "client" not in narrow.ended
    finish(narrow)


def test_b115_a_begun_job_that_v1_passes_over_is_given_back(narrow, loras, monkeypatch):
    """It began before the client that took its place."""
    scopes = load(narrow, *loras[:2])
    monkeypatch.setattr(InternalRequests, "_fits", lambda jobs, job, fits=InternalRequests._fits:
                        job.request is None or fits(jobs, job))
    running_client(narrow, loras[0])
    attempt = narrow.job(prompt(100), scope=scopes[1])
    for _ in range(4):
        narrow.turn()
    assert narrow.binding.prefill_jobs.waiting == [attempt]
    monkeypatch.setattr(prefill_module, "UNFIT_S", 0.0)
    narrow.turn()
    narrow.turn()
    assert ("failed", attempt) in narrow.protocol.calls and "client" not in narrow.ended
    finish(narrow)


def stream(narrow, loras) -> bool:
    """Jobs of one adapter, of which one runs at any time, and a client with another. Returns whether that was
    answered."""
    scope, _ = load(narrow, *loras[:2])
    for number in range(60):
        narrow.job(prompt(BATCH + 22), number=number, scope=scope)
        narrow.turn()
        for write in list(narrow.transfer.open_writes):
            narrow.transfer.end(write)
        if number == 3:
            narrow.add("client", prompt(20), 4, lora_request=loras[1])
    return "client" in narrow.ended


def test_b115_a_stream_of_jobs_starves_no_client(narrow, loras):
    assert stream(narrow, loras)


def test_b115_jobs_that_pass_clients_are_found(narrow, loras, monkeypatch):
    """Planted: a job begins wherever V1 would compute it."""
    monkeypatch.setattr(InternalRequests, "_fits", lambda jobs, job: True)
    assert not stream(narrow, loras)


def test_b115_no_two_adapters_of_one_name_are_in_a_batch(p, loras):
    """V1 would take one for the other: it knows them by name in one place, and by number in the next."""
    (scope,) = load(p, loras[0])
    before = LoRARequest("one", 9, loras[0].lora_path)
    load(p, before)
    running_client(p, loras[0])
    attempt = p.job(prompt(100), scope=scope)
    for _ in range(4):
        p.turn()
    assert p.binding.prefill_jobs.find(attempt) is JobStage.QUEUED
    p.run()
    p.transfer.end(str(attempt))
    begun = p.job(prompt(LONG), number=1, scope=scope)
    p.turn()
    p.turn()
    assert p.binding.prefill_jobs.find(begun) is JobStage.COMPUTING
    p.add("late", prompt(20), lora_request=loras[0])
    assert p.protocol.calls[-1] == ("failed", begun)
    finish(p)


def two_adapters(narrow, loras):
    """Of clients, with no job anywhere."""
    load(narrow, *loras[:2])
    for name, lora, tokens in (("a", loras[1], 100), ("b", loras[0], 300), ("c", loras[0], 300), ("d", loras[1], 300)):
        narrow.add(name, prompt(tokens), 30, lora_request=lora)
        narrow.turn()
    narrow.run()


def test_b115_no_step_has_more_adapters_than_fit(narrow, loras):
    two_adapters(narrow, loras)
    finish(narrow)


def test_b115_v1_counts_too_few_adapters_with_stages(narrow, loras, monkeypatch):
    """Planted: V1's own count, without those whose token is in flight. A release in which this fails has mended it."""
    if simulated.STAGES == 1:
        pytest.skip("each step has all that runs")
    monkeypatch.delattr(HandoverScheduling, "_handle_blocked_waiting_request")
    with pytest.raises(AssertionError):
        two_adapters(narrow, loras)


# Planted defects.


def test_b115_a_job_that_ignores_its_adapter_is_found(p, loras, monkeypatch):
    """Planted: P computes the base model."""
    (scope,) = load(p, loras[0])
    monkeypatch.setattr(prefill_module, "EngineCoreRequest", lambda **fields: EngineCoreRequest(
        **{**fields, "lora_request": None}))
    with pytest.raises(WrongRead):
        compute(p, prompt(100), 0, scope)


def test_b115_a_job_that_ends_without_a_look_is_found(p, loras, monkeypatch):
    """Planted: what was seen when it began is enough, though the workers read at its first step."""
    (scope,) = load(p, loras[0])
    monkeypatch.setattr(AdapterBook, "unchanged_since", lambda *asked: True)
    change(loras[0])
    with pytest.raises(WrongRead):
        compute(p, prompt(100), 0, scope)


def test_b115_a_scope_of_now_is_found(d, loras, monkeypatch):
    """Planted: the scope is that of an adapter that can go remote now."""
    (scope,) = load(d, loras[0])
    monkeypatch.setattr(ParkedRequests, "_scope", lambda handover, request: scope if handover._can_go_remote(request)
                        else NO_SCOPE)
    assert changed_since_the_decision(d, loras[0], monkeypatch) == [NO_SCOPE]
