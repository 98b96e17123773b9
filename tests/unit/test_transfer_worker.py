# SPDX-License-Identifier: Apache-2.0
"""B20, B27, B29, B42, B81: the worker answers each write once, and nothing a peer does makes it raise."""
import ctypes
import pickle
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.transport import FakeFabric, FakeTransport, Faults
from vllm_pd.transfer.layout import CacheDescription, Layout, Memory
from vllm_pd.transfer.ranks.transport import RankedTransport
from vllm_pd.transfer.requests import (
    AddTransferPeer,
    CancelTransfer,
    DropTransferPeer,
    Finished,
    Notice,
    PeerRefusal,
    TransferProgress,
    TransferRequest,
    Write,
)
from vllm_pd.transfer.slow import EmulatedWire, SlowTransport
from vllm_pd.transfer.transport import PeerMetadata
from vllm_pd.transfer.worker import SETTLE_S, SETTLE_STEP_S, TransferWorker

BLOCKS = 6

NO_FAULTS = Faults()


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def member(fabric, name, synchronize=lambda: None, clock=time.monotonic, **other):
    memory = bytearray(2 * BLOCKS * 64)
    base = _address(memory)
    cache = CacheDescription(**{**dict(layout=Layout.HEADS_FIRST, memory=Memory.DRAM, device_id=0, dtype="float32",
                                       num_blocks=BLOCKS, block_size=4, head_size=2, first_head=0, kv_heads=2,
                                       first_layer=0, layers=1, block_bytes=64, block_stride_bytes=64,
                                       planes=(base, base + BLOCKS * 64)), **other})
    transport = FakeTransport(fabric, name, [memory], cache)
    return TransferWorker(transport, synchronize, clock=clock), transport


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def pair(faults=NO_FAULTS, **other):
    clock = Clock()
    fabric = FakeFabric(0, faults, clock)
    p, _ = member(fabric, "p", clock=clock)
    d, transport = member(fabric, "d", **other)
    return clock, fabric, p, d, AddTransferPeer("d", transport.metadata())


def test_b20_a_write_is_answered_once_and_its_notice_arrives():
    _, _, p, d, add = pair()
    p.execute([add, Write("k", "d", [1], [2], [b"here"])])
    assert [(end.key, end.ok) for end in p.take_progress().finished] == [("k", True)]
    assert d.take_progress().notices == [Notice("p", b"here")]
    assert p.take_progress() == TransferProgress() and p.live_handles() == 0


@pytest.mark.parametrize("write,word", [
    (Write("k", "nobody", [1], [1], [b""]), "not known"),
    (Write("k", "d", [1, 2], [1], [b""]), "against"),
    (Write("k", "d", [BLOCKS], [1], [b""]), "outside"),
    (Write("k", "d", [1], [-1], [b""]), "outside"),
])
def test_b27_a_write_that_cant_be_made_ends_as_not_ok(write, word):
    _, _, p, d, add = pair()
    p.execute([add, write, Write("next", "d", [1], [1], [b""])])
    ends = {end.key: end for end in p.take_progress().finished}
    assert not ends["k"].ok and word in ends["k"].error
    assert ends["next"].ok, "one bad write must not touch the others"


def test_b42_a_peer_with_another_cache_is_refused_with_both_values():
    _, _, p, _, add = pair(dtype="bfloat16")
    p.execute([add, Write("k", "d", [1], [1], [b""])])
    progress = p.take_progress()
    refusal, = progress.refused
    assert refusal.peer == "d" and "float32" in refusal.reason and "bfloat16" in refusal.reason
    assert [(end.key, end.ok) for end in progress.finished] == [("k", False)]
    assert p.take_progress().refused == []


