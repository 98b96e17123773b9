# SPDX-License-Identifier: Apache-2.0
"""B102 on V1's real schedulers: a prefill engine keeps a prompt, a decode engine reads it."""
from types import SimpleNamespace

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.parallel_sampling import ParentRequest

from tests.v1.simulated import BLOCK_SIZE, PEER, Engine, answer, contents
from tests.v1.test_hazards import PARKED, end, prompt
from vllm_pd.protocol.actions import (
    AttemptEnd,
    DropPeer,
    Fallback,
    FallbackReason,
    HoldEnd,
    HoldEnded,
    Prefilled,
    ReadHold,
    Released,
    StopRead,
)
from vllm_pd.protocol.hashes import token_digest
from vllm_pd.protocol.holds import hold_params
from vllm_pd.protocol.messages import Attempt, Timings
from vllm_pd.transfer.requests import AddTransferPeer, CancelTransfer, DropTransferPeer, Read

HOLD = Attempt(PEER, "held", 5)
ASKS = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
        "remote_host": None, "remote_port": None}


def add(engine, request_id, tokens, params, count=4):
    engine.add(request_id, tokens, count, params=SamplingParams(
        max_tokens=count, temperature=0, ignore_eos=True, extra_args={"kv_transfer_params": params}))
    engine.run()


def counted(engine, *names):
    return [tuple(call) for call in engine.counted() if call[0] in names]


def finish(engine):
    engine.run()
    engine.check_answers()
    engine.check_at_rest()


# The prefill engine.


@pytest.fixture
def holder(model_folder, in_flight):
    return Engine(model_folder, in_flight, role="kv_producer", max_parked_fraction=0.5)


