# SPDX-License-Identifier: Apache-2.0
"""The reader of blocks of other hosts, pure: whom it asks, which answers count, and that each request goes on in time.
"""
from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from vllm_pd.store.beyond import fetches as module
from vllm_pd.store.beyond.fetches import (
    BACKOFF_S,
    FIND_S,
    HOST_SHARE,
    MAX_OPEN,
    QUARANTINE_S,
    BlockFetches,
    FetchPhase,
    FindQuestion,
    HostFailure,
    LandedBatch,
    SendQuestion,
)
from vllm_pd.store.beyond.waits import RequestWaits, WaitAnswer

WAIT_S = 2.0


def names(count: int, first: int = 0) -> list[bytes]:
    return [number.to_bytes(32) for number in range(first, first + count)]


class Reader:
    """The fetches of one engine, with a clock, and what it has asked."""

    def __init__(self, hosts: int = 2, rows: int = 32, models: int = 1) -> None:
        self.fetches = BlockFetches(hosts, rows, models, WAIT_S)
        self.models, self.now = models, 100.0

    def begin(self, count: int, first: int = 0) -> int | None:
        return self.fetches.begin(self.now, names(count, first))[0]

    def out(self) -> list[FindQuestion | SendQuestion]:
        return self.fetches.poll_transmit()

    def found(self, question: FindQuestion, blocks: int) -> None:
        self.fetches.found(self.now, question.host, question.number, blocks)

    def sent(self, question: SendQuestion, parts: int | None = None) -> LandedBatch | None:
        return self.fetches.sent(self.now, question.host, question.number,
                                 len(question.rows) if parts is None else parts)

    def store(self, question: SendQuestion, parts: int | None = None, right: int | None = None) -> None:
        """The host answers, and so many parts of what it says are right."""
        batch = self.sent(question, parts)
        self.fetches.checked(self.now, batch, len(batch.rows) if right is None else right)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.fetches.handle_timeout(self.now)

    def failures(self) -> list[tuple[int, HostFailure | None]]:
        return [(report.host, report.why) for report in self.fetches.poll_reports()]

    def counts(self) -> dict[str, int]:
        return {name: count for name, count in self.fetches.counts.items() if count}


def test_b104_the_host_with_the_longest_run_sends_it_batch_by_batch():
    reader = Reader(rows=8)
    number = reader.begin(5)
    one, other = reader.out()
    assert (one.host, other.host) == (0, 1) and one.number == other.number and one.names == tuple(names(5))
    reader.found(one, 2)
    assert reader.out() == [], "the other host may have more"
    reader.found(other, 4)
    asked = []
    for _ in range(2):  # a quarter of the rows each
        question, = reader.out()
        asked.append((question.host, question.names))
        reader.store(question)
    assert asked == [(1, tuple(names(2))), (1, tuple(names(2, 2)))]
    question, = reader.out()
    assert question == FindQuestion(0, question.number, tuple(names(1, 4))), "the rest, of who has not said it lacks it"
    reader.found(question, 0)
    assert not reader.fetches.is_open(number) and reader.out() == []
    assert reader.counts() == {"found": 4, "fetched": 4, "part": 1} and reader.fetches.free_rows() == 8


def test_a_host_that_has_all_is_not_waited_with():
    reader = Reader()
    number = reader.begin(3)
    reader.found(reader.out()[1], 3)
    question, = reader.out()
    assert isinstance(question, SendQuestion) and question.host == 1
    reader.store(question)
    assert not reader.fetches.is_open(number) and reader.counts()["whole"] == 1


def test_long_prompts_are_asked_for_in_windows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_NAMES", 4)
    reader = Reader(hosts=1)
    number, seen = reader.begin(10), []
    for _ in range(3):
        question, = reader.out()
        seen.append(len(question.names))
        reader.found(question, len(question.names))
        reader.store(*reader.out())
    assert seen == [4, 4, 2] and not reader.fetches.is_open(number) and reader.counts()["whole"] == 1


