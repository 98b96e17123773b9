# SPDX-License-Identifier: Apache-2.0
"""B115 on V1's real schedulers: prompts with salts go remote, and nobody shares a block across two of them. In random
histories, and what they find where a salt is ignored: tests/v1/test_machine.py.
"""
import collections
import os

import pytest
from simulation.fleet import Fleet
from simulation.node import Node
from simulation.storms import storm

from tests.v1.fleet_engine import V1FleetEngine, virtual_time
from tests.v1.simulated import BLOCK_SIZE, Engine, ScopedTokens, seed_of
from tests.v1.test_hazards import PARKED, end, prompt
from tests.v1.test_holds import ASKS, HOLD, finish
from vllm_pd.protocol.decode import DecodeProtocol
from vllm_pd.protocol.hashes import token_digest
from vllm_pd.protocol.holds import hold_params
from vllm_pd.protocol.prefill import PrefillProtocol
from vllm_pd.protocol.scope import SALT, PromptScope

SEEDS = int(os.environ.get("VLLM_PD_SEEDS", "480")) // 12
SALTS = (None, "s", "t")


def sampling(params):
    from vllm.sampling_params import SamplingParams
    return SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, extra_args={"kv_transfer_params": params})


@pytest.fixture
def engine(model_folder, in_flight):
    return Engine(model_folder, in_flight)


@pytest.mark.parametrize("salt", SALTS)
def test_b115_a_job_carries_the_salt_of_its_request(engine, salt):
    engine.add("a", prompt(100), cache_salt=salt)
    engine.run()
    assert engine.protocol.scopes[engine.attempt("a")] == PromptScope(salt or "")
    engine.prefilled("a")
    end(engine)


def test_b115_equal_prompts_of_two_salts_are_no_twins(engine):
    one = prompt(100)
    for number, salt in enumerate((None, "s", "t", "s", None)):
        engine.add(f"r{number}", one, cache_salt=salt)
    engine.run()
    assert [attempt.request_id for attempt in engine.protocol.jobs] == ["r0", "r1", "r2"], "the others wait for these"
    for name in ("r0", "r1", "r2"):
        engine.prefilled(name)
    end(engine)
    assert len(engine.protocol.jobs) == 3 and engine.cached["r3"] == engine.cached["r4"] == 6 * BLOCK_SIZE
    assert engine.cached["r1"] == engine.cached["r2"] == 0


def test_b115_jobs_of_two_salts_share_no_block_on_p(engine):
    """Nor with a client of P; those of one salt do."""
    one, scopes = prompt(100), [PromptScope(salt or "") for salt in SALTS]
    engine.protocol.state.hands_over = False
    engine.add("client", one)
    engine.run()
    computed = []
    for number, scope in enumerate((*scopes, *scopes)):
        before = engine.tokens_computed
        attempt = engine.job(one, number=number, scope=scope)
        engine.run()
        engine.check_sent(attempt, ScopedTokens(one, seed_of(scope.salt)))
        engine.transfer.end(str(attempt))
        computed.append(engine.tokens_computed - before)
    rest = 100 - 6 * BLOCK_SIZE
    assert computed == [rest, 100, 100, rest, rest, rest]
    finish(engine)


@pytest.mark.parametrize("salt", SALTS)
def test_b115_a_hold_has_the_salt_of_its_prompt(model_folder, in_flight, salt):
    """P names it with the salt, and D asks for it with that of its own request."""
    tokens = prompt(5 * BLOCK_SIZE)
    digest = token_digest(tokens, PromptScope(salt or ""))
    holder = Engine(model_folder, in_flight, role="kv_producer")
    holder.add("a", tokens, params=sampling(ASKS), cache_salt=salt)
    holder.run()
    assert [one for one, _ in holder.protocol.held.values()] == [digest]
    reader = Engine(model_folder, in_flight, role="kv_consumer")
    reader.add("a", tokens, params=sampling(hold_params(HOLD)), cache_salt=salt)
    reader.run()
    assert reader.status("a") is PARKED and list(reader.protocol.claimed.values()) == [(HOLD, digest)]


