# SPDX-License-Identifier: Apache-2.0
"""0.9.2's own NixlConnector between two groups of two ranks in lockstep: P prefills, D decodes. By hand: `heavy`.

A request that waits for KV at one rank goes on when the worker there sees that its transfer has ended. No front end
takes part in that, and the other rank has to run the same forward passes. The connector is upstream's, except for what
a CPU lacks: the kind of memory and the layout of the cache, see nixl_on_cpu.py. The tests share their groups and build
on each other, in this order. The last one shows that a defect of the step sync is found by the deadline.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import NamedTuple

import pytest
import zmq
from dp_loads import BOUND_S, MAX_TOKENS, PROMPTS, at_rest, forwards

from vllm_pd.bench.dp.group import Group
from vllm_pd.rpc.ports import take_free, take_free_run

HOST = "127.0.0.1"
BLOCK_TOKENS = 16  # the default is 128 beside IPEX, more than most prompts have
# Of a rank. Few, because the connector makes a list of all of them in Python. But so many that none is used again soon:
# the connector still writes into the blocks of a request that was aborted while it waited, after they have been freed.
BLOCKS = 2048
QUIET_S = 2.0  # how long a group at rest is watched
DEFECT_S = 15.0  # for a request that takes less than a second
LONG = [number for number, prompt in enumerate(PROMPTS) if len(prompt) >= BLOCK_TOKENS]  # others have no KV to send
CHOSEN = next(number for number in LONG if MAX_TOKENS[number] == 9)
SHORT = [number for number, prompt in enumerate(PROMPTS) if len(prompt) < BLOCK_TOKENS]
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.heavy]


class Relay:
    """Between a rank of D, which asks for the memory of a rank of P, and that rank. It passes the question on after
    `open`; until then the requests of this pair are parked. `port` is where D asks, `target` the port of P's rank."""

    def __init__(self) -> None:
        self.port, self.target = take_free(HOST), 0
        self._open, self._end = threading.Event(), threading.Event()
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def open(self) -> None:
        """Pass on what has come, and will come."""
        self._open.set()

    def close(self) -> None:
        """End its thread."""
        self._end.set()
        self._open.set()
        self._thread.join(BOUND_S)
        self._context.destroy(0)

    def _run(self) -> None:
        asked = self._context.socket(zmq.ROUTER)
        asked.bind(f"tcp://{HOST}:{self.port}")
        while not self._end.is_set():
            if not asked.poll(100):
                continue
            asker, blank, question = asked.recv_multipart()
            self._open.wait()
            if self._end.is_set():
                return
            with self._context.socket(zmq.REQ) as target:
                target.setsockopt(zmq.RCVTIMEO, int(BOUND_S * 1000))
                target.setsockopt(zmq.LINGER, 0)
                target.connect(f"tcp://{HOST}:{self.target}")
                target.send(question)
                asked.send_multipart([asker, blank, target.recv()])


class Groups(NamedTuple):
    """P, D, and the relay between each rank of P and each of D, by (P's, D's). `firsts`: P's token of each request."""
    p: Group
    d: Group
    relays: dict[tuple[int, int], Relay]
    firsts: dict[str, int]

    def request(self, number: int, pair: tuple[int, int], name: str) -> dict:
        """The arguments for D of a request for PROMPTS[number] that P has prefilled. D has to have the same name for
        it: the notice that ends P's hold is that name."""
        answer = self.p.submit("prefill", request=name, prompt=PROMPTS[number], rank=pair[0]).result(BOUND_S)
        [self.firsts[name]] = answer["tokens"]
        relay = self.relays[pair]
        relay.target = answer["kv"]["remote_port"]
        kv = answer["kv"] | {"remote_port": relay.port}
        return {"prompt": PROMPTS[number], "rank": pair[1], "max_tokens": MAX_TOKENS[number], "name": name,
                "extra_args": {"kv_transfer_params": kv}}

    def requests_of(self, group: Group) -> list[dict]:
        """What each rank's scheduler holds: see NixlProbe.probe_requests."""
        return [answer[0] for answer in group.call("collective_rpc", "probe_requests")]

    def until(self, group: Group, holds: Callable[[list[dict]], bool]) -> list[dict]:
        """Waits until that holds of `requests_of`."""
        deadline = time.monotonic() + BOUND_S
        while not holds(counts := self.requests_of(group)):
            assert time.monotonic() < deadline, counts
            time.sleep(0.1)
        return counts