def test_two_ranks_have_a_row_each():
    reader = Reader(hosts=1, rows=5, models=2)
    reader.begin(2)
    reader.found(*reader.out(), 2)
    question, = reader.out()
    assert len(question.names) == 1 and len(question.rows) == 2
    assert reader.sent(question, 1) is None, "half a block"
    assert reader.failures() == [(0, HostFailure.GARBAGE)]


@pytest.mark.parametrize("act", ["silent", "unreachable", "garbage", "nothing"])
def test_b104_a_host_that_does_not_answer_well_is_left_alone_and_the_others_serve(act: str):
    reader = Reader()
    number = reader.begin(2)
    bad, good = reader.out()
    reader.found(good, 1)
    if act == "silent":
        reader.sleep(FIND_S)
    elif act == "unreachable":
        reader.fetches.unreachable(reader.now, bad.host, bad.number)
    else:
        reader.found(bad, 3 if act == "garbage" else 0)
    reader.store(*reader.out())
    assert not reader.fetches.is_open(number) or reader.out()[0].host != good.host
    why = {"silent": HostFailure.LATE, "unreachable": HostFailure.UNREACHABLE, "garbage": HostFailure.GARBAGE}.get(act)
    assert reader.failures() == ([] if why is None else [(0, why)])
    reader.sleep(WAIT_S)
    assert len(reader.fetches) == 0


def test_a_host_is_left_alone_for_longer_each_time_and_for_what_it_sends_until_it_sends_well():
    reader, waits = Reader(hosts=1, rows=2), []
    for _ in range(9):
        assert reader.begin(1) is not None
        reader.found(*reader.out(), 1)
        reader.store(*reader.out(), right=0)
        report, = reader.fetches.poll_reports()
        assert report.why is HostFailure.TORN
        assert reader.begin(1) is None, "nobody is to be asked"
        waits.append(report.wait_s)
        reader.now += report.wait_s
    assert waits == [BACKOFF_S * 2**number for number in range(7)] + [64.0] * 2
    reader.begin(1)
    reader.found(*reader.out(), 1)
    assert reader.failures() == [], "a promise does not clear it"
    reader.store(*reader.out())
    assert reader.failures() == [(0, None)]


def test_a_torn_block_ends_its_run_and_what_came_before_it_stays():
    reader = Reader(hosts=2)
    number = reader.begin(3)
    reader.found(reader.out()[0], 3)
    reader.store(*reader.out(), right=2)
    assert reader.failures() == [(0, HostFailure.TORN)]
    question, = reader.out()
    assert question == FindQuestion(1, question.number, tuple(names(1, 2))), "of the other host the rest"
    reader.found(question, 1)
    reader.store(*reader.out())
    assert not reader.fetches.is_open(number)
    assert reader.counts() == {"found": 4, "fetched": 3, "torn": 1, "host_torn": 1, "whole": 1}


def test_b104_the_deadline_ends_a_fetch_and_its_rows_wait_for_the_write():
    """B104: nothing is written into by two hosts at a time, as long as that can be helped."""
    reader = Reader(hosts=1, rows=8)
    number = reader.begin(2)
    reader.found(*reader.out(), 2)
    late, = reader.out()
    reader.sleep(WAIT_S)
    assert not reader.fetches.is_open(number) and reader.fetches.free_rows() == 6
    assert reader.counts() == {"found": 2, "late": 2, "host_late": 1, "none": 1}
    assert reader.sent(late) is None and reader.fetches.free_rows() == 8, "it has answered now"
    assert reader.sent(late) is None and reader.fetches.free_rows() == 8, "once"


