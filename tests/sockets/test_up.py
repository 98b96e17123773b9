# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd up`: the plan is checked before anything starts (B80), and whatever starts also ends (B20)."""

import contextlib
import errno
import json
import math
import os
import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from vllm_pd.errors import ConfigError
from vllm_pd.events.reach import of_rank
from vllm_pd.model.installation import World
from vllm_pd.ops.client import fetch
from vllm_pd.ops.launch import plan as launch_plan
from vllm_pd.ops.launch import printer as launch_printer
from vllm_pd.ops.launch import up as launch_up
from vllm_pd.ops.launch.child import Child
from vllm_pd.ops.launch.plan import (
    STARTING_AT_ONCE,
    FleetPlan,
    UpOptions,
    cores_to_pin,
    parse_setting,
    parse_settings,
    plan_fleet,
    starting_at_once,
)
from vllm_pd.ops.launch.printer import LinePrinter
from vllm_pd.ops.launch.progress import StartProgress
from vllm_pd.ops.launch.router_args import parse_router_args
from vllm_pd.ops.launch.serve_args import value_of
from vllm_pd.ops.launch.shares import split_evenly
from vllm_pd.ops.launch.up import Fleet, StartError, check_times
from vllm_pd.protocol.messages import Role
from vllm_pd.rpc.ports import release, reserve, take_free_run

ROOT = Path(__file__).parents[2]
FAKE = [sys.executable, str(ROOT / "tests" / "fakes" / "fake_server.py")]
PROGRAM = """
import sys
from pathlib import Path
from vllm_pd.ops.launch.plan import UpOptions, plan_fleet
from vllm_pd.ops.launch.up import Fleet
fake, model, port, state, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), eval(sys.argv[5])
command = [sys.executable, fake]
router = options.pop("router", False)
plan = plan_fleet(UpOptions(model, 1, 1, port, router=router), [], serve=[*command, "serve"],
                  broker=[*command, "broker"], router=[*command, "router"])
sys.exit(Fleet(plan, state=state, **options).run())
"""


PLAN_EARLY = """
import sys
from pathlib import Path
from vllm_pd.errors import ConfigError
from vllm_pd.ops.launch.plan import UpOptions, plan_fleet
from vllm_pd.ops.launch.up import Fleet
command = [sys.executable, sys.argv[1]]
plan = plan_fleet(UpOptions("shares", port=int(sys.argv[3])), [], serve=[*command, "serve"],
                  broker=[*command, "broker"])
print("planned", flush=True)
sys.stdin.readline()
try:
    sys.exit(Fleet(plan, state=Path(sys.argv[2])).run())
except ConfigError as error:
    print(error, flush=True)
    sys.exit(2)
"""


def plan(cores=(), **options):
    options = {"model": "m", "prefill": 1, "decode": 1, "port": take_free_run("127.0.0.1", 4), **options}
    return plan_fleet(UpOptions(**options), cores)


