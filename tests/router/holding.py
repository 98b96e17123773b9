# SPDX-License-Identifier: Apache-2.0
"""What workers hold, for tests that feed an index without an engine's events."""
from vllm_pd.router.index import PrefixIndex
from vllm_pd.router.placing import Placer


def with_index(placer: Placer, block_size: int) -> PrefixIndex:
    """That of all workers, which are one family."""
    [family] = {placer.families.join(worker) for worker in placer._workers}
    return family.index(block_size)


def index_of(placer: Placer) -> PrefixIndex:
    """The only one."""
    [index] = placer.families.indexes()
    return index