def check_held(engine, hold, tokens):
    digest, block_ids = engine.protocol.held[hold]
    assert digest == token_digest(tokens) and len(block_ids) == -(-len(tokens) // BLOCK_SIZE)
    found = [engine.slots[block_ids[at // BLOCK_SIZE], at % BLOCK_SIZE] for at in range(len(tokens))]
    assert found == contents(tokens), "the blocks of a hold have other KV"


@pytest.mark.parametrize("length", [BLOCK_SIZE + 1, 4 * BLOCK_SIZE, 9 * BLOCK_SIZE + 3])
def test_b102_p_keeps_the_prompt_s_blocks_until_its_hold_ends(holder, length):
    tokens = prompt(length)
    add(holder, "a", tokens, ASKS, count=1)
    (hold,) = holder.protocol.held
    assert holder.params["a"] == hold_params(hold) | {"remote_prefill_cached_tokens": 0}
    for number in range(12):  # as many blocks as there are, twice
        add(holder, f"other {number}", prompt(10 * BLOCK_SIZE + number), {}, count=2)
    check_held(holder, hold, tokens)
    holder.tell(HoldEnded(hold, HoldEnd.DONE))
    finish(holder)
    assert counted(holder, "hold") == [("hold", "made"), ("hold", "done")]


def test_b102_p_keeps_no_more_than_its_share(holder):
    first = prompt(20 * BLOCK_SIZE)
    add(holder, "a", first, ASKS, count=1)
    add(holder, "b", prompt(15 * BLOCK_SIZE), ASKS, count=1)
    (hold,) = holder.protocol.held
    assert "b" not in holder.params
    holder.tell(HoldEnded(hold, HoldEnd.EXPIRED))
    add(holder, "c", prompt(16 * BLOCK_SIZE), ASKS, count=1)
    assert "c" in holder.params
    holder.tell(HoldEnded(list(holder.protocol.held)[-1], HoldEnd.LOST))
    finish(holder)
    assert [event for _, event in counted(holder, "hold")] == ["made", "full", "expired", "made", "lost"]


def test_b102_b34_both_halves_of_an_engine_share_the_cap(model_folder, in_flight):
    """Of 64 blocks 32 may be held, parked or in quarantine together, so that a peer that is stopped leaves the rest."""
    engine = Engine(model_folder, in_flight, role="kv_both", threshold=1, max_parked_fraction=0.5)
    engine.add("parked", prompt(12 * BLOCK_SIZE))
    engine.run()
    assert engine.status("parked") is PARKED
    add(engine, "too long to keep", prompt(21 * BLOCK_SIZE), ASKS, count=1)
    assert not engine.protocol.held
    add(engine, "kept", prompt(15 * BLOCK_SIZE), ASKS, count=1)
    (hold,) = engine.protocol.held
    add(engine, "stays", prompt(6 * BLOCK_SIZE), None)
    assert "stays" in engine.ended, "it is prefilled here"
    add(engine, "parked too", prompt(5 * BLOCK_SIZE), None)
    assert engine.status("parked too") is PARKED
    assert engine.gauge("parked_blocks") == 17 and engine.gauge("held_blocks") == 15
    for name in ("parked", "parked too"):
        engine.prefilled(name)
    engine.tell(HoldEnded(hold, HoldEnd.DONE))
    finish(engine)


def test_b102_what_holds_share_counts_once(holder):
    """The pool has 64 blocks, of which 32 may be held: a common beginning of 20, and 1 more for each of 10 prompts."""
    common = prompt(20 * BLOCK_SIZE)
    for number in range(10):
        add(holder, f"r{number}", common + prompt(5 + number), ASKS, count=1)
    assert len(holder.protocol.held) == 10 and holder.gauge("held_blocks") == 30
    add(holder, "more", prompt(3 * BLOCK_SIZE), ASKS, count=1)
    assert "more" not in holder.params
    first, *others = list(holder.protocol.held)
    holder.tell(HoldEnded(first, HoldEnd.DONE))
    holder.run()
    assert holder.gauge("held_blocks") == 29
    holder.tell(*(HoldEnded(one, HoldEnd.DONE) for one in others))
    finish(holder)
    assert holder.gauge("held_blocks") == 0 and not holder.binding.holds._blocks


def test_b102_as_many_holds_of_the_same_blocks_as_there_could_be_of_their_own(holder):
    tokens = prompt(3 * BLOCK_SIZE)
    for number in range(20):
        add(holder, f"r{number}", tokens, ASKS, count=1)
    assert len(holder.protocol.held) == 16 == len(holder.params)
    holder.tell(*(HoldEnded(one, HoldEnd.DONE) for one in holder.protocol.held))
    finish(holder)


def test_b102_the_samples_of_a_request_have_one_hold(holder):
    """V1's own names of them. Whichever ends last is in the answer. Another prompt, or another parent, has its own."""
    sampling = SamplingParams(n=3, max_tokens=1, temperature=1.0, ignore_eos=True,
                              extra_args={"kv_transfer_params": ASKS})
    parent = ParentRequest(EngineCoreRequest("cmpl-a", [1], None, sampling, None, 0.0, None, None, None,
                                             external_req_id="cmpl-a"))
    tokens = prompt(5 * BLOCK_SIZE + 3)
    names = [parent.get_child_info(index) for index in range(3)]
    for name, params in names:
        holder.add(name, tokens, 1, params=params)
    holder.run()
    (hold,) = holder.protocol.held
    assert [holder.params[name]["remote_request_id"] for name, _ in names] == [f"{hold.request_id}#{hold.number}"] * 3
    for name, length in (("3_cmpl-a", 4), ("0_cmpl-b", 5), ("cmpl-a", 5), ("b_cmpl-a", 5)):
        add(holder, name, prompt(length * BLOCK_SIZE) if length == 4 else tokens, ASKS, count=1)
    assert len(holder.protocol.held) == 5
    holder.tell(HoldEnded(hold, HoldEnd.EXPIRED))
    add(holder, "9_cmpl-a", tokens, ASKS, count=1)
    assert len(holder.protocol.held) == 6, "what is over is not named again"
    holder.tell(*(HoldEnded(one, HoldEnd.DONE) for one in list(holder.protocol.held)[1:]))
    finish(holder)
    assert not holder.binding.holds._samples


@pytest.mark.parametrize("broken", ["vllm_pd.handover.holds.token_digest", "hold"])
def test_b102_nothing_is_held_when_something_unexpected_goes_wrong(holder, broken, monkeypatch):
    def fail(*arguments):
        raise MemoryError("injected")

    if broken == "hold":
        holder.protocol.hold = fail
    else:
        monkeypatch.setattr(broken, fail)
    add(holder, "a", prompt(5 * BLOCK_SIZE), ASKS, count=1)
    holder.check_answers()
    holder.check_at_rest(errors=1)
    assert not holder.params


def test_b102_a_leg_for_p_on_an_engine_of_both_roles_counts_as_no_wish(model_folder, in_flight):
    engine = Engine(model_folder, in_flight, role="kv_both", threshold=1)
    add(engine, "a", prompt(5 * BLOCK_SIZE), ASKS, count=1)
    assert counted(engine, "asked", "decision") == [("decision", "local", "asked")]
    add(engine, "b", prompt(5 * BLOCK_SIZE), ASKS | {"pd": "local"}, count=1)
    assert counted(engine, "asked") == [("asked", "local", "local")]
    engine.tell(*(HoldEnded(one, HoldEnd.DONE) for one in engine.protocol.held))
    finish(engine)


@pytest.mark.parametrize("claimed", [True, False])
@pytest.mark.parametrize("shares", [True, False])
def test_b102_b10_a_job_that_does_not_fit_beside_claimed_holds_is_refused_at_once(holder, claimed, shares):
    """It would wait for a D. What nobody has claimed comes free soon; what is claimed may be the job's own prefix."""
    tokens = prompt(30 * BLOCK_SIZE)
    add(holder, "a", tokens, ASKS, count=1)
    (hold,) = holder.protocol.held
    holder.protocol.claimed_here = 30 if claimed else 0
    job = holder.job((tokens if shares else []) + prompt(40 * BLOCK_SIZE - len(tokens if shares else [])))
    holder.run()
    assert holder.protocol.calls.count(("failed", job)) == (claimed and not shares)
    holder.tell(HoldEnded(hold, HoldEnd.DONE))
    holder.run()
    for one in holder.last_writes():
        holder.transfer.end(one.key)
    finish(holder)
    assert ("sent", job) in holder.protocol.calls or (claimed and not shares)


def test_b102_b10_an_engine_that_needs_blocks_ends_what_nobody_has_claimed(holder):
    add(holder, "a", prompt(28 * BLOCK_SIZE), ASKS, count=1)
    (hold,) = holder.protocol.held
    assert holder.protocol.rooms == 0, "nothing waits"
    holder.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    holder.add("long", prompt(45 * BLOCK_SIZE))
    holder.run()
    assert holder.protocol.rooms == 0, "it waits for the end of the pause"
    holder.scheduler.set_pause_state(PauseState.UNPAUSED)
    holder.run()
    assert holder.protocol.rooms and "long" not in holder.ended
    holder.tell(HoldEnded(hold, HoldEnd.CLOSED))
    finish(holder)


def test_b102_b10_a_prompt_whose_grammar_is_there_waits_for_blocks_too(holder):
    """V1 keeps it with those that wait for their grammar until it begins."""
    add(holder, "a", prompt(28 * BLOCK_SIZE), ASKS, count=1)
    holder.scheduler.structured_output_manager = SimpleNamespace(
        grammar_init=lambda request: None, grammar_bitmask=lambda *_: None, should_advance=lambda request: False)
    holder.add("guided", prompt(45 * BLOCK_SIZE), params=SamplingParams(
        max_tokens=4, temperature=0, ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="a*")))
    for _ in range(5):
        holder.turn()
    assert holder.protocol.rooms == 0
    holder.scheduler.requests["guided"].structured_output_request.grammar = object()
    holder.run()
    assert holder.protocol.rooms


def test_b102_blocks_that_come_free_with_a_step_in_flight_need_no_room(model_folder):
    engine = Engine(model_folder, 2, role="kv_producer", max_parked_fraction=0.5)
    add(engine, "kept", prompt(20 * BLOCK_SIZE), ASKS, count=1)
    engine.add("gone", prompt(30 * BLOCK_SIZE), 4)
    engine.turn()
    engine.add("next", prompt(35 * BLOCK_SIZE), 2)
    engine.turn()
    engine.abort("gone")
    engine.turn()
    assert engine.scheduler.defer_block_free and engine.protocol.rooms == 0
    engine.run()
    assert "next" in engine.ended and engine.protocol.rooms == 0
    engine.tell(*(HoldEnded(one, HoldEnd.DONE) for one in engine.protocol.held))
    finish(engine)


def test_b102_a_job_that_is_refused_begins_no_wave(holder):
    """The other ranks of a group rest."""
    add(holder, "a", prompt(30 * BLOCK_SIZE), ASKS, count=1)
    holder.protocol.claimed_here, waves = 30, holder.binding._access.waves
    holder.binding._access.engines_running = False
    job = holder.job(prompt(40 * BLOCK_SIZE))
    holder.run()
    assert ("failed", job) in holder.protocol.calls and holder.binding._access.waves == waves


def test_b102_what_is_parked_needs_no_room(model_folder, in_flight):
    engine = Engine(model_folder, in_flight, role="kv_both", threshold=1, max_parked_fraction=0.5)
    add(engine, "kept", prompt(10 * BLOCK_SIZE), ASKS, count=1)
    add(engine, "parked", prompt(10 * BLOCK_SIZE), None)
    assert engine.status("parked") is PARKED and engine.protocol.rooms == 0
    engine.prefilled("parked")
    engine.tell(*(HoldEnded(one, HoldEnd.DONE) for one in engine.protocol.held))
    finish(engine)


@pytest.mark.parametrize("fraction, hold_s, warns", [(1.0, 30.0, True), (1.0, 0, False), (0.9, 30.0, False)])
def test_b102_a_share_that_leaves_nothing_is_said(model_folder, caplog, fraction, hold_s, warns):
    Engine(model_folder, role="kv_producer", max_parked_fraction=fraction, hold_s=hold_s)
    assert ("max_parked_fraction=1 with hold_s" in caplog.text) is warns


@pytest.mark.parametrize("spoil", ["aborted", "short", "not asked", "role", "off", "state", "feature", "preempted"])
def test_b102_p_names_itself_only_with_the_prompt_kept(model_folder, in_flight, spoil, monkeypatch):
    settings = {"hold_s": 0} if spoil == "off" else {}
    engine = Engine(model_folder, in_flight, role="kv_consumer" if spoil == "role" else "kv_producer", threshold=10**6,
                    **settings)
    engine.protocol.holds = spoil != "state"
    if spoil == "feature":
        monkeypatch.setattr("vllm_pd.v1.binding.can_go_remote", lambda *asked: False)
    if spoil == "preempted":  # V1 may have taken the blocks of a request that ends while it is preempted
        kept = engine.binding.holds.keep
        engine.binding.holds.keep = lambda *asked: kept(*asked[:4], asked[4][:-1], asked[5])
    tokens = prompt(BLOCK_SIZE if spoil == "short" else 5 * BLOCK_SIZE)
    params = {**ASKS, "do_remote_decode": 1} if spoil == "not asked" else ASKS
    if spoil == "aborted":
        engine.add("a", tokens, 50, params=SamplingParams(max_tokens=50, ignore_eos=True, temperature=0,
                                                          extra_args={"kv_transfer_params": params}))
        for _ in range(3):
            engine.turn()
        engine.abort("a")
    else:
        add(engine, "a", tokens, params, count=1)
    finish(engine)
    assert not engine.params and (spoil == "state" or not engine.protocol.held)


def test_b102_b96_a_reset_of_the_cache_ends_what_nobody_has_claimed(holder):
    add(holder, "a", prompt(5 * BLOCK_SIZE), ASKS, count=1)
    (hold,) = holder.protocol.held
    holder.protocol.close_unclaimed_holds = lambda: holder.tell(HoldEnded(hold, HoldEnd.CLOSED))
    assert holder.scheduler.reset_prefix_cache(reset_running_requests=True)
    finish(holder)


# The decode engine.


@pytest.fixture
def reader(model_folder, in_flight):
    return Engine(model_folder, in_flight, role="kv_consumer", threshold=10**6)


def claimed(engine, request_id="a", tokens=None, hold=HOLD):
    """The attempt of a request that names a hold, and is parked for it."""
    add(engine, request_id, tokens or prompt(6 * BLOCK_SIZE + 3), hold_params(hold))
    assert engine.status(request_id) is PARKED
    attempt = engine.attempt(request_id)
    assert engine.protocol.claimed[attempt] == (hold, token_digest(engine.prompts[request_id]))
    return attempt


def read(engine, attempt):
    """P has granted it: the read that is posted."""
    _, block_ids, cached = engine.protocol.jobs[attempt]
    engine.tell(ReadHold(attempt, PEER, b"memory", block_ids[cached:], list(range(100 + cached, 100 + len(block_ids)))))
    engine.run()
    found = [one for one in engine.transfer.requests if isinstance(one, Read)][-1]
    assert found.local_block_ids == block_ids[cached:]
    return found


def fill(engine, posted, tokens, ok=True):
    """The read ends; P's last block is as long as the prompt."""
    found = contents(tokens)
    for index, block in enumerate(posted.local_block_ids):
        first = (posted.remote_block_ids[index] - 100) * BLOCK_SIZE
        for offset in range(min(BLOCK_SIZE, len(tokens) - first)):
            engine.slots[block, offset] = found[first + offset] if ok else -1
    engine.transfer.end(posted.key, ok, "" if ok else "broken")
    engine.run()


def test_b102_d_reads_what_p_holds_and_goes_on(reader):
    tokens = prompt(6 * BLOCK_SIZE + 3)
    attempt = claimed(reader, tokens=tokens)
    posted = read(reader, attempt)
    assert [type(one) for one in reader.transfer.requests] == [AddTransferPeer, Read]
    fill(reader, posted, tokens)
    assert reader.protocol.calls == [("read_ended", attempt, "")]
    reader.tell(Prefilled(attempt, Timings()))
    finish(reader)
    assert reader.tokens_computed == 4 and reader.outputs["a"] == answer(tokens, 4)
    assert counted(reader, "decision", "attempt", "transfer_bytes") == [
        ("decision", "remote", "held"), ("transfer_bytes", 1), ("attempt", "done")]


def test_b102_d_reads_more_prompts_at_a_time_than_it_has_seats(model_folder, in_flight):
    """They are computed already, and a parked request has no seat. Those that come first begin, the others wait."""
    reader = Engine(model_folder, in_flight, role="kv_consumer", threshold=10**6, max_num_seqs=2,
                    max_parked_fraction=0.5)
    prompts = {f"{number}": prompt(2 * BLOCK_SIZE + 3 + number) for number in range(5)}
    reads = []
    for request_id, tokens in prompts.items():
        attempt = claimed(reader, request_id, tokens, Attempt(PEER, f"held {request_id}", 5))
        reads.append((attempt, read(reader, attempt), tokens))
    for attempt, posted, tokens in reads:
        fill(reader, posted, tokens)
        reader.tell(Prefilled(attempt, Timings()))
    finish(reader)
    assert reader.tokens_computed == 4 * len(prompts)
    assert reader.outputs == {request_id: answer(tokens, 4) for request_id, tokens in prompts.items()}


def test_b102_d_reads_only_what_it_has_not_cached(reader):
    tokens = prompt(6 * BLOCK_SIZE)
    add(reader, "first", tokens[:3 * BLOCK_SIZE], {})
    attempt = claimed(reader, tokens=tokens)
    posted = read(reader, attempt)
    assert posted.remote_block_ids == [103, 104, 105]
    fill(reader, posted, tokens)
    reader.tell(Prefilled(attempt, Timings()))
    finish(reader)


@pytest.mark.parametrize("ok", [True, False])
def test_b102_b93_a_read_that_expires_fails_over_and_brings_nothing(reader, ok):
    """Whatever lands late, it lands in blocks that nobody uses."""
    tokens = prompt(6 * BLOCK_SIZE + 3)
    attempt = claimed(reader, tokens=tokens)
    posted = read(reader, attempt)
    reader.tell(Fallback(attempt, FallbackReason.LEASE, AttemptEnd.EXPIRED, "", PEER), StopRead(attempt))
    reader.run()
    assert CancelTransfer(posted.key) in reader.transfer.requests
    assert "a" in reader.ended and reader.binding.fence.attempts() == [attempt]
    assert reader.outputs["a"] == answer(tokens, 4)
    for number in range(6):
        add(reader, f"other {number}", prompt(9 * BLOCK_SIZE + number), {})
    fill(reader, posted, prompt(6 * BLOCK_SIZE + 3), ok)
    assert reader.protocol.calls[-1][:2] == ("read_ended", attempt)
    reader.tell(Released(attempt))
    finish(reader)


def test_b102_b25_the_client_of_a_parked_request_leaves(reader):
    tokens = prompt(6 * BLOCK_SIZE + 3)
    for moment in ("claimed", "reading"):
        attempt = claimed(reader, moment, tokens)
        posted = read(reader, attempt) if moment == "reading" else None
        reader.abort(moment)
        assert reader.protocol.aborted[-1] == attempt and attempt in reader.binding.fence.attempts()
        if posted is not None:
            fill(reader, posted, tokens, ok=False)
        reader.tell(Released(attempt))
        reader.run()
    finish(reader)


def test_b102_a_denied_claim_is_computed_here(reader):
    attempt = claimed(reader)
    reader.tell(Fallback(attempt, FallbackReason.HOLD, AttemptEnd.FAILED, "tokens"), Released(attempt))
    finish(reader)
    assert counted(reader, "attempt", "decision") == [
        ("decision", "remote", "held"), ("attempt", "failed"), ("decision", "local", "threshold")]


@pytest.mark.parametrize("reason, level", [(FallbackReason.HOLD, "DEBUG"), (FallbackReason.PEER, "WARNING")])
def test_b102_a_name_that_is_made_up_writes_no_line_for_each_request(reader, caplog, reason, level):
    caplog.set_level("DEBUG", logger="vllm.pd")
    attempt = claimed(reader)
    reader.tell(Fallback(attempt, reason, AttemptEnd.FAILED, "unknown"), Released(attempt))
    finish(reader)
    assert [one.levelname for one in caplog.records if "has ended" in one.getMessage()] == [level]


def test_b102_b23_ranks_that_drop_a_peer_and_meet_it_again_are_told_in_that_order(model_folder, in_flight):
    """An engine of both roles: its two halves speak to the same ranks about the same peers."""
    engine = Engine(model_folder, in_flight, role="kv_both", threshold=10**6)
    for number in range(2):
        tokens = prompt(6 * BLOCK_SIZE + number)
        attempt = claimed(engine, f"r{number}", tokens)
        _, block_ids, cached = engine.protocol.jobs[attempt]
        if number:
            engine.tell(DropPeer(PEER))
        engine.tell(ReadHold(attempt, PEER, b"memory", block_ids, list(range(100, 100 + len(block_ids)))))
        engine.run()
        posted = [one for one in engine.transfer.requests if isinstance(one, Read)][-1]
        fill(engine, posted, tokens)
        engine.tell(Prefilled(attempt, Timings()))
        engine.run()
    finish(engine)
    assert [type(one).__name__ for one in engine.transfer.requests] == [
        "AddTransferPeer", "Read", "DropTransferPeer", "AddTransferPeer", "Read"]


def test_b102_the_ranks_learn_a_peer_once_and_again_after_a_failure(reader):
    for number, ok in enumerate((True, False, True)):
        tokens = prompt(4 * BLOCK_SIZE + number)
        attempt = claimed(reader, f"r{number}", tokens)
        fill(reader, read(reader, attempt), tokens, ok)
        assert reader.protocol.calls[-1] == ("read_ended", attempt, "" if ok else "broken")
        reader.tell(*([Prefilled(attempt, Timings())] if ok else [
            Fallback(attempt, FallbackReason.FAILED, AttemptEnd.FAILED, "", PEER), Released(attempt)]))
        reader.run()
    reader.tell(DropPeer(PEER))
    finish(reader)
    assert [type(one).__name__ for one in reader.transfer.requests] == [
        "AddTransferPeer", "Read", "Read", "AddTransferPeer", "Read", "DropTransferPeer"]
    assert reader.transfer.requests[-1] == DropTransferPeer(PEER)


def test_b102_b9_a_twin_waits_and_its_hold_is_not_wanted(reader):
    tokens = prompt(6 * BLOCK_SIZE + 3)
    attempt = claimed(reader, tokens=tokens)
    other = Attempt(PEER, "other", 6)
    add(reader, "twin", tokens, hold_params(other))
    assert list(reader.protocol.claimed) == [attempt]
    fill(reader, read(reader, attempt), tokens)
    reader.tell(Prefilled(attempt, Timings()))
    finish(reader)
    assert ("drop_hold", other) in reader.protocol.calls


@pytest.mark.parametrize("together", [True, False])
def test_b102_b9_the_usage_of_chats_with_equal_beginnings_goes_by_what_d_had_cached(reader, together):
    """Of those in flight together none is the other's prefix hit, for no KV has come yet. What is not cached is
    created, as `created_cache_tokens` says: both are the whole blocks of the prompt, as without disaggregation."""
    beginning = prompt(2 * BLOCK_SIZE)
    chats = {name: beginning + prompt(4 * BLOCK_SIZE + 3) for name in ("first", "second")}
    open_reads = []
    for number, (name, tokens) in enumerate(chats.items()):
        attempt = claimed(reader, name, tokens, Attempt(PEER, f"held {number}", 5))
        open_reads.append((attempt, read(reader, attempt), tokens))
        while open_reads and not (together and name == "first"):
            attempt, posted, tokens = open_reads.pop(0)
            fill(reader, posted, tokens)
            reader.tell(Prefilled(attempt, Timings()))
            reader.run()
    finish(reader)
    hit = 0 if together else 2 * BLOCK_SIZE
    assert reader.cached == {"first": 0, "second": hit}
    assert reader.created == {"first": 6 * BLOCK_SIZE, "second": 6 * BLOCK_SIZE - hit}


def test_b102_b20_a_twin_that_waits_for_a_job_does_not_delay_what_is_held(reader):
    tokens = prompt(6 * BLOCK_SIZE + 3)
    add(reader, "a", tokens, {"pd": "remote"})
    add(reader, "twin", tokens, hold_params(HOLD))
    assert reader.status("a") is PARKED and [one.request_id for one in reader.protocol.claimed] == ["twin"]
    (attempt, ) = reader.protocol.claimed
    fill(reader, read(reader, attempt), tokens)
    reader.tell(Prefilled(attempt, Timings()))
    reader.run()
    assert set(reader.ended) == {"twin"}
    reader.prefilled("a")
    finish(reader)


def test_b102_what_is_held_is_read_while_a_step_computes_its_prefix_hit(reader):
    """No peer reads that hit, so nobody waits for it."""
    shared = prompt(5 * BLOCK_SIZE)
    for name, tail, params in (("a", [1] * 10, {"pd": "local"}), ("b", [2] * 60, hold_params(HOLD))):
        reader.add(name, shared + tail, params=SamplingParams(
            max_tokens=4, temperature=0, ignore_eos=True, extra_args={"kv_transfer_params": params}))
    output = reader.schedule()
    assert "a" in output.num_scheduled_tokens and reader.status("b") is PARKED
    (attempt, ) = reader.protocol.claimed
    assert reader.protocol.jobs[attempt][2] == 5
    fill(reader, read(reader, attempt), shared + [2] * 60)
    reader.tell(Prefilled(attempt, Timings()))
    finish(reader)


@pytest.mark.parametrize("spoil, reason", [
    ("unknown", "threshold"), ("here", "asked"), ("cached", "threshold"), ("short", "threshold"), ("full", "cap"),
    ("feature", "threshold"), ("waits", None)])
def test_b102_a_hold_that_is_not_wanted_is_given_up(model_folder, in_flight, spoil, reason):
    engine = Engine(model_folder, in_flight, role="kv_consumer", threshold=10**6 if spoil != "full" else 1,
                    max_parked_fraction=0.01 if spoil == "full" else 1.0)
    tokens, hold, params = prompt(4 * BLOCK_SIZE + 1), HOLD, {}
    if spoil == "unknown":
        hold = Attempt("made-up", "held", 1)
    elif spoil == "here":
        params = {"pd": "local"}
    elif spoil == "cached":
        add(engine, "first", tokens, {})
    elif spoil == "short":
        tokens = tokens[:BLOCK_SIZE]
    elif spoil == "feature":
        engine.binding.remote_prefills._can_go_remote = lambda request: False
    if spoil == "waits":  # its client leaves before it was looked at
        engine.add("a", tokens, params=SamplingParams(extra_args={"kv_transfer_params": hold_params(hold)}))
        engine.abort("a")
    else:
        add(engine, "a", tokens, hold_params(hold) | params)
    finish(engine)
    assert not engine.protocol.claimed and engine.protocol.calls == [("drop_hold", hold)]
    assert counted(engine, "hold") == [("hold", "unused")]
    assert counted(engine, "decision")[-1:] == ([("decision", "local", reason)] if reason else [])


MADE_UP = [{"do_remote_prefill": 1}, {"do_remote_prefill": "true"}, {"remote_engine_id": 7}, {"remote_engine_id": ""},
           {"remote_engine_id": "x" * 2000}, {"remote_request_id": None}, {"remote_request_id": "held"},
           {"remote_request_id": "held#"}, {"remote_request_id": "#5"}, {"remote_request_id": "held#-5"},
           {"remote_request_id": "held#" + "9" * 400}, {"remote_request_id": "held#²"},
           {"remote_request_id": ["held#5"]}, {"remote_engine_id": {"a": "b"}}]


@pytest.mark.parametrize("change", MADE_UP, ids=str)
def test_b102_what_a_client_makes_up_is_no_hold(reader, change):
    add(reader, "a", prompt(4 * BLOCK_SIZE + 1), hold_params(HOLD) | change)
    finish(reader)
    assert not reader.protocol.claimed and not reader.protocol.calls and not reader.transfer.requests


@pytest.mark.parametrize("params", [[], [1], "text", 7, None, True])
def test_b102_parameters_that_are_no_map_are_no_hold(reader, params):
    add(reader, "a", prompt(4 * BLOCK_SIZE + 1), params)
    end(reader)
    assert not reader.protocol.claimed and not reader.params