class TestPlan:

    def test_commands_ports_and_roles(self):
        made = plan(prefill=2, decode=2, pd={"lease_s": 9}, serve_args=("--dtype", "float32"))
        first = made.engines[0].port
        assert [(e.name, e.role, e.port - first) for e in made.engines] == [
            ("decode 0", Role.DECODE, 0), ("decode 1", Role.DECODE, 1), ("prefill 0", Role.PREFILL, 2),
            ("prefill 1", Role.PREFILL, 3)]
        for engine, kv_role in zip(made.engines, ["kv_consumer"] * 2 + ["kv_producer"] * 2, strict=True):
            command = list(engine.command)
            assert command[command.index("serve"):][:2] == ["serve", "m"]
            assert command[-2:] == ["--dtype", "float32"]
            assert command[command.index("--port") + 1] == str(engine.port)
            config = json.loads(command[command.index("--kv-transfer-config") + 1])
            assert config == {"kv_connector": "PDConnector", "kv_role": kv_role,
                              "kv_connector_extra_config": {"broker": made.broker_url, "lease_s": 9}}
        assert made.broker_command[-2:] == ("--bind", made.broker_url)

    def test_the_broker_forgets_engines_when_they_would(self):
        command = list(plan(pd={"ttl_s": 7.5}).broker_command)
        assert command[command.index("--ttl-s") + 1] == "7.5"

    def test_a_router_takes_the_first_port_and_has_the_decode_engines_publish(self):
        made = plan(router=True, serve_args=("--api-key", "k"), pd={"ttl_s": 7})
        first = made.router.port
        assert [engine.port - first for engine in made.engines] == [1, 2]
        command = list(made.router.command)
        assert command[-4:] == ["--port", str(first), "--broker", made.broker_url]
        assert made.router.env == {"VLLM_API_KEY": "k"}, "not on a command line that everybody can read"
        decode, prefill = (list(engine.command) for engine in made.engines)
        events = json.loads(decode[decode.index("--kv-events-config") + 1])
        assert events["enable_kv_cache_events"] and events["endpoint"].startswith("ipc://")
        assert "--kv-events-config" not in prefill
        told = plan(router=True, serve_args=("--kv-events-config={}", ))
        assert [value_of("--kv-events-config", engine.command) for engine in told.engines] == ["{}", None]
        assert plan().router is None

    @pytest.mark.parametrize("options, publishing", [
        ({"router": True, "decode": 2}, 2), ({"router": True, "order": "prefill-first"}, 2), ({}, 2),
        ({"router": True}, 1)])
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_each_rank_that_publishes_can_bind_the_ports_of_its_own(self, monkeypatch, options, publishing, ranks):
        """As vLLM's publisher binds them: both plus the rank."""
        monkeypatch.setattr(launch_plan, "find_installation", lambda: SimpleNamespace(world=World.PLUGIN))
        first = take_free_run("127.0.0.1", 8)
        config = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{first}", "topic": "t",
                  "replay_endpoint": f"tcp://127.0.0.1:{first + 4}"}
        made = plan(**options, serve_args=("--kv_events_config", json.dumps(config), "--data-parallel-size", str(ranks),
                                           "--dtype", "float16"))
        found = [json.loads(text) for engine in made.engines
                 if (text := value_of("--kv-events-config", engine.command)) is not None]
        assert len(found) == publishing and found[0] == config
        assert all(engine.command[-4:] == ("--data-parallel-size", str(ranks), "--dtype", "float16")
                   for engine in made.engines)
        with zmq.Context() as context, contextlib.ExitStack() as sockets:
            for rank in range(ranks):
                for one in found:
                    for endpoint in (one["endpoint"], one["replay_endpoint"]):
                        socket_ = sockets.enter_context(context.socket(zmq.ROUTER))
                        socket_.linger = 0
                        socket_.bind(of_rank(endpoint, rank))

    @pytest.mark.parametrize("endpoint, replay, options", [
        ("tcp://*:5557", "tcp://*:5558", {"serve_args": ("-dp=2", )}), ("tcp://*:5557", "tcp://*:5558", {"decode": 2}),
        ("tcp://*:65535", None, {"decode": 2}), ("ipc:///tmp/e", None, {"serve_args": ("-dp=2", )})])
    def test_b80_ports_of_kv_events_that_several_would_have(self, endpoint, replay, options):
        config = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay}
        given = ("--kv-events-config", json.dumps(config))
        plan(router=True, serve_args=given)
        with pytest.raises(ConfigError, match="^-- --kv-events-config=.*: write "):
            plan(router=True, **{**options, "serve_args": (*given, *options.get("serve_args", ()))})

    def test_what_events_connect_to_and_free_ports_stay_and_sockets_differ(self):
        config = {"enable_kv_cache_events": True, "endpoint": "tcp://10.0.0.1:5557", "replay_endpoint": "tcp://*:0"}
        for endpoint, second in (("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5557"), ("ipc:///tmp/e", "ipc:///tmp/e-1")):
            given = json.dumps({**config, "endpoint": endpoint})
            made = plan(router=True, decode=2, serve_args=("--kv-events-config", given))
            assert [json.loads(value_of("--kv-events-config", engine.command)) for engine in made.engines[:2]] == [
                {**config, "endpoint": endpoint}, {**config, "endpoint": second}]

    def test_b80_a_folder_whose_sockets_would_have_too_long_names(self, monkeypatch):
        monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 80)
        plan()
        with pytest.raises(ConfigError, match="TMPDIR='/tmp/x.*at least 26 bytes shorter"):
            plan(router=True)
        monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 54)
        made = plan(router=True)
        endpoint = json.loads(value_of("--kv-events-config", made.engines[0].command))["endpoint"]
        assert len(endpoint.removeprefix("ipc://")) == 107

    def test_b102_in_the_order_prefill_first_all_engines_publish(self, monkeypatch):
        monkeypatch.setattr(launch_plan, "find_installation", lambda: SimpleNamespace(world=World.PLUGIN))
        made = plan(router=True, order="prefill-first")
        assert made.router.command[-2:] == ("--order", "prefill-first")
        assert [list(engine.command).count("--kv-events-config") for engine in made.engines] == [1, 1]
        assert "--order" not in plan(router=True).router.command
        monkeypatch.setattr(launch_plan, "find_installation", lambda: SimpleNamespace(world=World.PATCHED))
        with pytest.raises(ConfigError, match="engine V0"):
            plan(router=True, order="prefill-first")

    @pytest.mark.parametrize("pd", [{"transport": "torch"}, {"hold_s": 0}])
    def test_b102_the_order_prefill_first_needs_prefill_engines_that_keep_prompts(self, monkeypatch, pd):
        monkeypatch.setattr(launch_plan, "find_installation", lambda: SimpleNamespace(world=World.PLUGIN))
        plan(router=True, pd=pd)
        with pytest.raises(ConfigError, match="--order='prefill-first'.*leave out --pd transport=torch and --pd hold"):
            plan(router=True, order="prefill-first", pd=pd)

    def test_options_go_to_the_router(self):
        text = "--continue-streams --policy round-robin --unready-s=0.5"
        command = plan(router=True, router_args=text).router.command
        assert command[-4:] == ("--continue-streams", "--policy", "round-robin", "--unready-s=0.5")

    @pytest.mark.parametrize("more, said", [
        ({"port": 8100}, "write http://127.0.0.1:8100/v1/metaserver"),
        ({"pd": {}}, "--pd metaservers=None.* write metaservers=http://127.0.0.1:8200/"),
        ({"pd": {"metaservers": "http://127.0.0.1:9000/v1/metaserver"}}, "decode engines post to no other URL")])
    def test_b80_a_metaserver_that_no_engine_would_post_to(self, more, said):
        url = "http://127.0.0.1:8200/v1/metaserver"
        with pytest.raises(ConfigError, match=said):
            plan(router=True, router_args=f"--metaserver {url}", **{"port": 8200, "pd": {"metaservers": url}, **more})
        with pytest.raises(ConfigError, match="with --order prefill-first no decode engine posts"):
            parse_router_args(f"--metaserver {url}", order="prefill-first")

    @pytest.mark.parametrize("pd, text, grace_s", [
        ({"drain_timeout_s": 600.5}, "", 600.5), ({"drain_timeout_s": 600}, "--unready-s 1", 600),
        ({"drain_timeout_s": 600}, "--grace-s=120", 120), ({"drain_timeout_s": 5}, "--grace-s 120", 120), ({}, "", 30)])
    def test_b20_a_request_may_go_on_at_the_router_as_long_as_at_its_engine(self, pd, text, grace_s):
        words = plan(router=True, router_args=text, pd=pd).router.command
        words = shlex.join(words[words.index("--broker") + 2:])
        assert parse_router_args(words).options.grace_s == grace_s

    @pytest.mark.parametrize("text, error", [
        ("--continue-stream", "router --help"), ("--unready-s soon", "'--unready-s'"), ("--unready-s", "router --help"),
        ("--unready-s -1", "--unready-s"), ("--policy best", "policy="), ("'--unready-s", "No closing quotation"),
        ("--port 9000", "--port"), ("--broker=tcp://127.0.0.1:1", "--broker-port"), ("--help", "router --help"),
        ("8000", "router --help")])
    def test_the_routers_options_are_checked_before_anything_starts(self, text, error, capfd):
        with pytest.raises(ConfigError, match=re.escape(error)):
            plan(router=True, router_args=text)

    def test_options_for_a_router_need_a_router(self):
        with pytest.raises(ConfigError, match="--router-args.*add --router"):
            plan(router_args="--continue-streams")

    def test_each_engine_gets_cores_of_its_own(self):
        made = plan(cores=[4, 5, 6])
        assert [engine.cores for engine in made.engines] == [(4, ), (5, 6)]
        assert made.engines[1].env == {"VLLM_CPU_OMP_THREADS_BIND": "5,6", "OMP_NUM_THREADS": "2"}

    def test_each_engine_gets_gpus_of_its_own(self):
        made = plan(cores=[0, 1], gpus="0,1,2,3", serve_args=("--dtype", "float16"))
        assert [engine.env for engine in made.engines] == [{"CUDA_VISIBLE_DEVICES": "0,1"},
                                                           {"CUDA_VISIBLE_DEVICES": "2,3"}]
        assert all(engine.command[-2:] == ("--tensor-parallel-size", "2") for engine in made.engines)
        assert not any(engine.cores for engine in made.engines) and starting_at_once(made.engines) == STARTING_AT_ONCE
        told = plan(gpus="0,1,2,3", serve_args=("--pipeline-parallel-size=2", ))
        assert not any("--tensor-parallel-size" in engine.command for engine in told.engines)

    def test_engines_that_share_a_gpu_share_its_memory_and_start_one_at_a_time(self, monkeypatch):
        made = plan(prefill=1, decode=2, gpus="5,6")
        assert [engine.env["CUDA_VISIBLE_DEVICES"] for engine in made.engines] == ["5", "6", "5"]
        assert all(engine.command[-2:] == ("--gpu-memory-utilization", "0.40") for engine in made.engines)
        assert starting_at_once(made.engines) == 1
        assert starting_at_once(plan().engines) == STARTING_AT_ONCE, "on the CPU"
        monkeypatch.setattr(launch_plan, "engines_run_on_cpu", lambda: False)
        assert starting_at_once(plan().engines) == 1, "all of them see all GPUs"
        assert starting_at_once(plan(serve_args=("--kv-cache-memory-bytes=1G", )).engines) == STARTING_AT_ONCE

    def test_b80_engines_on_gpus_say_how_they_share_them(self, monkeypatch):
        monkeypatch.setattr(launch_plan, "engines_run_on_cpu", lambda: False)
        with pytest.raises(ConfigError, match="--gpus=None.*like --gpus 0,1, or all of them on one with --gpus 0"):
            cores_to_pin(UpOptions("m"), None)
        assert cores_to_pin(UpOptions("m", gpus="0"), None) == []
        for arguments in (["--gpu-memory-utilization=0.4"], ["--kv_cache_memory_bytes", "1G"]):
            assert cores_to_pin(UpOptions("m", serve_args=arguments), None) == []
        with pytest.raises(ConfigError, match="--gpus='0'.*leave out --pin, or --gpus"):
            cores_to_pin(UpOptions("m", gpus="0"), True)

    def test_engines_on_the_cpu_are_pinned_unless_told_otherwise(self, monkeypatch):
        monkeypatch.setattr(launch_plan, "engines_run_on_cpu", lambda: True)
        ours = sorted(os.sched_getaffinity(0))
        assert [cores_to_pin(UpOptions("m"), pin) for pin in (None, True, False)] == [ours, ours, []]

    def test_fewer_cores_than_engines_gives_each_one_thread_and_pins_none(self):
        made = plan(cores=[0, 1], prefill=1, decode=2)
        assert [(engine.cores, engine.env["OMP_NUM_THREADS"]) for engine in made.engines] == [((), "1")] * 3

    def test_without_cores_nothing_is_pinned_or_set(self):
        assert [(engine.cores, engine.env) for engine in plan(cores=[]).engines] == [((), {})] * 2

    @pytest.mark.parametrize("cores, count", [(7, 3), (2, 2), (64, 5)])
    def test_shares_are_disjoint_complete_and_even(self, cores, count):
        shares = split_evenly(range(cores), count)
        assert sorted(core for share in shares for core in share) == list(range(cores))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1

    @pytest.mark.parametrize("options, key", [
        ({"prefill": 0}, "--prefill"), ({"decode": 0}, "--decode"), ({"decode": -1}, "--decode"),
        ({"port": 65534, "router": True}, "--port"), ({"port": 0}, "--port"), ({"port": 65535}, "--port"),
        ({"broker_port": 65536}, "--broker-port"),
        ({"port": 18000, "broker_port": 18001}, "--broker-port"), ({"pd": {"broker": "x"}}, "--pd broker"),
        ({"pd": {"lease": 3}}, "lease"), ({"pd": {"lease_s": "long"}}, "lease_s"),
        ({"serve_args": ["--port", "1"]}, "-- --port"), ({"serve_args": ["--kv-transfer-config={}"]}, "-- --kv"),
        ({"serve_args": ["--kv_transfer_config", "{}"]}, "-- --kv"), ({"serve_args": ["--host=0.0.0.0"]}, "-- --host"),
        ({"pd": {"bind": "tcp://127.0.0.1:5800"}}, "--pd bind"),
        ({"pd": {"lifeline_port": 5800}}, "--pd lifeline_port"),
        ({"serve_args": ["--ssl-certfile", "c"]}, "-- --ssl-certfile"), ({"serve_args": ["--uds=/s"]}, "-- --uds"),
        ({"serve_args": ["--data-parallel-size", "2"], "router": True}, "--data-parallel-size"),
        ({"serve_args": ["-dp=3"], "router": True}, "-dp"),
        ({"serve_args": ["--kv-events-config", "tcp://*:5557"]}, "-- --kv-events-config"),
        ({"serve_args": ["--kv-events-config=[]"]}, "-- --kv-events-config"),
        ({"gpus": "0,0"}, "--gpus"), ({"gpus": "-1"}, "--gpus"), ({"gpus": "a"}, "--gpus"),
        ({"order": "prefill-first"}, "--order"), ({"order": "both", "router": True}, "--order"),
    ])
    def test_b80_impossible_options(self, options, key):
        with pytest.raises(ConfigError) as caught:
            plan(**options)
        assert caught.value.key.startswith(key)
        assert caught.value.cure

    @pytest.mark.parametrize("key", ["--port", "--broker-port"])
    def test_b80_port_in_use(self, key):
        taken = take_free_run("127.0.0.1", 2) + 1  # the one before it is free too
        with socket.create_server(("127.0.0.1", taken)):
            with pytest.raises(ConfigError, match="in use") as caught:
                plan(**({"port": taken - 1} if key == "--port" else {"broker_port": taken}))
            assert caught.value.key == key and str(taken) in str(caught.value)

    def test_the_broker_never_gets_a_port_of_an_engine(self, monkeypatch):
        first = take_free_run("127.0.0.1", 3)
        offered = iter(range(first, first + 3))
        monkeypatch.setattr("vllm_pd.ops.launch.plan.take_free", lambda host: next(offered))
        assert plan(port=first).broker_port == first + 2

    def test_settings_are_json_where_they_can_be(self):
        assert parse_setting("lease_s=30") == ("lease_s", 30)
        assert parse_setting("bind=tcp://127.0.0.1:0") == ("bind", "tcp://127.0.0.1:0")
        assert parse_setting("a=b=c") == ("a", "b=c")
        for wrong in ("lease_s", "=3", ""):
            with pytest.raises(ConfigError, match="key=value"):
                parse_setting(wrong)

    def test_b80_a_setting_is_given_once(self):
        assert parse_settings(["lease_s=30", "hold_s=5"]) == {"lease_s": 30, "hold_s": 5}
        with pytest.raises(ConfigError, match="--pd lease_s=5 .*given before as 30"):
            parse_settings(["lease_s=30", "lease_s=5"])


