# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench serve` from options to files, over dummy engines, a broker that only listens, and our router."""

import asyncio
import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from tests.waiting import wait_for
from vllm_pd.bench.serve import command, measure
from vllm_pd.bench.serve.drive import EntryPoint, send_each, send_load, send_one
from vllm_pd.bench.serve.settings import LoadShape, ServeBench, ServeLoad
from vllm_pd.bench.serve.traffic import LoadRequest, PromptKind
from vllm_pd.bench.servers import Server, Servers
from vllm_pd.cli import app
from vllm_pd.errors import ConfigError, PDError
from vllm_pd.rpc.ports import take_free_run

PROGRAM = (sys.executable, str(Path(__file__).parents[1] / "fakes" / "serve_program.py"))
LOAD = LoadShape(duration_s=0.6, streams=(2, ), answer_tokens=6, long_every_s=0.2, long_tokens=600)


class ServeOutcome:
    """One run: its status, its lines, its JSON after each turn of an arm, its picture."""

    def __init__(self, tmp_path: Path, model: str = "m", arms: tuple[str, ...] = (), output: Path | None = None,
                 log: Path | None = None, **changes) -> None:
        self.lines: list[str] = []
        self.output, self.log = output or tmp_path / "out.json", log or tmp_path / "log"
        self.picture = tmp_path / "out.png"
        bench = ServeBench(**{"model": model, "arms": arms, "rounds": 1, "compare": "text", "load": LOAD,
                              "programs": {"serve": [*PROGRAM, "serve"], "broker": [*PROGRAM, "broker"]}, **changes})
        self.status = command.run(bench, self.log, self.picture, self.output, self.lines.append, self.lines.append)

    @property
    def text(self) -> str:
        return "\n".join(map(str, self.lines))

    @property
    def found(self) -> dict:
        return json.loads(self.output.read_text())


def cores() -> str:
    """All that this process may run on."""
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


def test_every_arm_gets_the_same_load(tmp_path, monkeypatch):
    """For 4 s: what is due while the machine is too busy for it until the load's end is not sent."""
    before, warmed = cores(), []

    async def send(entries, *load):
        warmed.append(len(set(entries)))
        await send_each(entries, *load)

    monkeypatch.setattr(measure, "send_each", send)
    run = ServeOutcome(tmp_path, arms=("alone", "pd", "mixed-rr", "chunked-64", "single"), cores=cores(),
                       load_cores=cores().split(",")[0], load=replace(LOAD, duration_s=4.0))
    assert run.status == 0, run.text
    assert warmed == [1, 1, 3, 3, 1], "each engine behind a router, and the router"
    assert cores() == before, "--load-cores is for the run"
    arms = run.found["arms"]
    assert list(arms) == ["alone", "pd", "mixed-rr", "chunked-64", "single"]
    points = {name: arm["rounds"][0]["points"][0] for name, arm in arms.items()}
    assert all(point["requests"] > 0 and point["failed"] == 0 for point in points.values())
    assert all(point["cpu_share"] is not None for point in points.values())
    assert points["alone"]["long"]["ttft_ms"] == {} and points["pd"]["long"]["ttft_ms"]
    assert points["single"]["long"]["ttft_ms"]["p50"] >= 300 and points["single"]["itl_ms"]["max"] > 0
    assert arms["single"]["timeline"]["long"] and arms["single"]["timeline"]["itl"]
    assert run.found["compared"] > 10 and not run.found["different"] and not run.found["failed"]
    assert run.lines[-1].endswith(f"the same texts from every arm: yes, {run.found['compared']} answers compared")
    assert run.text.count("Serving Benchmark Result") == 5
    assert run.picture.read_bytes().startswith(b"\x89PNG")
    assert run.found["table"]["2 streams"]["pd"]["ratios"]["ITL p99 / mixed"]["median"] > 0
    assert str(tmp_path) not in run.output.read_text()
    lines = run.log.read_text().splitlines()
    seen = [line for line in lines if line.startswith("[single 0] cores")]
    assert len(seen) == 1 and all(line == f"[single 0] cores {sorted(os.sched_getaffinity(0))} {cores()}"
                                  for line in seen)


