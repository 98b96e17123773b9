# SPDX-License-Identifier: Apache-2.0
"""B100 with the router as the metaserver of real V1 servers. By hand: `heavy`, for its servers take minutes."""
import concurrent.futures
import functools
import json
import os
import subprocess

import psutil
import pytest

from tests import asking
from tests.fakes.metaserver_proxy import LoopThread
from tests.fakes.recording_proxy import METASERVER, RecordingProxy
from tests.v1.real_engines import kill
from tests.v1.test_real_engines import prompts
from tests.v1_engines.test_real_metaserver import (
    END_S,
    LENGTHS,
    SERVE_ARGS,
    START_S,
    TOKENS,
    at_rest,
    chat,
    complete,
    gauges,
    wait_for,
)
from vllm_pd.ops.launch.plan import HOST, ROUTER, UpOptions, plan_fleet
from vllm_pd.ops.launch.up import Fleet
from vllm_pd.ops.scrape import scrape
from vllm_pd.rpc.ports import take_free, take_free_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(1800)]
D, PS = "D", ("P 0", "P 1")


class Routed:
    """A router of its own, before it and each engine a proxy that records. `record`: by request id, who began and ended
    what. `fleets`: the URL of the router that `up` has started."""

    def __init__(self, loop, fleet, post, record):
        self.fleet, self.record, self.fleets = fleet, record, fleet.plan.router.url
        decode, *producers = [engine.url for engine in fleet.plan.engines]
        self.decode, self.producers = decode, producers
        self.proxies = [RecordingProxy(loop, record, name, url)
                        for name, url in zip((D, *PS), (decode, *producers), strict=True)]
        at_d, *at_ps = (proxy.base for proxy in self.proxies)
        port = take_free(HOST)
        self.base = post.target = f"http://{HOST}:{port}"
        self.process = subprocess.Popen([
            *ROUTER, "--port", str(port), "--worker", at_d, "--metaserver", post.base + METASERVER,
            *(word for url in at_ps for word in ("--prefill-worker", url))])

    def workers(self):
        try:
            return json.loads(asking.request(self.base, "GET", "/workers")[2])["workers"]
        except OSError:
            return []

    def calls_of(self, ask):
        """What `ask` returns, and what it has added to the record, for one request."""
        before = set(self.record)
        returned = ask()
        [name] = set(self.record) - before
        wait_for(lambda: self.count(name, "begins") == self.count(name, "ends"), lambda: self.record[name])
        return returned, list(self.record[name])

    def count(self, name, what):
        return sum(did == what for _, did in self.record[name])

    def posts(self, outcome, url=None):
        return scrape(url or self.base).value("vllm:pd_router_posts_total", outcome=outcome)

    def close(self):
        self.process.terminate()
        self.process.wait(END_S)
        for proxy in self.proxies:
            proxy.close()


@pytest.fixture
def routed(mono):
    """One D and two Ps; `mono` answers rightly."""
    loop, record = LoopThread(), {}
    post = RecordingProxy(loop, record, "post")
    port = take_free_run(HOST, 4)
    own = f"http://{HOST}:{port}{METASERVER}"
    pd = {"max_local_prefill_tokens": 0, "metaservers": f"{own},{post.base}{METASERVER}", "ttl_s": 5.0,
          "attempt_deadline_s": 100.0, "max_parked_fraction": 1.0}
    options = UpOptions(os.environ["VLLM_PD_TINY_MODEL"], 2, 1, port=port, pd=pd, serve_args=SERVE_ARGS, router=True,
                        router_args=f"--metaserver {own}")
    try:
        with Fleet(plan_fleet(options, ()), timeout_s=START_S) as fleet:
            found = Routed(loop, fleet, post, record)
            try:
                wait_for(lambda: [one["state"] for one in found.workers() if one["events"]] == ["up"] * 3,
                         found.workers)
                everybody = (found.decode, *found.producers)
                wait_for(lambda: [gauges(url)["peers"] for url in everybody] == [2, 1, 1],
                         lambda: [gauges(url)["peers"] for url in everybody])
                yield found
            finally:
                found.close()
    finally:
        post.close()
        loop.close()


