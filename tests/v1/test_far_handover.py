# SPDX-License-Identifier: Apache-2.0
"""PDConnector with a store that asks other hosts (B104), on V1's real schedulers: a request waits for their blocks
before it is loaded for, and before anybody decides. The other host is a dictionary, and answers when the test says so.
"""
import random

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.v1 import test_store_handover
from tests.v1.test_hazards import prompt
from tests.v1.test_store_handover import StoredEngine, check_stored, make, put  # noqa: F401
from vllm_pd.store.beyond.fetches import BlockFetches, FindQuestion
from vllm_pd.store.beyond.waits import RequestWaits, WaitAnswer

WAIT_S = 2.0


class FakeFar:
    """A `FarStore` with one other host, which has what `away` has. `chance`: it answers by itself, sometimes."""

    def __init__(self, chance: random.Random | None = None) -> None:
        self.fetches = BlockFetches(1, 64 * StoredEngine.ranks, StoredEngine.ranks, WAIT_S)
        self.waits = RequestWaits(self.fetches, WAIT_S)
        self.away: dict[tuple[int, bytes], list[int]] = {}
        self.now, self.asked, self.answers, self.chance = 100.0, 0, [], chance

    def ask(self, request_id, find_absent):
        self.asked += 1
        if self.chance is not None and self.chance.random() < 0.3:
            self.now += self.chance.random() * WAIT_S
            self.fetches.handle_timeout(self.now)
        elif self.chance is not None and self.chance.random() < 0.5:
            self.answer()
        self.answers.append(self.waits.ask(self.now, request_id, find_absent))
        return self.answers[-1]

    def answer(self):
        """It answers all that it was asked, and sends what it has."""
        while questions := self.fetches.poll_transmit():
            for question in questions:
                known = [name for name in question.names if (0, name) in self.away]
                if isinstance(question, FindQuestion):
                    run = next((place for place, name in enumerate(question.names) if name not in known),
                               len(question.names))
                    self.fetches.found(self.now, 0, question.number, run)
                else:
                    batch = self.fetches.sent(self.now, 0, question.number, len(question.rows))
                    if batch is not None:
                        StoredEngine.stored.update({(rank, name): self.away[rank, name] for name in batch.names
                                                    for rank in range(StoredEngine.ranks)})
                        self.fetches.checked(self.now, batch, len(batch.rows))

    def end_request(self, request_id):
        self.waits.end(self.now, request_id)

    def end_requests(self):
        self.waits.end_all(self.now)

    @property
    def is_waited_for(self):
        return self.waits.any_at(self.now)

    def take_counts(self):
        counts = {f"far_{name}": count for name, count in self.fetches.counts.items() if count}
        self.fetches.counts.clear()
        return counts

    def close(self):
        return True


@pytest.fixture
def far(make):  # noqa: F811
    """Makes engines that ask another host."""
    def one(chance: random.Random | None = None, **settings) -> StoredEngine:
        engine = make(**settings)
        engine.far = engine.scheduler.connector._store._far = FakeFar(chance)
        return engine
    return one


def put_away(engine: StoredEngine, tokens: list[int], blocks: int | None = None) -> None:
    """The other host has the KV of these tokens, or of their first blocks."""
    here, StoredEngine.stored = StoredEngine.stored, {}
    put(tokens, blocks)
    engine.far.away |= StoredEngine.stored
    StoredEngine.stored = here


def end(engine: StoredEngine) -> None:
    engine.end()
    assert len(engine.far.fetches) == 0 and not engine.far.waits._waits


@pytest.mark.parametrize("threshold, remote", [(16, True), (20, False)])
def test_b104_blocks_of_another_host_are_the_prefix_hit_by_which_is_decided(far, threshold, remote):
    """B104: of 100 tokens 2 blocks are here, and 5 there. Nothing is computed, here or by a peer, before they came."""
    engine, asked = far(threshold=threshold), prompt(100)
    put(asked, 2)
    put_away(engine, asked, 5)
    engine.add("a", asked)
    for _ in range(20):
        assert engine.has_work(), "no step, no answer"
        engine.turn()
    assert not engine.loads and not engine.protocol.jobs and not engine.tokens_computed
    engine.far.answer()
    engine.run()
    assert engine.loads == ["a"]
    if remote:
        attempt = engine.attempt("a")
        assert engine.protocol.jobs[attempt][2] == 5 and len(engine.grant(attempt)) == 2
        engine.prefilled("a")
    end(engine)
    assert engine.tokens_computed == (4 if remote else 100 - 80 + 3) and engine.cached["a"] == 80
    assert engine.far.answers.count(WaitAnswer.LOOK) == 1


def test_b104_a_host_that_never_answers_costs_wait_s(far):
    """B104: then the prompt is loaded for and computed as without it, and is not asked about again."""
    engine, asked = far(threshold=1000), prompt(100)
    put(asked, 3)
    engine.add("a", asked)
    for _ in range(20):
        engine.turn()
    engine.far.now += WAIT_S
    end(engine)
    assert engine.loads == ["a"] and engine.cached["a"] == 48