class Running:
    """One `up` over fake servers, heard through its output."""

    def __init__(self, process: subprocess.Popen, state: Path, port: int) -> None:
        self.process, self.state_file, self.port = process, state, port
        self.lines: list[str] = []

    def read_until(self, text: str) -> str:
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if text in line:
                return line
        raise AssertionError(f"{text!r} never came:\n" + "\n".join(self.lines))

    def finish(self, timeout_s: float = 120.0) -> int:
        rest, _ = self.process.communicate(timeout=timeout_s)
        self.lines += rest.splitlines()
        return self.process.returncode

    def state(self) -> dict:
        return json.loads(self.state_file.read_text())

    def pids(self) -> list[int]:
        state = self.state()
        return [state["broker"]["pid"], *(engine["pid"] for engine in state["engines"])]

    def grandchildren(self) -> list[int]:
        return [int(m[1]) for line in self.lines if (m := re.search(r"grandchild (\d+)", line))]


@contextlib.contextmanager
def running(tmp_path: Path, model: str, *, stdout: int = subprocess.PIPE, env: Mapping[str, str] | None = None,
            before: Sequence[str] = (), **options) -> Iterator[Running]:
    port, state = take_free_run("127.0.0.1", 3), tmp_path / "state.json"
    state.write_text("stale")
    process = subprocess.Popen([*before, sys.executable, "-c", PROGRAM, FAKE[1], model, str(port), str(state),
                                repr(options)], stdout=stdout, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                               env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **(env or {})})
    try:
        yield Running(process, state, port)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def ended(pid: int) -> bool:
    """Whether the process is gone or a zombie that somebody else has to reap."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def all_end(pids: list[int], within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if all(map(ended, pids)):
            return True
        time.sleep(0.02)
    return False


@contextlib.contextmanager
def talking(lines: int, say, path: Path) -> Iterator[Child]:
    """A process that prints so many lines, then writes the file, then ends."""
    program = f"for n in range({lines}): print(n, 'x' * 100)\nopen({str(path)!r}, 'w').close()"
    printer = LinePrinter(say)
    child, events = Child("engine", [sys.executable, "-c", program], say=printer.put), queue.SimpleQueue()
    child.start(events)
    try:
        yield child
        assert events.get(timeout=60).code == 0 and child.wait(time.monotonic() + 60)
    finally:
        child.kill()
        printer.close(60)


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, "the process stands still"
        time.sleep(0.02)


def test_b20_lines_that_can_not_be_printed_stop_no_process(tmp_path):
    said = []

    def say(name, line):
        said.append(line)
        if len(said) in (3, 4):
            raise OSError(errno.ENOSPC, "No space left on device") if len(said) == 3 else UnicodeError

    with talking(3000, say, tmp_path / "done") as child:
        await_file(tmp_path / "done")
    lost = "(lines that could not be printed: 1)"
    assert said[3] == said[5] == lost and said.count(lost) == 2, "once more, as it could not be printed either"
    assert len(said) == 3002 and said[-1].startswith("2999 ") and child.last_lines()[-1].startswith("2999 ")


def test_b20_a_reader_that_stands_still_stops_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(launch_printer, "MAX_UNPRINTED_BYTES", 20_000)
    said, reads = [], threading.Event()

    def say(name, line):
        assert reads.wait(60)
        said.append(line)

    with talking(3000, say, tmp_path / "done") as child:
        await_file(tmp_path / "done")
        while not child.last_lines() or not child.last_lines()[-1].startswith("2999 "):
            time.sleep(0.01)
        reads.set()
    lost = [int(line.rpartition(" ")[2].rstrip(")")) for line in said if "could not" in line]
    assert sum(lost) > 2800 and sum(lost) + len(said) - len(lost) == 3000


def test_b20_what_a_process_has_printed_is_printed_before_the_end(tmp_path):
    said = []

    def say(name, line):
        time.sleep(0.002)
        said.append(line)

    with talking(500, say, tmp_path / "done"):
        pass
    assert len(said) == 500 and said[-1].startswith("499 ")


def test_b20_a_process_that_has_ended_gets_no_signal(tmp_path, monkeypatch):
    killed, killpg = [], os.killpg

    def watch(pid, number):
        killed.append(Path(f"/proc/{pid}/stat").exists())
        killpg(pid, number)

    monkeypatch.setattr(os, "killpg", watch)
    with talking(1, lambda name, line: None, tmp_path / "done") as child:
        pass
    assert killed == [True], "its group, once, while its id was still its own"
    child.kill()
    child.stop()
    assert killed == [True] and not child.alive


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_b20_a_signal_takes_everything_down(tmp_path, number):
    with running(tmp_path, "grandchild") as up:
        up.read_until("everything is up")
        state = up.state()
        assert [(e["role"], e["url"]) for e in state["engines"]] == [
            ("decode", f"http://127.0.0.1:{up.port}"), ("prefill", f"http://127.0.0.1:{up.port + 1}")]
        assert state["broker"]["url"].startswith("tcp://127.0.0.1:")
        while len(up.grandchildren()) < 2:
            up.read_until("grandchild")
        pids = up.pids() + up.grandchildren()
        assert len(pids) == 5 and not any(map(ended, pids))
        up.process.send_signal(number)
        assert up.finish() == 0
        assert all_end(pids)


def test_b20_a_terminal_that_goes_ends_nothing_under_nohup(tmp_path):
    with running(tmp_path, "plain", before=("nohup", )) as up:
        up.read_until("everything is up")
        up.process.send_signal(signal.SIGHUP)
        time.sleep(1.0)
        assert up.process.poll() is None and not any(map(ended, up.pids()))
        up.process.send_signal(signal.SIGTERM)
        assert up.finish() == 0


def test_b20_what_does_not_end_by_itself_is_killed(tmp_path):
    with running(tmp_path, "stubborn", stop_timeout_s=0.5) as up:
        up.read_until("everything is up")
        pids = up.pids()
        os.kill(pids[1], signal.SIGSTOP)
        begin = time.monotonic()
        up.process.send_signal(signal.SIGTERM)
        assert up.finish() == 0
        assert time.monotonic() - begin < 60
        assert all_end(pids)
        assert sum("killed" in line for line in up.lines if "broker" not in line) == 2


@contextlib.contextmanager
def unread_pipe() -> Iterator[int]:
    """The end to write to of a pipe that is full."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, b"x" * 4096)
    os.set_blocking(writes, True)
    try:
        yield writes
    finally:
        os.close(reads)
        os.close(writes)


