# SPDX-License-Identifier: Apache-2.0
"""What the metadata of an agent leads to once the agent is destroyed and its port is another one's: B105.

UCX connects to whoever listens there. Real agents and processes, over TCP.
"""
from __future__ import annotations

import time

import pytest
from nixl_receiver import receiver
from test_generations import FREE, free, renew, retire

from vllm_pd.rpc.ports import take_free
from vllm_pd.transfer.nixl import identity
from vllm_pd.transfer.transport import PeerMetadata


@pytest.fixture
def ports(monkeypatch) -> set[str]:
    """The only two addresses at which agents of this process listen."""
    while True:
        first = take_free("127.0.0.1")
        if first < 65535:
            break
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_TCP_PORT_RANGE", f"{first}-{first + 1}")
    return {f"tcp://127.0.0.1:{first}", f"tcp://127.0.0.1:{first + 1}"}


ELSEWHERE = {"UCX_TLS": "tcp", "UCX_TCP_PORT_RANGE": "0"}


def listens(metadata: bytes) -> tuple[str, ...]:
    return PeerMetadata.decode_any(metadata).listens


def landed(rank) -> int:
    return sum(int((layer != FREE).sum()) for layer in rank.memory)


def arrived(rank) -> None:
    """Wait for a notice."""
    deadline_s = time.monotonic() + 60
    while not rank.worker.take_progress().notices:
        assert time.monotonic() < deadline_s


def test_b105_nothing_lands_by_metadata_of_an_agent_whose_port_another_generation_has(rank, ports):
    """P meets D by what D has said two generations ago."""
    d = rank("d-reused", progress_thread=True)
    old = d.transport.metadata()
    for number in (1, 2):
        newest = renew(d, f"d-reused~{number}")
        retire(d)
    assert listens(newest) == listens(old) and set(listens(old)) <= ports, "the test needs the same port"
    free(d)
    with receiver("p-late", environ=ELSEWHERE, progress_thread=False) as p:
        assert p.ask("write", "d-reused", old, [1, 2, 3], "") is None
        number, error = p.answer()
        assert (number, "another agent listens where d-reused did" in error) == (1, True), error
        time.sleep(0.2)
        assert not landed(d)
        p.tell("write", "d-reused~2", newest, [1, 2, 3], "")
        assert p.answer() is None
        arrived(d)
        assert p.ask("fill", 0)[1] == "" and landed(d)


@pytest.mark.heavy
def test_b105_a_connection_that_stood_is_not_made_again(rank, ports):
    """P knows that it reached D, writes nothing for a while, and goes on when another generation has D's port. The
    kernel keeps that for a minute after the connection."""
    d = rank("d-idle", progress_thread=True)
    old = d.transport.metadata()
    with receiver("p-idle", environ=ELSEWHERE, progress_thread=False) as p:
        assert p.ask("write", "d-idle", old, [1], "") is None
        arrived(d)
        assert p.ask("fill", 0)[1] == "" and p.answer() is None
        for number in (1, 2):
            renew(d, f"d-idle~{number}")
            retire(d)
        free(d)
        assert p.ask("write", "d-idle", old, [1], "") is None
        assert p.answer()[1]
        time.sleep(0.2)
        assert not landed(d)


def test_the_bytes_of_an_agent_are_gone_before_it_is():
    one = identity.Identity("one")
    proofs = identity.Proofs()
    place = proofs.slot("one")
    assert place == proofs.slot("one") and not proofs.is_proven("one")
    proofs._memory[proofs._slots["one"]] = one._memory
    assert proofs.prove("one") and proofs.is_proven("one")
    proofs.forget("one")
    proofs.slot("one")
    assert not proofs.prove("one"), "nothing was read yet"
    one.clear()
    proofs._memory[proofs._slots["one"]] = one._memory
    assert not proofs.prove("one")
    assert proofs.mistaken == {"one"}
    proofs.forget("one")
    assert not proofs.mistaken
    assert proofs.slot("two") == proofs.slot("one") - identity.DIGEST_BYTES, "a place is used again last"
    for number in range(identity.MAX_SLOTS - 2):
        proofs.slot(f"other {number}")
    with pytest.raises(IndexError):
        proofs.slot("one more")
