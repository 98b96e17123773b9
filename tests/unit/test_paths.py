# SPDX-License-Identifier: Apache-2.0
"""What a decode engine knows of the paths to its prefill engines, and tells the broker of them."""
import itertools
import random

import msgspec
import pytest

from vllm_pd.broker.choice import JobTaker, choose
from vllm_pd.decisions.expected import Here, There, expect
from vllm_pd.decisions.paths import (
    ALIKE_FACTOR,
    ALIKE_S,
    COMPARED_TOKENS,
    HALF_LIFE_S,
    LAST_HAND_OVERS,
    MAX_MEASURED,
    PathCosts,
)
from vllm_pd.ops.orders import SHOWN_PATHS, describe
from vllm_pd.peer.control import MessageSource
from vllm_pd.peer.protocol import PeerProtocol
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.actions import ToBroker
from vllm_pd.settings.engine import PDConfig

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
PAIR = {"near": "", "far": ""}


def timings(transfer_s, claim_s=0.0, nbytes=0, last_bytes=0):
    return m.Timings(claim_s=claim_s, transfer_s=transfer_s, bytes=nbytes, measured=True, last_bytes=last_bytes)


def paths(zone="", **seconds_per_1000):
    """Of each of these one hand-over of 1000 tokens was measured, at 0 s."""
    costs = PathCosts(zone)
    for name, seconds in seconds_per_1000.items():
        costs.handed_over(0.0, name, "", 1000, timings(seconds))
    return costs


def test_where_nothing_is_measured_nothing_is_told():
    assert PathCosts("").detours(0.0, 1000, PAIR) == ()
    assert PathCosts("").costs_s(0.0, 1000, PAIR) == {}
    assert PathCosts("here").costs_s(0.0, 1000, {"a": "here", "b": "there"}) == {}


def test_nor_where_there_is_no_choice():
    costs = paths(far=5.0)
    assert costs.detours(0.0, 1000, {}) == costs.detours(0.0, 1000, {"far": ""}) == ()
    assert costs.costs_s(0.0, 1000, {"far": ""}) == {}


def test_a_path_costs_its_round_trip_and_as_much_as_its_tokens():
    costs = PathCosts("")
    costs.handed_over(0.0, "far", "", 500, timings(2.0, claim_s=0.25))
    costs.handed_over(0.0, "far", "", 50, timings(9.0, claim_s=0.5))  # too short to tell a rate
    costs.handed_over(0.0, "near", "", 500, timings(0.005, claim_s=0.001))
    assert costs.costs_s(0.0, 2000, PAIR) == pytest.approx({"near": 0.021, "far": 8.25})
    assert costs.detours(0.0, 2000, PAIR) == (("far", pytest.approx(8.25 - 0.042)), )


def test_of_a_prompt_that_was_sent_while_it_was_computed_the_last_write_is_left():
    """As in the estimate of `auto`: 100,000 bytes in all, of which the last write had 10,000."""
    costs = paths(near=0.0)
    costs.handed_over(0.0, "far", "", 1000, timings(2.0, nbytes=100_000, last_bytes=10_000))
    assert costs.costs_s(0.0, 4000, PAIR)["far"] == pytest.approx(8.0)
    assert costs.costs_s(0.0, 200, PAIR)["far"] == pytest.approx(2.0)
    assert costs.costs_s(0.0, 50, PAIR)["far"] == pytest.approx(1.0)


@pytest.mark.parametrize("near_s, far_s, is_detour", [
    (0.001, ALIKE_S, False), (0.001, ALIKE_S + 0.002, True), (1.0, ALIKE_FACTOR * 0.99, False), (1.0, 2.5, True)])
def test_equal_paths_are_not_measured_equal(near_s, far_s, is_detour):
    costs = paths(near=near_s, far=far_s)
    assert bool(costs.detours(0.0, 1000, PAIR)) is is_detour


