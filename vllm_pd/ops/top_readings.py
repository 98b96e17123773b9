# SPDX-License-Identifier: Apache-2.0
"""The readings of `vllm-pd top`: who is registered, and each engine's metrics.

A round has a bound whatever engines do: `FETCHES` at a time, each for `PAGE_S` and `MAX_PAGE_BYTES`, all of them for
`ROUND_S`; an engine whose turn does not come by then is shown as not read. A round begins after the one before has
ended, so no two of them read one engine.
"""
from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live

from vllm_pd.broker.members import Access, list_members
from vllm_pd.errors import ConfigError, PDError
from vllm_pd.ops.options import TopOptions
from vllm_pd.ops.pages import MIB, PageReader, api_key, authorization
from vllm_pd.ops.scrape import MetricsSnapshot, parse
from vllm_pd.ops.top import WANTED, FleetReading, FleetTable, MemberReading, degraded_reason, wanted_lines
from vllm_pd.protocol.messages import Member
from vllm_pd.router.options import parse_worker

PAGE_S = 1.0
ROUND_S = 5.0
REGISTRY_S = 2.0
FETCHES = 32
MAX_PAGE_BYTES = 8 * MIB
MAX_STATUS_BYTES = MIB
WIDE = 240  # columns, where the output is no terminal


def show_fleet(broker: str, access: Access, options: TopOptions) -> None:
    """Show the table until Ctrl-C, or once. Raises ConfigError for what can't be used, and ControlError where the first
    question finds no broker."""
    options = options.checked()
    key = authorization(api_key("--api-key", options.api_key))
    list_members(broker, REGISTRY_S, access)  # what is wrong with the options, or the broker, is said at once
    console = Console()
    once = options.once or not console.is_terminal
    asyncio.run(_show(console if console.is_terminal else Console(width=WIDE), broker, FleetReader(broker, access, key),
                      None if once else options.interval_s))


async def _show(console: Console, broker: str, reader: FleetReader, interval_s: float | None) -> None:
    table, after = FleetTable(broker), await reader.read()
    if interval_s is None:
        console.print(table.render(None, after))
        return
    with Live(table.render(None, after), console=console, screen=True, auto_refresh=False) as live:
        live.refresh()
        while True:
            await asyncio.sleep(interval_s)
            before, after = after, await reader.read()
            live.update(table.render(before, after), refresh=True)


class FleetReader:
    """Reads a fleet again and again. Belongs to one event loop, from its first reading on. `headers` go to the engines'
    `/pd/status`. `names`: how the figures begin that are read."""

    def __init__(self, broker: str, access: Access, headers: Mapping[str, str],
                 names: tuple[str, ...] = WANTED) -> None:
        self._broker = broker
        self._access = access
        self._headers = headers
        self._names = names
        self._members: tuple[Member, ...] = ()
        self._pages: PageReader | None = None

    async def read(self) -> FleetReading:
        """One reading of all. Raises nothing for a broker or an engine that does not answer."""
        self._pages = self._pages or PageReader(PAGE_S)
        fault, queue_length = "", 0
        try:
            listed = await asyncio.to_thread(list_members, self._broker, REGISTRY_S, self._access)
            self._members, queue_length = listed.members, listed.queue_length
        except PDError as error:  # of the broker, or of a key file that is not there at this moment
            fault = str(error)
        turns = asyncio.Semaphore(FETCHES)
        tasks = {asyncio.ensure_future(self._in_turn(turns, member)): member for member in self._members}
        done, late = await asyncio.wait(tasks, timeout=ROUND_S) if tasks else (set(), set())
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        found = [task.result() if task in done else MemberReading(member, time.monotonic(), fault="not read in time")
                 for task, member in tasks.items()]
        return FleetReading(tuple(found), queue_length, fault)

    async def _in_turn(self, turns: asyncio.Semaphore, member: Member) -> MemberReading:
        async with turns:
            return await self._read_engine(member)

    async def _read_engine(self, member: Member) -> MemberReading:
        """The figures of an engine. Only the first rank of a server has its URL."""
        if not member.http:
            return MemberReading(member, time.monotonic())
        try:
            url = parse_worker("http", member.http)  # as that engine has registered it
            page = await self._pages.read(f"{url}/metrics", PAGE_S, MAX_PAGE_BYTES)
            if page.status != HTTPStatus.OK:
                raise ConnectionError(f"/metrics answers {page.status}")
            at_s = time.monotonic()
            figures = parse(wanted_lines(page.body.decode(errors="replace"), self._names))
        except TimeoutError:
            return MemberReading(member, time.monotonic(), fault=f"no answer within {PAGE_S:g} s")
        except (OSError, ValueError, ConfigError) as error:
            return MemberReading(member, time.monotonic(), fault=str(error))
        return MemberReading(member, at_s, figures, degraded=await self._why_degraded(member, figures))

    async def _why_degraded(self, member: Member, figures: MetricsSnapshot) -> str:
        """In the engine's own words; empty where it is not, or does not say so here: the figures have the reason."""
        if not degraded_reason(figures):
            return ""
        try:
            page = await self._pages.read(f"{member.http}/pd/status", PAGE_S, MAX_STATUS_BYTES, headers=self._headers)
            shown: Any = msgspec.json.decode(page.body, type=_Degraded).degraded
            return shown or ""
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return ""


class _Degraded(msgspec.Struct):
    degraded: str | None = None
