# SPDX-License-Identifier: Apache-2.0
"""V1's real schedulers with our binding do with jobs what `tests.bindings.jobs` says of both bindings. What only V1
does with them: test_jobs, test_chunks."""
import itertools

import pytest

from tests.bindings.jobs import *  # noqa: F403  all its tests
from tests.v1.simulated import BLOCK_SIZE, Engine
from vllm_pd.protocol.actions import Cancelled
from vllm_pd.transfer.requests import CancelTransfer, Read, Write


class V1Jobs:
    """A `PrefillEngine` of V1."""
    block_size = BLOCK_SIZE

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._peers_have: dict[str, int] = {}  # blocks, by job
        self._numbers = itertools.count()

    def job(self, tokens, cached_blocks=0):
        attempt = self.engine.job(tokens, cached_blocks, next(self._numbers))
        self._peers_have[attempt] = cached_blocks
        return attempt

    def cancel(self, attempt):
        self.engine.tell(Cancelled(attempt))

    def add(self, name, tokens):
        self.engine.add(name, tokens)

    def run(self):
        self.engine.run()

    def step(self):
        self.engine.turn()

    def is_writing(self, attempt):
        return str(attempt) in self.engine.transfer.open_writes

    def check_written(self, attempt, tokens):
        written = [block for one in self.engine.writes(attempt) for block in one.remote_block_ids]
        assert written == list(range(100 + self._peers_have[attempt], 100 - (-len(tokens) // BLOCK_SIZE)))
        self.engine.check_sent(attempt, tokens)

    def end_write(self, attempt, error=""):
        self.engine.transfer.end(self.engine.sent(attempt).key, not error, error)

    def end_read(self, tokens, has_come=True, ok=None):
        self.engine.fill(tokens, has_come, said=ok)

    def is_reading(self):
        ended = {one.key for one in self.engine.transfer.progress.finished}
        return any(isinstance(one, Read) and one.key not in ended for one in self.engine.transfer.requests)

    def is_stopped(self, attempt):
        return any(isinstance(one, CancelTransfer) and str(attempt) in one.key for one in self.engine.transfer.requests)

    def end_lease(self):
        self.engine.protocol.lease = False

    def computed(self):
        return self.engine.tokens_computed

    def said(self):
        return self.engine.protocol.calls

    def room(self):
        return self.engine.protocol.credits

    def end(self):
        self.engine.run()
        self.engine.check_answers()
        self.engine.check_at_rest()


@pytest.fixture
def engine(model_folder, in_flight):
    return V1Jobs(Engine(model_folder, in_flight, role="kv_producer", prefix_reads="always"))


@pytest.mark.parametrize("tokens, cached", [(BLOCK_SIZE + 1, 1), (300, 3)])
def test_b1_without_reads_what_the_peer_has_is_computed_here_and_not_written(model_folder, in_flight, tokens, cached):
    engine = V1Jobs(Engine(model_folder, in_flight, role="kv_producer", prefix_reads="never"))
    one = list(range(tokens))
    attempt = engine.job(one, cached)
    engine.run()
    assert not any(isinstance(one, Write) and set(one.remote_block_ids) & set(range(100, 100 + cached))
                   for one in engine.engine.transfer.requests)
    engine.check_written(attempt, one)
    engine.end_write(attempt)
    engine.end()