def test_one_long_pause_changes_nothing_and_a_link_that_has_become_slow_is_noticed():
    costs = paths(near=0.001, far=0.002)
    for _ in range(LAST_HAND_OVERS):
        costs.handed_over(0.0, "far", "", 1000, timings(0.002))
    costs.handed_over(0.0, "far", "", 1000, timings(30.0))
    assert costs.detours(0.0, 1000, PAIR) == ()
    for _ in range(LAST_HAND_OVERS // 2 + 1):
        costs.handed_over(0.0, "far", "", 1000, timings(30.0))
    ((name, more_s), ) = costs.detours(0.0, 1000, PAIR)
    assert name == "far" and more_s == pytest.approx(30.0, rel=0.01)


def test_one_that_nobody_has_measured_is_tried_before_a_slow_one_and_beside_a_near_one():
    costs = paths(near=0.001, far=2.0)
    assert dict(costs.detours(0.0, 1000, {**PAIR, "new": ""})).keys() == {"far"}
    assert paths(far=2.0).detours(0.0, 1000, {"far": "", "new": ""}) == (("far", pytest.approx(2.0 - ALIKE_S)), )


def test_a_new_one_counts_as_its_zone_does_and_in_our_own_as_near():
    costs = PathCosts("here")
    for name, zone, seconds in (("n", "here", 0.002), ("f", "there", 2.0), ("g", "there", 4.0), ("u", "", 9.0)):
        costs.handed_over(0.0, name, zone, 1000, timings(seconds))
    zones = {"n": "here", "new-here": "here", "new-there": "there", "new-elsewhere": "moon", "new-nowhere": ""}
    assert costs.costs_s(0.0, 1000, zones) == pytest.approx(
        {"n": 0.002, "new-here": 0.0, "new-there": 3.0, "new-elsewhere": 0.0, "new-nowhere": 0.0})
    costs.handed_over(0.0, "new-there", "there", 1000, timings(0.001))
    assert costs.costs_s(0.0, 1000, zones)["new-there"] == pytest.approx(0.001), "what is measured counts"


def test_a_slow_path_is_tried_again_after_some_minutes():
    costs = paths(near=0.001, far=1.0)
    times = [now for now in range(0, 1200, 10) if costs.detours(float(now), 1000, PAIR)]
    assert times[0] == 0 and 300 < times[-1] < 600
    assert costs.costs_s(HALF_LIFE_S, 1000, PAIR)["far"] == pytest.approx(0.5)
    costs.handed_over(1200.0, "far", "", 1000, timings(1.0))
    assert costs.detours(1200.0, 1000, PAIR), "one hand-over is enough"


def test_what_is_kept_and_told_is_bounded():
    costs = PathCosts("here")
    for number in range(MAX_MEASURED + 9):
        costs.handed_over(0.0, f"p{number}", "there", 1000, timings(1e9))
    assert len(costs) == MAX_MEASURED and "p8" not in costs._paths and "p9" in costs._paths
    zones = dict.fromkeys(costs._paths, "there")
    detours = costs.detours(0.0, m.MAX_TOKENS, {**zones, "near": "here"})
    assert len(detours) == m.MAX_DETOURS and {more_s for _, more_s in detours} == {m.MAX_SECONDS}
    job = m.Job(m.Attempt("d", "r", 0), "", [1], 0, 1.0, detours=detours)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=m.Job) == job
    for bad in (detours + detours[:1], (("p", -1.0), ), (("p", float("nan")), ), (("", 1.0), )):
        frame = msgspec.msgpack.encode(msgspec.structs.replace(job, detours=bad))
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(frame, type=m.Job)


def test_of_too_many_the_longest_are_told():
    costs = PathCosts("")
    names = [f"p{number}" for number in range(m.MAX_DETOURS + 20)]
    for number, name in enumerate(names):
        costs.handed_over(0.0, name, "", 1000, timings(1.0 + number))
    costs.handed_over(0.0, "near", "", 1000, timings(0.0))
    told = [name for name, _ in costs.detours(0.0, 1000, dict.fromkeys([*names, "near"], ""))]
    assert told == names[:-m.MAX_DETOURS - 1:-1]