def test_b115_a_salted_prompt_stays_where_no_peer_reads_salts(engine):
    engine.protocol.unable_peers = ("old", "older")  # both that there are
    engine.add("a", prompt(100), cache_salt="s")
    engine.add("b", [7, *prompt(99)])
    engine.run()
    assert [attempt.request_id for attempt in engine.protocol.jobs] == ["b"]
    assert ["decision", "local", "peer"] in engine.counted()
    engine.prefilled("b")
    end(engine)


class OldPrefill(PrefillProtocol):
    """That of an engine that does not read what a job carries beside its tokens."""

    def offer(self, now, job):
        return super().offer(now, type(job)(*(getattr(job, name) for name in job.__struct_fields__ if name != "scope")))


class GrantsToAll(DecodeProtocol):
    """Looks at no scope in a claim."""

    def _on_claim(self, now, sender, message):
        record = self._records.get(message.attempt)
        if record is not None:
            record.scope = PromptScope() if not message.scope else record.scope
        return super()._on_claim(now, sender, message)


class SaltedFleetEngine(V1FleetEngine):
    """Its clients all begin alike, and have one of three salts."""

    def client_asks(self, request_id: str, token_ids: list[int], max_tokens: int) -> None:
        self.simulated.add(request_id, [7, *token_ids[1:]], max_tokens, cache_salt=SALTS[int(request_id[1:]) % 3])
        self.wake()


class MixedFleet(Fleet):
    """Every second prefill engine is of an older release. `confessed`: the registry knows that, as it does in fact.
    `reads`: the scopes of the others."""

    confessed = True
    reads: tuple[str, ...] = (SALT, )

    def is_old(self, role) -> bool:
        return role.prefills and self._lives % 2 == 0

    def _start(self, role, machine: str) -> None:
        self._lives += 1
        is_old = self.is_old(role)
        node = Node(f"{role.value[3:4]}{self._lives}", role, self.config, self.post, machine=machine,
                    decode_type=self.plan.decode_type, prefill_type=OldPrefill if is_old else PrefillProtocol,
                    scopes=() if is_old and self.confessed else self.reads)
        engine = self._build(node, self.post)
        self.engines[node.name] = engine
        engine.engines = self.engines


class SilentFleet(MixedFleet):
    """As if its broker offered any job to anybody."""

    confessed = False


def run(folder, in_flight: int, seed: int, fleet_type=MixedFleet, **variant):
    fleet = fleet_type(seed, storm(seed, **variant), lambda node, post: SaltedFleetEngine(
        node, post, folder=folder, in_flight=in_flight, blocks=40, caching=True, chunk=64))
    with virtual_time(fleet.kernel):
        outcome = fleet.run()
    scopes = collections.Counter(bool(scope.salt) for engine in (*fleet.engines.values(), *fleet._gone)
                                 for scope in engine.simulated.protocol.scopes.values())
    denied = sum(engine.node.decode.dropped["claim_avoided"] for engine in fleet.engines.values())
    return outcome, scopes, denied


@pytest.mark.parametrize("fleet_type", [MixedFleet, SilentFleet])
def test_b115_b20_engines_of_two_releases(model_folder, in_flight, fleet_type, caplog):
    caplog.set_level("CRITICAL", logger="vllm.pd")
    done, scopes, denials = 0, collections.Counter(), 0
    for seed in range(SEEDS // 2):
        outcome, salted, denied = run(model_folder, in_flight, seed, fleet_type)
        assert not outcome.broken, f"seed {seed}: {outcome.broken}"
        done += outcome.done_remotely
        scopes.update(salted)
        denials += denied
    assert done >= 5 * (SEEDS // 2) and min(scopes[True], scopes[False]) >= SEEDS // 2
    assert fleet_type is MixedFleet or denials >= SEEDS // 2


def test_b115_a_grant_to_one_that_reads_no_salt_is_found(model_folder, caplog):
    caplog.set_level("CRITICAL", logger="vllm.pd")
    assert any(run(model_folder, 1, seed, SilentFleet, decode_type=GrantsToAll)[0].broken for seed in range(40))
