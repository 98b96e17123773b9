# SPDX-License-Identifier: Apache-2.0
"""What was made after vLLM's start is left out of collections, and nothing is where vLLM leaves nothing out."""
import gc

import pytest

from vllm_pd.transfer.heap import freeze_heap


@pytest.fixture(autouse=True)
def _thawed():
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_what_came_after_the_start_is_left_out_of_collections():
    gc.freeze()
    late = [[]]
    garbage = [[]]
    garbage.append(garbage)
    del garbage
    before = gc.get_freeze_count()
    freeze_heap()
    assert gc.get_freeze_count() > before
    assert not any(one is late for one in gc.get_objects())


def test_a_heap_that_vllm_collects_stays_so():
    freeze_heap()
    assert gc.get_freeze_count() == 0