def test_b112_what_is_measured_is_said_as_it_was_measured_the_farthest_first():
    assert PathCosts("").report(0.0, PAIR) == {}
    costs = PathCosts("")
    costs.handed_over(10.0, "far", "", 500, timings(2.0, nbytes=3_000_000, last_bytes=2_000_000))
    costs.handed_over(30.0, "near", "", 500, timings(0.5, nbytes=3_000_000))
    costs.handed_over(40.0, "gone", "", 500, timings(9.0, nbytes=3_000_000))
    found = costs.report(40.0, ["near", "far", "new"])
    # For 1000 tokens 4 s and 1 s.
    assert list(found) == ["far", "near"] and found["near"] == (6e6, 0.0, 10.0)
    assert found["far"] == (1e6, pytest.approx(4.0 - 1.0), 30.0)
    assert costs.report(40.0 + 10 * HALF_LIFE_S, ["near", "far"])["far"] == (1e6, pytest.approx(3.0), 630.0), "aged"


def test_b112_of_short_prompts_no_rate_is_known_and_one_long_pause_is_not_one():
    costs = PathCosts("")
    costs.handed_over(0.0, "p", "", 50, timings(9.0, claim_s=0.5, nbytes=1000))
    assert costs.report(0.0, ["p"]) == {"p": (0.0, 0.0, 0.0)}
    for seconds in (0.0, 1.0, 30.0, 1.0):
        costs.handed_over(0.0, "p", "", 1000, timings(seconds, nbytes=1000))
    assert costs.report(0.0, ["p"])["p"][0] == 1000.0


def test_b112_whatever_a_peer_measures_fits_a_status():
    costs = PathCosts("")
    costs.handed_over(0.0, "p", "", 64, timings(5e-324, nbytes=2**61))
    costs.handed_over(0.0, "q", "", 64, timings(1e9, nbytes=2**61))
    protocol = decode_engine(Clock())
    status = msgspec.structs.replace(protocol.operators.status(0), paths=costs.report(1e12, ["p", "q"]))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(status), type=m.StatusReply) == status
    for bad in ({"p": (-1.0, 0.0, 0.0)}, {"p": (0.0, 0.0)}, {"": (0.0, 0.0, 0.0)}, {"p": (0.0, float("nan"), 0.0)}):
        frame = msgspec.msgpack.encode(msgspec.structs.replace(status, paths=bad))
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(frame, type=m.StatusReply)


# Both together, in simulated time: one decode engine, prefill engines with a path each, the broker's choice.


class Scene:
    """Prefill engines that compute `RATE` tokens per second, one prompt after another; `pace_s` is how long the path of
    each takes for 1000 tokens."""
    RATE = 10_000.0

    def __init__(self, *pace_s):
        self.pace_s = pace_s
        self.costs = PathCosts("")
        self.takers = [JobTaker() for _ in pace_s]
        self.free_at = [0.0] * len(pace_s)
        self.given = [0] * len(pace_s)
        self.on_the_way = []  # (until, engine, tokens)
        for number, taker in enumerate(self.takers):
            taker.reported(m.Member(str(number), m.Role.PREFILL, "", FINGERPRINT, m.Load(tokens_per_s=self.RATE)))

    def run(self, prompts, every_s, tokens=1000):
        """So many prompts come, one each `every_s`, with some noise in what is measured. Returns the engines' jobs."""
        dice = random.Random(7)
        zones = {str(number): "" for number in range(len(self.takers))}
        for number in range(prompts):
            now = number * every_s
            for end in [end for end in self.on_the_way if end[0] <= now]:
                self.on_the_way.remove(end)
                noise = dice.uniform(0.7, 1.4)
                self.costs.handed_over(end[0], str(end[1]), "", end[2], timings(
                    self.pace_s[end[1]] * end[2] / 1000 * noise, claim_s=0.001 * noise))
            for taker, free_at in zip(self.takers, self.free_at, strict=True):
                taker.set_credit(m.Credit(1000, taker.offered, 10**9, round(max(0.0, free_at - now) * self.RATE)))
            job = m.Job(m.Attempt("d", "r", number), "", [number] * tokens, 0, 60.0,
                        detours=self.costs.detours(now, tokens, zones))
            chosen = choose(self.takers, job, ())
            chosen.offer(now, job, ())
            place = self.takers.index(chosen)
            self.given[place] += 1
            self.free_at[place] = max(now, self.free_at[place]) + tokens / self.RATE
            self.on_the_way.append((self.free_at[place] + self.pace_s[place] * tokens / 1000, place, tokens))
        return self.given