def test_b27_a_peer_with_which_something_unexpected_goes_wrong_is_refused(monkeypatch):
    """What follows it is done all the same, and a second try may succeed."""
    _, _, p, _, add = pair()
    with monkeypatch.context() as patched:
        patched.setattr(p.transport, "add_peer", lambda *_: 1 / 0)
        p.execute([add, Write("k", "d", [1], [1], [b""])])
    progress = p.take_progress()
    refusal, = progress.refused
    assert refusal.peer == "d" and "ZeroDivisionError" in refusal.reason
    assert [(end.key, end.ok) for end in progress.finished] == [("k", False)]
    assert not p.busy
    p.execute([add, Write("k", "d", [1], [1], [b""])])
    progress = p.take_progress()
    assert progress.refused == [] and [end.ok for end in progress.finished] == [True]


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_b81_random_metadata_is_refused(metadata):
    _, _, p, _, _ = pair()
    p.execute([AddTransferPeer("d", metadata)])
    assert [refusal.peer for refusal in p.take_progress().refused] == ["d"]


@settings(deadline=None)
@given(st.data())
def test_b81_damaged_metadata_is_refused(data):
    _, _, p, _, add = pair()
    damaged = bytearray(add.metadata)
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    p.execute([AddTransferPeer("d", bytes(damaged))])
    refusal, = p.take_progress().refused
    assert "damaged" in refusal.reason


@pytest.mark.parametrize("change,word", [(dict(name="e"), "belongs to e"), (dict(cache=None), "can't be read")])
def test_b24_metadata_of_another_life_or_kind_is_refused(change, word):
    _, _, p, _, add = pair()
    other = msgspec.structs.replace(PeerMetadata.decode("d", add.metadata), **change)
    p.execute([AddTransferPeer("d", other.encode())])
    refusal, = p.take_progress().refused
    assert word in refusal.reason


def test_b29_a_second_write_under_an_open_key_is_ignored():
    clock, _, p, d, add = pair(Faults(delay_s=1.0))
    p.execute([add, Write("k", "d", [1], [1], [b"first"]), Write("k", "d", [2], [2], [b"second"])])
    clock.now_s = 5.0
    assert len(p.take_progress().finished) == 1
    clock.now_s = 9.0
    assert [notice.payload for notice in d.take_progress().notices] == [b"first"]
    p.execute([Write("k", "d", [2], [2], [b"third"])])
    clock.now_s = 19.0
    assert [end.ok for end in p.take_progress().finished] == [True], "an ended key is free again"


@pytest.mark.parametrize("posted", [False, True])
def test_b27_a_write_with_which_something_unexpected_goes_wrong_ends(posted, monkeypatch):
    """B20: at once where nothing of it was posted, otherwise when no byte of it can land any more."""
    clock, fabric, _, _, add = pair(Faults(delay_s=1.0))
    p, transport = member(fabric, "other", clock=clock)
    write = transport.write

    def broken(*arguments) -> None:
        if posted:
            write(*arguments)
        raise MemoryError("injected")

    monkeypatch.setattr(transport, "write", broken)
    p.execute([add, Write("k", "d", [1], [1], [b"n"])])
    ends = [end.key for end in p.take_progress().finished]
    assert ends == ([] if posted else ["k"]) and p.moving == posted
    clock.now_s = 5.0
    ends += [end.key for end in p.take_progress().finished]
    assert ends == ["k"] and p.live_handles() == 0 and not p.moving


def test_the_youngest_of_the_open_transfers_says_how_rarely_to_poll():
    clock, fabric, _, _, add = pair(Faults(delay_s=10.0))
    p, transport = member(fabric, "other", clock=clock)
    transport.needs_polls = False
    assert p.youngest_s == 0.0
    p.execute([add, Write("k", "d", [1], [1], [b"n"])])
    clock.now_s = 4.0
    assert p.youngest_s == 4.0
    p.execute([Write("l", "d", [2], [2], [b"n"])])
    assert p.youngest_s == 0.0
    clock.now_s = 5.0
    assert p.youngest_s == 1.0
    transport.needs_polls = True
    assert p.youngest_s == 0.0 and p.moving
    transport.needs_polls = False
    clock.now_s = 30.0
    assert len(p.take_progress().finished) == 2 and p.youngest_s == 0.0


def test_b25_cancelling_what_is_not_there_changes_nothing():
    _, _, p, _, add = pair()
    p.execute([CancelTransfer("k"), DropTransferPeer("d"), add, Write("k", "d", [1], [1], [b""])])
    assert p.take_progress().finished[0].ok
    p.execute([CancelTransfer("k")])
    assert p.take_progress() == TransferProgress()