@pytest.fixture(scope="module")
def groups(moe, logs, start_group) -> Iterator[Groups]:
    """P and D, up, with every relay shut and their probes at zero."""
    with contextlib.ExitStack() as stack:
        both = []
        for name, role in (("p", "kv_producer"), ("d", "kv_consumer")):
            both.append(start_group(
                moe, 2, log=logs / f"nixl_{name}.log", enable_expert_parallel=True, block_size=BLOCK_TOKENS,
                num_gpu_blocks_override=BLOCKS, worker_extension_cls="nixl_on_cpu.NixlProbe",
                kv_transfer_config={"kv_connector": "NixlConnectorOnCpu", "kv_connector_module_path": "nixl_on_cpu",
                                    "kv_role": role, "engine_id": f"nixl-{name}"},
                environment={"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
                             "VLLM_NIXL_SIDE_CHANNEL_PORT": str(take_free_run(HOST, 2))}))  # fmt: skip
            stack.callback(both[-1].close)
        relays = {(p_rank, d_rank): Relay() for p_rank in (0, 1) for d_rank in (0, 1)}
        for group in both:
            group.ready().start_probe()
        yield Groups(*both, relays, {})
        for relay in relays.values():
            relay.close()


def quiet(group: Group) -> list[dict]:
    """The probes of a group that has come to rest, after QUIET_S more: it ran no forward pass, and no dummy."""
    at_rest(group)
    group.start_probe()
    time.sleep(QUIET_S)
    probes = group.take_probe()
    assert forwards(probes) == [0, 0]
    return probes


def no_waves(probes: list[dict]) -> None:
    """No collective about the end of a wave; the coordinator got counts of requests and nothing else."""
    assert [probe["collectives"] for probe in probes] == [0, 0]
    assert {name for probe in probes for fields in probe["coordinator"] for name in fields} <= {"scheduler_stats"}


def answers(asked: list[Future], numbers: list[int], expected: list[list[int]], bound_s: float = BOUND_S) -> None:
    """Each request is answered in time, with the tokens of one plain engine. Raises TimeoutError."""
    for future, number in zip(asked, numbers, strict=True):
        assert future.result(bound_s)["tokens"] == expected[number]


def computed(probes: list[dict]) -> int:
    """The tokens of all forward passes."""
    return sum(step[3] for probe in probes for step in probe["steps"])


def computed_at_d(number: int) -> int:
    """The tokens that D has to compute of a request whose whole blocks come from P. The last of the prompt is one."""
    return (len(PROMPTS[number]) % BLOCK_TOKENS or 1) + MAX_TOKENS[number] - 1


def test_nothing_can_speak_of_waves(groups):
    """No message between front ends, engines and the coordinator has a word for a wave."""
    names = groups.d.call("collective_rpc", "probe_names")[0][0]
    assert "DP_STEP" in names and "scheduler_stats" in names
    assert not [name for name in names if "wave" in name.lower()]


def test_kv_that_arrives_at_one_rank_wakes_the_other(groups, expected):
    """One request at D's rank 1, parked; rank 0 has none. Neither runs a forward pass, but rank 1's loop runs steps
    without tokens. When its KV comes, which no front end knows of, both run equally many, rank 0 only dummies."""
    asked = groups.d.generate(**groups.request(CHOSEN, (0, 1), "alone"))
    groups.until(groups.d, lambda counts: counts[1]["parked"] == 1)
    probes = quiet(groups.d)
    assert probes[1]["empty"] > 0 and not asked.done()
    groups.d.start_probe()
    groups.relays[0, 1].open()
    answers([asked], [CHOSEN], expected)
    probes = at_rest(groups.d)
    assert forwards(probes)[0] >= MAX_TOKENS[CHOSEN]
    assert {step[2] for step in probes[0]["steps"]} == {"dummy"}
    assert computed([probes[1]]) == computed_at_d(CHOSEN)
    no_waves(probes)
    quiet(groups.d)


