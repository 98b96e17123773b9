# SPDX-License-Identifier: Apache-2.0
"""B103 on V0's patched scheduler: a request says where its prompt is to be prefilled."""
import pytest

from tests.fakes.simulated_engine import BLOCK_SIZE
from tests.upstream.test_fallbacks import PROMPT, Decoder, lost
from vllm_pd.protocol.actions import Prefilled, Released
from vllm_pd.protocol.messages import Timings

SHORT = PROMPT[:BLOCK_SIZE + 1]  # under the threshold


class Counts:
    """In the place of `PDMetrics`: what was decided and asked."""

    def __init__(self, metrics) -> None:
        self._metrics = metrics
        self.calls = []

    def __getattr__(self, name):
        if name in ("decision", "asked"):
            return lambda *labels: self.calls.append((name, *labels))
        return getattr(self._metrics, name)


@pytest.fixture
def decoder(monkeypatch):
    found = Decoder(monkeypatch)
    found.prefills._metrics = Counts(found.prefills._metrics)
    return found


def add(decoder, request_id, tokens, place):
    decoder.engine.add(request_id, list(tokens))
    decoder.engine.groups[request_id].sampling_params.extra_args = {"kv_transfer_params": {"pd": place}}
    decoder.step()


def counted(decoder):
    calls, decoder.prefills._metrics.calls = decoder.prefills._metrics.calls, []
    return calls


def test_b103_a_short_prompt_is_handed_over_where_it_asks_for_that(decoder):
    add(decoder, "r", SHORT, "remote")
    attempt = decoder.engine.attempt_of("r")
    decoder.engine.write_remotely(attempt)
    decoder.tell(Prefilled(attempt, Timings()))
    decoder.run()
    assert counted(decoder) == [("decision", "remote", "asked"), ("asked", "remote", "remote")]
    decoder.engine.check_at_rest()


def test_b103_a_long_prompt_stays_where_it_asks_for_that(decoder):
    add(decoder, "r", PROMPT, "local")
    decoder.run()
    assert not decoder.agent.submitted
    assert counted(decoder) == [("decision", "local", "asked"), ("asked", "local", "local")]


@pytest.mark.parametrize("spoil, reason", [("no peer", "peer"), ("role", "role"), ("short", "threshold"),
                                           ("cached", "threshold")])
def test_b103_what_can_t_be_handed_over_is_computed_here_and_counted(decoder, spoil, reason):
    tokens = SHORT
    if spoil == "no peer":
        decoder.agent.peers = set()
    elif spoil == "role":
        decoder.agent.state.hands_over = False
    elif spoil == "short":
        tokens = SHORT[:BLOCK_SIZE - 1]
    else:
        add(decoder, "first", SHORT, "local")
        decoder.run()
        counted(decoder)
    add(decoder, "r", tokens, "remote")
    decoder.run()
    assert not decoder.agent.submitted and "r" not in decoder.engine.scheduler.remote_prefilling
    assert counted(decoder) == [("decision", "local", reason), ("asked", "remote", "local")]
    decoder.engine.check_at_rest()


@pytest.mark.parametrize("tokens", [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE])
def test_b2_what_is_less_than_a_block_stays_whatever_the_threshold(monkeypatch, tokens):
    """B2: D computes the last token again, so a peer's part of a block brings nothing."""
    decoder = Decoder(monkeypatch, max_local_prefill_tokens=0)
    decoder.prefills._metrics = Counts(decoder.prefills._metrics)
    decoder.engine.add("r", list(PROMPT[:tokens]))
    decoder.step()
    if tokens < BLOCK_SIZE:
        decoder.run()
        assert not decoder.agent.submitted
        assert counted(decoder) == [("decision", "local", "threshold")]
        decoder.engine.check_at_rest()
    else:
        assert len(decoder.agent.submitted) == 1
        assert counted(decoder) == [("decision", "remote", "length")]


@pytest.mark.parametrize("place", ["fast", "x" * 10**6, None, 7, [["remote"]], {"remote": {}}])
def test_b103_a_place_that_does_not_exist_is_counted_and_changes_nothing(decoder, place):
    add(decoder, "long", PROMPT, place)
    assert counted(decoder) == [("decision", "remote", "length"), ("asked", "other", "remote")]
    add(decoder, "short", [900 + token for token in SHORT], place)
    assert counted(decoder) == [("decision", "local", "threshold"), ("asked", "other", "local")]


def test_b103_after_a_failure_it_asks_another_peer_and_then_stays(decoder):
    add(decoder, "r", SHORT, "remote")
    for peer in ("p", "q"):
        attempt = decoder.engine.attempt_of("r")
        decoder.tell(lost(attempt, peer=peer), Released(attempt))
        decoder.step()
    decoder.run()
    assert [labels[1:] for labels in counted(decoder) if labels[0] == "decision"] == [
        ("remote", "asked"), ("remote", "asked"), ("local", "retry")]
    decoder.engine.check_at_rest()


def test_b103_an_engine_that_hands_nothing_over_counts_nobody_else(decoder):
    decoder.agent.state.hands_over = False
    decoder.engine.add("r", list(PROMPT))
    decoder.run()
    assert counted(decoder) == []


def test_b100_a_metaserver_that_a_request_names_is_nothing_to_v0(decoder, caplog):
    """Nor is it said that the key metaservers would help, which V0 refuses."""
    decoder.engine.add("r", list(PROMPT))
    decoder.engine.groups["r"].sampling_params.extra_args = {
        "kv_transfer_params": {"do_remote_prefill": True, "metaserver": "http://a:1/v1/metaserver"}}
    decoder.step()
    attempt = decoder.engine.attempt_of("r")
    assert attempt.request_id == "r" and "metaserver" not in caplog.text
    decoder.engine.write_remotely(attempt)
    decoder.tell(Prefilled(attempt, Timings()))
    decoder.run()
    decoder.engine.check_at_rest()