def test_b20_closing_ends_open_writes():
    _, _, p, _, add = pair(Faults(delay_s=1.0))
    p.execute([add, Write("k", "d", [1], [1], [b""])])
    assert p.live_handles() == 1
    p.close()
    assert p.live_handles() == 0


def test_what_is_not_a_request_is_our_own_bug():
    _, _, p, _, _ = pair()
    with pytest.raises(TypeError):
        p.execute(["write"])


@pytest.mark.parametrize("request_", [
    AddTransferPeer("d", b"m"), DropTransferPeer("d"), Write("k", "d", [1, 2], [3, 4], [b"n"]), CancelTransfer("k")])
def test_requests_survive_both_ways_to_a_worker(request_):
    assert pickle.loads(pickle.dumps(request_)) == request_
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request_), type=TransferRequest) == request_


def test_progress_survives_the_way_back():
    progress = TransferProgress([Finished("k", True, 64, 0.5)], [Notice("p", b"n")], [PeerRefusal("d", "why")])
    assert pickle.loads(pickle.dumps(progress)) == progress
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(progress), type=TransferProgress) == progress


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7), st.integers(-1, BLOCKS)), max_size=60),
       st.integers(0, 2**32))
def test_b20_any_order_of_requests_ends_each_write_once_and_leaves_nothing(steps, seed):
    clock = Clock()
    fabric = FakeFabric(seed, Faults(error=0.2, notice_lost=0.2, notice_twice=0.2, delay_s=2.0), clock)
    p, sender = member(fabric, "p")
    _, receiver = member(fabric, "d")
    add = AddTransferPeer("d", receiver.metadata())
    open_keys, ended = set(), []
    for what, key, block in steps:
        clock.now_s += 0.3
        name = f"{key}"
        if what == 0:
            p.execute([add])
        elif what == 1:
            p.execute([DropTransferPeer("d")])
        elif what == 2:
            p.execute([CancelTransfer(name)])
        elif what == 3 and block == 0:
            fabric.kill("d")
        elif name not in open_keys:
            p.execute([Write(name, "d", [block], [block], [b"n"])])
            open_keys.add(name)
        now = [end.key for end in p.take_progress().finished]
        assert len(now) == len(set(now)) and set(now) <= open_keys
        open_keys -= set(now)
    clock.now_s += 10.0
    assert {end.key for end in p.take_progress().finished} == open_keys
    assert p.live_handles() == 0 and sender.poll().finished == ended


def test_b34_a_new_peer_is_polled_for_while_its_connection_is_made():
    clock, _, p, _, add = pair()
    assert not p.busy
    p.execute([AddTransferPeer("other", b"no metadata")])
    p.take_progress()
    assert not p.busy, "a refused peer has no connection"
    p.execute([add])
    assert p.busy and p.settling
    polls = 0
    while p.busy:
        clock.now_s += SETTLE_STEP_S
        p.take_progress()
        polls += 1
    assert SETTLE_S <= (polls + 0.01) * SETTLE_STEP_S < SETTLE_S + 2 * SETTLE_STEP_S


def test_b34_a_notice_that_nobody_sees_leave_is_polled_for(monkeypatch):
    """Also if several ranks have a part of the write, where it is sent after the last of them."""
    clock = Clock()
    fabric = FakeFabric(0, NO_FAULTS, clock)
    _, transport = member(fabric, "p", clock=clock)
    poll = transport.poll
    monkeypatch.setattr(transport, "poll", lambda: msgspec.structs.replace(poll(), unseen=clock.now_s == 1.0))
    for each in (transport, RankedTransport(transport, 0, 1, 2), SlowTransport(transport, EmulatedWire(), 1, clock)):
        p, clock.now_s = TransferWorker(each, clock=clock), 0.0
        p.take_progress()
        assert not p.busy
        clock.now_s = 1.0
        p.take_progress()
        clock.now_s = 2.0
        p.take_progress()
        assert p.settling and p.busy


def test_b34_an_engine_that_stands_still_has_polled_no_more_for_a_new_peer():
    clock, _, p, _, add = pair()
    p.execute([add])
    p.take_progress()
    clock.now_s += 10 * SETTLE_S
    p.take_progress()
    assert p.settling
