# SPDX-License-Identifier: Apache-2.0
"""B119: `vllm-pd top` reads a fleet that may not answer, and is held up by nobody."""
import asyncio
import itertools
import os
import pty
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from tests.fakes.page_server import PageServer, Reply
from tests.waiting import wait_for
from vllm_pd import cli
from vllm_pd.broker.members import Access, MemberList
from vllm_pd.errors import ControlError
from vllm_pd.ops import top_readings
from vllm_pd.ops.top_readings import FETCHES, FleetReader
from vllm_pd.protocol import messages as m
from vllm_pd.rpc.ports import take_free

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
D = m.Member("d", m.Role.DECODE, "tcp://127.0.0.1:1", FINGERPRINT, m.Load(1, 2))
BROKER = "tcp://127.0.0.1:5700"


def member(name: str, http: str) -> m.Member:
    return msgspec.structs.replace(D, incarnation=name, http=http)


def listing(monkeypatch, *members: m.Member) -> list[m.Member]:
    """The registry, as a list that a test may change; without members the broker does not answer."""
    registered = list(members)

    def list_members(*_: object) -> MemberList:
        if not registered:
            raise ControlError("no broker answers")
        return MemberList(tuple(registered), 3)

    monkeypatch.setattr(top_readings, "list_members", list_members)
    return registered


class FakeFigures:
    """The pages of an engine, whose counters grow with each reading."""

    def __init__(self, degraded: bool = False) -> None:
        self.readings = itertools.count(1)
        self.degraded = degraded
        self.keys: list[str | None] = []

    def __call__(self, method, path, headers, body):
        self.keys.append(headers.get("authorization"))
        if path == "/pd/status":
            return Reply({"degraded": "peer: no prefill engine is there"})
        count = next(self.readings)
        return Reply(f'vllm:num_requests_running{{engine="0"}} 5.0\n'
                     f'vllm:pd_decisions_total{{decision="remote",reason="length"}} {10 * count}.0\n'
                     f'vllm:pd_degraded{{reason="peer"}} {float(self.degraded)}\n'.encode())


def test_each_engine_is_read_and_those_that_do_not_answer_are_shown_as_such(monkeypatch):
    figures, degraded = FakeFigures(), FakeFigures(degraded=True)
    with (PageServer(figures) as well, PageServer(degraded) as ill, PageServer(lambda *_: Reply(delay_s=60)) as silent,
          PageServer(lambda *_: Reply(b"x" * 2000, drip=True)) as slow,
          PageServer(lambda *_: Reply(b"vllm:pd_parked_blocks 1.0\n" * 400_000)) as long,
          PageServer(lambda *_: Reply(b"vllm:pd_parked_blocks {{{\n")) as wrong,
          PageServer(lambda *_: None) as missing):
        listing(monkeypatch, *(member(name, server.url) for name, server in (
            ("well", well), ("ill", ill), ("silent", silent), ("slow", slow), ("long", long), ("wrong", wrong),
            ("missing", missing))), member("gone", f"http://127.0.0.1:{take_free('127.0.0.1')}"), member("none", ""))
        reader = FleetReader(BROKER, Access(), {"authorization": "Bearer k"})
        began_s = time.monotonic()
        found = asyncio.run(reader.read())
        took_s = time.monotonic() - began_s
    by_name = {one.member.incarnation: one for one in found.engines}
    assert len(by_name) == 9 and found.queue_length == 3 and not found.fault
    assert by_name["well"].figures.value("vllm:num_requests_running") == 5.0 and not by_name["well"].fault
    assert by_name["ill"].degraded == "peer: no prefill engine is there"
    assert degraded.keys == [None, "Bearer k"] and figures.keys == [None], "the key goes to /pd/status only"
    late = "no answer within 1 s"
    for name, fault in (("silent", late), ("slow", late), ("long", "more than 8 MiB"), ("gone", "Connect call failed"),
                        ("missing", "/metrics answers 404")):
        assert fault in by_name[name].fault and by_name[name].figures is None, by_name[name]
    assert by_name["wrong"].fault and by_name["none"].figures is None and not by_name["none"].fault
    assert took_s < 30, "the slowest ones are waited for at once"


