# SPDX-License-Identifier: Apache-2.0
"""V0's patched scheduler and binding do with jobs what `tests.bindings.jobs` says of both bindings."""
import pytest

from tests.bindings.jobs import *  # noqa: F403  all its tests
from tests.fakes.simulated_engine import BLOCK_SIZE, RemoteWork, past
from tests.upstream.test_mutual_waits import Node, Ring, Transfer
from vllm_pd.protocol.actions import Cancelled, Prefill
from vllm_pd.protocol.messages import Attempt
from vllm_pd.transfer.requests import CancelTransfer, Finished, Read, TransferProgress, TransferRequest, Write

PEER = "peer-incarnation"
THEIRS = 100  # the first block of a prompt at the peer


class OpenTransfer(Transfer):
    """The worker's transfers: each ends when the test says so."""

    def end(self, finished: Finished) -> None:
        """As the transfer thread and then the step loop see it."""
        self._tell(finished)
        self.finished.append(finished)

    def take_progress(self) -> TransferProgress:
        finished, self.finished = self.finished, []
        return TransferProgress(finished=finished)


class Prefiller(Node):
    """An engine of V0 that only prefills, and notes what it does for its peers."""
    ROLE, PREFIX_READS = "kv_producer", "always"

    def make_transfer(self) -> OpenTransfer:
        self.requests: list[TransferRequest] = []
        self.told: list[tuple[str, Attempt]] = []
        self.lease = True
        self.state.hands_over = False
        return OpenTransfer()

    def _carry(self, outputs) -> None:
        self._after_schedule(outputs)
        self.requests += outputs.memory_transfer_requests
        for read in outputs.memory_transfer_requests:
            if isinstance(read, Read):  # into these blocks, which must be nobody else's
                attempt = next(one for one in self.sim.scheduler.remote_prefilling if str(one) in read.key)
                self.sim.peers.work[attempt] = RemoteWork([], read.local_block_ids, 0)

    def may_write(self, attempt: Attempt) -> bool:
        return self.lease

    lease_stands = may_write

    def sent(self, attempt, timings) -> None:
        self.told.append(("sent", attempt))

    def failed(self, attempt, reason) -> None:
        self.told.append(("failed", attempt))

    def ended(self, attempt) -> None:
        self.told.append(("ended", attempt))


class V0Jobs:
    """A `PrefillEngine` of V0."""
    block_size = BLOCK_SIZE

    def __init__(self, ring) -> None:
        self.node = Prefiller(ring, "p", 0.9, blocks=64)
        self._seen: list[Attempt] = []
        self._ended: set[str] = set()  # transfers, by key
        self.run()  # its loop takes jobs from now on

    def job(self, tokens, cached_blocks=0):
        attempt = Attempt(PEER, "r", len(self._seen))
        self._seen.append(attempt)
        theirs = list(range(THEIRS, THEIRS - (-len(tokens) // BLOCK_SIZE)))
        self.node.events.append(Prefill(attempt, list(tokens), theirs[cached_blocks:], cached_blocks,
                                        theirs[:cached_blocks], PEER))
        return attempt

    def cancel(self, attempt):
        self.node.events.append(Cancelled(attempt))

    def add(self, name, tokens):
        self.node.ask(name, list(tokens))

    def run(self):
        for _ in range(100):
            if not (self.node.disagg.has_work() or self.node.input):
                return
            self.node.step()
        raise AssertionError("no end in sight")

    def step(self):
        self.node.step()

    def is_writing(self, attempt):
        return bool(self._writes(attempt)) and str(attempt) not in self._ended

    def check_written(self, attempt, tokens):
        [write] = self._writes(attempt)
        last = THEIRS - (-len(tokens) // BLOCK_SIZE)
        assert write.remote_block_ids == list(range(last - len(write.local_block_ids), last))
        first = write.remote_block_ids[0] - THEIRS
        for position in range(first * BLOCK_SIZE, len(tokens)):
            slot = write.local_block_ids[position // BLOCK_SIZE - first], position % BLOCK_SIZE
            assert self.node.sim.slots[slot] == past(tokens, position)

    def end_write(self, attempt, error=""):
        [write] = self._writes(attempt)
        self._ended.add(write.key)
        self.node.transfer.end(Finished(write.key, not error, bytes=1, seconds=0.01, error=error))

    def end_read(self, tokens, has_come=True, ok=None):
        ok = has_come if ok is None else ok
        [read] = self._reads()
        self._ended.add(read.key)
        first = read.remote_block_ids[0] - THEIRS
        for index, block in enumerate(read.local_block_ids):
            for offset in range(BLOCK_SIZE):
                self.node.sim.slots[block, offset] = (
                    past(tokens, (first + index) * BLOCK_SIZE + offset) if has_come else -1)
        self.node.transfer.end(Finished(read.key, ok, bytes=1, seconds=0.01, error="" if ok else "ERR"))

    def is_reading(self):
        return bool(self._reads())

    def is_stopped(self, attempt):
        return any(isinstance(one, CancelTransfer) and str(attempt) in one.key for one in self.node.requests)

    def end_lease(self):
        self.node.lease = False

    def computed(self):
        return self.node.sim.computed_tokens

    def said(self):
        return self.node.told

    def room(self):
        return self.node.room

    def end(self):
        self.run()
        self.node.sim.check_at_rest()
        assert self.node.disagg.prefill_jobs.idle

    def _writes(self, attempt) -> list[Write]:
        return [one for one in self.node.requests if isinstance(one, Write) and one.key == str(attempt)]

    def _reads(self) -> list[Read]:
        return [one for one in self.node.requests if isinstance(one, Read) and one.key not in self._ended]


@pytest.fixture
def engine(monkeypatch):
    return V0Jobs(Ring(monkeypatch))