def test_rows_of_a_host_that_never_answers_come_back_in_the_end():
    reader = Reader(hosts=1, rows=2)
    reader.begin(1)
    reader.found(*reader.out(), 1)
    reader.sleep(WAIT_S)
    reader.out()
    reader.sleep(QUARANTINE_S - 0.1)
    assert reader.fetches.free_rows() == 1
    assert reader.fetches.next_timeout() == pytest.approx(reader.now + 0.1)
    reader.sleep(0.1)
    assert reader.fetches.free_rows() == 2 and reader.fetches.next_timeout() is None


def test_a_slow_host_that_sends_is_asked_again():
    reader = Reader(hosts=1, rows=8)
    reader.begin(4)
    reader.found(*reader.out(), 4)
    reader.store(*reader.out())
    reader.out()
    reader.sleep(WAIT_S)
    assert reader.failures() == [] and reader.counts()["part"] == 1
    reader.sleep(QUARANTINE_S)
    assert reader.begin(1) is not None


def test_a_fetch_without_rows_waits_for_some():
    reader = Reader(hosts=1, rows=8)
    first, second, third = (reader.begin(1, 10 * number) for number in range(3))
    for question in reader.out():
        reader.found(question, 1)
    sends = reader.out()
    assert len(sends) == 2 and reader.fetches.free_rows() == 6, "one host has a quarter"
    reader.store(sends[0])
    assert not reader.fetches.is_open(first)
    question, = reader.out()
    assert question.names == tuple(names(1, 20)) and question.rows[0] not in sends[0].rows, "the longest unused"
    reader.store(question)
    reader.store(sends[1])
    assert not (reader.fetches.is_open(second) or reader.fetches.is_open(third))
    assert reader.counts()["whole"] == 3


def test_a_fetch_ends_at_once_when_all_rows_are_set_aside_and_blames_nobody():
    reader = Reader(hosts=1, rows=1)
    reader.begin(1)
    reader.now += 1.0
    waiting = reader.begin(1, 10)
    for question in reader.out():
        reader.found(question, 1)
    late, = reader.out()
    reader.sleep(WAIT_S - 1.0)
    assert not reader.fetches.is_open(waiting) and reader.failures() == [(0, HostFailure.LATE)]
    reader.now += BACKOFF_S
    assert reader.begin(1, 20) is None, "a request would wait for nothing"
    assert reader.counts()["starved"] == 2
    reader.sent(late)
    assert reader.begin(1, 20) is not None


def both_hosts_have(reader: Reader, good: int) -> None:
    """Answer all finds: that host has all, the other one has nothing."""
    for question in reader.out():
        if isinstance(question, FindQuestion):
            reader.found(question, len(question.names) if question.host == good else 0)


def test_b104_a_dead_host_takes_no_rows_from_a_good_one():
    """B104: it promises blocks to two prompts, and sends nothing."""
    reader = Reader()
    reader.begin(20, 0), reader.begin(20, 100)
    both_hosts_have(reader, good=0)
    assert len(reader.out()) == 1
    reader.sleep(WAIT_S)
    assert reader.fetches.free_rows() == 24
    for turn in range(5):
        reader.sleep(4.0)
        number = reader.begin(3, 200 + 10 * turn)
        find, = reader.out()
        assert find.host == 1, "the other one has a quarter of all rows"
        reader.found(find, 3)
        reader.store(*reader.out())
        assert not reader.fetches.is_open(number)
    assert reader.counts()["whole"] == 5 and reader.counts()["late"] == 8
    reader.sleep(QUARANTINE_S)
    reader.begin(1, 900)
    assert [question.host for question in reader.out()] == [0, 1]


def test_b104_a_fetch_that_waits_for_rows_of_a_host_that_goes_silent_asks_the_others():
    reader = Reader(rows=4)
    reader.begin(1)
    reader.now += 1.0
    waiting = reader.begin(1, 10)
    both_hosts_have(reader, good=0)
    reader.out()
    reader.sleep(WAIT_S - 1.0)
    question, = reader.out()
    assert question == FindQuestion(1, question.number, tuple(names(1, 10))) and reader.fetches.is_open(waiting)


