# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd planner` as a process: what it prints, and what its /metrics say."""
import itertools
import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from tests.fakes.page_server import PageServer, Reply
from tests.waiting import wait_for
from vllm_pd.ops.scrape import parse
from vllm_pd.rpc.ports import take_free

PROGRAM = """
import sys
from vllm_pd import cli
from vllm_pd.broker.members import MemberList
from vllm_pd.ops import planner, top_readings
from vllm_pd.protocol import messages as m
fingerprint = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
d = m.Member("d" * 32, m.Role.DECODE, "tcp://127.0.0.1:1", fingerprint, http=sys.argv.pop())
p = m.Member("a" * 32, m.Role.PREFILL, "tcp://127.0.0.1:2", fingerprint, m.Load(tokens_per_s=1000.0))
planner.list_members = top_readings.list_members = lambda *_: MemberList((d, p), 0)
cli.main()
"""


class GrowingFigures:
    """The pages of a decode engine that gets 40 requests with 1,000 tokens between two readings."""

    def __init__(self) -> None:
        self.readings = itertools.count(1)

    def __call__(self, method, path, headers, body):
        requests = 40 * next(self.readings)
        return Reply("\n".join((
            "vllm:num_requests_running 4.0", "vllm:num_requests_waiting 0.0", "vllm:pd_parked_blocks 0.0",
            f"vllm:prompt_tokens_total {1000 * requests}.0", "vllm:prefix_cache_hits_total 0.0",
            f"vllm:request_generation_tokens_sum {100 * requests}.0",
            f"vllm:request_generation_tokens_count {requests}.0",
            f"vllm:inter_token_latency_seconds_sum {3 * requests}.0",
            f"vllm:inter_token_latency_seconds_count {100 * requests}.0",
            f"vllm:time_to_first_token_seconds_count {requests}.0",
            f'vllm:time_to_first_token_seconds_bucket{{le="0.5"}} {requests}.0',
            f'vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} {requests}.0', "")).encode())


def start(url: str, *options: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, "planner", "--broker", "tcp://127.0.0.1:5700",
                             "--interval", "0.5", *options, url], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})


def page(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return answer.read().decode()
    except OSError:
        return ""


def test_once_prints_one_decision():
    with PageServer(GrowingFigures()) as server:
        out, _ = (process := start(server.url, "--once")).communicate(timeout=60)
    assert process.returncode == 0 and out.startswith("wanted: ") and out.count("\n") == 1, out


def test_its_page_has_what_is_wanted_until_ctrl_c():
    """Some 80 requests a second with 1,000 tokens each are 80 engines that compute 1,000 tokens a second."""
    port = take_free("127.0.0.1")
    with PageServer(GrowingFigures()) as server:
        process = start(server.url, "--port", str(port), "--most", "9")
        try:
            wait_for(lambda: "vllm:pd_wanted_engines{" in page(port), "nothing is wanted", timeout_s=60)
            found = parse(page(port))
            assert found.value("vllm:pd_wanted_engines", role="prefill") == 9.0
            assert 40 <= found.value("vllm:pd_offered_engines", role="prefill") <= 120
        finally:
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and out.startswith("wanted: 9 prefill, "), out


@pytest.mark.parametrize("options, said", [(("--ttft-ms", "0"), "--ttft-ms=0.0 can't be used"),
                                           (("--most", "0"), "--most=0 can't be used")])
def test_b80_an_option_that_can_not_be_used_is_one_line(options, said):
    out, _ = (process := start("http://127.0.0.1:1", *options)).communicate(timeout=60)
    assert process.returncode != 0 and said in out and "Traceback" not in out
