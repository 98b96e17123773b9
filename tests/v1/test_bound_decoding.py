# SPDX-License-Identifier: Apache-2.0
"""V1's real schedulers with our binding do with prompts what `tests.bindings.decoding` says of both bindings."""
import functools
import time

import pytest
from vllm.sampling_params import SamplingParams

from tests.bindings.decoding import *  # noqa: F403  all its tests
from tests.v1.simulated import BLOCK_SIZE, Engine
from tests.v1.test_hazards import PARKED
from vllm_pd.protocol.actions import FallbackReason, Prefilled, Released
from vllm_pd.protocol.messages import Timings
from vllm_pd.settings.engine import PDConfig


class V1Decoding:
    """A `DecodeEngine` of V1."""
    block_size = BLOCK_SIZE

    def __init__(self, folder, in_flight, monkeypatch, **settings) -> None:
        self.engine = Engine(folder, in_flight, settings=PDConfig.parse("kv_consumer", {
            "broker": "tcp://127.0.0.1:5700", "max_local_prefill_tokens": 2 * BLOCK_SIZE, "max_parked_fraction": 1.0,
            **settings}))
        self._read = 0
        self._monkeypatch = monkeypatch

    def add(self, name, tokens, **params):
        extra = {"extra_args": {"kv_transfer_params": params}} if params else {}
        self.engine.add(name, tokens, params=SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, **extra))
        self.engine.run()

    def abort(self, name):
        self.engine.abort(name)

    def is_parked(self, name):
        return name in self.engine.scheduler.requests and self.engine.status(name) is PARKED

    def is_answered(self, name):
        return self.engine.ended.get(name) == "length"

    def attempts(self, name):
        return [attempt for attempt in self.engine.protocol.jobs if attempt.request_id == name]

    def blocks(self, attempt):
        return set(self.engine.grant(attempt))

    def asked_for(self, attempt):
        return self.engine.protocol.asked_for[attempt]

    def write(self, attempt, tokens=None):
        self.engine.write(attempt, tokens)

    def prefilled(self, attempt):
        self.write(attempt)
        self.engine.tell(Prefilled(attempt, Timings()))
        self.engine.run()

    def lost(self, attempt, reason=FallbackReason.PEER, peer="p", released=True):
        self.engine.lost(attempt, reason, peer)
        if released:
            self.engine.tell(Released(attempt))
        self.engine.run()

    def release(self, attempt):
        self.engine.tell(Released(attempt))

    def counted(self):
        calls = [tuple(call) for call in self.engine.counted() if call[0] in ("decision", "asked")]
        new, self._read = calls[self._read:], len(calls)
        return new

    def set_peers(self, *names):
        self.engine.protocol.peers = len(names)

    def hand_nothing_over(self):
        self.engine.protocol.state.hands_over = False

    def later(self, seconds):
        now = time.monotonic
        self._monkeypatch.setattr(time, "monotonic", lambda: now() + seconds)

    def end(self):
        self.engine.run()
        self.engine.check_answers()
        self.engine.check_at_rest()


@pytest.fixture
def make(model_folder, in_flight, monkeypatch):
    return functools.partial(V1Decoding, model_folder, in_flight, monkeypatch)
