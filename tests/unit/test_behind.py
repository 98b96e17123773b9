# SPDX-License-Identifier: Apache-2.0
"""scripts/lab/behind_gateway.py: what counts as failed, cut and changed, and which figures are of which phase (B117).
"""
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "lab"))

from _behind.gateways import envoy_config, require_workers
from _behind.load import AskedRequest
from _behind.report import BehindRecord, KilledEngine, RunPhase
from _behind.watch import EngineReading, added

from vllm_pd.bench.load import GenerationAnswer
from vllm_pd.errors import ConfigError

yaml = pytest.importorskip("yaml")
D0, D1 = "127.0.0.1:8000", "127.0.0.1:8001"
KILLED = KilledEngine("D0", D0, 10.0, 10.5)
RIGHT = (1, 2, 3)
DONE = EngineReading(5.0, "D0", 1, attempts=Counter(done=1))


def asked(sent_s: float, ended_s: float, tokens: tuple[int, ...] | None = RIGHT, *, engine: str = D0,
          stream: bool = True, begun: bool = True, long: bool = False) -> AskedRequest:
    answer = tokens and GenerationAnswer("", tokens, "length", (3, len(tokens)),
                                         tuple(float(number) for number in range(1, 1 + len(tokens))))
    return AskedRequest(long, stream, sent_s, ended_s, engine, begun, answer or None, RIGHT,
                        "" if answer else "it broke")


def record(*requests: AskedRequest, readings: tuple[EngineReading, ...] = (DONE, )) -> BehindRecord:
    return BehindRecord("a gateway", [RunPhase("one", 0.0, 8.0), RunPhase("two", 8.0, 20.0)], [KILLED],
                        [(0.0, "D0", True), (9.0, "P0", True), (9.0, "P1", True)], list(requests), list(readings))


@pytest.mark.parametrize("request_, cut", [
    (asked(9.0, 10.1, None), True),
    (asked(9.0, 10.1, None, engine=""), True),  # a gateway that names none
    (asked(9.0, 10.1, None, engine=D1), False),
    (asked(9.0, 10.1, None, begun=False), False),  # it could have been sent to the other one
    (asked(9.0, 10.1, None, stream=False), False),
    (asked(11.0, 12.0, None), False),
    (asked(8.0, 9.9, None), False)])
def test_b117_only_a_stream_of_the_engine_that_was_killed_is_cut(request_, cut):
    found = record(request_)
    assert (found.cut(), found.failed()) == (([request_], []) if cut else ([], [request_]))
    assert found.faults() == ([] if cut else ["1 requests failed", "it broke"])


def test_b117_a_killed_prefill_engine_cuts_nothing():
    found = record(asked(9.0, 10.1, None, engine=""))
    found.killed = [KilledEngine("P0", D0, 10.0, 10.5)]
    assert len(found.failed()) == 1


def test_b117_another_token_is_a_fault_and_so_is_a_run_without_prefill_engines():
    assert record(asked(1.0, 2.0)).faults() == []
    assert record(asked(1.0, 2.0, (1, 2, 4)), asked(1.0, 2.0, (1, 2))).faults() == ["2 answers have changed"]
    assert record(asked(1.0, 2.0), readings=()).faults() == ["no prompt was handed over"]


def test_b117_figures_by_phase():
    figures = record(asked(1.0, 4.0), asked(7.0, 10.0), asked(9.0, 10.1, None), asked(2.0, 9.0, long=True),
                     asked(2.0, 9.0, stream=False)).figures()
    assert (figures["requests"], figures["cut"], figures["failed"]) == (5, 1, 0)
    assert [phase["requests"] for phase in figures["phases"]] == [1, 4]
    assert [phase["cut"] for phase in figures["phases"]] == [0, 1]
    assert figures["pause_ms"]["max"] == 1000.0
    assert [phase["attempts"] for phase in figures["phases"]] == [{"done": 1}, {}]


def test_b117_counters_of_an_engine_that_is_replaced():
    readings = [EngineReading(at_s, "D0", life, Counter({"remote: length": count}))
                for at_s, life, count in ((1.0, 1, 3), (2.0, 1, 5), (4.0, 2, 1), (6.0, 2, 4))]
    assert added(readings, "decisions", 0.0, 10.0) == {"remote: length": 9}
    assert added(readings, "decisions", 2.0, 5.0) == {"remote: length": 3}


def test_b117_the_page_has_the_configuration_of_the_run():
    page = (Path(__file__).parents[2] / "docs" / "behind.md").read_text()
    shown = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    run = envoy_config(8080, [f"http://{D0}", f"http://{D1}"])
    [manager] = run["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
    del manager["typed_config"]["route_config"]["virtual_hosts"][0]["response_headers_to_add"]
    assert shown == run


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999999", "http://[::1", "http://:8000"])
def test_b117_a_worker_that_is_no_address(url):
    with pytest.raises(ConfigError, match="worker=.*write"):
        require_workers([url])