def test_parked_requests_some_aborted_beside_local_ones(groups, expected):
    """Two parked requests at each rank of D; one of each is aborted while it waits. Others are served meanwhile."""
    pairs = [(1, 0), (1, 1), (0, 0), (1, 1)]
    numbers = LONG[10:14]
    parked = [groups.request(number, pair, f"parked{number}") for number, pair in zip(numbers, pairs, strict=True)]
    stay = [groups.d.generate(**each) for each in parked[:2]]
    go = [groups.d.submit("given_up", request=each["name"], prompt=each["prompt"], rank=each["rank"],
                          params={"max_tokens": each["max_tokens"], "ignore_eos": True,
                                  "extra_args": each["extra_args"]}) for each in parked[2:]]  # fmt: skip
    groups.until(groups.d, lambda counts: [each["parked"] for each in counts] == [2, 2])
    local = [groups.d.generate(PROMPTS[number], rank=number % 2, max_tokens=MAX_TOKENS[number]) for number in SHORT[:6]]
    answers(local, SHORT[:6], expected)
    for each in parked[2:]:
        assert groups.d.submit("go_away", request=each["name"]).result(BOUND_S)
    assert [each.result(BOUND_S) for each in go] == [True, True]
    groups.until(groups.d, lambda counts: [each["parked"] for each in counts] == [1, 1])
    probes = quiet(groups.d)
    assert all(probe["empty"] > 0 for probe in probes) and not any(each.done() for each in stay)
    for relay in groups.relays.values():
        relay.open()
    answers(stay, numbers[:2], expected)
    no_waves(at_rest(groups.d))
    quiet(groups.d)


def test_both_groups_give_the_tokens_of_one_engine(groups, expected):
    """40 requests over all pairs of ranks, local ones at D between them: tokens equal, equally many forward passes in
    each group, none at rest."""
    numbers = list(range(20, 60))
    pairs = [(number % 2, 1 if number % 5 else 0) for number in numbers]
    for group in groups[:2]:
        at_rest(group)
        group.start_probe()
    local_numbers = [number + 1 for number in numbers if number % 4 == 0]
    asked, local = [], []
    for number, pair in zip(numbers, pairs, strict=True):
        asked.append(groups.d.generate(**groups.request(number, pair, f"pd{number}")))
        if number in local_numbers:
            local.append(groups.d.generate(PROMPTS[number], rank=number // 4 % 2, max_tokens=MAX_TOKENS[number]))
    answers(asked, numbers, expected)
    answers(local, local_numbers, expected)
    assert all(groups.firsts[f"pd{number}"] == expected[number][0] for number in numbers)
    own = sum(len(PROMPTS[number]) + MAX_TOKENS[number] - 1 for number in local_numbers)
    assert 0 < computed(at_rest(groups.d)) <= own + sum(map(computed_at_d, numbers))  # less where D has a prefix
    for group in groups[:2]:
        probes = at_rest(group)
        assert forwards(probes)[0] > 20
        no_waves(probes)
        # P's requests end in the step in which they come, so its counts never change.
        assert all(bool(probe["coordinator"]) == (group is groups.d) for probe in probes)
        quiet(group)


def test_p_frees_what_was_read_in_its_next_step(groups):
    """P keeps the blocks of what it prefilled until D has read them. It looks for D's notices only in steps of its own,
    and a rank without requests makes none, neither here nor upstream. Nothing stays after the next request."""
    number = LONG[0]
    kept = groups.request(number, (0, 0), "kept")
    assert groups.requests_of(groups.p)[0]["kept"] > 0
    assert [probe["empty"] for probe in quiet(groups.p)] == [0, 0]
    groups.d.generate(**kept).result(BOUND_S)
    deadline = time.monotonic() + BOUND_S
    while any(counts["kept"] + counts["live"] for counts in groups.requests_of(groups.p)):
        assert time.monotonic() < deadline
        for rank in (0, 1):
            groups.p.generate(PROMPTS[SHORT[0]], rank=rank, max_tokens=2).result(BOUND_S)
    assert groups.requests_of(groups.d) == [{"parked": 0, "kept": 0, "live": 0}] * 2
    for group in groups[:2]:
        quiet(group)


def test_a_planted_defect_is_found(groups, expected):
    """D's rank 0 keeps up with no other rank: a request whose KV comes to rank 1 is never answered, which takes less
    than a second before. Ends the group."""
    # D has no prefix of these.
    before, after = [number for number in LONG if number > 60 and MAX_TOKENS[number] == 9][:2]
    requests = [groups.request(number, (1, 1), f"plant{number}") for number in (before, after)]
    answers([groups.d.generate(**requests[0])], [before], expected, DEFECT_S)
    groups.d.call("collective_rpc", "probe_plant", None, [0])
    with pytest.raises(TimeoutError):
        answers([groups.d.generate(**requests[1])], [after], expected, DEFECT_S)