def test_so_many_are_read_at_once_and_a_round_has_an_end(monkeypatch):
    monkeypatch.setattr(top_readings, "ROUND_S", 1.5)
    open_now, most, changing = 0, 0, threading.Lock()

    def answer(*_):
        nonlocal open_now, most
        with changing:
            open_now += 1
            most = max(most, open_now)
        server.ended.wait(0.7)
        with changing:
            open_now -= 1
        return Reply(delay_s=60)

    with PageServer(answer) as server:
        listing(monkeypatch, *(member(f"d{number}", server.url) for number in range(5 * FETCHES)))
        began_s = time.monotonic()
        found = asyncio.run(FleetReader(BROKER, Access(), {}).read())
        assert time.monotonic() - began_s < 15
    faults = [one.fault for one in found.engines]
    assert len(faults) == 5 * FETCHES and set(faults) == {"no answer within 1 s", "not read in time"}
    assert faults.count("not read in time") >= 3 * FETCHES and 1 < most <= 2 * FETCHES, "an old one may end late"


def test_a_broker_that_is_away_leaves_the_last_members(monkeypatch):
    with PageServer(FakeFigures()) as server:
        registered = listing(monkeypatch, member("d", server.url))

        async def read() -> list:
            reader = FleetReader(BROKER, Access(), {})
            first = await reader.read()
            registered.clear()
            return [first, await reader.read()]

        first, second = asyncio.run(read())
    assert not first.fault and second.fault == "no broker answers" and len(second.engines) == 1
    assert second.engines[0].figures is not None


@pytest.mark.parametrize("http", ["http://", "http://[::1", "nonsense", "http://h:99999", "file:///etc/passwd",
                                  "\x1b[2J", "http://u:p@127.0.0.1:1", "http://127.0.0.1:1/?a", "http://\ud800:1"])
def test_an_address_that_is_none_is_a_fault_of_that_engine(monkeypatch, http):
    listing(monkeypatch, member("d", http))
    found, = asyncio.run(FleetReader(BROKER, Access(), {}).read()).engines
    assert found.fault and found.figures is None


@pytest.mark.parametrize("once", [[], ["--once"]])
def test_one_table_where_the_output_is_no_terminal(monkeypatch, capsys, once):
    with PageServer(FakeFigures()) as server:
        listing(monkeypatch, member("d" * 32, server.url))
        monkeypatch.setattr(sys, "argv", ["vllm-pd", "top", "--broker", BROKER, *once])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    out = capsys.readouterr().out
    assert not ended.value.code and "d" * 12 in out and server.url in out and "since each engine's start" in out
    assert "\x1b" not in out


PROGRAM = """
import sys
from vllm_pd import cli
from vllm_pd.broker.members import MemberList
from vllm_pd.ops import top_readings
from vllm_pd.protocol import messages as m
fingerprint = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")
member = m.Member("d" * 32, m.Role.DECODE, "tcp://127.0.0.1:1", fingerprint, http=sys.argv.pop())
top_readings.list_members = lambda *_: MemberList((member, ), 0)
cli.main()
"""


def test_a_terminal_has_a_table_that_is_always_new_until_ctrl_c():
    figures = FakeFigures()
    ours, theirs = pty.openpty()
    seen = bytearray()

    def read() -> None:
        try:
            while part := os.read(ours, 65536):
                seen.extend(part)
        except OSError:
            pass  # the other end is closed

    with PageServer(figures) as server:
        process = subprocess.Popen([sys.executable, "-c", PROGRAM, "top", "--broker", BROKER, "--interval", "0.5",
                                    server.url], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
                                   env={**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "40"})
        os.close(theirs)
        reader = threading.Thread(target=read)
        reader.start()
        try:
            wait_for(lambda: b"since the last reading" in seen and b"remote/s" in seen, lambda: bytes(seen))
            process.send_signal(2)
            assert process.wait(60) == 0, bytes(seen)
        finally:
            process.kill()
            process.wait()
            reader.join()
            os.close(ours)
    assert b"Traceback" not in seen and seen.rstrip().endswith((b"\x1b[?1049l", b"\x1b[?25h"))


@pytest.mark.parametrize("arguments, key", [(["--interval", "0"], "--interval"), (["--api-key", "\n"], "--api-key"),
                                            (["--keys", "/no/such/file"], "--keys")])
def test_options_that_can_not_be_used(monkeypatch, capsys, arguments, key):
    monkeypatch.setattr(sys, "argv", ["vllm-pd", "top", "--broker", BROKER, *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2 and capsys.readouterr().err.startswith(f"error: {key}=")
