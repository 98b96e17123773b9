# SPDX-License-Identifier: Apache-2.0
"""Every request ends, in whatever state it is met, and nothing of it is left (B20, seen to by the fixture)."""

import time

import msgspec
import pytest
from harness import GREEDY, PATIENT, ChildError, Counters, prompt

from tests.waiting import wait_for
from vllm_pd.peer.agent import ControlAgent
from vllm_pd.peer.degraded import DegradedReason
from vllm_pd.peer.liveness.process import local_member
from vllm_pd.protocol.messages import Fingerprint, Role
from vllm_pd.settings.engine import PDConfig

GRANTED = "disagg.agent.counts()['decode_granted'] == {}"
LOCAL = {"prompt_logprobs": 0}  # what makes a request stay on D


def granted(pair, name: str, tokens: list[int], count: int = 1) -> None:
    """The request is parked and a P that does not step has claimed it."""
    pair.p.do("hold", held=True)
    pair.d.add(tokens, name)
    pair.d.wait_until(GRANTED.format(count))


class TestAbort:
    """B25: the output ends at once, the blocks come back after P's word, and the id can be used again."""

    def test_b25_while_queued(self, pair, mono):
        """B25: no P has claimed it: nothing to wait for."""
        tokens = prompt(70, 1)
        pair.p.freeze()
        pair.d.add(tokens, "x")
        pair.d.wait_until("disagg.agent.counts()['decode_queued'] == 1")
        pair.d.abort("x")
        pair.d.at_rest()  # while P stands still
        pair.p.thaw()
        pair.d.wait_for_peers()
        [result] = pair.d.wait([pair.d.add(tokens, "x")])
        assert result["outputs"][0]["token_ids"] == mono.tokens([tokens])[0]

    def test_b25_while_granted(self, pair, mono):
        """B25: P has the block ids and might write: they are kept aside, while the same id goes on in others."""
        tokens = prompt(70, 2)
        granted(pair, "x", tokens)
        old = pair.d.block_ids("x")
        used = pair.d.stats()["used_blocks"]
        pair.d.abort("x")
        stats = pair.d.stats()
        assert stats["quarantined"] == 1 and not stats["unfinished"]
        assert stats["used_blocks"] == used
        granted(pair, "x", tokens)
        assert not set(old) & set(pair.d.block_ids("x"))
        time.sleep(0.5)
        assert pair.d.stats()["quarantined"] == 1  # by P's word, not by time
        pair.p.do("hold", held=False)
        [result] = pair.d.wait(["x"])
        assert result["outputs"][0]["token_ids"] == mono.tokens([tokens])[0]

    def test_b25_while_prefilled_and_not_sent(self, pair, mono):
        """B25: P has computed it and looks before it writes: nothing is written."""
        tokens = prompt(70, 3)
        before = pair.p.counters()
        granted(pair, "x", tokens)
        pair.p.wait_until("scheduler.prefill_sending")
        assert pair.p.evaluate("[job.state.value for job in disagg.prefill_jobs._jobs.values()]") == ["computed"]
        pair.d.abort("x")
        pair.p.hear_cancel(before)
        pair.p.do("hold", held=False)
        pair.at_rest()
        assert pair.p.counters().since(before)["transfer_bytes_total"] == 0
        assert pair.d.tokens([tokens]) == mono.tokens([tokens])

    def test_b25_while_sending(self, pair, mono):
        """B25: the write is under way or over, D has not looked yet."""
        tokens = prompt(70, 4)
        sent = pair.p.counters()["agent:prefill_sent"]
        granted(pair, "x", tokens)
        pair.d.do("hold", held=True)
        pair.p.do("hold", held=False)
        pair.p.wait_until("disagg.prefill_jobs.sending or "
                          f"driver.op_counters().get('agent:prefill_sent', 0) > {sent}")
        pair.d.abort("x")
        pair.d.do("hold", held=False)
        pair.at_rest()
        assert pair.d.tokens([tokens]) == mono.tokens([tokens])

    def test_b25_just_arrived(self, pair, mono):
        """B25: the binding knows that it is done, the scheduler does not yet."""
        tokens = prompt(70, 5)
        granted(pair, "x", tokens)
        pair.d.do("hold", held=True)
        pair.p.do("hold", held=False)
        wait_for(lambda: pair.d.evaluate("disagg._collect() or list(map(str, disagg._progress.finished_prefills))"),
                   "it is there")
        pair.d.abort("x")
        pair.d.do("hold", held=False)
        pair.at_rest()
        [result] = pair.d.wait([pair.d.add(tokens, "x")])
        assert result["outputs"][0]["token_ids"] == mono.tokens([tokens])[0]

    def test_b25_while_decoding(self, pair):
        """B25: an ordinary request by now."""
        pair.d.do("hold", held=True)  # it steps only while it is waited for: the request has not ended then
        pair.d.add(prompt(70, 6), "x", max_tokens=500)
        pair.d.wait_until("'x' in driver.started")
        assert pair.d.stats()["running"] == 1
        pair.d.abort("x")
        assert not pair.d.stats()["running"]

    def test_b25_many_at_random_times(self, pair, mono):
        """B25: a crowd, half of which goes away at any moment; the others get their tokens."""
        prompts = [prompt(40 + seed, 7) for seed in range(40)]
        names = pair.d.add_all(prompts)
        for name in names[::2]:
            pair.d.do("step", count=2)
            pair.d.abort(name)
        results = pair.d.wait(names[1::2])  # 40 at once: some stay, as those that wait have half of the seats at most
        assert [r["outputs"][0]["token_ids"] for r in results] == mono.tokens(prompts[1::2])