@pytest.mark.parametrize("early_s", [0.0, 1.5])
def test_b104_a_host_that_promises_and_sends_nothing_is_blamed_whoever_leaves_first(early_s: float):
    """B104: the request asks at its deadline, before `handle_timeout` is called; or its client has gone before."""
    reader = Reader(hosts=1)
    waits = RequestWaits(reader.fetches, WAIT_S)
    waits.ask(reader.now, "r", lambda: names(2))
    reader.found(*reader.out(), 2)
    reader.out()
    reader.now += WAIT_S - early_s
    waits.end(reader.now, "r")
    if early_s:
        assert reader.failures() == [], "it has time until the deadline"
        assert reader.fetches.next_timeout() == pytest.approx(reader.now + early_s)
        reader.sleep(early_s)
    assert reader.failures() == [(0, HostFailure.LATE)] and reader.counts()["late"] == 2
    assert reader.begin(1) is None
    reader.sleep(0.0)
    assert reader.failures() == [], "once"


def test_a_host_that_answers_in_time_is_not_blamed_after_an_early_leave():
    reader = Reader(hosts=1)
    number = reader.begin(2)
    reader.found(*reader.out(), 2)
    send, = reader.out()
    reader.fetches.leave(reader.now, number)
    assert reader.sent(send) is None
    reader.sleep(WAIT_S)
    assert reader.failures() == [] and reader.fetches.next_timeout() is None


@pytest.mark.parametrize("how", ["left", "found", "answers in time"])
def test_b104_a_host_that_does_not_say_what_it_has_is_blamed_after_the_end_too(how: str):
    """B104: the fetch was left, or another host had all of it."""
    reader = Reader()
    number = reader.begin(2)
    silent, good = reader.out()
    if how == "left":
        reader.found(good, 0)
        reader.fetches.leave(reader.now, number)
    else:
        reader.found(good, 2)
        reader.store(*reader.out())
    assert len(reader.fetches) == 0 and reader.fetches.next_timeout() == pytest.approx(reader.now + FIND_S)
    if how == "answers in time":
        reader.fetches.sent(reader.now, silent.host, silent.number, 1)
        assert reader.fetches.next_timeout() is not None, "that is no answer to it"
        reader.found(silent, 2)
    reader.sleep(FIND_S)
    assert reader.failures() == ([] if how == "answers in time" else [(0, HostFailure.LATE)])


def test_a_question_of_the_last_moment_has_time_for_its_answer():
    reader = Reader()
    reader.begin(5)
    one, other = reader.out()
    reader.found(other, 0), reader.found(one, 2)
    reader.now += WAIT_S - 0.01
    reader.store(*reader.out())
    reader.sleep(0.01)
    assert reader.failures() == []


def test_what_is_awaited_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_AWAITED", 3)
    reader = Reader()
    for number in range(10):
        reader.fetches.leave(reader.now, reader.begin(1, number))
    assert len(reader.fetches._awaited) == 3


def test_a_host_that_was_just_blamed_is_not_chosen():
    reader = Reader(hosts=3)
    reader.begin(1)
    reader.found(reader.out()[0], 1)
    reader.now += WAIT_S - 0.1
    reader.begin(4, 10)
    longest, short, silent = reader.out()[1:]
    reader.found(longest, 3), reader.found(short, 2)
    reader.fetches.found(reader.now, 1, 2, 0), reader.fetches.found(reader.now, 2, 2, 0)
    reader.sleep(0.1)
    assert (0, HostFailure.LATE) in reader.failures()
    reader.found(silent, 0)
    send, = reader.out()
    assert (send.host, send.names) == (1, tuple(names(2, 10))), "the one that was blamed has a longer run"