def test_nothing_is_left_running(tmp_path):
    ServeOutcome(tmp_path, arms=("pd", "mixed-rr"))
    wait_for(lambda: not any(PROGRAM[1] in " ".join(words(one))
                             for one in psutil.Process().children(recursive=True)), "a process is left")


def words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        return process.cmdline()
    return []


def test_b80_an_arm_that_does_not_start_is_named_and_the_others_are_kept(tmp_path):
    run = ServeOutcome(tmp_path, "no-chunks", arms=("single", "chunked-64"), rounds=2)
    assert run.status == 1
    assert [turn["round"] for turn in run.found["arms"]["single"]["rounds"]] == [0, 1]
    assert list(run.found["failed"]) == ["chunked-64"] and "my last words" in run.found["failed"]["chunked-64"]
    assert "chunked-64 was not measured to its end: chunked-64 0 has ended" in run.lines[-1]
    assert run.text.count("round 1, chunked-64 failed") == 1 and "round 2, chunked-64" not in run.text


def test_other_words_fail_the_run_and_are_named(tmp_path):
    run = ServeOutcome(tmp_path, "other", arms=("single", "pd"))
    assert run.status == 1 and run.found["different"] and not run.found["failed"]
    assert "stream 0, request 0: pd and single differ from character 5 on" in run.text
    assert "the same texts from every arm: NO" in run.lines[-1]


def test_an_engine_that_dies_in_the_middle_fails_its_arm(tmp_path):
    run = ServeOutcome(tmp_path, "dies", arms=("pd", "single"), warm_up=0)
    assert run.status == 1 and list(run.found["failed"]) == ["pd"] and "single" in run.found["arms"]


async def test_upstreams_connector_is_asked_like_its_proxy_does():
    """First P, for one token; then D, with what P said; both with the same name. Both legs count as TTFT."""
    heard = []

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        body = json.loads(await reader.readexactly(int(re.search(r"Content-Length: (\d+)", head)[1])))
        heard.append((re.search(r"X-Request-Id: (\S+)", head)[1], body))
        await asyncio.sleep(0.05)
        said = {"choices": [{"text": "a", "logprobs": {"tokens": ["token_id:7"]}}],
                "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
        text = (b"data: " + json.dumps(said).encode() + b"\n\ndata: [DONE]\n\n" if body["stream"]
                else json.dumps(said | {"kv_transfer_params": {"blocks": [4]}}).encode())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text))
        await writer.drain()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        request = LoadRequest("one", PromptKind.SHORT, "what", 1)
        found = await send_one(EntryPoint(url, url), "m", request, True, time.perf_counter())
    assert found.answer is not None and found.answer.token_ids == (7, ) and found.answer.ttft_s >= 0.1
    (first_name, first), (second_name, second) = heard
    assert first_name == second_name and first["max_tokens"] == 1 and first["kv_transfer_params"]["do_remote_decode"]
    assert second["kv_transfer_params"] == {"blocks": [4]} and second["prompt"] == "what" and second["stream"]


def test_a_sweep_has_a_block_for_each_point(tmp_path):
    load = LoadShape(load=ServeLoad.RATE, rates=(10.0, 20.0), duration_s=0.5, answer_tokens=4, long_tokens=600)
    run = ServeOutcome(tmp_path, arms=("single", ), load=load)
    assert run.status == 0 and run.text.count("Serving Benchmark Result") == 2
    assert "goodput, single: " in run.text and list(run.found["table"]) == ["10 requests/s", "20 requests/s"]


@pytest.mark.filterwarnings("ignore:Data has no positive values")
def test_points_before_one_that_fails_are_kept(tmp_path, monkeypatch):
    async def send(entries, model, point, token_ids):
        return await send_load([EntryPoint("http://127.0.0.1:1")] if point.value == 20 else entries, model, point,
                               token_ids)

    monkeypatch.setattr(measure, "send_load", send)
    load = LoadShape(load=ServeLoad.RATE, rates=(10.0, 20.0), duration_s=0.3, answer_tokens=4, long_share=0)
    with started(tmp_path, 1) as [server]:
        run = ServeOutcome(tmp_path, "", url=server.url, load=load, rounds=2, warm_up=0)
    [turn] = run.found["arms"]["given"]["rounds"]
    assert run.status == 1 and (turn["round"], [point["label"] for point in turn["points"]]) == (0, ["10 requests/s"])
    assert "no request was answered" in run.found["failed"]["given"] and run.text.count("Benchmark Result") == 1