def test_b104_others_go_on_meanwhile(far):
    """B104: one that lacks nothing, and one that is short."""
    engine, asked, other = far(threshold=1000), prompt(100), prompt(96)
    put(other)
    engine.add("a", asked)
    engine.add("b", other)
    engine.add("c", prompt(10))
    for _ in range(40):
        engine.turn()
    assert engine.ended.keys() == {"b", "c"}
    engine.far.answer()
    end(engine)


def test_b104_b94_a_wait_has_steps_beside_parked_requests_only(far):
    """B94: an engine that waits for peers sleeps, but not while a request waits for another host."""
    engine, asked = far(), prompt(100)
    engine.add("a", prompt(100))
    engine.turn()
    engine.far.answer()
    engine.run()
    assert engine.binding.asleep
    put_away(engine, asked, 5)
    engine.add("b", asked)
    for _ in range(10):
        assert engine.has_work()
        engine.turn()
    engine.far.answer()
    engine.run()
    assert engine.binding.asleep and engine.protocol.jobs[engine.attempt("b")][2] == 5
    engine.prefilled("a")
    engine.prefilled("b")
    end(engine)


def test_b104_b25_an_abort_of_a_request_that_waits(far):
    """B104, B25: it is gone at once, and so is the fetch. Another one of its name may come."""
    engine, asked = far(threshold=1000), prompt(100)
    engine.add("a", asked)
    engine.turn()
    engine.abort("a")
    assert "a" not in engine.scheduler.requests and len(engine.far.fetches) == 0
    engine.ended.clear()
    engine.prompts.clear()
    put_away(engine, asked)
    engine.add("a", asked)
    engine.turn()
    engine.far.answer()
    end(engine)
    assert engine.cached["a"] == 96


def test_b104_equal_prompts_share_a_fetch_and_its_blocks(far):
    engine, asked = far(threshold=1000), prompt(100)
    put_away(engine, asked)
    for name in "abc":
        engine.add(name, asked)
    engine.turn()
    assert len(engine.far.fetches) == 1
    engine.far.answer()
    end(engine)
    assert engine.loads == ["a"] and [engine.cached[name] for name in "abc"] == [96] * 3


def test_b104_a_job_of_a_peer_waits_too(far):
    """B104: P computes what no host has."""
    engine, asked = far(role="kv_producer"), prompt(100)
    put_away(engine, asked, 4)
    attempt = engine.job(asked)
    for _ in range(5):
        engine.turn()
    assert not engine.tokens_computed
    engine.far.answer()
    engine.run()
    engine.check_sent(attempt, asked)
    assert engine.tokens_computed == 100 - 64
    engine.transfer.end(str(attempt))
    end(engine)
    check_stored(asked)


def test_b104_b96_a_reset_with_the_connector_ends_all_waits(far):
    engine = far(threshold=1000)
    engine.add("a", prompt(100))
    engine.turn()
    assert engine.scheduler.connector.reset_cache()
    assert len(engine.far.fetches) == 0
    end(engine)
    assert engine.tokens_computed == 103


def test_b104_b96_a_pause_with_a_request_that_waits(far):
    engine, asked = far(threshold=1000), prompt(100)
    put_away(engine, asked)
    engine.add("a", asked)
    engine.turn()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    engine.far.answer()
    for _ in range(3):
        if engine.has_work():
            engine.turn()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    end(engine)
    assert engine.cached["a"] == 96


def test_b104_the_figures_go_with_a_step(far):
    """B104: those of EngineCore beside those of the hand-overs."""
    engine, asked = far(threshold=1000), prompt(100)
    put_away(engine, asked)
    engine.add("a", asked)
    engine.turn()
    engine.far.answer()
    engine.binding._metrics.attempt("done")
    calls = engine.scheduler.connector.get_kv_connector_stats().data["calls"]
    ranks = StoredEngine.ranks
    assert ["store", {"far_found": 6 * ranks, "far_fetched": 6 * ranks, "far_whole": 1}] in calls
    assert ["attempt", "done"] in calls
    end(engine)


@pytest.mark.parametrize("seed", range(12))
def test_b104_any_order(far, seed, monkeypatch):
    """B104, B34: the search of the store, with another host that has the beginnings of all, and answers at any time."""
    made, chance = [], random.Random(seed)

    def one(**settings) -> StoredEngine:
        engine = far(chance, **settings)
        made.append(engine)
        return engine

    texts = []
    real = test_store_handover.prompt

    def noting(tokens: int) -> list[int]:
        texts.append(real(tokens))
        put_away(made[0], texts[-1])
        return texts[-1]

    monkeypatch.setattr(test_store_handover, "prompt", noting)
    test_store_handover.test_b104_any_order(one, seed)
    assert len(made[0].far.fetches) == 0 and not made[0].far.waits._waits and made[0].far.asked