def answered_past_the_lease(pair, mono) -> Counters:
    """P is stopped in the middle of a job until its lease is over, and stays so; D answers by itself. Returns what D
    has counted."""
    tokens = prompt(90, 2200)
    before = pair.d.counters()
    granted(pair, "x", tokens)
    pair.p.freeze()
    pair.d.bring_forward("lease_until")
    [result] = pair.d.wait(["x"])
    assert result["outputs"][0]["token_ids"] == mono.tokens([tokens])[0]
    counted = pair.d.counters().since(before)
    assert counted["attempts_total:expired"] == 1
    return counted


def test_b22_p_stands_still_longer_than_its_lease(pair, mono):
    """B22: D goes on by itself, in other blocks; those that P might write stay aside until P has spoken."""
    counted = answered_past_the_lease(pair, mono)
    assert counted["decisions_total:local,peer"] == 1, "there is no other"
    assert pair.d.stats()["quarantined"] == 1
    pair.p.thaw()
    pair.p.do("hold", held=False)
    pair.at_rest()
    pair.d.wait_for_peers()


def test_b26_broker_gone_and_back(pair, mono):
    """B26: gone at submit and while a job waits; prefilled here meanwhile, elsewhere again afterwards."""
    prompts = [prompt(50, 2600 + number) for number in range(4)]
    expected = mono.tokens(prompts)
    before = pair.d.counters()
    pair.p.freeze()
    pair.d.add(prompts[0], "waiting")
    pair.d.wait_until("disagg.agent.counts()['decode_queued'] == 1")
    pair.broker.kill()
    try:
        [result] = pair.d.wait(["waiting"])
        assert result["outputs"][0]["token_ids"] == expected[0]
        pair.p.thaw()
        pair.d.wait_until("not disagg.protocol.decode.view().broker_up")
        assert pair.d.tokens(prompts[1:3]) == expected[1:3]
        counted = pair.d.counters().since(before)
        assert counted["decisions_total:local,broker"] == 2
        assert counted["attempts_total:failed"] == 1
    finally:
        pair.p.thaw()
        pair.broker.start()
    pair.d.wait_for_peers()
    before = pair.d.counters()
    assert pair.d.tokens(prompts[3:]) == expected[3:]
    assert pair.d.counters().since(before)["attempts_total:done"] == 1


