# SPDX-License-Identifier: Apache-2.0
"""The patched scheduler's own queues: parked groups, groups whose KV is sent, and blocks that outlive their group."""

import random

import pytest
from vllm.sequence import SequenceStage, SequenceStatus

from tests.fakes.simulated_engine import SimulatedEngine

PROMPT = list(range(10, 30))


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [None, 8])
class TestParking:
    """With and without prefix caching, with both of the scheduler's policies."""

    @pytest.fixture
    def engine(self, caching, chunk):
        return SimulatedEngine(caching=caching, chunk=chunk)

    def test_b1_a_parked_group_costs_no_step_and_resumes_as_a_decode(self, engine):
        """B1: nothing is computed until the KV is there; then the last prompt token only, and it samples."""
        attempt = engine.park("a", PROMPT)
        assert engine.computed_tokens == 0
        assert engine.seq("a").status is SequenceStatus.REMOTE_PREFILLING
        assert not engine.seq("a").is_finished()
        assert engine.scheduler.has_unfinished_seqs() and not engine.scheduler.has_schedulable_seqs()
        assert engine.scheduler.get_num_unfinished_seq_groups() == 1
        engine.write_remotely(attempt)
        seq = engine.seq("a")
        assert engine.step(finished_prefills=[attempt]) == ["a"]
        assert engine.computed_tokens == 1
        assert seq.get_output_len() == 1
        assert seq.data.stage is SequenceStage.DECODE
        engine.finish()

    def test_b20_what_is_said_of_an_unknown_attempt_changes_nothing(self, engine):
        """B20, B29: late, twice, or never heard of."""
        attempt = engine.park("a", PROMPT)
        before = engine.references()
        engine.step(failed_prefills=["y"], finished_transfers=["z", attempt])
        assert engine.references() == before
        assert attempt in engine.scheduler.remote_prefilling
        engine.arrive(attempt)
        assert len(engine.scheduler.running) == 1
        engine.step(failed_prefills=[attempt], finished_transfers=[attempt])
        engine.finish()

    def test_b25_abort_while_parked(self, engine):
        """B25: gone at once, the blocks stay until the fence is down, the same id can come again."""
        attempt = engine.park("a", PROMPT)
        free = engine.manager.get_num_free_gpu_blocks()
        engine.abort("a")
        assert engine.peers.work[attempt].aborted
        assert not engine.scheduler.has_unfinished_seqs()
        assert engine.manager.get_num_free_gpu_blocks() == free
        again = engine.park("a", PROMPT)
        assert again != attempt
        engine.check_writers()
        engine.write_remotely(attempt)
        engine.step(finished_transfers=[attempt])
        engine.step(finished_transfers=[attempt], failed_prefills=[attempt])  # too late, and of that id's first life
        assert again in engine.scheduler.remote_prefilling
        engine.arrive(again)
        engine.finish()

    def test_b25_abort_while_waiting_and_after_the_resume(self, engine):
        """B25: the states around the parked one."""
        engine.add("waiting", PROMPT)
        engine.abort("waiting")
        assert engine.step() == []
        attempt = engine.park("resumed", PROMPT, max_tokens=10)
        engine.arrive(attempt)
        engine.abort("resumed")
        engine.step(finished_transfers=[attempt])
        engine.check_at_rest()

    def test_b25_abort_between_the_arrival_and_its_news(self, engine):
        """B25: the KV is complete, the scheduler has not heard of it, the client leaves. No other news of it comes."""
        attempt = engine.park("a", PROMPT)
        engine.write_remotely(attempt)
        engine.abort("a")
        assert engine.step(finished_prefills=[attempt]) == []
        engine.check_at_rest()

    def test_b25_progress_may_come_from_generators(self, engine):
        """B25: schedule() takes any iterables, so it reads each of them once."""
        aborted, failed = engine.park("a", PROMPT), engine.park("b", PROMPT[:8])
        engine.write_remotely(aborted)
        engine.abort("a")
        engine.peers.wants_remote = lambda group: False
        engine.step(finished_prefills=iter([aborted]), failed_prefills=iter([failed]), finished_transfers=iter([]))
        engine.step(finished_transfers=iter([failed]))
        engine.run()
        engine.check_at_rest()

    def test_b21_a_failed_prefill_is_done_here_in_other_blocks(self, engine):
        """B21: before all that waits; the old blocks stay aside until no peer writes to them."""
        engine.peers.wants_remote = lambda group: not engine.peers.work
        attempt = engine.park("a", PROMPT)
        engine.add("later", [7] * 9)
        engine.write_remotely(attempt, tokens=6)
        ran = engine.step(failed_prefills=[attempt])
        assert ran[0] == "a"
        table = engine.manager.get_block_table(engine.seq("a"))
        assert not set(table) & set(engine.peers.work[attempt].block_ids)
        engine.write_remotely(attempt)
        engine.run()
        engine.step(finished_transfers=[attempt])
        engine.check_at_rest()

    def test_b21_several_failures_keep_their_order(self, engine):
        """B21: those that came first are computed first."""
        names = ["a", "b", "c"]
        engine.peers.wants_remote = lambda group: len(engine.peers.work) < 3
        for name in names:
            engine.add(name, [ord(name)] * 10)
        engine.step()
        attempts = [engine.attempt_of(name) for name in names]
        engine.scheduler._apply_prefills([], {}, attempts)
        engine.scheduler._apply_transfers(attempts)
        assert [group.request_id for group in engine.scheduler.waiting] == names
        engine.finish()

    def test_b20_parked_groups_count_against_max_num_seqs(self, engine):
        """B20: a resumed group always has a place in the batch."""
        names = [f"r{i}" for i in range(6)]
        for name in names:
            engine.add(name, [ord(name[1])] * 6, max_tokens=6)
        engine.step()
        assert len(engine.scheduler.remote_prefilling) == 4  # max_num_seqs
        assert len(engine.scheduler.waiting) == 2
        attempts = list(engine.scheduler.remote_prefilling)
        for attempt in attempts:
            engine.write_remotely(attempt)
        engine.peers.wants_remote = lambda group: False
        engine.step(finished_prefills=attempts)
        assert len(engine.scheduler.running) == 4
        engine.finish()

    def test_b20_a_parked_group_does_not_stop_others(self, engine):
        """B20: local prompts and decodes go on beside it."""
        attempt = engine.park("a", PROMPT)
        engine.peers.wants_remote = lambda group: False
        engine.add("local", [3] * 13)
        engine.run()
        assert "local" not in engine.groups
        assert attempt in engine.scheduler.remote_prefilling
        engine.arrive(attempt)
        engine.finish()

    def test_b20_blocks_of_a_prompt_for_a_peer_are_kept_until_they_were_sent(self, engine):
        """B20: finished, and yet its blocks are nobody else's until the transfer has ended."""
        engine.add("job", PROMPT, remote_decode="attempt")
        while "job" in engine.groups:
            engine.step()
        assert list(engine.scheduler.prefill_sending) == ["attempt"]
        [table] = [t.physical_block_ids for t in engine.manager.block_tables.values()]
        assert engine.peers.to_send == {"attempt": table}
        assert engine.scheduler.has_unfinished_seqs() and not engine.scheduler.has_schedulable_seqs()
        engine.peers.wants_remote = lambda group: False
        engine.add("other", [5] * 30)
        engine.run()
        assert all(block in engine.references() for block in table)
        engine.step(finished_transfers=["attempt"])
        assert "job" in engine.scheduler.get_and_reset_finished_requests_ids()
        engine.check_at_rest()

    def test_b25_abort_of_a_prompt_for_a_peer_before_it_ran(self, engine):
        """B25, on P: nothing is sent, nothing is kept."""
        engine.add("job", PROMPT, remote_decode="attempt")
        engine.abort("job")
        assert engine.step() == []
        engine.check_at_rest()

    def test_b30_a_prompt_that_fits_nowhere_is_refused_not_parked(self, engine):
        """B30: longer than the pool; upstream ignores it, and so do we."""
        engine.add("long", list(range(127)) * 3)
        engine.step()
        assert not engine.scheduler.remote_prefilling and not engine.scheduler.waiting
        engine.check_at_rest()


