# SPDX-License-Identifier: Apache-2.0
"""KV events of a dummy engine, which has no KV cache: as many as an engine would send, so that a router has that work.

A dummy has no tokenizer, so the tokens are made up, and no prompt is ever a hit. Real are the number of blocks that
each request stores and, once the pool is full, the number that it evicts.
"""

import collections
import itertools
import time

import msgspec
import zmq

from vllm_pd.events import messages as m
from vllm_pd.events.notice import EventsNotice

QUEUED_BATCHES = 10_000  # more is dropped, as is all that no subscriber wants


class MadeUpEvents:
    """The publisher of one dummy. It never waits. Its owner closes it."""

    def __init__(self, block_size: int, pool_blocks: int = 4096) -> None:
        self._block_size, self._pool_blocks = block_size, pool_blocks
        self._held: collections.deque[int] = collections.deque()
        self._hashes = itertools.count(1)
        self._batches = itertools.count()
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, QUEUED_BATCHES)
        self._socket.bind("tcp://127.0.0.1:*")

    def notice(self) -> EventsNotice:
        """The answer to `GET /pd/events`: where the events are published."""
        return EventsNotice(self._socket.getsockopt_string(zmq.LAST_ENDPOINT), self._block_size)

    def answered(self, tokens: int) -> None:
        """Publishes the blocks that a request with so many tokens, prompt and answer, has filled and evicted."""
        count = min(tokens // self._block_size, self._pool_blocks)
        if not count:
            return
        hashes = list(itertools.islice(self._hashes, count))
        first = hashes[0] << 8
        events: list[m.KVEvent] = [m.BlockStored(hashes, None, [(first + number) % 128_000 for number in
                                                                range(count * self._block_size)], self._block_size)]
        self._held.extend(hashes)
        gone = [self._held.popleft() for _ in range(len(self._held) - self._pool_blocks)]
        if gone:
            events.insert(0, m.BlockRemoved(gone))
        batch = self._encoder.encode(m.EventBatch(time.time(), events))
        try:
            self._socket.send_multipart([b"", next(self._batches).to_bytes(8, "big"), batch], zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return  # a subscriber sees the gap in the numbers

    def close(self) -> None:
        self._socket.close()
        self._context.term()