@pytest.mark.parametrize("models", [1, 3])
def test_a_batch_is_bounded_in_bytes(models: int):
    """A server sends no more than MAX_OPEN_BYTES: of more it would send nothing."""
    part_bytes = 10 << 20
    fetches = BlockFetches(1, 10**4, models, WAIT_S, part_bytes)
    fetches.begin(0.0, names(100))
    find, = fetches.poll_transmit()
    fetches.found(0.0, 0, find.number, 100)
    send, = fetches.poll_transmit()
    assert len(send.names) == module.MAX_BATCH_BYTES // part_bytes // models
    assert BlockFetches(1, 10, 1, WAIT_S, 1 << 40)._batch_blocks == 1, "a block that is larger is asked for by itself"


def test_noise_leaves_a_host_alone_for_a_second_at_least():
    reader = Reader(hosts=1)
    assert reader.fetches.spoke_garbage(reader.now, 0) == reader.now + BACKOFF_S
    reader.now += 0.9
    assert reader.fetches.spoke_garbage(reader.now, 0) == reader.now + BACKOFF_S, "again, while nobody asks it"
    reader.now += 0.9
    assert reader.begin(1) is None and len(reader.failures()) == 1


def test_open_fetches_are_bounded():
    reader = Reader()
    assert all(reader.begin(1, 10 * number) for number in range(MAX_OPEN))
    assert reader.begin(1, 10 * MAX_OPEN) is None


def test_answers_that_nobody_waits_for_change_nothing():
    reader = Reader()
    reader.begin(2)
    find, other = reader.out()
    state = repr(reader.fetches._fetches)
    assert reader.fetches.sent(reader.now, 0, find.number, 1) is None, "nothing was to be sent"
    for number in (0, find.number + 1, 10**9):
        reader.fetches.found(reader.now, 0, number, 1)
        assert reader.fetches.sent(reader.now, 0, number, 1) is None
    assert repr(reader.fetches._fetches) == state
    reader.found(find, 1)
    reader.found(find, 2)
    assert reader.out() == [], "only the first answer of a host counts"
    reader.found(other, 0)
    send, = reader.out()
    assert reader.fetches.sent(reader.now, 1, send.number, 1) is None, "another host's"
    reader.store(send)
    assert reader.sent(send) is None


# Requests.

def test_b97_a_request_waits_for_its_fetch_and_then_looks():
    reader = Reader(hosts=1)
    waits = RequestWaits(reader.fetches, WAIT_S)
    looks = []

    def absent() -> list[bytes]:
        looks.append(1)
        return names(1)

    for _ in range(3):
        assert waits.ask(reader.now, "r", absent) is WaitAnswer.WAIT
    reader.found(*reader.out(), 1)
    reader.store(*reader.out())
    assert waits.ask(reader.now, "r", absent) is WaitAnswer.LOOK
    assert waits.ask(reader.now, "r", absent) is WaitAnswer.GO_ON
    assert looks == [1], "what it lacks is looked up once"
    waits.end(reader.now, "r")
    assert len(waits) == 0


def test_b104_no_request_waits_longer_than_wait_s_even_if_no_thread_runs():
    """B104: `handle_timeout` is not called."""
    reader = Reader(hosts=1)
    waits = RequestWaits(reader.fetches, WAIT_S)
    assert waits.ask(reader.now, "r", lambda: names(1)) is WaitAnswer.WAIT
    assert waits.ask(reader.now + WAIT_S, "r", lambda: names(1)) is WaitAnswer.LOOK
    assert not len(reader.fetches), "nobody waits for it any more"


def test_b97_steps_are_made_for_a_wait_and_not_for_ever():
    """A request that V1 has no room to look at is not asked for."""
    reader = Reader(hosts=1)
    waits = RequestWaits(reader.fetches, WAIT_S)
    assert not waits.any_at(reader.now)
    waits.ask(reader.now, "r", lambda: names(1))
    assert waits.any_at(reader.now + WAIT_S + 0.5) and not waits.any_at(reader.now + WAIT_S + 1.0)
    assert waits.ask(reader.now + 100.0, "r", lambda: names(1)) is WaitAnswer.LOOK
    assert not waits.any_at(reader.now)


