# SPDX-License-Identifier: Apache-2.0
"""B119: the table of `vllm-pd top`, from readings to rows."""
import io

import msgspec
import pytest
from rich.console import Console

from vllm_pd.errors import ConfigError
from vllm_pd.handover.metrics import HandoverFamilies
from vllm_pd.ops.options import TopOptions
from vllm_pd.ops.scrape import parse
from vllm_pd.ops.top import (
    MAX_CELL_CHARS,
    TITLES,
    WANTED,
    FleetReading,
    FleetTable,
    MemberReading,
    make_rows,
    wanted_lines,
)
from vllm_pd.protocol import messages as m

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
D = m.Member("d" * 32, m.Role.DECODE, "tcp://127.0.0.1:1", FINGERPRINT, m.Load(3, 4), http="http://127.0.0.1:8000")
P = m.Member("a" * 32, m.Role.PREFILL, "tcp://127.0.0.1:2", FINGERPRINT, http="http://127.0.0.1:8001")
LABELS = 'engine="0",model_name="m"'


def page(remote=10.0, local=5.0, seconds=2.0, count=4.0, hits=30.0, queries=40.0, failed=0.0, degraded="") -> str:
    return f"""# HELP vllm:num_requests_running x
vllm:num_requests_running{{{LABELS}}} 7.0
vllm:num_requests_waiting{{{LABELS}}} 2.0
vllm:kv_cache_usage_perc{{{LABELS}}} 0.25
vllm:kv_cache_usage_perc{{engine="1",model_name="m"}} 0.5
vllm:pd_parked_blocks{{{LABELS}}} 11.0
vllm:pd_quarantined_blocks{{{LABELS}}} 3.0
vllm:pd_decisions_total{{{LABELS},decision="remote",reason="length"}} {remote}
vllm:pd_decisions_total{{{LABELS},decision="local",reason="threshold"}} {local}
vllm:pd_attempts_total{{{LABELS},outcome="failed"}} {failed}
vllm:pd_attempts_total{{{LABELS},outcome="done"}} 9.0
vllm:pd_transfer_bytes_total{{{LABELS}}} {remote * 1e6}
vllm:pd_handover_seconds_sum{{{LABELS},stage="prefill"}} {seconds}
vllm:pd_handover_seconds_count{{{LABELS},stage="prefill"}} {count}
vllm:pd_handover_seconds_bucket{{{LABELS},stage="prefill",le="1.0"}} {count}
vllm:prefix_cache_hits_total{{{LABELS}}} {hits}
vllm:prefix_cache_queries_total{{{LABELS}}} {queries}
vllm:pd_degraded{{{LABELS},reason="broker"}} 0.0
vllm:pd_degraded{{{LABELS},reason="peer"}} {float(degraded == "peer")}
"""


def reading(member=D, at_s=0.0, **figures) -> MemberReading:
    return MemberReading(member, at_s, parse(wanted_lines(page(**figures))))


def row(before, after) -> dict[str, str]:
    return make_rows(before and FleetReading((before, )), FleetReading((after, )))[0]


def test_what_holds_now_and_what_was_counted_since_the_start():
    found = row(None, reading())
    assert {title: found[title] for title in TITLES} == {
        "engine": "d" * 12, "role": "kv_consumer", "at": "http://127.0.0.1:8000", "run": "7", "wait": "2", "KV": "50%",
        "parked": "11", "fenced": "3", "sending": "0", "held": "0", "remote/s": "-", "local/s": "-", "jobs/s": "-",
        "MB/s": "-", "failed": "0", "queue": "-", "prefill": "500 ms", "transfer": "-", "first": "-", "hits": "75%",
        "state": "ok"}


def test_rates_times_and_hits_of_what_is_between_two_readings():
    found = row(reading(at_s=10.0), reading(at_s=14.0, remote=18.0, seconds=8.0, count=6.0, hits=32.0, queries=60.0,
                                            failed=2.0))
    assert (found["remote/s"], found["local/s"], found["MB/s"]) == ("2", "0", "2")
    assert (found["prefill"], found["hits"], found["failed"]) == ("3 s", "10%", "2")
    quiet = row(reading(at_s=10.0), reading(at_s=14.0))
    assert (quiet["prefill"], quiet["hits"], quiet["remote/s"]) == ("-", "-", "0"), "nothing was counted"


def test_counters_that_began_anew_make_no_negative_rate():
    found = row(reading(at_s=10.0, remote=1e6, seconds=1e6, hits=50.0, failed=5.0), reading(at_s=14.0))
    assert (found["remote/s"], found["prefill"], found["hits"], found["failed"]) == ("-", "-", "-", "0")