def test_b25_abort_of_a_prompt_for_a_peer_half_way():
    """B25, on P: between two chunks; what was computed stays a hit."""
    engine = SimulatedEngine(chunk=8)
    engine.add("job", PROMPT, remote_decode="attempt")
    engine.step()
    engine.abort("job")
    assert not engine.scheduler.prefill_sending
    assert engine.hit(PROMPT) == 8
    engine.check_at_rest()


class TestPriority:
    """B7, B32: priority scheduling takes blocks only for a group that can run with them."""

    @pytest.fixture
    def engine(self):
        """"first" is parked, its sibling waits for it, "low" runs, and the rest of the pool takes no other prompt."""
        engine = SimulatedEngine(blocks=14, policy="priority", wants_remote=lambda group: group.request_id == "first")
        engine.peers.waits = lambda group: group.request_id == "sibling" and bool(engine.scheduler.remote_prefilling)
        engine.add("low", list(range(50, 66)), max_tokens=24, priority=5)
        engine.step()
        engine.add("first", PROMPT)
        engine.add("sibling", PROMPT)
        engine.step()
        assert engine.attempt_of("first")
        return engine

    def test_b7_nobody_is_preempted_for_a_group_that_waits_for_its_sibling(self, engine):
        """B7: before, it was at each second step, and computed anew at each other one."""
        for _ in range(10):
            assert engine.step() == ["low"]
        assert engine.scheduler.num_cumulative_preemption == 0
        self.finish(engine)

    def test_b7_the_next_in_line_preempts_in_its_place(self, engine):
        """B7: one that could run is not kept back by one that could not."""
        engine.add("next", PROMPT[::-1], priority=1)
        engine.step()
        assert engine.step() == ["next"]
        assert [group.request_id for group in engine.scheduler.waiting] == ["sibling", "low"]
        self.finish(engine)

    @staticmethod
    def finish(engine):
        attempt = engine.attempt_of("first")
        engine.arrive(attempt)
        engine.finish()