def test_requests_with_one_beginning_share_a_fetch():
    reader = Reader(hosts=1)
    waits = RequestWaits(reader.fetches, WAIT_S)
    assert waits.ask(reader.now, "a", lambda: names(2)) is WaitAnswer.WAIT
    assert waits.ask(reader.now, "b", lambda: names(3)) is WaitAnswer.WAIT
    assert len(reader.fetches) == 1
    waits.end(reader.now, "a")
    assert len(reader.fetches) == 1, "the other one waits for it"
    find, = reader.out()
    reader.found(find, 2)
    reader.store(*reader.out())
    assert waits.ask(reader.now, "b", lambda: names(1, 2)) is WaitAnswer.WAIT, "it lacks one block more"
    find, = reader.out()
    assert find.names == tuple(names(1, 2))
    reader.found(find, 0)
    assert waits.ask(reader.now, "b", lambda: names(1, 2)) is WaitAnswer.LOOK
    assert waits.ask(reader.now, "b", lambda: names(1, 2)) is WaitAnswer.GO_ON


@pytest.mark.parametrize("seed", range(20))
def test_the_names_that_a_request_lacks_are_asked_for_when_it_needs_them(seed: int):
    """`needs_names` says before what `ask` calls, so that a lock is not held for it."""
    reader, chance = Reader(), random.Random(seed)
    waits, calls = RequestWaits(reader.fetches, WAIT_S), []
    for _ in range(300):
        request = f"r{chance.randrange(8)}"
        needs = waits.needs_names(reader.now, request)
        before = len(calls)
        waits.ask(reader.now, request, lambda: calls.append(1) or names(3, chance.choice([0, 10])))
        assert len(calls) == before + needs
        if chance.random() < 0.2:
            waits.end(reader.now, request)
        for question in reader.out() if chance.random() < 0.5 else ():
            if isinstance(question, FindQuestion):
                reader.found(question, 0)
        reader.sleep(chance.choice([0.0, 0.1, 1.0]))
    assert len(calls) > 20


def test_a_request_that_lacks_nothing_asks_nobody():
    reader = Reader()
    waits = RequestWaits(reader.fetches, WAIT_S)
    assert waits.ask(reader.now, "r", list) is WaitAnswer.GO_ON and reader.out() == []


def test_when_all_wait_no_more_the_fetches_end():
    reader = Reader()
    waits = RequestWaits(reader.fetches, WAIT_S)
    for number in range(5):
        waits.ask(reader.now, str(number), lambda number=number: names(1, number))
    waits.end_all(reader.now)
    assert len(reader.fetches) == 0 and len(waits) == 0


# Any history.