@pytest.mark.parametrize("before", [None, MemberReading(D, 0.0, fault="no answer within 1 s"),
                                    MemberReading(msgspec.structs.replace(D, incarnation="other"), 0.0)])
def test_an_engine_without_an_earlier_reading_has_no_rates(before):
    assert row(before, reading(at_s=4.0))["remote/s"] == "-"


@pytest.mark.parametrize("now, state", [
    (reading(degraded="peer"), "degraded: peer"),
    (MemberReading(D, 0.0, parse(page(degraded="peer")), degraded="peer: no prefill engine is there"),
     "degraded, peer: no prefill engine is there"),
    (MemberReading(D, 0.0, fault="no answer within 1 s"), "no answer within 1 s"),
    (MemberReading(msgspec.structs.replace(D, draining=True), 0.0), "draining"),
    (MemberReading(msgspec.structs.replace(P, unreached=("x", "y")), 0.0), "can't reach 2 decode engines"),
    (MemberReading(D, 0.0, parse("vllm:pd_control_dead 1.0\n")), "control thread has ended: restart it"),
])
def test_who_is_not_well_and_why(now, state):
    assert row(None, now)["state"] == state


def test_an_engine_that_can_not_be_read_has_what_the_registry_knows():
    found = row(None, MemberReading(D, 0.0, fault="no answer within 1 s"))
    assert (found["run"], found["wait"], found["KV"], found["prefill"]) == ("3", "4", "-", "-")


def test_those_that_are_not_well_come_first_then_decode_engines():
    ill = MemberReading(msgspec.structs.replace(P, incarnation="ill"), 0.0, fault="no answer within 1 s")
    rows = make_rows(None, FleetReading((reading(P), reading(D), ill)))
    assert [one["engine"][:3] for one in rows] == ["ill", "ddd", "aaa"]


def shown(before, after, width=200, table=None) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print((table or FleetTable("tcp://127.0.0.1:5700")).render(before, after))
    return console.file.getvalue()


def test_the_table_leaves_out_columns_without_anything_in_them():
    text = shown(None, FleetReading((reading(), ), queue_length=3))
    assert "1 engine, 3 jobs wait; counts and times since each engine's start" in text
    assert "parked" in text and "sending" not in text and "remote/s" not in text
    after = FleetReading((reading(at_s=2.0, remote=20.0), ), fault="no broker answers")
    table = FleetTable("tcp://127.0.0.1:5700")
    later = shown(FleetReading((reading(), )), after, table=table)
    assert "remote/s" in shown(after, after, table=table), "it stays, so that the table does not jump"
    assert "remote/s" in later and "no broker answers; counts and times since the last reading" in later


def test_what_engines_say_moves_no_cursor_and_is_no_markup():
    hostile = "\x1b[2J\x1b]0;owned\x07\u202e[bold red]x[/]\r\n" + "y" * 5000
    member = msgspec.structs.replace(D, incarnation=hostile, http=hostile)
    text = shown(None, FleetReading((MemberReading(member, 0.0, fault=hostile), ), fault=hostile), width=1000)
    assert "\\x1b[2J" in text and "[bold red]x[/]" in text and "\x1b" not in text and "\u202e" not in text
    assert "y" * MAX_CELL_CHARS not in text


def test_only_figures_that_are_shown_are_parsed():
    kept = wanted_lines(page() + "vllm:e2e_request_latency_seconds_bucket 5\nno metric at all {{{\n")
    assert "_bucket" not in kept and "no metric" not in kept and "# HELP" not in kept
    assert parse(kept).value("vllm:pd_parked_blocks") == 11.0


@pytest.mark.parametrize("page", ["vllm:pd_jobs_total 1.0\n" * 20_001, f'vllm:pd_jobs_total{{a="{"x" * 5000}"}} 1.0\n'])
def test_a_page_that_would_take_long_to_parse_is_refused(page):
    with pytest.raises(ValueError, match="more than 20,000 figures"):
        wanted_lines(page)


def test_every_figure_of_ours_that_is_read_is_one_that_engines_show():
    names = {sample for family in HandoverFamilies().describe() for sample in (
        family.name, f"{family.name}_total", f"{family.name}_sum", f"{family.name}_count")}
    assert {name for name in WANTED if name.startswith("vllm:pd_")} <= names


@pytest.mark.parametrize("interval_s", [0.0, 0.1, -1.0, float("nan"), 1e9])
def test_an_interval_that_can_not_be_used(interval_s):
    with pytest.raises(ConfigError, match="^--interval="):
        TopOptions(interval_s=interval_s).checked()
