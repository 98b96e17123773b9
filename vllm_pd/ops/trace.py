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
    """Read the fleet for `options.seconds`, or until Ctrl-C, and write the timeline. Raises ConfigError for what can't
    be used, and ControlError where there is no engine to read, or none has answered."""
    options = options.checked()
    headers = {"content-type": "application/json", **authorization(api_key("--api-key", options.api_key))}
    output = options.output
    unfinished = output.with_name(f"{output.name}.{os.getpid()}")
    try:
        unfinished.touch()  # so that it is not found out after the wait
        urls = _urls(broker, access, options)
        say(f"reading {len(urls)} engine{'s' * (len(urls) != 1)} for {options.seconds:g} s")
        recorder = Recorder(urls, headers, say)
        timeline = asyncio.run(recorder.record(options.seconds))
        if not recorder.answered:
            raise ControlError(f"none of {len(urls)} engines has answered GET {_PATH}: see above")
        unfinished.write_text(json.dumps(timeline.as_json()))
        os.replace(unfinished, output)
    except OSError as error:
        raise ConfigError("--output", str(output), f"{error.strerror}: write a file in a folder that is there"
                          ) from None
    finally:
        unfinished.unlink(missing_ok=True)
    left_out = f", {timeline.left_out} left out" if timeline.left_out else ""
    say(f"{timeline.prompts} prompts of {len(recorder.answered)} engines{left_out}: {output}. Open it at "
        "ui.perfetto.dev, or in chrome://tracing")


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
        self._silent: set[str] = set()

    async def record(self, seconds: float) -> Timeline:
        """What they say of the prompts of so many seconds, from now on."""
        timeline, pages, turns = Timeline(time.time()), PageReader(PAGE_S), asyncio.Semaphore(FETCHES)
        until = time.monotonic() + seconds
        while True:
            begun = time.monotonic()
            await asyncio.gather(*(self._read(url, timeline, pages, turns) for url in self._urls))
            if begun >= until:
                return timeline
            try:
                await asyncio.sleep(max(0.0, min(begun + ROUND_S, until) - time.monotonic()))
            except asyncio.CancelledError:  # Ctrl-C: what there is is worth a file
                return timeline

    async def _read(self, url: str, timeline: Timeline, pages: PageReader, turns: asyncio.Semaphore) -> None:
        """One answer of one server, or why there is none, once."""
        try:
            async with turns:
                asked_at = time.time()
                page = await pages.read(f"{url}{_PATH}", PAGE_S, MAX_PAGE_BYTES, headers=self._headers)
                answered_at = time.time()
            if page.status != HTTPStatus.OK:
                raise ConnectionError(_refusal(page.status, page.body))
            timeline.add(url, msgspec.json.decode(page.body, type=PromptsPage), asked_at, answered_at)
            self.answered.add(url)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            if url not in self._silent:
                self._silent.add(url)
                self._say(printable(f"{url}: {error or 'no answer'}"[:SHOWN_CHARS]))


def _refusal(status: int, body: bytes) -> str:
    cure = {HTTPStatus.UNAUTHORIZED: "give its key: --api-key, or $VLLM_API_KEY",
            HTTPStatus.FORBIDDEN: "give its key: --api-key, or $VLLM_API_KEY; from another machine it answers nobody "
                                  "without one",
            HTTPStatus.NOT_FOUND: "it has no /pd/prompts: an engine without disaggregation, or an older release"}
    return f"GET {_PATH} answers {status}: {cure.get(status) or body[:SHOWN_CHARS].decode(errors='replace')}"
