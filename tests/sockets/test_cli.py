# SPDX-License-Identifier: Apache-2.0
"""B80: what `vllm-pd` refuses, it refuses in one line and with a status, before anything is started."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import certifi
import pytest

from vllm_pd import cli
from vllm_pd.broker import members
from vllm_pd.errors import ControlError
from vllm_pd.ops import doctor, orders
from vllm_pd.protocol import messages as m
from vllm_pd.rpc.keys import Keys
from vllm_pd.rpc.ports import take_free, take_free_run

ROOT = Path(__file__).parents[2]


def call(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["vllm-pd", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


@pytest.mark.parametrize("arguments, key", [
    (["broker", "--bind", "tcp://0.0.0.0:5700"], "--bind"),
    (["broker", "--bind", "5700"], "--bind"),
    (["broker", "--ttl-s", "0"], "--ttl-s"),
    (["broker", "--ttl-s", "-1"], "--ttl-s"),
    (["broker", "--ttl-s", "nan"], "--ttl-s"),
    (["status", "--broker", "nats://127.0.0.1:4222", "--nats-ca", certifi.where()], "--nats-ca"),
    (["status", "--broker", "nats://127.0.0.1:4222", "--ttl-s", "nan"], "--ttl-s"),
    (["up", "m", "--prefill", "0"], "--prefill"),
    (["up", "m", "--pd", "lease=3"], "lease"),
    (["up", "m", "--pd", "lease_s"], "--pd"),
    (["up", "m", "--pd", "lease_s=3", "--pd", "lease_s=30"], "--pd lease_s"),
    (["up", "m", "--", "--port", "1"], "-- --port"),
    (["bench", "handover", "--decode", "http://127.0.0.1:1", "--prefill", "http://127.0.0.1:1"], "--decode"),
])
def test_b80_refusals_are_one_line(monkeypatch, capsys, arguments, key):
    assert call(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {key}=") and error.count("\n") == 1 and "Traceback" not in error


def test_b80_the_broker_is_to_listen_at_a_name_without_an_address(monkeypatch, capsys, tmp_path):
    keys = tmp_path / "vllm-pd.keys"
    Keys.make(keys)
    capsys.readouterr()
    assert call(monkeypatch, "broker", "--bind", "tcp://no-such.invalid:5700", "--keys", str(keys)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --bind='tcp://no-such.invalid:5700' can't be used: no-such.invalid has no address")
    assert "write a name that this machine can look up, or an address" in error and error.count("\n") == 1


def test_b80_the_router_is_to_listen_at_a_name_without_an_address(monkeypatch, capsys):
    assert call(monkeypatch, "router", "--host", "no-such.invalid", "--port", str(take_free("127.0.0.1")), "--worker",
                "http://127.0.0.1:1") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --host='no-such.invalid' can't be used: no-such.invalid has no address")
    assert "write a name that this machine can look up, or an address" in error and error.count("\n") == 1


@pytest.mark.parametrize("key, value", [("--timeout-s", "nan"), ("--timeout-s", "0"), ("--stop-timeout-s", "-1"),
                                        ("--stop-timeout-s", "30")])
def test_b80_times_of_up_are_checked(monkeypatch, capsys, key, value):
    assert call(monkeypatch, "up", "m", "--port", str(take_free_run("127.0.0.1", 2)), key, value) == 2
    assert capsys.readouterr().err.startswith(f"error: {key}={float(value)} can't be used")


@pytest.mark.parametrize("arguments", [["up", "m", "--prefil", "1"], ["up", "m", "--lease-s", "1"], ["no-such"]])
def test_unknown_options_are_refused(monkeypatch, capsys, arguments):
    assert call(monkeypatch, *arguments) == 2


def test_doctor_tells_by_its_status(monkeypatch, capsys):
    good, bad = doctor.Finding("a", "fact"), doctor.Finding("b", "fault", "cure")
    monkeypatch.setattr(doctor, "examine", lambda broker, ports, access: [good])
    assert call(monkeypatch, "doctor") == 0
    monkeypatch.setattr(doctor, "examine", lambda broker, ports, access: [good, bad])
    assert call(monkeypatch, "doctor") == 1
    assert "-> cure" in capsys.readouterr().out


HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m\r\ud800\nok   broker    all is well"


@pytest.mark.parametrize("arguments, status", [
    (["status"], 0), (["status", "e"], 0), (["status", "x"], 2), (["drain", "e"], 1), (["role", "e", "kv_both"], 0),
    (["role", "p", "kv_both"], 2), (["doctor"], 1)])
def test_b82_what_engines_send_never_reaches_the_terminal_as_it_is(monkeypatch, capsys, arguments, status):
    """Addresses, names and reasons are whatever an engine says; each stays on its line, its controls are escaped."""
    fingerprint = m.Fingerprint(m.PROTOCOL, "m", "float32", "auto", 16, 30, 3, 64, "ipex")
    engine = m.Member("e", m.Role.DECODE, f"tcp://{HOSTILE}", fingerprint)
    other = m.Member("p" + HOSTILE, m.Role.PREFILL, "tcp://p", m.Fingerprint(
        m.PROTOCOL, HOSTILE, "float32", "auto", 16, 30, 3, 64, "ipex"))
    listed = members.MemberList((engine, other), 0)
    monkeypatch.setattr(members, "list_members", lambda *_, **__: listed)
    monkeypatch.setattr(orders, "list_members", lambda *_, **__: listed)
    monkeypatch.setattr(doctor, "list_members", lambda *_, **__: listed)
    monkeypatch.setattr(doctor, "examine", lambda broker, ports, access: [*doctor.check_peers(broker, access)])

    def answer(operator: orders.Operator, order: m.Message, timeout_s: float = 5.0) -> m.StatusReply:
        if "p" in operator.target.incarnation:
            raise ControlError(HOSTILE)
        return m.StatusReply(engine, "", {HOSTILE: 1}, HOSTILE, paths={HOSTILE: (1e6, 0.5, 0.0)})

    monkeypatch.setattr(orders, "Call", lambda *_, **__: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(orders.Operator, "tell", answer)
    options = ["--timeout-s", "0"] if arguments[0] == "drain" else []
    assert call(monkeypatch, *arguments, "--broker", "tcp://127.0.0.1:1", *options) == status
    printed = "".join(capsys.readouterr())
    assert "\\x1b]0;owned\\x07" in printed and "\\u202e" in printed
    assert all(line.isprintable() for line in printed.splitlines()) and "\nok   broker    all is well" not in printed


@contextlib.contextmanager
def broker(port: int):
    process = subprocess.Popen([sys.executable, "-m", "vllm_pd.cli", "broker", "--bind", f"tcp://127.0.0.1:{port}"],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                               env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
                                    "PYTHONUNBUFFERED": "1"})
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_broker_listens_and_ends_when_told(number):
    port = take_free("127.0.0.1")
    with broker(port) as process:
        assert f"listening at tcp://127.0.0.1:{port}" in process.stdout.readline()
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
        process.send_signal(number)
        assert process.wait(timeout=60) == 0


def test_b80_broker_on_a_taken_port():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with broker(other.getsockname()[1]) as process:
            assert process.wait(timeout=60) == 2
            assert "in use" in process.stdout.read()