@pytest.mark.parametrize("dies", [False, True])
def test_b20_a_reader_that_stands_still_keeps_up_from_nothing(tmp_path, dies):
    buffered = {"PYTHONUNBUFFERED": ""}  # then a thread that writes to sys.stdout holds a lock
    with unread_pipe() as stdout, running(tmp_path, "dies-late", stdout=stdout, env=buffered, stop_on_death=True) as up:
        deadline = time.monotonic() + 60
        while not up.state_file.exists() or up.state_file.read_text() == "stale":
            assert up.process.poll() is None and time.monotonic() < deadline, "it does not come up"
            time.sleep(0.02)
        pids = up.pids()
        if dies:
            kill_prefill(up)
        else:
            up.process.send_signal(signal.SIGTERM)
        assert all_end(pids)
        assert up.process.wait(60) == int(dies)


def test_b20_what_stdout_can_not_encode_is_escaped(tmp_path):
    with running(tmp_path, "utf-8", env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}) as up:
        up.read_until("everything is up")
        up.process.send_signal(signal.SIGTERM)
        assert up.finish() == 0
        assert any("gr\\xfc\\xdf" in line for line in up.lines)


def test_b20_nothing_outlives_a_killed_up(tmp_path):
    with running(tmp_path, "plain") as up:
        up.read_until("everything is up")
        pids = up.pids()
        up.process.kill()
        up.process.wait()
        assert all_end(pids)