def test_a_full_disk_does_not_end_a_run(tmp_path):
    run = ServeOutcome(tmp_path, arms=("single", ), output=Path("/dev/full"), log=Path("/dev/full"), warm_up=0,
                       load=replace(LOAD, duration_s=0.2))
    assert run.status == 1 and "/dev/full was not written: [Errno 28]" in run.text
    assert run.text.count("Serving Benchmark Result") == 1 and "the same texts from every arm" in run.lines[-1]


@contextlib.contextmanager
def started(tmp_path: Path, count: int = 2) -> Iterator[list[Server]]:
    """Dummy engines, and a state file of them."""
    with Servers(lambda *_: None) as servers:
        found = servers.dummies(count)
        engines = [{"role": "decode", "url": server.url, "pid": server.child.pid} for server in found]
        (tmp_path / "state.json").write_text(json.dumps({"engines": engines}))
        yield found


def test_a_fleet_that_runs_is_measured_by_its_url_or_its_state_file(tmp_path):
    with started(tmp_path) as servers:
        for changes in ({"url": servers[0].url + "/"}, {"state": tmp_path / "state.json"}):
            run = ServeOutcome(tmp_path, "", **changes)
            assert run.status == 0 and run.found["arms"]["given"]["rounds"][0]["points"][0]["requests"] > 0
    assert servers[1].url in run.found["arms"]["given"]["where"]
    with pytest.raises(ConfigError, match="--state.*no healthy engine"):
        ServeOutcome(tmp_path, "", state=tmp_path / "state.json")


@pytest.mark.parametrize("changes, key", [({"arms": ("nonesuch", )}, "--arm"), ({"ttft_slo": 0}, "--ttft-slo"),
                                          ({"url": "nowhere"}, "--url"), ({"cores": "4711"}, "--cores"),
                                          ({"load_cores": "x"}, "--load-cores"), ({"pd": {"lease": 3}}, "lease"),
                                          ({"arms": ("single", ), "serve_args": ("--port", "1")}, "-- --port")])
def test_b80_bad_options_are_named_before_anything_starts(tmp_path, changes, key):
    with pytest.raises(PDError, match=key):
        ServeOutcome(tmp_path, **{"model": "" if "url" in changes else "m", **changes})
    assert not (tmp_path / "log").exists() or not (tmp_path / "log").read_text()


def test_b80_a_port_in_use(tmp_path):
    first = take_free_run("127.0.0.1", 3)
    with socket.create_server(("127.0.0.1", first + 1)), pytest.raises(ConfigError, match="--port.*in use"):
        ServeOutcome(tmp_path, arms=("mixed-rr", ), port=first)


def test_the_command_has_its_options(tmp_path):
    path = tmp_path / "load.json"
    done = CliRunner().invoke(app, ["bench", "serve", "--load", "conversations", "--conversations", "2", "--turns", "2",
                                    "--export", str(path)])
    assert done.exit_code == 0, done.output
    entries = json.loads(path.read_text())
    assert [entry["id"] for entry in entries][:2] == ["0.5 conversations/s, conversation 0, turn 0",
                                                      "0.5 conversations/s, conversation 0, turn 1"]
    with started(tmp_path, 1) as [server]:
        done = CliRunner().invoke(app, ["bench", "serve", "--url", server.url, "--compare", "text", "--rounds", "1",
                                        "--duration-s", "0.2", "--output", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    assert "the same texts from every arm: nothing to compare" in done.output
    assert json.loads((tmp_path / "out.json").read_text())["settings"]["load"]["duration_s"] == 0.2
    assert isinstance(CliRunner().invoke(app, ["bench", "serve", "m", "--arm", "x"]).exception, ConfigError)
    assert isinstance(CliRunner().invoke(app, ["bench", "serve", "m", "--output", str(tmp_path / "a" / "b")]).exception,
                      ConfigError)
