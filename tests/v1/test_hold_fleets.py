# SPDX-License-Identifier: Apache-2.0
"""B102 in the simulated fleets: clients that choose the prefill engine first, V1's real schedulers, the whole binding
and protocol; messages lost, doubled, late; engines killed, restarted, stopped; clients that leave; reads that fail.

Beside the tokens of each answer it is checked of each read, at the moment that it lands, that P keeps the blocks that
it takes bytes from, and D those that it fills. VLLM_PD_SEEDS=N runs N / 12 seeds.
"""
import collections
import os

import pytest
from simulation.engine import require
from simulation.fleet import Fleet
from simulation.storms import storm
from vllm.sampling_params import SamplingParams

from tests.v1.fleet_engine import V1FleetEngine, find_call, virtual_time
from tests.v1.test_holds import ASKS
from vllm_pd.protocol.actions import HoldEnd
from vllm_pd.protocol.decode import DecodeProtocol
from vllm_pd.protocol.hold_reads import HoldReads, ReadState
from vllm_pd.protocol.holds import Holds
from vllm_pd.protocol.prefill import PrefillProtocol
from vllm_pd.transfer.requests import Read

SEEDS = int(os.environ.get("VLLM_PD_SEEDS", "480")) // 12


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("CRITICAL", logger="vllm.pd")


class HoldingFleetEngine(V1FleetEngine):
    """An engine whose clients name holds, or ask for one."""

    def __init__(self, *arguments, **keywords) -> None:
        self.legs: dict = {}  # by the request id of a prompt that is to be held: who is called with the answer's params
        self.reads: collections.Counter[bool] = collections.Counter()
        super().__init__(*arguments, **keywords)
        protocol, node = self.simulated.protocol, self.node

        def claim_hold(attempt, hold, digest, block_ids, cached_blocks, deadline_s):
            protocol.jobs[attempt] = None, block_ids, cached_blocks
            node.protocol.decode.claim_hold(attempt, hold, digest, block_ids, cached_blocks, deadline_s)
            node._speak()

        def spoken(name):
            def call(*arguments):
                answer = find_call(node, name)(*arguments)
                node._speak()
                return answer
            return call

        protocol.claim_hold = claim_hold
        for name in ("read_ended", "hold", "drop_hold", "lasting_hold_blocks", "end_old_holds",
                     "close_unclaimed_holds"):
            setattr(protocol, name, spoken(name))

    def asks(self, request_id: str, token_ids: list[int], max_tokens: int, params: dict | None, then=None) -> None:
        if then is not None:
            self.legs[request_id] = then
        extra = None if params is None else {"kv_transfer_params": params}
        self.simulated.add(request_id, token_ids, max_tokens, params=SamplingParams(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, extra_args=extra))
        self.wake()

    def _step(self) -> None:
        super()._step()
        for request_id in [one for one in self.legs if one in self.simulated.ended]:
            self.legs.pop(request_id)(self.simulated.params.get(request_id))

    def attempt_of(self, request):
        read = self.simulated.binding.holds._reads.get(request.key)
        return super().attempt_of(request) if read is None else read.attempt

    def land(self, request, attempt) -> None:
        there = self.engines.get(request.peer)
        if isinstance(request, Read) and request.key.startswith("hold") and self.node.alive and not self.node.stopped:
            fence = self.simulated.binding.fence
            require(set(request.local_block_ids) <= set(fence.block_ids(attempt)),
                    f"{attempt} is read into other blocks")
            if there is not None and there.node.alive:
                self.reads[True] += 1
                held = there.simulated.binding.fence
                kept = {block for name in held.attempts() for block in held.block_ids(name)}
                require(set(request.remote_block_ids) <= kept, f"{attempt} reads blocks that are not kept")
        super().land(request, attempt)

    def check_at_rest(self) -> None:
        super().check_at_rest()
        require(not self.node.protocol.operators.open_attempts(), f"{self.node.name} has open attempts")


