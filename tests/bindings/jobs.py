# SPDX-License-Identifier: Apache-2.0
"""What both bindings do alike with the jobs of a prefill engine: B1, B5, B22, B25, B27, B30. Of every way in which one
ends the peer hears once, and the blocks are freed once.

`test_bound_jobs.py` of tests/upstream and of tests/v1 import all tests of this module, and have the fixture
`engine`: a prefill engine of theirs, on the real scheduler over memory that notices a wrong read.
"""
from typing import Protocol

import pytest

from vllm_pd.protocol.messages import Attempt


class PrefillEngine(Protocol):
    """A prefill engine that a test drives. Where a peer has a prompt's beginning it reads it."""
    block_size: int

    def job(self, tokens: list[int], cached_blocks: int = 0) -> Attempt:
        """A job of a peer, granted, of which the peer has so many blocks."""

    def cancel(self, attempt: Attempt) -> None:
        """The peer wants it no more."""

    def add(self, name: str, tokens: list[int]) -> None:
        """A client's request."""

    def run(self) -> None:
        """Until the engine rests."""

    def step(self) -> None:
        """One turn of its loop."""

    def is_writing(self, attempt: Attempt) -> bool:
        """Whether the last write of this job was posted and has not ended."""

    def check_written(self, attempt: Attempt, tokens: list[int]) -> None:
        """All writes together have carried what the peer lacks, and the blocks of the last one hold it now."""

    def end_write(self, attempt: Attempt, error: str = "") -> None:
        """The last write ends, without an error well."""

    def end_read(self, tokens: list[int], has_come: bool = True, ok: bool | None = None) -> None:
        """The read of a prompt's beginning ends: it has come, or garbage. `ok`: what the transport says of it, None: as
        it is."""

    def is_reading(self) -> bool:
        """Whether a read was posted that has not ended."""

    def is_stopped(self, attempt: Attempt) -> bool:
        """Whether the transfer of this job was asked to stop."""

    def end_lease(self) -> None:
        """From now on no lease stands."""

    def computed(self) -> int:
        """Tokens that were computed up to now."""

    def said(self) -> list[tuple[str, Attempt]]:
        """What peers were told of their jobs up to now: "sent", "failed" or "ended"."""

    def room(self) -> int:
        """For how many jobs it has room."""

    def end(self) -> None:
        """It runs to the end, and nothing is left."""


def prompt(engine: PrefillEngine, blocks: int, more: int = 0, first: int = 100) -> list[int]:
    """A prompt of so many tokens. Those with another first token share no block."""
    return [first + number for number in range(blocks * engine.block_size + more)]


@pytest.mark.parametrize("blocks, more", [(0, 1), (1, 0), (2, 1), (5, 4)])
def test_b1_a_job_is_computed_and_its_blocks_stay_until_they_are_sent(engine, blocks, more):
    tokens, most = prompt(engine, blocks, more), engine.room()
    attempt = engine.job(tokens)
    engine.run()
    assert engine.is_writing(attempt) and not engine.said() and engine.room() == most - 1
    for number in range(5):  # others come and go meanwhile
        engine.add(f"c{number}", prompt(engine, 4, 0, 300 + 100 * number))
        engine.run()
        engine.check_written(attempt, tokens)
    engine.end_write(attempt)
    assert engine.said() == [("sent", attempt)], "the peer need not wait for the step loop"
    engine.end()
    assert engine.said() == [("sent", attempt)] and engine.room() == most


def test_b1_what_the_peer_has_is_not_written(engine):
    tokens = prompt(engine, 3)
    first = engine.job(tokens)
    engine.run()
    engine.end_write(first)
    second = engine.job(tokens, cached_blocks=2)  # cached here, too
    engine.run()
    engine.check_written(second, tokens)
    engine.end_write(second)
    engine.end()


def test_b5_a_job_uses_and_fills_the_prefix_cache(engine):
    tokens = prompt(engine, 4, 1)
    first = engine.job(tokens)
    engine.run()
    engine.end_write(first)
    engine.run()
    before = engine.computed()
    second = engine.job(tokens)
    engine.run()
    assert engine.computed() == before + 1
    engine.check_written(second, tokens)
    engine.end_write(second)
    engine.end()