def of_one_p(calls):
    """The P of the calls of a request whose job one P has done, in the order of the form."""
    assert calls[:2] == [(D, "begins"), ("post", "begins")], calls
    [asked] = {name for name, _ in calls} - {D, "post"}
    without_d = [call for call in calls if call[0] != D]  # its answer may end before that of P
    assert without_d == [("post", "begins"), (asked, "begins"), (asked, "ends"), ("post", "ends")], calls
    assert calls.index((D, "ends")) > calls.index((asked, "begins"))
    return asked


def test_b100_tokens_of_a_plain_engine_in_the_order_of_the_form_and_p_is_killed_in_the_middle(mono, routed):
    url = routed.base
    free = {one: gauges(one)["free_blocks"] for one in (routed.decode, *routed.producers)}
    asked = []
    for one in prompts(70, LENGTHS):
        tokens, calls = routed.calls_of(functools.partial(complete, url, one))
        assert tokens == mono.generate([one], TOKENS)[0], len(one)
        asked.append(of_one_p(calls))
    assert set(asked) == set(PS), "both compute some"
    [short] = prompts(71, (20, ))
    tokens, calls = routed.calls_of(functools.partial(complete, url, short))
    assert tokens == mono.generate([short], TOKENS)[0] and calls == [(D, "begins"), (D, "ends")], "D keeps it"
    [long] = prompts(72, (1500, ))
    answers = []
    for length in (900, 1200, 1500):  # each has the one before as its prefix
        tokens, calls = routed.calls_of(functools.partial(complete, url, long[:length]))
        assert tokens == mono.generate([long[:length]], TOKENS)[0]
        answers.append(of_one_p(calls))
    assert len(set(answers)) == 1, "the P that has the prefix"
    said, calls = routed.calls_of(functools.partial(chat, url))
    assert of_one_p(calls) and said == chat(routed.producers[0])
    assert routed.posts("done") == len(LENGTHS) + 4
    [one] = prompts(76, (700, ))
    assert complete(routed.fleets, one) == mono.generate([one], TOKENS)[0]
    wait_for(lambda: routed.posts("done", routed.fleets) == 1)
    many = prompts(73, (700, 300, 900, 500, 1000, 65, 1500, 400))
    right = mono.generate(many, TOKENS)
    with concurrent.futures.ThreadPoolExecutor(len(many)) as pool:
        assert list(pool.map(functools.partial(complete, url), many)) == right
    wait_for(lambda: routed.posts("done") == len(LENGTHS) + 4 + len(many))
    at_rest(*free)
    assert {one: gauges(one)["free_blocks"] for one in free} == free

    last = prompts(74, (1900, 1901, 1902, 1903, 1904, 1905, 1906, 1907))
    right = mono.generate(last, TOKENS)
    dead, alive = routed.producers
    with concurrent.futures.ThreadPoolExecutor(len(last)) as pool:
        asked = [pool.submit(complete, url, one) for one in last]
        wait_for(lambda: gauges(dead)["prefill_jobs"] and gauges(routed.decode)["decode_fenced"], "it has no job")
        pid = next(one["pid"] for one in routed.fleet.state()["engines"] if one["url"] == dead)
        kill([*psutil.Process(pid).children(recursive=True), psutil.Process(pid)])
        assert [one.result(END_S) for one in asked] == right
    at_rest(routed.decode, alive)
    assert gauges(routed.decode)["free_blocks"] == free[routed.decode]
    wait_for(lambda: [one["state"] for one in routed.workers()].count("down") == 1, routed.workers)
    for one in prompts(75, (400, 800)):
        tokens, calls = routed.calls_of(functools.partial(complete, url, one))
        assert tokens == mono.generate([one], TOKENS)[0] and of_one_p(calls) == PS[1]