def test_child_that_dies_while_starting_ends_all(tmp_path):
    with running(tmp_path, "dies") as up:
        assert up.finish() == 1
        assert "[up]     my last words" in up.lines
        assert any("ended with 7" in line for line in up.lines)
        assert not up.state_file.exists(), "a state file from before must not be taken for ours"


def test_b80_two_fleets_do_not_share_a_port(tmp_path):
    """Both are planned before the engines of either listen, and vLLM's servers may share a port."""
    port = str(take_free_run("127.0.0.1", 3))
    ups = [subprocess.Popen([sys.executable, "-c", PLAN_EARLY, FAKE[1], str(tmp_path / name), port], text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT,
                            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])})
           for name in ("1", "2")]
    try:
        for up in ups:
            assert up.stdout.readline() == "planned\n"
        ups[0].stdin.write("\n")
        ups[0].stdin.flush()
        while "everything is up" not in (line := ups[0].stdout.readline()):
            assert line
        output, _ = ups[1].communicate("\n", timeout=60)
        assert ups[1].returncode == 2 and f"--port='127.0.0.1:{port}'" in output, output
        assert "another `vllm-pd up` has that port" in output
        assert (tmp_path / "1").exists()
    finally:
        for up in ups:
            up.terminate()
            up.communicate(timeout=60)


