# SPDX-License-Identifier: Apache-2.0
"""Ranks of a model without experts: engines of their own, behind one front end or one each."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from dp_children import ENDED
from dp_loads import BOUND_S, END_S, MAX_TOKENS, PROMPTS, forwards

from tests.waiting import wait_for
from vllm_pd.bench.dp.group import ENGINE, MEETINGS, Group, GroupError
from vllm_pd.rpc.ports import take_free, take_free_run

LONGEST = 4096  # tokens of a request

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def pair(dense, logs, start_group) -> Iterator[Group]:
    """Two ranks behind one front end."""
    with start_group(dense, 2, log=logs / "independent.log", max_model_len=LONGEST) as group:
        yield group


@pytest.fixture
def meeting() -> dict:
    """Where the processes of one group meet."""
    return {"data_parallel_address": "127.0.0.1", "data_parallel_rpc_port": take_free("127.0.0.1")}


def test_independent_ranks_give_the_tokens_of_one(pair, dense_expected):
    """100 mixed requests, four of five at rank 0."""
    asked = [pair.generate(prompt, rank=0 if number % 5 else 1, max_tokens=most)
             for number, (prompt, most) in enumerate(zip(PROMPTS, MAX_TOKENS, strict=True))]  # fmt: skip
    assert pair.tokens(asked) == dense_expected


def test_the_front_end_forgets_requests_that_have_ended(pair):
    """Or it grows with each one."""
    pair.tokens([pair.generate(PROMPTS[number], max_tokens=3) for number in range(6)])
    wait_for(lambda: pair.submit("in_flight").result(BOUND_S) == [])


def test_no_rank_runs_a_pass_for_another(pair):
    """A request takes as many passes of its own rank as it has tokens, and none of the other."""
    for rank in (0, 1):
        pair.start_probe()
        pair.generate(PROMPTS[1], rank=rank, max_tokens=12).result(BOUND_S)
        probes = pair.take_probe()
        assert forwards(probes)[rank] == 12 and forwards(probes)[1 - rank] == 0
        assert not any(probe["messages"] for probe in probes)


def test_a_rank_that_stands_still_holds_up_no_other(pair):
    """A stopped process is the plainest of slow ranks. Its own request ends when it goes on."""
    stopped = pair.pids["EngineCore_0"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        waiting = pair.generate(PROMPTS[2], rank=0, max_tokens=10)
        others = pair.generate(PROMPTS[2], rank=1, max_tokens=300).result(BOUND_S)["tokens"]
        assert not waiting.done()
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert waiting.result(BOUND_S)["tokens"] == others[:10]


def test_the_front_end_still_balances(pair):
    """By the counts that the ranks publish: with four requests known to be at rank 0, the next ones go to rank 1."""
    _counts(pair, [[0, 0], [0, 0]])
    held = [pair.generate(PROMPTS[8], rank=0, max_tokens=LONGEST - len(PROMPTS[8]), abort_after=2000, name=f"held{n}")
            for n in range(4)]  # fmt: skip
    _counts(pair, [[0, 4], [0, 0]])
    asked = [pair.generate(PROMPTS[8], max_tokens=200, name=f"new{number}") for number in range(2)]
    chosen = pair.submit("chosen").result(BOUND_S)
    assert [chosen[f"new{number}"] for number in range(2)] == [1, 1]
    pair.tokens([*asked, *held])
    _counts(pair, [[0, 0], [0, 0]])


def test_each_rank_makes_its_calls_at_once_and_alone(pair):
    """Also a call that ranks in lockstep make together; and while the other rank stands still."""
    os.kill(pair.pids["EngineCore_0"], signal.SIGSTOP)
    try:
        assert pair.call("sleep", 1, ranks=[1], timeout_s=BOUND_S) == [None]
        assert pair.call("is_sleeping", ranks=[1], timeout_s=BOUND_S) == [True]
        pair.call("wake_up", ranks=[1], timeout_s=BOUND_S)
        assert pair.call("is_sleeping", ranks=[1], timeout_s=BOUND_S) == [False]
    finally:
        os.kill(pair.pids["EngineCore_0"], signal.SIGCONT)
    busy = [pair.generate(PROMPTS[4], rank=rank, max_tokens=100) for rank in (0, 1)]
    assert pair.call("collective_rpc", "probe_collective", timeout_s=BOUND_S) == [[1], [1]]  # a group of one each
    assert [len(tokens) for tokens in pair.tokens(busy)] == [100, 100]


def test_b73_a_rank_dies(pair):
    """B73: rank 1 is killed while rank 0 has a request: an error, in time. Ends the group."""
    asked = pair.generate(PROMPTS[0], rank=0, max_tokens=LONGEST - len(PROMPTS[0]))
    os.kill(pair.pids["EngineCore_1"], signal.SIGKILL)
    _fails(pair, 0, asked)
    with pytest.raises(GroupError, match="Dead"):
        pair.submit("health").result(BOUND_S)


def test_b73_a_rank_without_a_front_end_dies(dense, dense_expected, logs, meeting, forks, start_group):
    """B73: rank 1 runs as on another machine, which goes down with all processes: the front end's machine hears of it
    by the network, and requests at either rank end with an error, in time."""
    arguments = {**ENGINE, **meeting, "data_parallel_size": 2, "data_parallel_size_local": 1}
    options = [f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}")
               for key, value in arguments.items()]  # fmt: skip
    network = {"dp_sync": {"shared_memory": False}}
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((logs / "dense-headless.log").open("ab"))
        node = forks.script(
            "vllm.entrypoints.cli.main", ["serve", str(dense), "--headless", *options, "--data-parallel-start-rank=1",
                                          '--additional-config={"dp_sync": {"shared_memory": false}}'],
            Path(log.name), log.fileno())  # fmt: skip
        stack.callback(node.wait, BOUND_S)
        stack.callback(node.terminate)
        head = stack.enter_context(start_group(dense, 2, log=logs / "dense-head.log", data_parallel_size_local=1,
                                               additional_config=network, **meeting))  # fmt: skip
        asked = [head.generate(prompt, rank=1 - number % 2, max_tokens=most)
                 for number, (prompt, most) in enumerate(zip(PROMPTS[:20], MAX_TOKENS[:20], strict=True))]  # fmt: skip
        assert head.tokens(asked) == dense_expected[:20]
        lost = head.generate(PROMPTS[0], rank=1, max_tokens=480 - len(PROMPTS[0]))
        for process in [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]:
            process.kill()
        _fails(head, 1, lost)
        _fails(head, 0)


def test_a_rank_with_a_front_end_of_its_own_outlives_the_other(dense, dense_expected, logs, meeting, start_group):
    """External load balancing: the servers share nothing, so the end of one is nothing to the other."""
    with contextlib.ExitStack() as stack:
        fronts = [start_group(dense, 2, log=logs / f"own{rank}.log", ranks=[rank], data_parallel_rank=rank, **meeting)
                  for rank in (0, 1)]  # fmt: skip
        for front in fronts:
            stack.callback(front.close)
        for front in fronts:
            assert front.ready().generate(PROMPTS[3], max_tokens=MAX_TOKENS[3]).result(BOUND_S)["tokens"] \
                == dense_expected[3]  # fmt: skip
        busy = fronts[1].generate(PROMPTS[2], max_tokens=400)
        os.kill(fronts[0].pids["EngineCore_0"], signal.SIGKILL)
        assert len(busy.result(BOUND_S)["tokens"]) == 400
        assert fronts[1].generate(PROMPTS[3], max_tokens=MAX_TOKENS[3]).result(BOUND_S)["tokens"] == dense_expected[3]
        assert fronts[1].submit("health").result(BOUND_S)


def test_an_offline_rank_needs_no_other(dense, logs, forks):
    """`LLM` in a process per rank, of which one alone is ever started."""
    said = logs / "lone.txt"
    env = {"VLLM_DP_RANK": "1", "VLLM_DP_RANK_LOCAL": "1", "VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_IP": "127.0.0.1",
           "VLLM_DP_MASTER_PORT": str(take_free_run("127.0.0.1", MEETINGS))}  # fmt: skip
    with said.open("wb") as output:
        rank = forks.script(str(Path(__file__).with_name("offline_rank.py")), [str(dense), "20"], logs / "lone.log",
                            output.fileno(), **env)  # fmt: skip
    rank.wait(BOUND_S)
    assert said.read_text().splitlines()[-2:] == ["called [1] served 20", ENDED]


def test_ranks_with_experts_are_independent_if_asked_to_be(moe, expected, logs, start_group):
    """Each then has all of the experts."""
    with start_group(moe, 2, log=logs / "experts-independent.log", additional_config={"dp_sync": {"lockstep": False}}
                     ) as group:  # fmt: skip
        group.start_probe()
        asked = [group.generate(prompt, rank=0, max_tokens=most)
                 for prompt, most in zip(PROMPTS[:20], MAX_TOKENS, strict=False)]  # fmt: skip
        assert group.tokens(asked) == expected[:20]
        assert forwards(group.take_probe())[1] == 0


def _counts(group: Group, wanted: list) -> None:
    """Until the front end balances by these [waiting, running] counts."""
    wait_for(lambda: group.submit("counts").result(BOUND_S) == wanted)


def _fails(group: Group, rank: int, asked: object = None) -> None:
    """A request, or one after it, ends with an error within END_S."""
    began = time.monotonic()
    with pytest.raises(GroupError):
        while time.monotonic() < began + END_S:  # it may have ended before the kill
            asked = asked or group.generate(PROMPTS[9], rank=rank, max_tokens=3)
            asked.result(END_S)
            asked = None
            time.sleep(0.1)
    assert time.monotonic() < began + END_S
