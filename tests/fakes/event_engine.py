# SPDX-License-Identifier: Apache-2.0
"""An engine as a subscriber sees it: the announcer as it is, over a publisher that loses, swaps and repeats batches."""

import itertools
import random
import time
from dataclasses import dataclass

import msgspec
import zmq

from vllm_pd.events.announcer import EventAnnouncer
from vllm_pd.events.messages import EngineLoad, EventBatch
from vllm_pd.events.notice import EventsNotice
from vllm_pd.events.side import SidePort
from vllm_pd.events.sink import BlockSink

BLOCK_SIZE = 4
TOPIC = "kv-events"


@dataclass
class FakeBlock:
    """What the sink looks at."""
    block_id: int
    content_hash: int
    prev_block: "FakeBlock | None"
    token_ids: list[int]
    extra_hash: int | None = None


class LossyPublisher:
    """`faults` are the shares of batches that are lost, swapped with the next one, and sent twice. `held` keeps all
    back."""

    def __init__(self, endpoint: str, faults: tuple[float, float, float] = (0, 0, 0), seed: int = 0) -> None:
        self.faults = faults
        self.lose_next = 0
        self._rng = random.Random(seed)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._socket.bind(endpoint)
        self._seq = itertools.count()
        self._swapped: list[list[bytes]] = []

    def publish(self, events: list) -> None:
        payload = msgspec.msgpack.encode(EventBatch(time.time(), events))
        frames = [TOPIC.encode(), next(self._seq).to_bytes(8, "big"), payload]
        lost, swapped, twice = self.faults
        if self.lose_next:
            self.lose_next -= 1
        elif self._rng.random() < lost:
            pass
        elif self._rng.random() < swapped:
            self._swapped.append(frames)
            return
        else:
            self._socket.send_multipart(frames)
            if self._rng.random() < twice:
                self._socket.send_multipart(frames)
        for late in self._swapped:
            self._socket.send_multipart(late)
        self._swapped.clear()

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class FakeEngine:
    """One life: a sink with made-up blocks, the announcer, a side socket. `truth` is what it holds."""

    def __init__(self, events: str, side: str = "tcp://127.0.0.1:0", *, max_queued: int = 65536, keys=None,
                 faults: tuple[float, float, float] = (0, 0, 0), seed: int = 0) -> None:
        self.load = EngineLoad(total_blocks=1000)
        self.truth: dict[int, FakeBlock] = {}
        self._rng = random.Random(seed)
        self._ids = itertools.count(1)
        self.publisher = LossyPublisher(events, faults, seed)
        side_port = SidePort(side, keys)
        self.sink = BlockSink(side_port.waker.set, max_queued=max_queued)
        self.announcer = EventAnnouncer(self.sink, BLOCK_SIZE, self.publisher.publish, lambda: self.load, lambda: False,
                                        side_port)
        self.announcer.start()
        self.notice = EventsNotice(events, BLOCK_SIZE, None, TOPIC, self.announcer.address, self.announcer.epoch)

    def store(self, count: int, parent: FakeBlock | None = None) -> list[FakeBlock]:
        """A prompt of so many blocks, computed in one step."""
        blocks = []
        for _ in range(count):
            parent = FakeBlock(next(self._ids), self._rng.getrandbits(62), parent,
                               [self._rng.randrange(50000) for _ in range(BLOCK_SIZE)])
            self.sink.registered(parent)
            self.truth[parent.content_hash] = parent
            blocks.append(parent)
        self.sink.computed({block.block_id for block in blocks})
        self.sink.begin_step()
        return blocks

    def remove(self, block: FakeBlock) -> None:
        del self.truth[block.content_hash]
        self.sink.removed(block.content_hash, block.block_id)
        self.sink.begin_step()

    def clear(self) -> None:
        self.truth.clear()
        self.sink.cleared()
        self.sink.begin_step()

    def leaf(self) -> FakeBlock | None:
        """One that is nobody's parent."""
        parents = {block.prev_block.content_hash for block in self.truth.values() if block.prev_block}
        leaves = [block for block_hash, block in self.truth.items() if block_hash not in parents]
        return self._rng.choice(leaves) if leaves else None

    def close(self) -> None:
        self.announcer.close()
        self.publisher.close()