@pytest.mark.parametrize("key", ["--port", "--broker-port"])
def test_b80_a_fleet_gets_no_port_of_another(key):
    made = plan(router=True)
    ports = [made.router.port, *(engine.port for engine in made.engines)] if key == "--port" else [made.broker_port]
    for port in ports:
        others = reserve("", launch_plan.HOST, [port])
        fleet = Fleet(made, say=lambda *_: None)
        fleet._broker.start = lambda events: pytest.fail("started")
        with pytest.raises(ConfigError, match=f"^{key}='127.0.0.1:{port}'.*another `vllm-pd up`"):
            fleet.run()
        release(others)


def in_no_folder(path: Path) -> Path:
    return path / "none" / "state"


def is_a_folder(path: Path) -> Path:
    return path


@pytest.mark.parametrize("state", [in_no_folder, is_a_folder])
def test_b80_a_state_file_that_can_not_be_written_is_refused_before_anything_starts(tmp_path, state):
    fleet = Fleet(plan(), state=state(tmp_path), say=lambda *_: None)
    fleet._broker.start = lambda events: pytest.fail("started")
    with pytest.raises(ConfigError, match=f"--state='{state(tmp_path)}'.*name a file in a folder"):
        fleet.run()
    with pytest.raises(ConfigError, match="--state"):  # its ports are free again
        fleet.run()


