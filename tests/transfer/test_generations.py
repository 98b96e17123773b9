# SPDX-License-Identifier: Apache-2.0
"""Transfer agents that are made and destroyed over the same memory while peers write and read, in real processes: B3,
B20, B22, B105 (the rank's part).

Over TCP as between machines, where the end of an agent is a fence, and over what UCX chooses on one machine (CMA),
where it is none for the writes of others. Not over UCX's shared memory alone (`UCX_TLS=posix,sysv`): there is no NIXL
without a transport that notices a peer's end, which in UCX 1.23 posix and sysv do not. Beside TCP they carry nothing.
"""
import os
import signal
import time

import pytest
import torch
from nixl_receiver import receiver
from remote_rank import BLOCKS, expected
from writes import connect, finish, send

from tests.forked import freeze
from tests.verdict import same_bytes
from vllm_pd.errors import ConfigError, TransferError
from vllm_pd.protocol.names import generation_name
from vllm_pd.transfer.nixl.devices import only_network
from vllm_pd.transfer.nixl.generations import MAX_GENERATIONS
from vllm_pd.transfer.requests import (
    AddTransferPeer,
    DestroyOlder,
    DropTransferPeer,
    Finished,
    GenerationMade,
    MakeGeneration,
    Read,
    Write,
)
from vllm_pd.transfer.transport import RanksMetadata

MANY = 700  # blocks, 68 MB: a write of all lasts for a while over TCP
TCP = {"UCX_TLS": "tcp"}
FREE = -1  # in each number of a block that is free


@pytest.fixture(params=[TCP, {}], ids=["tcp", "default"])
def environ(request, monkeypatch):
    """UCX's variables, here and in the other processes."""
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)
    return request.param


