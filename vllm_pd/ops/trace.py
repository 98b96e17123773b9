# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd trace`: what all engines of a fleet say of their prompts for some seconds, as a timeline in a file.

A round has a bound whatever engines do, as one of `vllm-pd top`: `FETCHES` engines at a time, each for `PAGE_S` and
`MAX_PAGE_BYTES`. An engine that does not answer is named once, and asked again in the next round. Engines remember 256
prompts a rank: of more in a round the oldest are not in the timeline.
"""
from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Self

import msgspec

from vllm_pd.broker.members import Access, list_members
from vllm_pd.errors import ConfigError, ControlError
from vllm_pd.ops.launch.state import UpState
from vllm_pd.ops.options import TraceOptions
from vllm_pd.ops.pages import MIB, PageReader, api_key, authorization
from vllm_pd.ops.printing import printable
from vllm_pd.ops.timeline import PromptsPage, Timeline
from vllm_pd.router.options import parse_worker

ROUND_S = 0.5  # from the beginning of one round to that of the next
PAGE_S = 2.0
REGISTRY_S = 2.0
FETCHES = 32
MAX_PAGE_BYTES = 8 * MIB
SHOWN_CHARS = 200
_PATH = "/pd/prompts"


def trace_fleet(broker: str | None, access: Access, options: TraceOptions, say: Callable[[str], None]) -> None:
    """Read the fleet for `options.seconds`, or until Ctrl-C, and write the timeline, readable by its owner only. Raises
    ConfigError for what can't be used, and ControlError where there is no engine to read, or none has answered."""
    options = options.checked()
    headers = {"content-type": "application/json", **authorization(api_key("--api-key", options.api_key))}
    with _Output(options.output) as output:  # what can't be written is not found out after the wait
        urls = _urls(broker, access, options)
        say(f"reading {len(urls)} engine{'s' * (len(urls) != 1)} for {options.seconds:g} s")
        recorder = Recorder(urls, headers, say)
        timeline = asyncio.run(recorder.record(options.seconds))
        if not recorder.answered:
            raise ControlError(f"none of {len(urls)} engines has answered GET {_PATH}: see above")
        output.finish(json.dumps(timeline.as_json()))
    left_out = f", {timeline.left_out} left out" if timeline.left_out else ""
    say(f"{timeline.prompts} prompts of {len(recorder.answered)} engines{left_out}: {options.output}. Open it at "
        "ui.perfetto.dev, or in chrome://tracing")


class _Output:
    """A file that appears as a whole or not at all. A context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unfinished = path.parent / f".{path.name}.{os.getpid()}"

    def __enter__(self) -> Self:
        """Raises ConfigError where no such file can be written."""
        if not self._path.name or self._path.exists() and not self._path.is_file():
            raise ConfigError("--output", str(self._path), "it is no file: write the name of one, like trace.json")
        try:
            os.close(os.open(self._unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
        except OSError as error:
            raise ConfigError("--output", str(self._path), f"{error.strerror}: write a file in a folder that is there"
                              ) from None
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._unfinished.unlink(missing_ok=True)

    def finish(self, text: str) -> None:
        """Write all of it. Raises ConfigError."""
        try:
            self._unfinished.write_text(text)
            os.replace(self._unfinished, self._path)
        except OSError as error:
            raise ConfigError("--output", str(self._path), f"{error.strerror}: make room, or write another file"
                              ) from None


def _urls(broker: str | None, access: Access, options: TraceOptions) -> list[str]:
    """Where the engines serve, by the state file or the broker."""
    if (broker is None) == (options.state is None):
        raise ConfigError("--broker", broker, "write either --broker ADDRESS, or --state FILE of `vllm-pd up`")
    if options.state is not None:
        state = UpState.read(options.state)
        return [parse_worker("--state", url) for url in (*state.decode, *state.prefill)]
    found = list(dict.fromkeys(member.http for member in list_members(broker, REGISTRY_S, access).members
                               if member.http))
    if not found:
        raise ControlError(f"the broker at {broker} knows no engine with a server that others can reach: start one, or "
                           "write --state FILE of `vllm-pd up`")
    return [parse_worker("http", url) for url in found]


class Recorder:
    """Reads the servers at `urls` again and again. Belongs to one event loop."""

    def __init__(self, urls: Sequence[str], headers: Mapping[str, str], say: Callable[[str], None]) -> None:
        self.answered: set[str] = set()
        self._urls = urls
        self._headers = headers
        self._say = say
        self._silent: set[str] = set()  # at the last question
        self._named: set[str] = set()

    async def record(self, seconds: float) -> Timeline:
        """What they say of the prompts of so many seconds, from now on. Ctrl-C ends it sooner, with what there is."""
        timeline, pages, turns = Timeline(time.monotonic()), PageReader(PAGE_S), asyncio.Semaphore(FETCHES)
        until = time.monotonic() + seconds
        try:
            while True:
                begun = time.monotonic()
                await self._round(timeline, pages, turns, max(until - begun, PAGE_S))
                if begun >= until:
                    return timeline
                await asyncio.sleep(max(0.0, min(begun + ROUND_S, until) - time.monotonic()))
        except asyncio.CancelledError:
            return timeline

    async def _round(self, timeline: Timeline, pages: PageReader, turns: asyncio.Semaphore, limit_s: float) -> None:
        """Ask each server once, those that have not answered before after the others, for `limit_s` at most."""
        ordered = sorted(self._urls, key=lambda url: url in self._silent)
        tasks = [asyncio.ensure_future(self._read(url, timeline, pages, turns)) for url in ordered]
        try:
            await asyncio.wait(tasks, timeout=limit_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, url: str, timeline: Timeline, pages: PageReader, turns: asyncio.Semaphore) -> None:
        """One answer of one server, or why there is none, once."""
        try:
            async with turns:
                asked_at = time.monotonic()
                page = await pages.read(f"{url}{_PATH}", PAGE_S, MAX_PAGE_BYTES, headers=self._headers)
                answered_at = time.monotonic()
            if page.status != HTTPStatus.OK:
                raise ConnectionError(_refusal(page.status, page.body))
            timeline.add(url, msgspec.json.decode(page.body, type=PromptsPage), asked_at, answered_at)
            self.answered.add(url)
            self._silent.discard(url)
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            if url not in self._named:
                self._named.add(url)
                self._say(printable(f"{url}: {str(error) or f'no answer in {PAGE_S:g} s'}"[:SHOWN_CHARS]))
            self._silent.add(url)


def _refusal(status: int, body: bytes) -> str:
    cure = {HTTPStatus.UNAUTHORIZED: "give its key: --api-key, or $VLLM_API_KEY",
            HTTPStatus.FORBIDDEN: "give its key: --api-key, or $VLLM_API_KEY; from another machine it answers nobody "
                                  "without one",
            HTTPStatus.NOT_FOUND: "it has no /pd/prompts: an engine without disaggregation, or an older release"}
    return f"GET {_PATH} answers {status}: {cure.get(status) or body[:SHOWN_CHARS].decode(errors='replace')}"