class HoldingFleet(Fleet):
    """Clients choose a prefill engine, and then a decode engine. One in four pairs the answer with another prompt, or
    brings it twice, or late."""

    def _ask(self, request_id: str, length: int, max_tokens: int) -> None:
        random = self.kernel.random
        number = int(request_id[1:])
        token_ids = [1000 + number, *range(length - 1)]
        first = [one for one in self._living() if one.node.member.role.prefills and not one.node.stopped]
        if not first:
            return
        late_s = random.choice((0.0, 0.0, 0.0, random.uniform(5.0, 8.0), 40.0))
        odd = random.random()
        random.choice(first).asks(f"{request_id} p", token_ids, 1, ASKS, lambda params: self.kernel.at(
            late_s, None, "request", self._second, request_id, token_ids, max_tokens, params, odd))

    def _second(self, request_id: str, token_ids: list[int], max_tokens: int, params: dict | None, odd: float) -> None:
        random = self.kernel.random
        engines = [e for e in self._living() if e.node.member.role.decodes and not e.node.stopped]
        if not engines:
            return
        legs = [(request_id, [*token_ids[1:], 7] if odd < 0.1 else token_ids)]
        if odd > 0.85:
            legs.append((f"{request_id} again", token_ids))
        for name, tokens in legs:
            engine = random.choice(engines)
            self.asked[name] = engine.node.name
            engine.asks(name, tokens, max_tokens, params)
            if self.kernel.happens(self.plan.faults.aborts):
                self.kernel.at(random.expovariate(2.0), engine.node, "abort", engine.client_leaves, name)

    def _left(self) -> dict:
        left = super()._left()
        for name, engine in self.engines.items():
            if engine.node.protocol.operators.open_attempts() or (not left and engine.simulated.has_work()):
                left.setdefault(name, engine.node.protocol.operators.open_attempts())
        return left


def run(folder, in_flight: int, seed: int, **variant):
    """The outcome, and how often which end was counted, reads among them."""
    settings = {"settings": {"push_chunks": False, "hold_s": 8.0, "max_local_prefill_tokens": 8 if seed % 3 else 10**6,
                             "max_parked_fraction": 0.5}}
    fleet = HoldingFleet(seed, storm(seed, **settings, **variant), lambda node, post: HoldingFleetEngine(
        node, post, folder=folder, in_flight=in_flight, blocks=(24, 40)[seed % 2], caching=seed % 3 != 0, chunk=64))
    with virtual_time(fleet.kernel):
        outcome = fleet.run()
    seen: collections.Counter = collections.Counter()
    for engine in (*fleet.engines.values(), *fleet._gone):
        seen.update(call[1] for call in engine.simulated.counted() if call[0] == "hold")
        seen["reads"] += engine.reads[True]
        seen["read well"] += engine.node.decode.counters["read_done"]
    return outcome, seen


def test_b102_b20_storms(model_folder, in_flight, capsys):
    seen: collections.Counter = collections.Counter()
    requests = 0
    for seed in range(SEEDS):
        outcome, counted = run(model_folder, in_flight, seed)
        assert not outcome.broken, f"seed {seed}: {outcome.broken}"
        seen.update(counted)
        requests += outcome.requests
    with capsys.disabled():
        print(f"\n  {in_flight} in flight: {SEEDS} runs, {requests:,} requests, {dict(seen)}", end="")
    assert seen["read well"] >= 5 * SEEDS and seen["reads"] >= seen["read well"]
    assert all(seen[event] for event in ("made", "done", "dropped", "expired", "lost", "unused"))


class FreesByTime(Holds):
    """What is claimed ends by time, too."""

    def _query(self, now, hold):
        return self._end(hold, HoldEnd.EXPIRED)


class SaysDoneEarly(HoldReads):
    """P gets its message when the attempt ends, not its read."""

    def _end(self, now, read, outcome, reason, detail=""):
        early = self._done(read.peer, read.attempt, read.hold) if read.state is ReadState.READING else []
        return super()._end(now, read, outcome, reason, detail) + early


class BrokenHolder(PrefillProtocol):

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.holds = FreesByTime(self.holds.limits, self.dropped, self.generations)


class BrokenReader(DecodeProtocol):

    def __init__(self, *arguments):
        super().__init__(*arguments)
        reads = self.reads
        self.reads = SaysDoneEarly(reads.member, reads.claim_wait_s, reads.claim_retry_s, reads.lease_s, self.counters,
                                   self.dropped, self.generations)


@pytest.mark.parametrize("variant", [{"prefill_type": BrokenHolder}, {"decode_type": BrokenReader}],
                         ids=["by time", "too soon"])
def test_b102_a_broken_hold_is_found(model_folder, variant):
    for seed in range(400):
        if run(model_folder, 1 + seed % 2, seed, **variant)[0].broken:
            return
    raise AssertionError("no seed up to 400 shows it")