def test_b1_a_prompt_is_parked_in_a_step_that_has_no_tokens_left():
    """B1: parking needs none. What is to be computed here waits, as upstream has it."""
    engine = SimulatedEngine(chunk=8, wants_remote=lambda group: group.request_id == "remote")
    engine.add("long", list(range(100, 140)))
    engine.step()
    engine.add("remote", PROMPT)
    engine.add("here", [7] * 9)
    assert engine.step() == ["long"]
    assert [group.request_id for group in engine.scheduler.remote_prefilling.values()] == ["remote"]
    assert [group.request_id for group in engine.scheduler.waiting] == ["here"]
    engine.arrive(engine.attempt_of("remote"))
    engine.finish()


def test_b50_decisions_without_disaggregation():
    """B50: an engine whose peers never want anything, and one that has none, schedule the same."""
    def history(disagg: bool) -> list:
        engine = SimulatedEngine(disagg=disagg, wants_remote=lambda group: False, blocks=24)
        draw, steps = random.Random(5), []
        for number in range(40):
            engine.add(str(number), draw.choices(range(40), k=draw.randint(1, 30)), max_tokens=draw.randint(1, 20))
            steps.append((engine.step(), engine.manager.get_num_free_gpu_blocks()))
        while engine.scheduler.has_unfinished_seqs():
            steps.append((engine.step(), engine.manager.get_num_free_gpu_blocks()))
        engine.check_at_rest()
        return steps

    assert history(True) == history(False)


