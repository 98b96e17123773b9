# SPDX-License-Identifier: Apache-2.0
"""Peers that join, leave, die and come back, on either side: B20, B23, B24, B40, B41, B43, in real processes."""
import collections
import random
import signal
import time

import pytest
import zmq
from light_engine import BLOCKS, WAIT_S, Light, Nursery

from tests.waiting import wait_for
from vllm_pd.broker.members import list_members
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.messages import Role
from vllm_pd.rpc import codec, sockets
from vllm_pd.rpc.ports import take_free


def requests(name: str, count: int, dice: random.Random | None = None) -> list[tuple[str, list[int]]]:
    dice = dice or random.Random(name)
    return [(f"{name}-{number}", [dice.randrange(1000) for _ in range(dice.randrange(1, 100))])
            for number in range(count)]


def all_remote(decode: Light, name: str, count: int) -> None:
    asked = requests(name, count)
    decode.ask("submit", asked)
    ended = decode.wait_ended({name for name, _ in asked})
    assert set(ended.values()) == {"remote"}, ended


def queue_becomes(broker: str, jobs: int) -> None:
    """So many wait at the broker; a decode engine counts its own before it has sent them."""
    wait_for(lambda: list_members(broker, WAIT_S).queue_length == jobs)


def test_hand_overs_between_processes(nursery: Nursery, broker: str):
    """The light engines do what the tests below build upon."""
    decode, prefill = nursery.engine(Role.DECODE, broker), nursery.engine(Role.PREFILL, broker)
    decode.wait_for_peers(1)
    all_remote(decode, "r", 30)
    decode.at_rest()
    assert prefill.at_rest()["moved"] > 0
    for one in (decode, prefill):
        one.quit()


# B23, B24: death and return at the same address.


def test_b23_decode_engine_killed_while_its_prompts_are_computed_and_sent(nursery, broker):
    """B23: P frees its blocks, drops the peer and serves the other; the next life at that address is refused the old
    one's jobs, and what is said about them is counted there."""
    bind = {"bind": f"tcp://127.0.0.1:{take_free('127.0.0.1')}"}
    prefill = nursery.engine(Role.PREFILL, broker, work_s=600.0, room=8)
    doomed, other = nursery.engine(Role.DECODE, broker, bind), nursery.engine(Role.DECODE, broker)
    for one in (doomed, other):
        one.wait_for_peers(1)
    doomed.ask("submit", requests("doomed", 6))
    other.ask("submit", requests("other", 2))
    prefill.wait_until(lambda state: state["jobs"] >= 6)
    doomed.kill()
    prefill.ask("work", 0.0)
    again = nursery.engine(Role.DECODE, broker, bind)
    assert again.member.address == doomed.member.address and again.member.incarnation != doomed.member.incarnation
    assert set(other.wait_ended({name for name, _ in requests("other", 2)}).values()) == {"remote"}
    prefill.wait_until(lambda state: (state["counts"]["peers"], state["counts"]["sockets"]) == (2, 4))
    assert prefill.at_rest()["free"] == BLOCKS
    again.wait_for_peers(1)
    all_remote(again, "again", 6)
    all_remote(other, "after", 6)
    for one in (prefill, again, other):
        one.at_rest()


def test_b23_words_about_an_earlier_life_are_refused_and_counted(nursery, broker):
    """B23: whatever a P says to the new D of an attempt of the old one, by message or by notice, changes a counter."""
    prefill, decode = nursery.engine(Role.PREFILL, broker), nursery.engine(Role.DECODE, broker)
    decode.wait_for_peers(1)
    all_remote(decode, "first", 2)
    before = decode.state()["dropped"]
    old = m.Attempt("an earlier life", "r", 0)
    prefill.ask("notify", decode.member.incarnation, old)
    context = zmq.Context()
    socket = sockets.client(context, decode.member.address, only_connected=False)
    for word in (m.Claim(old, 1), m.Renew(old, 1, 1), m.Writing(old, 1), m.Sent(old, 1, m.Timings()),
                 m.Failed(old, 1, "late"), m.Stopped(old, 1)):
        socket.send(codec.encode("an earlier life of P", word))  # its name now is that of its connection
    names = [f"decode_{name}_unknown" for name in ("claim", "renew", "writing", "sent", "failed", "stopped", "notice")]
    decode.wait_until(lambda state: all(state["dropped"].get(name, 0) > before.get(name, 0) for name in names))
    socket.close()
    context.term()
    for one in (prefill, decode):
        one.at_rest()