def test_b29_notices_that_are_none(pair, mono):
    """B29: garbage, and notices of unknown, finished and foreign attempts, sent by a real peer while one is awaited."""
    first, second = prompt(60, 2900), prompt(60, 2901)
    pair.d.execute("driver.seen = []; start = disagg.protocol.decode.submit\n"
                   "def submit(attempt, *rest):\n    driver.seen.append(attempt)\n    start(attempt, *rest)\n"
                   "disagg.protocol.decode.submit = submit")
    [expected_first, expected_second] = mono.tokens([first, second])
    assert pair.d.tokens([first]) == [expected_first]
    before = pair.d.counters()
    granted(pair, "x", second)
    [done, parked] = pair.d.evaluate("[[a.incarnation, a.request_id, a.number] for a in driver.seen]")
    pair.d.execute("del disagg.protocol.decode.submit")
    older = [parked[0], parked[1], parked[2] - 1]
    notices = [b"", b"\xc1", b"noise" * 50000, msgspec.msgpack.encode([done, 0]), msgspec.msgpack.encode([older, 0]),
               msgspec.msgpack.encode([["nobody", "x", 1], 0]), msgspec.msgpack.encode([parked, 1]),
               msgspec.msgpack.encode([parked, -1]), msgspec.msgpack.encode([parked, 2**40]),
               msgspec.msgpack.encode([parked]), msgspec.msgpack.encode({"attempt": parked, "rank": 0})]
    for notice in notices:
        pair.p.execute(f"send = disagg.transfer.own.transport.transport.newest._agent.send_notice\n"
                       f"send({parked[0] + '/0'!r}, bytes.fromhex({notice.hex()!r}))")
    kinds = ("frames_dropped_total:notice_malformed", "agent:decode_notice_unknown")
    known = sum(before[kind] for kind in kinds)
    pair.d.wait_until(f"sum(driver.op_counters().get(kind, 0) for kind in {kinds}) == {known + len(notices)}")
    assert pair.d.stats()["remote_prefilling"] == 1
    pair.p.do("hold", held=False)
    [result] = pair.d.wait(["x"])
    assert result["outputs"][0]["token_ids"] == expected_second
    pair.at_rest()
    twice = msgspec.msgpack.encode([parked, 0])
    pair.d.execute(f"disagg.remote_prefills.notice(bytes.fromhex({twice.hex()!r}))")  # late and again
    assert pair.d.tokens([second]) == [expected_second]


def test_b33_only_parked_requests(pair):
    """B33: while all that there is waits for a peer, the engine sleeps, and yet takes new requests at once."""
    granted(pair, "x", prompt(100, 3300))
    granted(pair, "y", prompt(100, 3301), count=2)
    wall, cpu = pair.d.do("cpu")
    time.sleep(5)
    wall_after, cpu_after = pair.d.do("cpu")
    share = (cpu_after - cpu) / (wall_after - wall)
    assert share < 0.10, f"{share:.0%} of a core"
    waits = []
    for number in range(3):  # what the engine makes a request wait, it makes each of them
        began = time.monotonic()
        pair.d.generate([prompt(20, 3302 + number)], max_tokens=1, **LOCAL)
        waits.append(time.monotonic() - began)
    assert min(waits) < 2, waits
    assert pair.d.stats()["remote_prefilling"] == 2
    pair.p.do("hold", held=False)
    pair.d.wait(["x", "y"])


def test_b20_descriptors_and_handles_do_not_grow(pair):
    """B20: the same mix twice; the second time nothing is left that the first did not leave."""
    def mix(seed: int) -> None:
        names = pair.d.add_all([prompt(30 + number, seed) for number in range(20)])
        pair.d.abort(*names[::3])
        pair.d.wait([name for name in names if name not in names[::3]])
        pair.at_rest()

    mix(2000)
    engines = (pair.d, pair.p)
    before = [min(engine.do("fds") for _ in range(20)) for engine in engines]
    mix(2001)
    for engine, count in zip(engines, before, strict=True):
        wait_for(lambda engine=engine, count=count: engine.do("fds") <= count, f"{count} descriptors, no more")


def test_b32_generate_on_a_prefill_engine_ends_with_its_own_requests(pair, mono):
    """B32: `LLM.generate` waits for its own requests, not for what peers have this engine do meanwhile."""
    tokens = prompt(60, "own")
    pair.p.execute("ends = []; disagg.prefill_jobs.ended = lambda end, progress: ends.append(end)")
    try:
        name = pair.d.add(prompt(60, "peer's"))
        pair.p.wait_until("ends")
        assert pair.p.evaluate("len(scheduler.prefill_sending)") == 1
        assert pair.p.evaluate("engine.get_num_unfinished_requests()") == 0
        pair.p.execute("from vllm import SamplingParams\n"
                       f"[output] = llm.generate({{'prompt_token_ids': {tokens!r}}}, SamplingParams(**{GREEDY!r}), "
                       "use_tqdm=False)")
        assert pair.p.evaluate("list(output.outputs[0].token_ids)") == mono.tokens([tokens])[0]
        assert pair.p.evaluate("len(scheduler.prefill_sending)") == 1, "or nothing is shown here"
    finally:
        pair.p.execute("del disagg.prefill_jobs.ended\n"
                       "for end in ends: disagg.prefill_jobs.ended(end, disagg._progress)")
    pair.d.wait([name])


