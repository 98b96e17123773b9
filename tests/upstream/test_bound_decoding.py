# SPDX-License-Identifier: Apache-2.0
"""V0's patched scheduler and binding do with prompts what `tests.bindings.decoding` says of both bindings. B100."""
import functools

import pytest

from tests.bindings.decoding import *  # noqa: F403  all its tests
from tests.fakes.simulated_engine import BLOCK_SIZE
from tests.upstream.decoder import PROMPT, Decoder, lost
from vllm_pd.protocol.actions import FallbackReason, Prefilled, Released
from vllm_pd.protocol.messages import Timings


class Counts:
    """In the place of `PDMetrics`: what was decided and asked."""

    def __init__(self, metrics) -> None:
        self._metrics = metrics
        self.calls = []

    def __getattr__(self, name):
        if name in ("decision", "asked"):
            return lambda *labels: self.calls.append((name, *labels))
        return getattr(self._metrics, name)


class V0Decoding:
    """A `DecodeEngine` of V0."""
    block_size = BLOCK_SIZE

    def __init__(self, monkeypatch, **settings) -> None:
        self.decoder = Decoder(monkeypatch, **settings)
        self.engine = self.decoder.engine
        self.counts = self.decoder.prefills._metrics = Counts(self.decoder.prefills._metrics)

    def add(self, name, tokens, **params):
        self.engine.add(name, list(tokens))
        if params:
            self.engine.groups[name].sampling_params.extra_args = {"kv_transfer_params": params}
        self._run()

    def abort(self, name):
        self.engine.abort(name)

    def is_parked(self, name):
        return any(group.request_id == name for group in self.engine.scheduler.remote_prefilling.values())

    def is_answered(self, name):
        return name not in self.engine.groups

    def attempts(self, name):
        return [attempt for attempt in self.decoder.agent.submitted if attempt.request_id == name]

    def blocks(self, attempt):
        return set(self.decoder.agent.submitted[attempt][0])

    def asked_for(self, attempt):
        return self.decoder.agent.submitted[attempt][1:]

    def write(self, attempt, tokens=None):
        self.engine.write_remotely(attempt, tokens)

    def prefilled(self, attempt):
        self.write(attempt)
        self.decoder.tell(Prefilled(attempt, Timings()))
        self._run()

    def lost(self, attempt, reason=FallbackReason.PEER, peer="p", released=True):
        self.decoder.tell(lost(attempt, reason, peer), *[Released(attempt)][:released])
        self._run()

    def release(self, attempt):
        self.decoder.tell(Released(attempt))

    def counted(self):
        calls, self.counts.calls = self.counts.calls, []
        return calls

    def set_peers(self, *names):
        self.decoder.agent.peers = set(names)

    def hand_nothing_over(self):
        self.decoder.agent.state.hands_over = False

    def later(self, seconds):
        self.decoder.now += seconds

    def end(self):
        self._run()
        self.engine.check_at_rest()
        assert not self.decoder.prefills.waiting_for_peers

    def _run(self):
        self.decoder.step()
        self.decoder.run()


@pytest.fixture
def make(monkeypatch):
    return functools.partial(V0Decoding, monkeypatch)


def test_b100_a_metaserver_that_a_request_names_is_nothing_to_v0(engine, caplog):
    """Nor is it said that the key metaservers would help, which V0 refuses."""
    engine.add("r", PROMPT, do_remote_prefill=True, metaserver="http://a:1/v1/metaserver")
    [attempt] = engine.attempts("r")
    assert "metaserver" not in caplog.text
    engine.prefilled(attempt)
    engine.end()