@pytest.mark.parametrize("ok", [True, False])
def test_b5_b27_the_beginning_is_read_from_the_peer_that_has_it(engine, ok):
    tokens = prompt(engine, 5, 3)
    attempt = engine.job(tokens, cached_blocks=4)
    engine.run()
    assert engine.is_reading() and not engine.computed()
    engine.end_read(tokens, ok)
    engine.run()
    assert engine.computed() == (len(tokens) - 4 * engine.block_size if ok else len(tokens)) and not engine.said()
    engine.check_written(attempt, tokens)
    engine.end_write(attempt)
    engine.end()


def test_b22_a_lease_that_is_over_posts_no_write(engine):
    attempt = engine.job(prompt(engine, 3))
    engine.end_lease()
    engine.run()
    assert engine.said() == [("failed", attempt)] and not engine.is_writing(attempt)
    engine.end()


def test_b22_what_was_read_after_the_lease_is_not_used(engine):
    tokens = prompt(engine, 5, 3)
    attempt = engine.job(tokens, cached_blocks=4)
    engine.run()
    engine.end_lease()
    engine.end_read(tokens, has_come=False, ok=True)  # the peer has reused the blocks meanwhile
    engine.add("c", tokens)  # finds no hit in them
    engine.run()
    assert engine.said() == [("failed", attempt)]
    engine.end()


def test_b27_a_write_that_failed_is_said_and_its_blocks_are_free(engine):
    attempt = engine.job(prompt(engine, 3))
    engine.run()
    engine.end_write(attempt, "ERR")
    assert engine.said() == [("failed", attempt)]
    engine.end()
    assert engine.said() == [("failed", attempt)]


@pytest.mark.parametrize("tokens", [list(range(2000)), [5, 1 << 30], [3, -1]], ids=["length", "vocabulary", "negative"])
def test_b30_what_can_t_run_here_is_answered_at_once(engine, tokens):
    most = engine.room()
    attempt = engine.job(tokens)
    engine.run()
    assert engine.said() == [("failed", attempt)] and engine.room() == most
    engine.end()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_b25_a_job_cancelled_while_it_is_computed(engine, steps):
    attempt = engine.job(prompt(engine, 6))
    for _ in range(steps):
        engine.step()
    is_writing = engine.is_writing(attempt)
    engine.cancel(attempt)
    engine.run()
    if is_writing:
        assert not engine.said(), "bytes may still land"
        engine.end_write(attempt, "cancelled")
    assert engine.said() == [("ended", attempt)]
    engine.end()


@pytest.mark.parametrize("error", ["", "cancelled"], ids=["it lands", "it does not"])
def test_b25_a_job_cancelled_while_it_is_sent_waits_for_the_end(engine, error):
    tokens = prompt(engine, 3)
    attempt = engine.job(tokens)
    engine.run()
    for _ in range(2):
        engine.cancel(attempt)
        engine.run()
    assert engine.is_stopped(attempt) and not engine.said()
    engine.add("c", prompt(engine, 6, 0, 900))
    engine.run()
    engine.check_written(attempt, tokens)
    engine.end_write(attempt, error)
    assert engine.said() == [("ended", attempt)]
    engine.end()


@pytest.mark.parametrize("ok", [True, False])
def test_b25_a_job_cancelled_while_it_reads_keeps_its_blocks_until_the_read_has_ended(engine, ok):
    tokens = prompt(engine, 5, 3)
    attempt = engine.job(tokens, cached_blocks=4)
    engine.run()
    engine.cancel(attempt)
    engine.run()
    assert engine.is_stopped(attempt) and engine.is_reading() and not engine.said(), "bytes may still land"
    engine.add("c", tokens)  # finds no hit in what was never read
    engine.run()
    engine.end_read(tokens, ok)
    assert engine.said() == [("ended", attempt)]
    engine.end()


def test_b25_a_cancel_for_nothing_is_answered(engine):
    attempt = Attempt("peer", "never heard of", 9)
    engine.cancel(attempt)
    engine.run()
    assert engine.said() == [("ended", attempt)]
    engine.end()
