# SPDX-License-Identifier: Apache-2.0
"""B80: what `vllm-pd` refuses, it refuses in one line and with a status, before anything is started."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import certifi
import pytest

from vllm_pd import cli
from vllm_pd.admin import doctor
from vllm_pd.ports import take_free

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
    (["up", "m", "--prefill", "0"], "--prefill"),
    (["up", "m", "--pd", "lease=3"], "lease"),
    (["up", "m", "--pd", "lease_s"], "--pd"),
    (["up", "m", "--", "--port", "1"], "-- --port"),
    (["bench", "handover", "--decode", "http://127.0.0.1:1", "--prefill", "http://127.0.0.1:1"], "--decode"),
])
def test_b80_refusals_are_one_line(monkeypatch, capsys, arguments, key):
    assert call(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {key}=") and error.count("\n") == 1 and "Traceback" not in error


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