def test_a_slow_link_gets_few_jobs_and_some_once_the_queue_on_this_side_takes_longer():
    near, far = Scene(0.001, 2.0).run(400, every_s=0.2)
    assert far < 12 and near + far == 400, "half of what one can do: the link is tried, and left"
    near, far = Scene(0.001, 2.0).run(400, every_s=0.09)
    assert far <= near / 5
    near, far = Scene(0.001, 2.0).run(400, every_s=0.05)
    assert near / 3 < far < near, "twice what one can do"


@pytest.mark.parametrize("pace_s", [0.0, 0.002, 0.5])
def test_equal_paths_get_as_many(pace_s):
    near, far = Scene(pace_s, pace_s).run(400, every_s=0.09)
    assert abs(near - far) < 40


def test_the_slower_the_link_the_fewer_jobs():
    shares = [Scene(0.001, pace_s).run(300, every_s=0.06)[1] for pace_s in (0.001, 0.5, 2.0, 8.0)]
    assert all(more >= less for more, less in itertools.pairwise(shares)) and shares[0] > 2 * shares[-1] > 0


# The expected time (`auto`).


def test_auto_takes_the_engine_from_which_the_kv_would_be_here_first():
    here = Here(0, 1000.0, 0.0, 0, 512)
    busy = ((0, 1000.0), (3000, 1000.0))
    average = expect(1000, here, There(0, busy, 0.5, 0.0))
    assert average.there_s == pytest.approx(1.5)
    assert expect(1000, here, There(0, busy, 0.5, 0.0, paths_s=(0.5, 0.5))) == msgspec.structs.replace(
        average, there=There(0, busy, 0.5, 0.0, paths_s=(0.5, 0.5))), "alike"
    far_is_free = expect(1000, here, There(0, busy, 0.5, 0.0, paths_s=(9.0, 0.1)))
    assert far_is_free.there_s == pytest.approx(4.1) and "transfer 9.000, 0.100 s" in far_is_free.explained()
    assert expect(1000, here, There(0, busy, 0.5, 0.0, paths_s=(2.0, 0.1))).there_s == pytest.approx(3.0)


# What the peer does with it.


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def decode_engine(clock, **settings):
    """A decode engine that two prefill engines, "p" and "q", have greeted."""
    config = PDConfig.parse("kv_consumer", {"broker": "tcp://127.0.0.1:9", **settings})
    us = m.Member("us", m.Role.DECODE, "tcp://127.0.0.1:1", FINGERPRINT, zone=config.zone or "")
    protocol = PeerProtocol(config, us, b"memory", clock)
    protocol.control.handle_timeout()
    known = [m.Member(name, m.Role.PREFILL, "tcp://127.0.0.1:2", FINGERPRINT, zone=zone)
             for name, zone in (("p", "here"), ("q", "there"))]
    for one in known:
        assert protocol.control.receive(MessageSource.PREFILL, one.incarnation, m.Hello(one, b""))
    protocol.control.receive(MessageSource.BROKER, "b", m.Peers("b", 1, [us, *known], 0))
    return protocol


def put(protocol):
    """Submits a prompt of 160 tokens. Its attempt, and the job that the broker gets."""
    attempt = protocol.decode.next_attempt("r")
    protocol.decode.submit(attempt, [1] * 160, list(range(10)), 0)
    jobs = [action.message.job for action in iter(protocol.control.poll_transmit, None)
            if isinstance(action, ToBroker) and isinstance(action.message, m.Put)]
    return attempt, jobs[-1]


def hand_over(protocol, attempt, name, seconds, late, nbytes=0):
    """P does it; its message comes before the notice, or after it (`late`)."""
    protocol.control.receive(MessageSource.PREFILL, name, m.Claim(attempt, 1))
    sent = m.Sent(attempt, 1, timings(seconds, nbytes=nbytes))
    if not late:
        protocol.control.receive(MessageSource.PREFILL, name, sent)
    protocol.decode.arrived(attempt, 0)
    if late:
        protocol.control.receive(MessageSource.PREFILL, name, sent)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("auto", [False, True])