def test_b20_a_parked_request_is_waiting_for_upstreams_gauges(pair):
    """B20: neither running nor lost."""
    granted(pair, "x", prompt(60, 2020))
    gauges = "(lambda s: [s.num_waiting_sys, s.num_running_sys, s.num_swapped_sys])(engine._get_stats(None))"
    assert pair.d.evaluate(gauges) == [1, 0, 0]
    pair.p.do("hold", held=False)
    pair.d.wait(["x"])
    assert pair.d.evaluate(gauges) == [0, 0, 0]


def test_b25_a_control_thread_that_has_ended_shows_in_a_gauge(pair):
    """Not for real, for the others need it: the engine is only told so."""
    shown = []
    for error in ("RuntimeError('planned')", "None"):
        pair.d.execute(f"disagg.agent.thread.error = {error}")
        pair.d.tokens([prompt(8, 2030)])
        shown.append(pair.d.counters()["control_dead"])
    assert shown == [1, 0]


@pytest.fixture
def stranger(pair):
    """A prefill engine's control thread without an engine, whose fingerprint differs from D's in one key."""
    agents: list[ControlAgent] = []

    def start(**difference) -> ControlAgent:
        ours = pair.d.evaluate("__import__('msgspec').to_builtins(disagg.agent.member.fingerprint)")
        fingerprint = msgspec.convert(ours, Fingerprint)
        member = local_member(Role.PREFILL, msgspec.structs.replace(fingerprint, **difference))
        config = PDConfig.parse("kv_producer", {"broker": pair.broker.url, **PATIENT})
        agent = ControlAgent(config, member, b"", wake=lambda: None)
        agent.start()
        agent.protocol.prefill.set_credits(8)
        agents.append(agent)
        return agent

    yield start
    for agent in agents:
        agent.close()
    pair.p.thaw()
    pair.d.wait_for_peers()
    pair.d.wait_until("disagg._degraded is None")
    assert set(pair.d.counters().with_prefix("degraded:").values()) == {0}


@pytest.mark.parametrize(("key", "value", "ours"), [("block_size", 32, "16"), ("dtype", "bfloat16", "float32"),
                                                    ("protocol", 99, ""), ("kv_heads", 2, "4"), ("pp", 99, "1")])
def test_b42_a_peer_that_differs(key, value, ours, pair, mono, stranger):
    """B42: refused, both values named on both sides, traffic stays local, and the one that fits is used again."""
    tokens = prompt(60, f"4200 {key}")
    pair.p.freeze()
    pair.d.wait_until("disagg.protocol.decode.view().prefill_peers == 0")
    agent = stranger(**{key: value})
    pair.d.wait_until(f"{key!r} in (disagg.protocol.decode.view().mismatch or '')")
    named = pair.d.evaluate("disagg.protocol.decode.view().mismatch")
    assert key in named and str(value) in named and ours in named
    pair.d.wait_until("disagg.protocol.operators.degraded().reason == 'mismatch'")
    pair.d.wait_until("disagg._degraded is not None and disagg._degraded.reason == 'mismatch'")
    assert pair.d.counters().with_prefix("degraded:") == {
        one.value: one is DegradedReason.MISMATCH for one in DegradedReason}
    before = pair.d.counters()
    assert pair.d.tokens([tokens]) == mono.tokens([tokens])
    assert pair.d.counters().since(before)["decisions_total:local,peer"] == 1
    wait_for(lambda: agent.protocol.decode.view().mismatch is not None, "the stranger does not hear it")
    assert key in agent.protocol.decode.view().mismatch and str(value) in agent.protocol.decode.view().mismatch
    assert agent.protocol.poll_event() is None
    assert agent.error is None


def test_a_child_that_fails_says_so(pair):
    """The harness: an error in the engine's process is one here."""
    with pytest.raises(ChildError, match="ZeroDivisionError"):
        pair.d.evaluate("1 / 0")
