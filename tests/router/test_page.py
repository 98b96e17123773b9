# SPDX-License-Identifier: Apache-2.0
"""The page at `/` with the table of the fleet, what it asks for, and how a browser shows it (headless Chromium)."""
import asyncio
import base64
import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.fakes.faulty_engine import Fault, FaultyEngine, Served, serving
from vllm_pd.protocol import messages as m
from vllm_pd.router import overview
from vllm_pd.router.overview import EngineFigures, FleetOverview, figures_of
from vllm_pd.router.policy import Policy
from vllm_pd.router.workers import WorkerState

needs_chromium = pytest.mark.skipif(not shutil.which("chromium"), reason="chromium missing: apt-get install chromium")
EVIL = "<img/src=x/onerror=window.injected=1>"
FINGERPRINT = m.Fingerprint(m.PROTOCOL, "m", "float32", "float32", 16, 2, 2, 64, "hnd")
PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:pd_parked_blocks 7.0
vllm:pd_quarantined_blocks 2.0
vllm:pd_decisions_total{decision="remote",reason="long"} 10.0
vllm:pd_decisions_total{decision="local",reason="short"} 4.0
vllm:pd_attempts_total{outcome="failed"} 1.0
vllm:pd_attempts_total{outcome="done"} 9.0
vllm:pd_handover_seconds_sum{stage="prefill"} 1.0
vllm:pd_handover_seconds_count{stage="prefill"} 4.0
vllm:pd_handover_seconds_bucket{stage="prefill",le="1.0"} 4.0
vllm:prefix_cache_queries_total{engine="0"} 100.0
vllm:prefix_cache_hits_total{engine="0"} 80.0
vllm:pd_degraded{reason="address"} 0.0
vllm:other_total 5.0
"""


async def fleet(served: Served, **headers: str) -> dict:
    answer = await served.ask(path="/fleet", method="GET", headers=headers)
    assert answer.status == 200 and answer.headers["cache-control"] == "no-store"
    return answer.json


def rows(found: dict) -> dict[str, dict]:
    return {row["url"]: row for row in found["rows"]}


async def test_the_page_allows_its_own_script_and_nothing_else():
    async with serving(1) as (served, _):
        page = await served.ask(path="/", method="GET")
        assert page.status == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "http" not in policy
        text = page.body.decode()
        for kind in ("script", "style"):
            [content] = re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert f"{kind}-src 'sha256-{digest}'" in policy
        assert not re.search(r'\bon[a-z]+=|(src|href)="(?!data:,)|innerHTML|insertAdjacent|document\.write|eval', text)
        head = await served.ask(path="/", method="HEAD")
        assert head.status == 200 and not head.body
        assert (await served.ask(path="/")).status == (await served.ask(path="/fleet")).status == 405


async def test_what_is_known_of_each_engine():
    async with serving(2) as (served, engines):
        engines[0].page = PAGE
        found = await fleet(served)
        assert found["engines"] == 2 and found["policy"] == "round-robin" and found["registry"] == "ok"
        row = rows(found)[engines[0].url]
        assert {key: row[key] for key in ("role", "source", "state", "why", "well", "models", "in_flight")} == {
            "role": "kv_consumer", "source": "static", "state": "up", "why": "", "well": True, "models": ["m"],
            "in_flight": 0}
        assert (row["running"], row["waiting"], row["kv_used"], row["parked_blocks"], row["fenced_blocks"]) == (
            4, 2, 0.5, 7, 2)
        assert (row["failed_attempts"], row["prefill_s"], row["queue_s"], row["hit_rate"]) == (1, 0.25, None, 0.8)
        assert row["remote_per_s"] is None and row["jobs_per_s"] is None
        other = rows(found)[engines[1].url]
        assert other["state"] == "up" and other["well"] and other["why"] == "its metrics: 404"
        assert other["running"] is None


async def test_what_is_wrong_with_an_engine_comes_first(monkeypatch):
    monkeypatch.setattr(overview, "PERIOD_S", 0.0)
    async with serving(3) as (served, engines):
        urls = sorted(engine.url for engine in engines)
        assert [row["url"] for row in (await fleet(served))["rows"]] == urls
        by_url = {engine.url: engine for engine in engines}
        by_url[urls[1]].page = PAGE.replace('reason="address"} 0', 'reason="address"} 1')
        by_url[urls[2]].page = "vllm:pd_control_dead 1.0\n"
        found = await fleet(served)
        assert [row["url"] for row in found["rows"]] == [urls[1], urls[2], urls[0]]
        assert [(row["state"], row["why"]) for row in found["rows"][:2]] == [
            ("degraded", "address"), ("dead", "its control thread has ended: restart it")]
        await by_url[urls[0]].stop()
        await served.ask(), await served.ask(), await served.ask()
        await served.until(lambda: served.worker(by_url[urls[0]]).state is WorkerState.DOWN)
        row = (await fleet(served))["rows"][0]
        assert (row["url"], row["state"], row["well"]) == (urls[0], "down", False) and "Connect" in row["why"]


async def test_a_worker_that_leaves_is_shown_until_its_requests_have_ended(monkeypatch):
    monkeypatch.setattr(overview, "PERIOD_S", 0.0)
    async with serving(2) as (served, engines):
        for engine in engines:
            engine.gap_s = 0.3
        streams = [asyncio.create_task(served.ask(True)) for _ in engines]
        await served.until(lambda: all(engine.asked for engine in engines))
        served.router._membership.remove(engines[0].url)
        row = rows(await fleet(served))[engines[0].url]
        assert (row["state"], row["in_flight"], row["well"]) == ("leaving", 1, False)
        for stream in streams:
            assert (await stream).events[-1] == "[DONE]"
        assert rows(await fleet(served)).keys() == {engines[1].url}


async def test_engines_are_read_when_somebody_looks_and_once_for_all():
    async with serving(2) as (served, engines):
        assert not any(engine.metrics_read for engine in engines)
        answers = await asyncio.gather(*(fleet(served) for _ in range(20)))
        assert [engine.metrics_read for engine in engines] == [1, 1]
        assert all(answer == answers[0] for answer in answers)
        assert await fleet(served) == answers[0]
        served.router._overview._read_s -= overview.PERIOD_S
        await fleet(served)
        assert [engine.metrics_read for engine in engines] == [2, 2]


async def test_an_engine_that_does_not_answer_holds_up_no_other(monkeypatch):
    monkeypatch.setattr(overview, "READ_TIMEOUT_S", 0.2)
    async with serving(3) as (served, engines):
        engines[0].sick = Fault.HANG  # its /metrics is silent then, too
        engines[1].page = "vllm:pd_parked_blocks{" + "x" * 2000 + "\n"
        engines[2].page = "vllm:num_requests_running 1.0\n"
        found = rows(await fleet(served))
        assert found[engines[0].url]["why"] == "its metrics: no answer in 0.2 s"
        assert "longer than 512 bytes" in found[engines[1].url]["why"]
        assert found[engines[2].url]["running"] == 1


@pytest.mark.parametrize("page", [
    b"vllm:pd_parked_blocks{ 1\n", b"vllm:pd_parked_blocks x\n", b"vllm:pd_parked_blocks\n",
    b"vllm:pd_parked_blocks 1\n" * 5000, b"vllm:pd_parked_blocks{a=\"\xff\"} 1\n",
    b'vllm:pd_parked_blocks{a="' + b"x" * 500 + b'"} 1\n', (b'vllm:pd_jobs_total{a="' + b"x" * 400 + b'"} 1\n') * 1000,
    b"vllm:other 1\n" * (1 << 16)])
def test_pages_that_can_t_be_read(page):
    with pytest.raises(ValueError):
        EngineFigures.of(page, 0.0)


def test_rates_are_of_what_was_counted_between_two_readings():
    before, after = EngineFigures.of(PAGE.encode(), 10.0), EngineFigures.of(PAGE.replace("10.0", "16.0").replace(
        'failed"} 1', 'failed"} 3').replace("} 80", "} 90").replace("} 100", "} 120").encode(), 12.0)
    shown = figures_of(before, after)
    assert (shown["remote_per_s"], shown["local_per_s"], shown["failed_attempts"], shown["hit_rate"]) == (3, 0, 2, 0.5)
    assert shown["prefill_s"] is None, "no prompt since"
    assert "remote_per_s" not in figures_of(after, EngineFigures.of(PAGE.encode(), 14.0)), "its counters began anew"
    assert "remote_per_s" not in figures_of(None, after)
    odd = EngineFigures.of(b"vllm:num_requests_running NaN\nvllm:kv_cache_usage_perc +Inf\n", 0.0)
    assert figures_of(None, odd)["kv_used"] is None and "running" not in figures_of(None, odd)


def test_little_is_kept_of_a_page():
    many = "".join(f'vllm:pd_jobs_total{{engine="{number}"}} 2.0\n' for number in range(1000))
    first = EngineFigures.of((PAGE + many).encode(), 10.0)
    second = EngineFigures.of((PAGE.replace("10.0", "16.0").replace("} 80", "} 90").replace("} 100", "} 120")
                               + many.replace("2.0", "3.0")).encode(), 12.0)
    kept = first.kept()
    assert figures_of(kept, second) == figures_of(first, second) and figures_of(kept, second)["jobs_per_s"] == 500
    assert sum(map(len, kept._samples.values())) < 20 and kept.kept()._samples == kept._samples
    sick = EngineFigures.of(b'vllm:pd_degraded{reason="a"} 0\nvllm:pd_degraded{reason="b"} 1\nvllm:pd_control_dead 1\n',
                            0.0).kept()
    assert sick.degraded() == "b" and sick.sum("vllm:pd_control_dead") == 1
    assert EngineFigures.of(b"x\n\nvllm:pd_held_blocks 7", 0.0).sum("vllm:pd_held_blocks") == 7


async def test_a_page_that_is_long_to_parse_is_alone_in_one_thread(monkeypatch):
    """Each reading ends in time, and none begins to parse while a page of an earlier one is not done."""
    monkeypatch.setattr(overview, "PERIOD_S", 0.0)
    monkeypatch.setattr(overview, "ALL_TIMEOUT_S", 0.2)
    free, parsed, read_page = threading.Event(), [], overview._read_page

    def wait_and_read(*args):
        parsed.append(threading.current_thread().name)
        assert free.wait(60)
        return read_page(*args)

    monkeypatch.setattr(overview, "_read_page", wait_and_read)
    try:
        async with serving(3) as (served, engines):
            for engine in engines:
                engine.page = PAGE
            for _ in range(4):
                assert {row["why"] for row in (await fleet(served))["rows"]} == {"its metrics: not read"}
            assert len(parsed) == 1 and parsed[0].startswith("fleet")
            free.set()
            monkeypatch.setattr(overview, "ALL_TIMEOUT_S", 20.0)
            assert [row["running"] for row in (await fleet(served))["rows"]] == [4, 4, 4]
            assert set(parsed) == set(parsed[:1])
            free.clear()
            monkeypatch.setattr(overview, "ALL_TIMEOUT_S", 0.2)
            await fleet(served)
        assert not free.is_set(), "the router has ended"
    finally:
        free.set()


async def test_the_load_that_a_worker_reports_fills_in_for_its_metrics(monkeypatch):
    from vllm_pd.events.messages import EngineLoad
    async with serving(1) as (served, [engine]):
        monkeypatch.setattr(served.router._overview, "_load_of",
                            lambda url: (EngineLoad(running=5, parked_blocks=3, used_blocks=1, total_blocks=4), 0.1))
        row = rows(await fleet(served))[engine.url]
        assert (row["running"], row["parked_blocks"], row["kv_used"], row["held_blocks"]) == (5, 3, 0.25, None)


async def test_the_other_engines_of_the_registry_are_shown():
    async with serving(1) as (served, [engine]):
        prefill = FaultyEngine()
        prefill.page = PAGE
        await prefill.start()
        member = m.Member("prefill-1", m.Role.PREFILL, "tcp://127.0.0.1:1", FINGERPRINT, http=prefill.url)
        silent = m.Member("silent-1", m.Role.PREFILL, "tcp://127.0.0.1:2", FINGERPRINT, draining=True)
        decode = m.Member("decode-1", m.Role.BOTH, "tcp://127.0.0.1:3", FINGERPRINT, http=engine.url)
        try:
            served.router._membership.update([member, silent, decode], 0.0)
            found = await fleet(served)
        finally:
            await prefill.stop()
        assert found["engines"] == 3
        row = rows(found)[prefill.url]
        assert (row["engine"], row["role"], row["source"], row["state"], row["running"]) == (
            "prefill-1", "kv_producer", "registry", "registered", 4)
        assert rows(found)["tcp://127.0.0.1:2"]["state"] == "draining" and row["in_flight"] is None
        row = rows(found)[engine.url]
        assert (row["engine"], row["role"], row["state"]) == ("decode-1", "kv_both", "up")


async def test_a_large_fleet_is_read_and_shown_in_part(monkeypatch):
    monkeypatch.setattr(overview, "MAX_READ", 2)
    monkeypatch.setattr(overview, "MAX_ROWS", 3)
    async with serving(4) as (served, engines):
        found = await fleet(served)
        assert found["engines"] == 4 and len(found["rows"]) == 3
        assert sum(engine.metrics_read for engine in engines) == 2
        assert sum(row["why"] == "its metrics: not read" for row in found["rows"]) >= 1


async def test_b80_the_fleet_needs_a_key_and_the_page_none():
    for options, keys in (({"api_key": "clients"}, ["clients"]),
                          ({"api_key": "clients", "operator_key": "operators"}, ["clients", "operators"])):
        async with serving(1, **options) as (served, [engine]):
            page = await served.ask(path="/", method="GET")
            assert page.status == 200 and engine.url.encode() not in page.body
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                for method in ("GET", "HEAD"):
                    assert (await served.ask(path="/fleet", method=method, headers=headers)).status == 401
            assert not engine.metrics_read
            for key in keys:
                assert rows(await fleet(served, Authorization=f"Bearer {key}")).keys() == {engine.url}


@pytest.mark.parametrize("path", ["/fleet", "/workers"])
async def test_b80_without_a_key_no_web_page_reads_the_fleet(path):
    """Nor one whose name its owner has made resolve to this machine, so that its requests carry no Origin."""
    async with serving(1) as (served, [engine]):
        for method in ("GET", "HEAD"):
            for headers in ({"Host": "evil.test"}, {"Host": "evil.test:8000", "X-Forwarded-For": "10.0.0.1"},
                            {"Origin": "http://evil.test"}, {"Host": "127.0.0.1.evil.test"}):
                assert (await served.ask(path=path, method=method, headers=headers)).status in (
                    (403, 405) if method == "HEAD" else (403, ))
        assert not engine.metrics_read
        for host in ("localhost:8000", "127.0.0.1", "[::1]:80"):
            assert engine.url in (await served.ask(path=path, method="GET", headers={"Host": host})).body.decode()
        away = {"client": ("10.0.0.9", 1), "method": "GET", "headers": [(b"host", b"router.example")]}
        assert served.router._refused(away) is None, "as /metrics"
        assert served.router._refused({**away, "headers": [(b"origin", b"http://a")]}).status == 403
    async with serving(1, operator_key="operators") as (served, [engine]):
        for headers, status in (({}, 403), ({"Authorization": "Bearer operators"}, 200)):
            assert (await served.ask(path=path, method="GET", headers={"Host": "a.test", **headers})).status == status
    async with serving(1, api_key="clients") as (served, [engine]):
        headers = {"Host": "router.example", "Origin": "http://router.example", "Authorization": "Bearer clients"}
        assert (await served.ask(path=path, method="GET", headers=headers)).status == 200


async def test_a_reading_that_fails_leaves_the_next_one_possible(monkeypatch):
    async with serving(1) as (served, [engine]):
        monkeypatch.setattr(FleetOverview, "_urls", lambda self: 1 / 0)
        assert (await served.ask(path="/fleet", method="GET")).status == 500
        monkeypatch.undo()
        assert rows(await fleet(served)).keys() == {engine.url}


class Browser:
    """One tab of a headless Chromium, by the DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.log: list[str] = []  # of the console, and of what the policy has kept out

    async def send(self, method: str, **params) -> dict:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await asyncio.wait_for(self._socket.receive_json(), 60)
            if message.get("method") == "Log.entryAdded":
                self.log.append(message["params"]["entry"]["text"])
            if message.get("id") == number:
                return message["result"]

    async def value(self, expression: str):
        """What an expression of JavaScript is, as JSON has it."""
        found = await self.send("Runtime.evaluate", expression=f"JSON.stringify({expression})", awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return json.loads(found["result"].get("value") or "null")

    async def until(self, expression: str, condition):
        async with asyncio.timeout(60):
            while not condition(value := await self.value(expression)):
                await asyncio.sleep(0.1)
        return value


@contextlib.asynccontextmanager
async def browsing(url: str, folder: Path) -> AsyncIterator[Browser]:
    """A browser that has opened this page."""
    process = await asyncio.create_subprocess_exec(
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
        f"--user-data-dir={folder}", "--remote-debugging-port=0", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True)
    try:
        file = folder / "DevToolsActivePort"
        async with asyncio.timeout(120):
            while not (file.exists() and file.read_text().count("\n") >= 1):
                assert process.returncode is None
                await asyncio.sleep(0.05)
        port = file.read_text().split("\n")[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                [target] = [one for one in await answer.json() if one["type"] == "page"]
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                browser = Browser(socket)
                await browser.send("Log.enable")
                await browser.send("Page.navigate", url=url)
                yield browser
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


TABLE = "[...document.querySelectorAll('tr')].map(row => [...row.children].map(cell => cell.textContent))"


def table(found: list[list[str]] | None) -> dict[str, dict[str, str]]:
    """The rows by the engines' addresses: their cells by title."""
    head, *lines = found or [[]]
    return {row["at"]: row for row in (dict(zip(head, line, strict=True)) for line in lines)}


@needs_chromium
async def test_a_browser_shows_the_fleet_as_it_changes(tmp_path):
    async with serving(2, policy=Policy.ROUND_ROBIN) as (served, engines):
        first, second = (engine.url for engine in engines)
        engines[0].page = PAGE
        engines[1].page = PAGE.replace('reason="address"} 0', 'reason="<b>address</b>"} 1')
        async with browsing(served.url + "/", tmp_path) as browser:
            found = table(await browser.until(TABLE, lambda found: len(found) == 3))
            assert (found[first]["state"], found[first]["run"], found[first]["KV"], found[first]["prefill"]) == (
                "up", "4", "50 %", "250 ms")
            assert (found[second]["state"], found[second]["why"]) == ("degraded", "<b>address</b>")
            assert await browser.value("document.querySelectorAll('tr.unwell').length") == 1
            engines[1].gap_s = 1.5
            streams = [asyncio.create_task(served.ask(True)) for _ in engines]
            await served.until(lambda: engines[1].asked)
            served.router._membership.remove(second)
            await browser.until(TABLE, lambda found: table(found).get(second, {}).get("state") == "leaving")
            await asyncio.gather(*streams)
            await browser.until(TABLE, lambda found: table(found).keys() == {first})
            await engines[0].stop()
            await served.ask()
            await browser.until(TABLE, lambda found: table(found)[first]["state"] == "down")
            assert not browser.log


@needs_chromium
async def test_what_engines_say_is_text_in_a_browser(tmp_path):
    """The name of a model, a path in a URL, and what is wrong."""
    async with serving(1) as (served, [engine]):
        engine.model = EVIL
        engine.page = f'vllm:pd_degraded{{reason="{EVIL}"}} 1.0\n'
        worker = served.worker(engine)
        await served.until(lambda: ask_models(worker) or EVIL in worker.models)
        named = f"http://127.0.0.1:9/{EVIL}"
        assert served.router._membership.add(named) is not None
        async with browsing(served.url + "/", tmp_path) as browser:
            found = table(await browser.until(TABLE, lambda found: len(found) == 3))
            assert (found[engine.url]["models"], found[engine.url]["why"]) == (EVIL, EVIL) and named in found
            assert await browser.value("[document.images.length, typeof window.injected]") == [0, "undefined"]
            assert not browser.log
            tried = ("(() => { try { document.body.innerHTML = '" + EVIL + "'; return 'set' } "
                     "catch (error) { return error.name } })()")
            assert await browser.value(tried) == "TypeError", "the policy refuses HTML"


def ask_models(worker) -> None:
    worker.ask_models_soon()


@needs_chromium
async def test_a_browser_asks_for_the_key(tmp_path):
    async with (serving(1, api_key="secret") as (served, [engine]),
                browsing(served.url + "/", tmp_path) as browser):
        await browser.until("document.getElementById('login')?.hidden", lambda hidden: hidden is False)
        assert await browser.value(TABLE) == []
        for key, rows_shown in (("wrong", 0), ("secret", 2)):
            await browser.value(f"(document.getElementById('key').value = '{key}', "
                                "document.querySelector('button').click(), 0)")
            await browser.until(TABLE, lambda found, expected=rows_shown: len(found) == expected)
        assert await browser.until("document.getElementById('login').hidden", bool)
        assert engine.url in table(await browser.value(TABLE))


COUNTED = """(() => {
  window.timers = new Set(); window.open = 0;
  const set = window.setTimeout, clear = window.clearTimeout, fetch = window.fetch;
  window.setTimeout = (call, after) => {
    const id = set(() => { timers.delete(id); call() }, after);
    timers.add(id);
    return id;
  };
  window.clearTimeout = id => { timers.delete(id); clear(id) };
  window.fetch = async (...given) => {
    if (window.broken) throw new TypeError("broken");
    window.open += 1;
    const answer = await fetch(...given);
    set(() => { window.open -= 1 }, 300);  // the page has shown it, or dropped it
    return answer;
  };
  return 0;
})()"""
CLICK = "(document.querySelector('button').click(), 0)"


@needs_chromium
async def test_a_browser_has_one_timer(tmp_path):
    """After two clicks, too, and after an error while the page waits for a key."""
    async with (serving(1, api_key="secret") as (served, _), browsing(served.url + "/", tmp_path) as browser):
        await browser.until("document.getElementById('login')?.hidden", lambda hidden: hidden is False)
        await browser.value(COUNTED)
        await browser.value(f"(window.broken = true, {CLICK})")
        await browser.until("timers.size", lambda timers: timers == 1)
        assert "does not answer" in await browser.value("document.getElementById('problem').textContent")
        assert await browser.value("document.getElementById('login').hidden") is False
        await browser.value("(window.broken = false, document.getElementById('key').value = 'secret', 0)")
        await browser.value(f"({CLICK}, {CLICK})")
        await browser.until(TABLE, lambda found: len(found) == 2)
        await browser.until("open", lambda open: open == 0)
        assert await browser.value("timers.size") == 1