def test_b24_a_hundred_lives_at_one_address_leave_nothing(nursery, broker):
    """B24: P dies without a word, and comes back with the same address and other memory, a hundred times; each life
    fills blocks of D. D grows by nothing: descriptors, sockets, records, threads, memory."""
    bind = {"bind": f"tcp://127.0.0.1:{take_free('127.0.0.1')}"}
    decode = nursery.engine(Role.DECODE, broker)
    alone = decode.wait_for_peers(0)["counts"]
    early = None
    unborn = collections.deque(nursery.prepare(Role.PREFILL, broker, bind) for _ in range(3))
    for life in range(100):
        prefill = unborn.popleft().start()
        if life < 97:
            unborn.append(nursery.prepare(Role.PREFILL, broker, bind))
        decode.wait_for_peers(1)
        asked = requests(f"life-{life}", 2)
        decode.ask("submit", asked)
        ended = decode.wait_ended({name for name, _ in asked})
        assert set(ended.values()) <= {"remote"}, (life, ended)
        prefill.kill()
        decode.wait_until(lambda state: state["view"]["prefill_peers"] == 0)
        if life == 19:
            decode.at_rest()
            early = decode.wait_until(lambda state: state["counts"] == alone)
    decode.at_rest()
    late = decode.wait_until(lambda state: state["fds"] <= early["fds"] + 2 and state["counts"] == alone
                             and state["threads"] == early["threads"])
    assert late["rss"] - early["rss"] < 16 << 20, (early["rss"], late["rss"])
    assert late["totals"]["decode_done"] == 200


# B40: under load, in any order, on either side.


@pytest.mark.parametrize("seed", range(2))
def test_b40_engines_come_and_go_in_any_order_under_load(nursery, broker, seed):
    """B40: join, leave and crash on both sides, while every decode engine is never without work: each request of an
    engine that lives ends with the right content, and nothing is left anywhere."""
    dice = random.Random(seed)
    alive: dict[Role, list[Light]] = {Role.DECODE: [], Role.PREFILL: []}
    open_names: dict[Light, set[str]] = {}
    ends: dict[str, int] = {}

    def join(role: Role) -> None:
        one = nursery.engine(role, broker, work_s=dice.choice([0.0, 0.02, 0.1]), room=dice.randrange(1, 6))
        alive[role].append(one)
        open_names[one] = set()

    def take(decode: Light) -> None:
        for name, end in decode.ask("ended").items():
            open_names[decode].remove(name)
            ends[end] = ends.get(end, 0) + 1

    def go_on(turn: int) -> None:
        for number, decode in enumerate(alive[Role.DECODE]):
            asked = requests(f"{seed}-{turn}-{number}", 3, dice)
            open_names[decode] |= {name for name, _ in asked}
            decode.ask("submit", asked)
        time.sleep(0.03)
        for decode in alive[Role.DECODE]:
            take(decode)

    def finish() -> None:
        deadline = time.monotonic() + WAIT_S
        for decode in alive[Role.DECODE]:
            while open_names[decode]:
                assert time.monotonic() < deadline, (open_names[decode], decode.state())
                take(decode)
                time.sleep(0.02)

    for role in (Role.DECODE, Role.PREFILL):
        join(role)
    alive[Role.DECODE][0].wait_for_peers(1)
    for turn in range(60):
        go_on(turn)
        role = dice.choice([Role.DECODE, Role.PREFILL])
        what = dice.random()
        if what < 0.12 and len(alive[role]) < 3:
            join(role)
        elif what < 0.24 and len(alive[role]) > (role is Role.DECODE):
            victim = alive[role].pop(dice.randrange(len(alive[role])))
            del open_names[victim]
            (victim.kill if dice.random() < 0.6 else victim.quit)()
        elif what < 0.30 and alive[role]:
            victim = dice.choice(alive[role])
            victim.stop()
            time.sleep(0.1)
            victim.send(signal.SIGCONT)
    finish()
    if not alive[Role.PREFILL]:
        join(Role.PREFILL)
    deadline = time.monotonic() + WAIT_S
    while ends.get("remote", 0) <= 60:  # they came and went faster than they could meet
        assert time.monotonic() < deadline, ends
        go_on(turn := turn + 1)
        finish()
    assert ends.keys() <= {"remote", "local"}, ends
    for one in (*alive[Role.DECODE], *alive[Role.PREFILL]):
        one.at_rest()


# B41: a job comes before the peer's metadata.


def test_b41_a_job_waits_for_the_peer_that_it_came_from(nursery, broker):
    """B41: P is offered a job of a D that it has not met and that does not answer yet; it waits, and does the job when
    D answers; where D never does, the job is forgotten in bounded time."""
    patient = {"ttl_s": 60.0, "claim_retry_s": 19.0}
    decode = nursery.engine(Role.DECODE, broker, patient)
    busy = nursery.engine(Role.PREFILL, broker, room=0)
    decode.wait_for_peers(1)
    for name, answers in (("in-time", True), ("never", False)):
        asked = requests(name, 1)
        decode.ask("submit", asked)
        queue_becomes(broker, 1)
        decode.stop()
        late = nursery.engine(Role.PREFILL, broker)
        late.wait_until(lambda state: state["open"] == 1)
        time.sleep(0.3)
        state = late.state()
        assert state["jobs"] == 0 and state["counts"]["peers"] == 0 and state["error"] is None
        if answers:
            decode.send(signal.SIGCONT)
            assert decode.wait_ended({asked[0][0]}) == {asked[0][0]: "remote"}
            late.at_rest()
        else:
            late.wait_until(lambda state: state["open"] == 0)
            decode.send(signal.SIGCONT)
        late.quit()
    decode.kill()
    busy.at_rest()