@dataclasses.dataclass
class World:
    """Hosts that answer anything at any time, and requests that come and go. `rows_in_use`: by outstanding writes that
    are known to be under way."""
    seed: int

    def run(self, steps: int) -> Counter:
        chance = random.Random(self.seed)
        models = chance.choice([1, 1, 2, 3])
        reader = Reader(hosts=chance.randint(1, 4), rows=models * chance.randint(1, 20), models=models)
        total_rows = reader.fetches.free_rows()
        waits = RequestWaits(reader.fetches, WAIT_S)
        began: dict[str, float] = {}
        asked: list[FindQuestion | SendQuestion] = []
        checking: list[LandedBatch] = []
        for step in range(steps):
            act = chance.random()
            if act < 0.2:
                request, first = f"r{step}", chance.choice([0, 0, 10, 20, 30])
                if waits.ask(reader.now, request, lambda first=first: names(chance.randint(1, 9), first)) is (
                        WaitAnswer.WAIT):
                    began[request] = reader.now
            elif act < 0.4 and began:
                request = chance.choice(list(began))
                answer = waits.ask(reader.now, request, lambda: names(chance.randint(1, 9)))
                assert answer is not WaitAnswer.WAIT or reader.now < began[request] + WAIT_S
                if answer is not WaitAnswer.WAIT or chance.random() < 0.2:
                    waits.end(reader.now, request)
                    del began[request]
            elif act < 0.8 and asked:
                question = asked[chance.randrange(len(asked))]
                if chance.random() < 0.8:
                    asked.remove(question)
                host = question.host if chance.random() < 0.9 else chance.randrange(4) % len(reader.fetches._hosts)
                kind = chance.random()
                if kind < 0.1:
                    reader.fetches.unreachable(reader.now, host, question.number)
                elif kind < 0.15:
                    reader.fetches.spoke_garbage(reader.now, host)
                elif isinstance(question, FindQuestion):
                    reader.fetches.found(reader.now, host, question.number, chance.randint(0, len(question.names) + 1))
                else:
                    parts = chance.choice([len(question.rows)] * 3 + [0, 1, models, len(question.rows) + 1])
                    batch = reader.fetches.sent(reader.now, host, question.number, parts)
                    checking += [] if batch is None else [batch]
            elif act < 0.9 and checking:
                batch = checking.pop(0)
                reader.fetches.checked(reader.now, batch, chance.choice([len(batch.rows)] * 3
                                                                        + [chance.randint(0, len(batch.rows))]))
            else:
                reader.sleep(chance.choice([0.0, 0.01, 0.1, 0.5, 3.0]))
            asked += reader.out()
            self.check(reader, total_rows)
        while checking:
            batch = checking.pop()
            reader.fetches.checked(reader.now, batch, len(batch.rows))
        waits.end_all(reader.now)
        reader.sleep(WAIT_S)
        reader.sleep(QUARANTINE_S)
        assert reader.fetches.free_rows() == total_rows, "all rows are back"
        assert not reader.fetches._awaited
        assert len(reader.fetches) == 0 and not reader.fetches._questions and not reader.fetches._by_first
        assert reader.fetches.next_timeout() is None
        return reader.fetches.counts

    @staticmethod
    def check(reader: Reader, total_rows: int) -> None:
        """Each row is in one place, and each fetch waits for something that ends."""
        fetches = reader.fetches
        rows = [*fetches._free]
        for fetch in fetches._fetches.values():
            rows += fetch.rows
            assert fetch.phase is not FetchPhase.FINDING or fetch.asked
            assert bool(fetch.rows) == (fetch.phase in (FetchPhase.SENDING, FetchPhase.CHECKING))
            assert fetch.phase is not FetchPhase.STARVED or any(other.rows for other in fetches._fetches.values())
            assert 0 <= fetch.done <= len(fetch.names)
        rows += [row for aside in fetches._set_aside.values() for row in aside.rows]
        assert sorted(rows) == list(range(total_rows))
        for host, record in enumerate(fetches._hosts):
            aside = sum(len(one.rows) for one in fetches._set_aside.values() if one.host == host)
            live = sum(len(fetch.rows) for fetch in fetches._fetches.values() if fetch.host == host)
            assert record.aside_rows == aside and record.held_rows == aside + live
            assert record.held_rows <= max(reader.models, total_rows // HOST_SHARE)
        assert fetches._fetches.keys() == set(fetches._questions.values()) == set(fetches._by_first.values())


@pytest.mark.parametrize("seed", range(60))
def test_b104_any_history(seed: int):
    """B104: hosts answer anything, at any time, or nothing; requests come, wait, and go."""
    World(seed).run(600)


def test_the_histories_come_to_all_ends():
    total: Counter = Counter()
    for seed in range(1000, 1020):
        total.update(World(seed).run(600))
    assert {"whole", "part", "none", "starved", "found", "fetched", "torn", "late"} <= total.keys()
    assert {f"host_{why.value}" for why in HostFailure} <= total.keys()