def test_what_hand_overs_measure_is_told_with_the_next_jobs(late, auto):
    protocol = decode_engine(Clock(), **({"max_local_prefill_tokens": "auto"} if auto else {}))
    for name, seconds in (("p", 0.001), ("q", 4.0)):
        attempt, job = put(protocol)
        assert job.detours == ()
        hand_over(protocol, attempt, name, seconds, late)
    _, job = put(protocol)
    assert job.detours == (("q", pytest.approx(4.0, rel=0.01)), )
    if auto:
        assert protocol.decode.prefill_loads((), 320).paths_s == pytest.approx((0.002, 8.0))
        assert protocol.decode.prefill_loads(("p", ), 320).paths_s == (), "there is no choice"


def shown_paths(protocol):
    """The lines of its status about paths."""
    return [line for line in describe(protocol.operators.status(0)) if line.startswith(("  prefill engine", "  and "))]


def test_b112_a_status_names_each_path_that_was_measured():
    clock = Clock()
    protocol = decode_engine(clock)
    assert shown_paths(protocol) == [] and protocol.operators.status(0).paths == {}
    hand_over(protocol, put(protocol)[0], "p", 0.001, late=False, nbytes=1_000_000)
    assert shown_paths(protocol) == ["  prefill engine p: 1,000 MB/s, the nearest, measured 0 s ago"]
    hand_over(protocol, put(protocol)[0], "q", 4.0, late=False, nbytes=1_000_000)
    clock.now = 12.0
    assert shown_paths(protocol) == [
        f"  prefill engine q: 0.25 MB/s, 25 s more than the nearest for {COMPARED_TOKENS:,} tokens, measured 12 s ago",
        "  prefill engine p: 1,000 MB/s, the nearest, measured 12 s ago"]
    protocol.control.receive(MessageSource.BROKER, "b", m.Peers("b", 2, [], 0, since=1, gone=["q"]))
    assert shown_paths(protocol) == ["  prefill engine p: 1,000 MB/s, the nearest, measured 12 s ago"]


@pytest.mark.parametrize("count, left_out", [(SHOWN_PATHS, None), (SHOWN_PATHS + 3, 3)])
def test_b112_of_many_paths_the_farthest_are_shown_and_the_others_counted(count, left_out):
    status = msgspec.structs.replace(decode_engine(Clock()).operators.status(0), paths={
        f"p{number}": (0.0, float(count - number), 0.0) for number in range(count)})
    lines = [line for line in describe(status) if line.startswith(("  prefill engine", "  and "))]
    assert lines[0].startswith(f"  prefill engine p0: {count} s more") and "MB/s" not in lines[0]
    assert len(lines) == SHOWN_PATHS + (left_out is not None)
    assert left_out is None or lines[-1] == f"  and {left_out} nearer prefill engines"


def test_a_restarted_engine_beyond_a_slow_link_is_known_by_its_zone():
    protocol = decode_engine(Clock(), zone="here")
    attempt, _ = put(protocol)
    hand_over(protocol, attempt, "q", 4.0, late=False)
    new = m.Member("new", m.Role.PREFILL, "tcp://127.0.0.1:3", FINGERPRINT, zone="there")
    near = m.Member("p", m.Role.PREFILL, "tcp://127.0.0.1:2", FINGERPRINT, zone="here")
    assert protocol.control.receive(MessageSource.PREFILL, "new", m.Hello(new, b""))
    protocol.control.receive(MessageSource.BROKER, "b", m.Peers("b", 2, [protocol.member, near, new], 0))
    _, job = put(protocol)
    assert job.detours == (("new", pytest.approx(4.0, rel=0.01)), )


def test_a_member_of_an_older_release_has_no_zone_and_its_jobs_no_detours():
    member = m.Member("p", m.Role.PREFILL, "", FINGERPRINT, zone="here")
    *older, _, _ = msgspec.msgpack.decode(msgspec.msgpack.encode(member))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(older), type=m.Member).zone == ""
    job = m.Job(m.Attempt("d", "r", 0), "", [1], 0, 1.0, detours=(("p", 1.0), ))
    *older, _, _ = msgspec.msgpack.decode(msgspec.msgpack.encode(job))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(older), type=m.Job).detours == ()
    *older, _, _ = msgspec.msgpack.decode(msgspec.msgpack.encode(m.StatusReply(member, paths={"p": (1.0, 1.0, 1.0)})))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(older), type=m.StatusReply).paths == {}