class Storm:
    """Random requests, and peers that do whatever peers may do, at random. B34 as far as one scheduler sees it."""

    def __init__(self, seed: int, **options) -> None:
        self.draw = random.Random(seed)
        self.engine = SimulatedEngine(wants_remote=self.wants_remote, **options)
        self.number = 0
        self.over: set[str] = set()  # attempts that no peer will write any more
        self.fenced: dict[str, None] = {}  # attempts that were given up while a peer had them, in order

    def wants_remote(self, group) -> bool:
        parked = sum(len(w.block_ids) for a, w in self.engine.peers.work.items() if a not in self.over)
        return group.request_id[0] == "r" and parked < 0.5 * self.engine.free_at_start and self.draw.random() < 0.9

    def run(self, steps: int) -> None:
        actions = [self.submit, self.submit, self.write, self.abort, self.step, self.step, self.step]
        for _ in range(steps):
            self.draw.choice(actions)()
            self.engine.check_references()
            self.engine.check_writers()
        self.finish()

    def submit(self) -> None:
        if len(self.engine.groups) > 12:
            return
        self.number += 1
        kind = self.draw.choice("rrrlj")
        stem = self.draw.randint(0, 2)  # many share a prefix
        tokens = [stem] * self.draw.randint(1, 12) + self.draw.choices(range(50, 52), k=self.draw.randint(0, 10))
        self.engine.add(f"{kind}{self.number}", tokens, max_tokens=self.draw.randint(1, 15),
                        remote_decode=f"job{self.number}" if kind == "j" else None)

    def write(self) -> None:
        """A part or all of a prompt, whether anybody waits for it any more or not."""
        open_attempts = [a for a in self.engine.peers.work if a not in self.over]
        if open_attempts:
            attempt = self.draw.choice(open_attempts)
            work = self.engine.peers.work[attempt]
            self.engine.write_remotely(attempt, self.draw.randint(work.cached_tokens, len(work.token_ids)))

    def abort(self) -> None:
        if self.engine.groups and self.draw.random() < 0.4:
            request_id = self.draw.choice(list(self.engine.groups))
            self.fenced |= {a: None for a, g in self.engine.scheduler.remote_prefilling.items()
                            if g.request_id == request_id}
            self.engine.abort(request_id)

    def step(self, all_ends: bool = False) -> None:
        finished, failed, transfers = [], [], []
        for attempt in list(self.engine.scheduler.remote_prefilling):
            fate = self.draw.random()
            if fate < 0.3 or all_ends:
                self.engine.write_remotely(attempt)
                finished.append(attempt)
                self.over.add(attempt)
            elif fate < 0.4:
                failed.append(attempt)
                self.fenced[attempt] = None
        for attempt in [a for a in self.fenced if all_ends or self.draw.random() < 0.2]:
            if attempt not in failed:
                del self.fenced[attempt]
                self.over.add(attempt)
                transfers.append(attempt)
        transfers += [a for a in self.engine.scheduler.prefill_sending if all_ends or self.draw.random() < 0.3]
        self.draw.shuffle(finished)
        self.engine.step(finished_prefills=finished, failed_prefills=failed,
                         finished_transfers=transfers)

    def finish(self) -> None:
        for _ in range(400):
            if not self.engine.scheduler.has_unfinished_seqs() and not self.fenced:
                break
            self.step(all_ends=True)
        assert not self.engine.groups
        self.engine.check_at_rest()


@pytest.mark.parametrize("options", [
    {"blocks": 64},
    {"blocks": 20},
    {"blocks": 20, "caching": False},
    {"blocks": 64, "chunk": 8},
    {"blocks": 20, "chunk": 6},
    {"blocks": 20, "chunk": 8, "caching": False},
], ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_b34_random_operations(options, seed):
    """B34: 500 operations each, among them writes of peers that were given up. Each step checks that every block is
    referred to as often as the pool thinks, that peers write to blocks of one owner only, and that nobody attends to
    KV that is not its own; in the end everything has ended once and the pool is as it was."""
    Storm(seed, **options).run(500)
