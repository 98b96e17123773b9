# SPDX-License-Identifier: Apache-2.0
"""B102: a prefill engine's jobs and its clients' prompts that are to be kept are begun in one order."""
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd.decisions.job_order import JobOrder, may_begin
from vllm_pd.handover.jobs import PrefillCapacity
from vllm_pd.handover.prefill import PrefillHandover
from vllm_pd.handover.progress import Progress
from vllm_pd.protocol.actions import Prefill
from vllm_pd.protocol.messages import Attempt
from vllm_pd.protocol.rows import BlockRows

STEP = 1000  # tokens


class FakeEngineJobs(PrefillHandover):
    """Jobs of an engine whose requests are a number: the tokens that are left."""
    _by_priority = False

    def __init__(self) -> None:
        config = SimpleNamespace(max_prefill_jobs=8, job_order=JobOrder(8, 100, 30), prefix_reads="never",
                                 is_two_sided=False, max_parked_fraction=0.5)
        super().__init__(config, SimpleNamespace(set_credits=lambda *_: None, lasting_hold_blocks=lambda: 0,
                                                 state=SimpleNamespace(has_other_weights=False)),
                         PrefillCapacity(BlockRows(16), 1000, 1, 1, True, STEP, 100), SimpleNamespace(),
                         SimpleNamespace(tokens_per_s=0))
        self.cached = 0

    def take(self, number: int, tokens: int) -> None:
        self.handle(Prefill(Attempt("d", "r", number), [1] * tokens, list(range(-(-tokens // 16))), 0, [], "d"),
                    Progress())

    def _add_request(self, job):
        return SimpleNamespace(left=job.tokens)

    def _abort_request(self, job):
        raise AssertionError("nothing is aborted here")

    def _is_waiting(self, job):
        return False

    def _is_ready(self, prompt):
        return prompt.request.ready

    def _tokens_left(self, prompt):
        return prompt.request.left

    def _cached_tokens(self, prompt):
        return self.cached

    def client(self, name: str, tokens: int, priority: int = 0):
        self.add_prompt(name, SimpleNamespace(left=tokens, ready=True), tokens, priority)
        return self._to_keep[name]

    def who_passes(self, running, waiting) -> list[str]:
        turns = {one.request_id: self.turn(one) for one in (*running, *waiting)}
        return names(self.passing(running, sorted(waiting, key=self.turn), turns))


@pytest.fixture
def jobs() -> FakeEngineJobs:
    return FakeEngineJobs()


def names(prompts) -> list[str]:
    return [one.request_id.rpartition("#")[2] for one in prompts]


def test_jobs_wait_for_each_other_and_not_for_a_client_s_prompt(jobs):
    """The scheduler has that already, in its turn."""
    prompt = jobs.client("a", 2 * STEP)
    jobs.take(1, 3 * STEP)
    jobs.take(2, 4 * STEP)
    assert len(jobs.queued) == 1 and names(jobs.begun) == ["1", "a"]
    assert jobs.turn(prompt) < jobs.turn(jobs.begun[0])


def test_a_job_that_is_shorter_passes_a_client_s_prompt(jobs):
    jobs.client("a", 5 * STEP)
    jobs.take(1, 100)
    assert jobs.who_passes([jobs._to_keep["a"]], [one for one in jobs.begun if one.request_id != "a"]) == ["1"]


@pytest.mark.parametrize("count, passing", [(1, 1), (3, 3), (4, 4), (9, 4)])
def test_only_those_pass_that_the_next_step_would_begin(jobs, count, passing):
    """Of 300 tokens each, in the order of their arrival."""
    running = jobs.client("long", 20 * STEP)
    waiting = [jobs.client(str(number), 300) for number in range(count)]
    assert jobs.who_passes([running], waiting[::-1]) == [str(number) for number in range(passing)]


def test_nobody_passes_where_nothing_runs_and_none_that_is_longer(jobs):
    short, long = jobs.client("short", 50), jobs.client("long", 100)
    assert jobs.who_passes([], [short]) == [] == jobs.who_passes([short], [long])
    jobs._by_priority, long.priority = True, -1
    assert jobs.who_passes([short], [long]) == ["long"]


PROMPTS = st.lists(st.tuples(st.integers(1, 3 * STEP), st.integers(0, 3 * STEP), st.integers(-1, 1)), max_size=6)


@given(PROMPTS, PROMPTS)
def test_one_passes_where_it_would_begin_as_a_job_does(running, waiting):
    """Prompts of so many tokens, of which so many are left, with a priority."""
    jobs, sides = FakeEngineJobs(), []
    jobs._by_priority = True
    for side, prompts in (("running", running), ("waiting", waiting)):
        sides.append([jobs.client(f"{side} {number}", tokens, priority)
                      for number, (tokens, _, priority) in enumerate(prompts)])
        for prompt, (_, left, _) in zip(sides[-1], prompts, strict=True):
            prompt.request.left = min(left, prompt.tokens)
    running, waiting = (sorted(side, key=jobs.turn) for side in sides)
    begun, expected = [jobs._begun_job(one) for one in running], []
    for one in waiting if running else ():
        if jobs.turn(one) >= jobs.turn(running[-1]) or not may_begin(jobs.turn(one), begun, STEP):
            break
        expected.append(one.request_id)
        begun.append(jobs._begun_job(one))
    assert jobs.who_passes(running, waiting) == expected


def test_a_prompt_that_waits_for_something_else_has_no_turn_meanwhile(jobs):
    """As one that is parked, of which nothing is left to be computed, or one whose grammar is not there."""
    prompt = jobs.client("a", 5)
    prompt.request.ready = False
    assert not jobs.begun
    prompt.request.ready = True
    assert jobs.begun == [prompt]


def test_a_prompt_has_its_turn_by_what_is_not_cached_until_its_last_tokens_are_in_a_step(jobs):
    jobs.cached = 600
    prompt = jobs.client("a", 640)
    assert prompt.new_tokens == jobs.tokens_left(prompt) == 40
    assert jobs.turn(prompt).due_s == prompt.started_at + 8 * 40 / 5000
    prompt.request.left = 10
    jobs.drop_computed({"a": 30, "b": 1})
    assert jobs.begun == [prompt] and jobs.tokens_left(prompt) == 10
    prompt.request.left = 0
    jobs.drop_computed({"b": 1})
    assert jobs.begun, "another step's requests say nothing about it"
    jobs.drop_computed({"a": 10})
    assert not jobs.begun


def test_a_prompt_that_is_cached_as_a_whole_has_a_token_left(jobs):
    jobs.cached = 64
    prompt = jobs.client("a", 64)
    assert prompt.new_tokens == jobs.tokens_left(prompt) == 1


def test_a_request_that_ends_has_no_turn(jobs):
    jobs.client("a", 100)
    jobs.drop_prompt("unknown")
    assert jobs.begun
    jobs.drop_prompt("a")
    assert not jobs.begun and not jobs.job_tokens
