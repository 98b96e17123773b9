# SPDX-License-Identifier: Apache-2.0
"""B7: a request for prompt_logprobs has its whole prompt computed, whatever is cached, and stays out of others' way."""

import pytest
from vllm import SamplingParams
from vllm.core.block_manager import SelfAttnBlockSpaceManager
from vllm.inputs import token_inputs
from vllm.sequence import Sequence, SequenceGroup, SequenceStatus

BLOCK_SIZE = 16
TOKENS = list(range(3 * BLOCK_SIZE + 1))


class Pool:
    """A block manager and requests that have just been computed in one step."""

    def __init__(self) -> None:
        self.manager = SelfAttnBlockSpaceManager(BLOCK_SIZE, 64, 0, enable_caching=True)
        self._seq_ids = iter(range(100))

    def waiting(self, **params) -> SequenceGroup:
        seq = Sequence(next(self._seq_ids), inputs=token_inputs(TOKENS), block_size=BLOCK_SIZE)
        return SequenceGroup("r", seqs=[seq], arrival_time=0.0, sampling_params=SamplingParams(**params))

    def compute(self, group: SequenceGroup) -> int:
        """The prefix hit with which it was admitted. Its blocks stay allocated."""
        seq = group.first_seq
        hit = self.manager.get_num_cached_tokens(seq)
        self.manager.allocate(group)
        seq.status = SequenceStatus.RUNNING
        self.manager.mark_blocks_as_computed(group, len(TOKENS))
        return hit


@pytest.fixture
def pool():
    return Pool()


def test_others_share_what_is_cached(pool):
    assert [pool.compute(pool.waiting()) for _ in range(2)] == [0, 3 * BLOCK_SIZE]


@pytest.mark.parametrize("wanted", [0, 1])
def test_b7_it_has_no_hit_and_is_none(pool, wanted):
    pool.compute(pool.waiting())
    assert pool.compute(pool.waiting(prompt_logprobs=wanted)) == 0
    assert pool.compute(pool.waiting(prompt_logprobs=wanted)) == 0
    assert pool.compute(pool.waiting()) == 3 * BLOCK_SIZE


def test_b7_nor_has_it_one_on_itself_after_a_preemption(pool):
    group = pool.waiting(prompt_logprobs=1)
    pool.compute(group)
    seq = group.first_seq
    seq.status = SequenceStatus.WAITING
    pool.manager.free(seq)
    seq.reset_state_for_recompute()
    assert pool.compute(group) == 0