def test_b80_a_state_file_that_can_not_be_written_at_last_is_named(tmp_path):
    """The disk is full by then: an error that `run` reports, and no other."""
    fleet = Fleet(plan(), state=tmp_path / "state", say=lambda *_: None)
    (tmp_path / "state.part").mkdir()
    with pytest.raises(StartError, match="the state file can't be written: .*state.part"):
        fleet._announce()
    fleet.stop()


def kill_prefill(up: Running) -> None:
    """The prefill engine ends by itself."""
    with pytest.raises(ConnectionError):
        fetch(f"http://127.0.0.1:{up.port + 1}", "/die")


def test_child_that_dies_later_is_reported_and_the_others_go_on(tmp_path):
    with running(tmp_path, "dies-late") as up:
        up.read_until("everything is up")
        kill_prefill(up)
        up.read_until("prefill 0 ended with 9")
        up.read_until("[up]     my late last words")
        broker, decode, prefill = up.pids()
        assert ended(prefill) and not ended(decode) and not ended(broker)
        up.process.send_signal(signal.SIGTERM)
        assert up.finish() == 1
        assert all_end([broker, decode])


def test_child_that_dies_later_ends_all_when_asked(tmp_path):
    with running(tmp_path, "dies-late", stop_on_death=True) as up:
        up.read_until("everything is up")
        pids = up.pids()
        kill_prefill(up)
        assert up.finish() == 1
        assert all_end(pids)


def test_engine_that_never_becomes_healthy(tmp_path):
    with running(tmp_path, "slow", timeout_s=6.0) as up:
        assert up.finish() == 1
        assert any(re.search(r"not healthy after \d+\.\d s: decode 0, prefill 0", line) for line in up.lines)


def test_engine_that_is_slow_but_prints_what_it_does_is_waited_for(tmp_path):
    """As on a slow machine, where it loads its model."""
    with running(tmp_path, "slow-but-logs", timeout_s=5.0) as up:
        up.read_until("everything is up")
        up.process.send_signal(signal.SIGTERM)
        assert up.finish() == 0


@pytest.mark.parametrize(("times_s", "stops_s", "limit_s"), [
    ([], 10.5, 10.0),  # it prints nothing
    ([0.5, 1.0], 11.0, 10.0),  # it stopped long ago
    ([0.5, 9.0], 19.0, 10.0), ([0.5, 9.0, 18.5, 28.0], 38.0, 10.0),  # each line gives it 10 s more
    (list(range(1, 60)), 40.5, 40.0)])  # without an end