@pytest.fixture
def tcp(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    return TCP


@pytest.mark.parametrize("tls", ["posix,sysv", "posix,sysv,self", "self"])
def test_there_is_no_agent_over_shared_memory_alone(rank, monkeypatch, tls):
    """Where there is, `environ` wants it as a third parameter."""
    monkeypatch.setenv("UCX_TLS", tls)
    with pytest.raises(TransferError, match="NIXL makes no UCX"):
        rank("nobody")


@pytest.fixture(params=["tcp", "posix,sysv,tcp"])
def copied_here(request, monkeypatch):
    """UCX's variables where the receiver copies what comes in: TCP, alone and beside shared memory."""
    monkeypatch.setenv("UCX_TLS", request.param)
    return {"UCX_TLS": request.param}


@pytest.fixture
def network_only(monkeypatch):
    """What `only_network` makes of UCX's variables, with those of this process as they were."""
    monkeypatch.setenv("UCX_TLS", "")
    only_network()
    made = os.environ["UCX_TLS"]
    assert made.startswith("^sm,")
    monkeypatch.delenv("UCX_TLS")
    return {"UCX_TLS": made}


@pytest.mark.parametrize("which", ["writer", "receiver"])
def test_b105_an_engine_on_several_nodes_is_fenced_on_its_own_machine_too(rank, network_only, monkeypatch, which):
    """B105: one of the two uses the network only. The other may use shared memory, and can't here: nothing lands once
    the receiver's agent is destroyed."""
    if which == "receiver":
        monkeypatch.setenv("UCX_TLS", network_only["UCX_TLS"])
    d = rank("d-fences", blocks=MANY)
    monkeypatch.delenv("UCX_TLS", raising=False)
    free(d)
    environ = network_only if which == "writer" else {}
    with receiver("p-writes", blocks=MANY, environ=environ, progress_thread=False) as p:
        assert p.ask("write", d.name, d.transport.metadata(), list(range(MANY)), "") is None
        landed = landing(d)
        if which == "receiver":
            monkeypatch.setenv("UCX_TLS", network_only["UCX_TLS"])
        renew(d, "d-fences~1")
        assert retire(d) == []
        free(d)
        _, error = p.answer()
        assert error and landed < MANY
        time.sleep(0.5)
        assert all(bool((layer == FREE).all()) for layer in d.memory), "it landed in blocks that are free"


@pytest.mark.parametrize("given, made", [("", "^sm,cuda_ipc,rocm_ipc,ze_ipc"), ("tcp", "tcp"), ("rc,tcp", "rc,tcp"),
                                         ("^rc,sm", "^rc,sm,cuda_ipc,rocm_ipc,ze_ipc")])
def test_only_the_network(monkeypatch, given, made):
    monkeypatch.setenv("UCX_TLS", given)
    only_network()
    only_network()
    assert os.environ["UCX_TLS"] == made


@pytest.mark.parametrize("given", ["all", "tcp,sm", "tcp,cma:aux", "rc,cuda", "posix, sysv,tcp"])
def test_b80_a_way_that_exists_on_one_machine_only_is_refused(monkeypatch, given):
    monkeypatch.setenv("UCX_TLS", given)
    with pytest.raises(ConfigError, match="UCX_TLS=.*take .* out of it"):
        only_network()


def renew(rank, name: str) -> bytes:
    """A new generation of the rank. Returns its metadata."""
    rank.worker.execute([MakeGeneration(name)])
    progress = rank.worker.take_progress()
    assert [(made.name, made.error) for made in progress.made] == [(name, "")] and not progress.refused
    return progress.made[0].metadata


def retire(rank, *ends: str) -> list[Finished]:
    """Have the older generations destroyed. Returns how the transfers `ends` ended; no other one does."""
    rank.worker.execute([DestroyOlder("retire")])
    finished = rank.worker.take_progress().finished
    assert finished[-1] == Finished("retire", ok=True) and [end.key for end in finished[:-1]] == list(ends)
    return finished[:-1]


def landing(rank) -> int:
    """Wait until a part of a write of all blocks has landed, which is written again and again. Returns how many of the
    last layer's blocks have."""
    deadline_s, landed = time.monotonic() + 60, MANY
    while landed == MANY:
        free(rank)  # it was all there before this process had its turn
        while bool((rank.memory[0][0, 0] == FREE).all()):
            assert time.monotonic() < deadline_s, "nothing lands, or all at once"
        landed = int((rank.memory[-1][1, :, 0] != FREE).sum())
    return landed


def free(rank) -> None:
    for layer in rank.memory:
        layer.fill_(FREE)


@pytest.mark.parametrize("both", [False, True], ids=["stays", "renews"])
def test_b105_nothing_lands_once_the_agent_is_destroyed_and_the_two_go_on(rank, copied_here, both):
    """The writer's error comes by itself. It goes on with the new generation, from its old one or a new one."""
    d = rank("d-fences", blocks=MANY)
    free(d)
    with receiver("p-writes", blocks=MANY, environ=copied_here, progress_thread=False) as p:
        assert p.ask("write", d.name, d.transport.metadata(), list(range(MANY)), "") is None
        landed = landing(d)
        metadata = renew(d, "d-fences~1")
        assert retire(d) == []
        free(d)
        number, error = p.answer()
        assert error and landed < MANY
        time.sleep(0.5)
        assert all(bool((layer == FREE).all()) for layer in d.memory), "it landed in blocks that are free"
        if both:
            p.ask("renew", "p-writes~1")
            assert p.ask("retire", "retire") == [Finished("retire", ok=True)]
        p.tell("write", "d-fences~1", metadata, [1, 2], "")
        assert p.answer() is None
        while not (notices := d.worker.take_progress().notices):
            time.sleep(0.001)
        assert p.ask("stop")[1] == "" and notices[0].peer == ("p-writes~1" if both else "p-writes")
        assert bool((d.memory[0][:, [1, 2]] != FREE).all()) and bool((d.memory[0][:, 3:] == FREE).all())


def test_b105_what_goes_well_ends_in_the_generation_in_which_it_began(rank, environ):
    """The one who makes the new agent is disturbed as little as the one who writes."""
    d = rank("d-lasts", blocks=MANY, progress_thread=True)
    p = rank("p-lasts", blocks=MANY, start=7)
    p.worker.execute([AddTransferPeer(d.name, d.transport.metadata()),
                      Write("k", d.name, list(range(MANY)), list(range(MANY)), [b"all"]), MakeGeneration("p-lasts~1")])
    d.worker.execute([MakeGeneration("d-lasts~1")])
    notices = d.worker.take_progress().notices
    assert finish(p, ["k"])["k"].ok
    deadline_s = time.monotonic() + 60
    while not notices and time.monotonic() < deadline_s:
        p.worker.take_progress()
        notices += d.worker.take_progress().notices
    assert [(notice.peer, notice.payload) for notice in notices] == [("p-lasts", b"all")]
    same_bytes(torch.equal(torch.stack(d.memory), torch.stack(p.memory)))
    for each in (d, p):
        assert retire(each) == [] and each.worker.live_handles() == 0


@pytest.mark.parametrize("reads", [False, True], ids=["write", "read"])
@pytest.mark.parametrize("connected", [False, True], ids=["new", "connected"])
def test_b105_b22_own_transfers_that_hang_end_with_the_agent_at_once(rank, environ, reads, connected):
    """The peer stands still. Of a write the peer may get more; a read is over, for it is this process that copies."""
    p = rank("p-hangs", blocks=MANY, progress_thread=False)
    with receiver("d-hangs", blocks=MANY, environ=environ) as d, receiver("other", environ=environ) as other:
        if connected:
            connect(p, d)
        else:
            p.worker.execute([AddTransferPeer(d.name, d.metadata)])
        connect(p, other)
        freeze(d.process.pid)
        ids = list(range(MANY))
        p.worker.execute([Read("k", d.name, ids, ids) if reads else Write("k", d.name, ids, ids, [b"n"])])
        began_s = time.monotonic()
        while time.monotonic() < began_s + 0.2:
            if p.worker.take_progress().finished:
                assert environ != TCP and connected, "it does not hang"  # CMA needs nobody
                return
        renew(p, "p-hangs~1")
        send(p, other, "healthy", [1], [1])
        began_s = time.monotonic()
        ends = {end.key: end for end in retire_all(p)}
        end = ends["k"]
        assert time.monotonic() - began_s < 1.0, "it waits for the peer"
        assert not end.ok and end.may_land is not reads and "destroyed" in end.error
        free(p)
        os.kill(d.process.pid, signal.SIGCONT)
        time.sleep(0.5)
        assert not reads or all(bool((layer == FREE).all()) for layer in p.memory)
        assert (ends.get("healthy") or finish(p, ["healthy"])["healthy"]).ok and p.worker.live_handles() == 0
        d.kill()  # UCX 1.23 over TCP may have ended it: it aborts where the other end of a connection went meanwhile


def retire_all(rank) -> list[Finished]:
    """As `retire`, with transfers of the newest generation under way."""
    rank.worker.execute([DestroyOlder("retire")])
    finished = rank.worker.take_progress().finished
    [end] = [end for end in finished if end.key == "retire"]
    assert end.ok
    return finished


def test_b105_after_a_failed_transfer_new_agents_heal_the_two(rank, tcp, caplog):
    """D has made its own anew. Until P knows them, or has its own anew, P is refused, and nobody is to restart an
    engine for it."""
    d, p = rank("d-heals"), rank("p-heals")
    p.worker.execute([AddTransferPeer(d.name, d.transport.metadata())])
    send(p, d, "before", [1], [1])
    assert finish(p, ["before"])["before"].ok
    metadata = renew(d, "d-heals~1")
    retire(d)

    def write(key: str, peer: str) -> Finished:
        p.worker.execute([Write(key, peer, [2], [2], [b"n"])])
        return finish(p, [key])[key]

    failed, refused = write("fails", d.name), write("refused", d.name)
    assert not failed.ok and failed.may_land and not refused.ok and not refused.may_land
    for said in (refused.error, caplog.text):
        assert "new transfer agents, which both make by themselves" in said and "restart" not in said
    renew(p, "p-heals~1")
    assert "by themselves" not in write("again", d.name).error, "it is tried again"
    p.worker.execute([AddTransferPeer("d-heals~1", metadata)])
    assert write("heals", "d-heals~1").ok
    retire(p)


def test_b105_other_peers_notice_nothing(rank, environ):
    """Each of them writes, and is written to through the new generation."""
    d, peers = rank("d-many"), [rank(f"p-many-{number}", start=number << 20) for number in range(6)]
    for p in peers:
        p.worker.execute([AddTransferPeer(d.name, d.transport.metadata())])
        d.worker.execute([AddTransferPeer(p.name, p.transport.metadata())])
    d.worker.execute([DropTransferPeer(peers[5].name)])
    metadata = renew(d, "d-many~1")
    for p in peers:
        send(p, d, "old", [1], [1])
        assert finish(p, ["old"])["old"].ok
    retire(d)
    for number, p in enumerate(peers):
        p.worker.execute([AddTransferPeer("d-many~1", metadata), Write("new", "d-many~1", [2], [3 + number], [b"n"])])
        assert finish(p, ["new"])["new"].ok
        d.worker.execute([Write(p.name, p.name, [0], [0], [b"back"])])
        assert finish(d, [p.name])[p.name].ok is (number != 5), "one that was dropped stays dropped"
        same_bytes(torch.equal(d.blocks([3 + number]), p.blocks([2])))


def test_b105_a_peer_that_is_dead_by_then_is_met_by_nobody(rank, environ):
    d, alive = rank("d-left", progress_thread=False), rank("p-alive")
    with receiver("p-dead", environ=environ) as dead:
        connect(d, dead)
        d.worker.execute([AddTransferPeer(alive.name, alive.transport.metadata())])
        dead.kill()
    renew(d, "d-left~1")
    retire(d)
    send(d, alive, "alive", [1], [1])
    send(d, dead, "dead", [1], [1])
    ends = finish(d, ["alive", "dead"])
    assert ends["alive"].ok and not ends["dead"].ok


def test_b105_b107_a_peer_that_can_t_be_added_there_has_its_transfers_fail_until_it_is_added_anew(rank, monkeypatch):
    """B105, B107: each try may hold up all other transfers for seconds, so there is one, and the engine hears of it."""
    d, p = rank("d-refused"), rank("p-refused")
    d.worker.execute([AddTransferPeer(p.name, p.transport.metadata())])
    real = type(d.transport.newest).add_peer

    tries = []

    def broken(*arguments) -> None:
        tries.append(arguments)
        raise TransferError("out of order")

    monkeypatch.setattr(type(d.transport.newest), "add_peer", broken)
    renew(d, "d-refused~1")
    for key in ("lost", "lost too"):
        send(d, p, key, [1], [1])
        end = finish(d, [key])[key]
        assert "out of order" in end.error and not end.may_land
    assert len(tries) == 1
    monkeypatch.setattr(type(d.transport.newest), "add_peer", real)
    d.worker.execute([DropTransferPeer(p.name), AddTransferPeer(p.name, p.transport.metadata())])
    send(d, p, "k", [1], [1])
    assert finish(d, ["k"])["k"].ok


def test_b105_a_generation_that_is_asked_for_again_is_made_once(rank):
    """Another rank of the engine could not make its own, again and again, and something hangs in ours."""
    d = rank("d-again", progress_thread=False)
    first = renew(d, "d-again~1")
    with receiver("p-again") as p:
        d.worker.execute([AddTransferPeer(p.name, p.metadata)])
        freeze(p.process.pid)
        for number in range(2 * MAX_GENERATIONS):
            d.worker.execute([Write(f"{number}", p.name, [0], [0], [b"n"])])
            assert renew(d, "d-again~1") == first
        assert retire(d) == [] and d.worker.live_handles() == 2 * MAX_GENERATIONS


def test_b105_there_is_a_bound_of_generations_that_are_not_destroyed(rank):
    d = rank("d-bound", progress_thread=False)
    with receiver("p-bound") as p:
        d.worker.execute([AddTransferPeer(p.name, p.metadata)])
        freeze(p.process.pid)
        for number in range(1, MAX_GENERATIONS):
            d.worker.execute([Write(f"{number}", p.name, [0], [0], [b"n"])])
            renew(d, generation_name("d-bound", number))
        d.worker.execute([MakeGeneration(generation_name("d-bound", MAX_GENERATIONS))])
        assert "have not been destroyed" in d.worker.take_progress().made[0].error
        with pytest.raises(TransferError, match="already open"):
            d.transport.write("1", p.name, [0], [0], b"n")
        ends = retire(d, *(f"{number}" for number in range(1, MAX_GENERATIONS)))
        assert all(end.may_land for end in ends) and d.worker.live_handles() == 0


def test_b20_generations_that_come_and_go_leave_nothing(rank, environ):
    d, p = rank("d-turns"), rank("p-turns")

    def life(number: int) -> None:
        name = generation_name("d-turns", number)
        p.worker.execute([AddTransferPeer(name, renew(d, name)), Write("k", name, [1], [1], [b"n"])])
        assert finish(p, ["k"])["k"].ok
        assert retire(d) == []
        p.worker.execute([DropTransferPeer(name)])
        finish_drop(p)

    for number in range(1, 4):
        life(number)
    before = resources()
    for number in range(4, 12):
        life(number)
    deadline_s = time.monotonic() + 60
    while resources() > before:
        assert time.monotonic() < deadline_s, (resources(), before)
        time.sleep(0.05)


def finish_drop(rank) -> None:
    rank.worker.take_progress()
    assert rank.worker.live_handles() == 0


def resources() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def test_b20_closing_ends_all_generations(rank, environ):
    d = rank("d-closes", progress_thread=False)
    with receiver("p-closes", environ=environ) as p:
        d.worker.execute([AddTransferPeer(p.name, p.metadata)])
        freeze(p.process.pid)
        for key, name in (("old", "d-closes~1"), ("new", "d-closes~2")):
            d.worker.execute([Write(key, p.name, [0], [0], [b"n"]), MakeGeneration(name)])
        assert d.worker.live_handles() == 2
        began_s = time.monotonic()
        assert not d.worker.close() and time.monotonic() - began_s < 2.0, "the generations share the time"
        assert sorted(end.key for end in d.worker.take_progress().finished) == ["new", "old"]
        with pytest.raises(TransferError, match="closed"):
            d.transport.renew("d-closes~3")


# Engines of several ranks, in processes of their own.


@pytest.mark.parametrize("p_ranks,d_ranks", [(1, 2), (2, 1), (2, 2)])
def test_b105_an_engine_renews_when_all_its_ranks_have(engine, p_ranks, d_ranks):
    p, d = engine(p_ranks, True), engine(d_ranks, False)
    p.meet(d)
    ours, theirs = [3, 4, 9, 0], [7, 8, 2, 11]

    def write(key: str, peer: str) -> None:
        p.transfer.execute([Write(key, peer, ours, theirs, [b"from %d" % rank for rank in range(p_ranks)])])
        assert p.until(lambda progress: any(end.key == key for end in progress.finished)).finished[-1].ok

    write("old", d.name)
    name = generation_name(d.name, 1)
    d.transfer.execute([MakeGeneration(name)])
    [made] = d.until(lambda progress: progress.made).made
    assert made.name == name and len(RanksMetadata.decode(name, made.metadata).ranks) == d_ranks
    p.transfer.execute([MakeGeneration(generation_name(p.name, 1)), AddTransferPeer(name, made.metadata)])
    write("new", name)
    d.transfer.execute([DestroyOlder("retire")])
    assert d.until(lambda progress: progress.finished).finished == [
        Finished("retire", ok=True, seconds=d.progress.finished[0].seconds)]
    write("newer", name)
    notices = d.until(lambda progress: len(progress.notices) == 3 * p_ranks, look=True).notices
    assert {notice.peer for notice in notices} == {
        f"{generation_name(p.name, number)}/{rank}" for number in (0, 1) for rank in range(p_ranks)}
    for rank in d.processes:
        held = rank.memory()
        heads = range(held.shape[2]) if d_ranks == 1 else None
        if heads is not None:
            same_bytes(torch.equal(held[:, theirs], expected(heads, BLOCKS)[:, ours]))
    assert not p.progress.refused and p.transfer.live_handles() == 0


def test_b105_one_rank_that_can_make_none_is_an_error_of_the_engine(engine):
    """A rank that was killed answers nothing; then the executor ends the engine, and nothing is made."""
    d = engine(2, False)
    d.transfer.execute([MakeGeneration("x" * 5)])
    [made] = d.until(lambda progress: progress.made).made
    assert made == GenerationMade("x" * 5, made.metadata) and made.metadata
    d.processes[1].kill()
    d.transfer.execute([MakeGeneration("y" * 5)])
    time.sleep(1.0)
    assert d.transfer.take_progress().made == []