def test_how_long_a_start_is_waited_for(times_s, stops_s, limit_s):
    """B20: a start that prints lines for ever ends, too."""
    progress, now_s = StartProgress(100.0, 10.0), 100.0
    while not progress.has_stopped:
        now_s += 0.5
        progress.see(sum(100.0 + time_s <= now_s for time_s in times_s), now_s)
    assert (now_s - 100.0, progress.limit_s) == (stops_s, limit_s)


@pytest.mark.parametrize("prefill", [1, 2])
def test_engines_that_are_late_are_named_also_those_that_wait_for_their_start(monkeypatch, prefill):
    fleet = unstarted(plan(prefill=prefill, decode=2), monkeypatch)
    monkeypatch.setattr(launch_up, "is_healthy", lambda url: False)
    names = ", ".join(["decode 0", "decode 1", "prefill 0", "prefill 1"][:2 + prefill])
    with fleet_ends(fleet), pytest.raises(StartError, match=rf"not healthy after [\d.]+ s: {names}; "):
        fleet.start()


def test_engines_that_are_healthy_at_the_check_that_ends_after_the_deadline_are_up(monkeypatch):
    fleet = unstarted(plan(router=True), monkeypatch)
    router_checks = iter([False, True])  # it is still starting at the first one
    monkeypatch.setattr(launch_up, "is_healthy", lambda url: url != fleet.plan.router.url or next(router_checks))
    with fleet_ends(fleet):
        fleet.start()


def unstarted(made: FleetPlan, monkeypatch) -> Fleet:
    """A fleet that has 0.1 s to come up, whose processes are not started."""
    monkeypatch.setattr(Child, "start", lambda child, events: None)
    monkeypatch.setattr(Fleet, "_await_broker", lambda fleet, deadline: None)
    return Fleet(made, timeout_s=0.1, say=lambda *_: None)


@contextlib.contextmanager
def fleet_ends(fleet: Fleet) -> Iterator[None]:
    try:
        yield
    finally:
        fleet.stop()


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan, math.inf])
def test_b80_no_fleet_comes_up_in_such_a_time(timeout_s):
    with pytest.raises(ConfigError, match="--timeout-s=.*above 0"):
        check_times(plan(), timeout_s, None)


@pytest.mark.parametrize("options, ending_s", [
    ({}, 30), ({"router": True}, 32), ({"router": True, "router_args": "--grace-s 120 --unready-s 5"}, 125),
    ({"pd": {"drain_timeout_s": 600}}, 600),
    ({"pd": {"drain_timeout_s": 600}, "router": True}, 602),
    ({"pd": {"drain_timeout_s": 0}, "router": True}, 2),
    ({"pd": {"drain_timeout_s": 600}, "router": True, "router_args": "--grace-s 120"}, 600)])
def test_b20_nothing_is_killed_while_it_drains(options, ending_s):
    made = plan(**options)
    fleet = Fleet(made)
    fleet.stop()
    assert fleet._stop_timeout_s == ending_s + 10
    check_times(made, 600.0, None)
    check_times(made, 600.0, ending_s + 0.5)
    for stop_timeout_s in (ending_s, 0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match=f"--stop-timeout-s=.* may take {ending_s} s .*write more"):
            check_times(made, 600.0, stop_timeout_s)


def test_b20_the_router_ends_before_the_engines_behind_it(tmp_path):
    with running(tmp_path, "plain", router=True) as up:
        up.read_until("everything is up")
        up.process.send_signal(signal.SIGTERM)
        assert up.finish() == 0
        words = ("asked to end", "ends")
        order = [line for line in up.lines if line.endswith(words) and "broker" not in line]
        assert order == [f"[{name}] {word}" for name in ("router", "decode 0", "prefill 0") for word in words]


def test_a_router_comes_up_last_and_ends_with_the_rest(tmp_path):
    with running(tmp_path, "plain", router=True, env={"VLLM_PD_OPERATOR_KEY": "o"}) as up:
        up.read_until("everything is up")
        state = up.state()
        assert state["router"]["url"] == f"http://127.0.0.1:{up.port}"
        assert [engine["url"] for engine in state["engines"]] == [f"http://127.0.0.1:{up.port + n}" for n in (1, 2)]
        pids = [*up.pids(), state["router"]["pid"]]
        assert {line for line in up.lines if "operator key" in line} == {
            "[broker] operator key None", "[decode 0] operator key None", "[prefill 0] operator key None",
            "[router] operator key o"}
        up.process.send_signal(signal.SIGTERM)
        assert up.finish() == 0
        assert all_end(pids)
