# SPDX-License-Identifier: Apache-2.0
"""What disaggregated engines count while a load is sent: bytes of KV, steps, and blocks that wait for decode engines.

Their /metrics pages are read when the load begins, each second, and after its end, in a thread of this program: of each
page only the few lines that are needed are kept, and these are parsed at the end, because all that this program does
meanwhile could hold up what measures times.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

from vllm_pd.ops.client import fetch
from vllm_pd.ops.launch.plan import EnginePlan
from vllm_pd.ops.scrape import MetricsSnapshot, parse
from vllm_pd.protocol.messages import Role

PERIOD_S = 1.0
LATE_S = 0.5  # an engine counts some of it shortly after the client has its answer
PAGE_TIMEOUT_S = 5.0
BYTES = "vllm:pd_transfer_bytes_total"
STEPS = "vllm:iteration_tokens_total_count"  # V1: steps from which some client got something
KEPT = ("vllm:pd_held_blocks", "vllm:pd_sending_blocks")


@dataclass(frozen=True)
class EngineReading:
    """An engine's page at `at_s`, in seconds since the load began: the lines that are needed."""
    at_s: float
    role: Role
    lines: str

    def parsed(self) -> MetricsSnapshot:
        """The figures."""
        return parse(self.lines)


class EngineWatch:
    """Reads the pages inside the `with` block, and once after it. With no engines it does nothing."""

    def __init__(self, engines: Sequence[EnginePlan], period_s: float = PERIOD_S, late_s: float = LATE_S) -> None:
        self._engines = engines
        self._period_s, self._late_s = period_s, late_s
        self._over = threading.Event()
        self._began_s = time.monotonic()
        self._reading: Future[list[list[EngineReading]]] | None = None

    def __enter__(self) -> Self:
        if self._engines:
            self._began_s = time.monotonic()
            pool = ThreadPoolExecutor(1, "engine watch")
            self._reading = pool.submit(self._read)
            pool.shutdown(wait=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def figures(self) -> dict[str, Any]:
        """See `handover_figures`. To be called after the `with` block. Raises what the thread has raised."""
        return handover_figures(self._reading.result()) if self._reading is not None else {}

    def _read(self) -> list[list[EngineReading]]:
        found = [self._turn()]
        while not self._over.wait(self._period_s):
            found.append(self._turn())
        time.sleep(self._late_s)
        return [*found, self._turn()]

    def _turn(self) -> list[EngineReading]:
        """A reading of each engine; [] where one did not answer."""
        at_s = time.monotonic() - self._began_s
        try:
            pages = [fetch(engine.url, "/metrics", PAGE_TIMEOUT_S) for engine in self._engines]
        except OSError:
            return []
        if any(status != 200 for status, _ in pages):
            return []
        return [EngineReading(at_s, engine.role, needed(page))
                for engine, (_, page) in zip(self._engines, pages, strict=True)]


def needed(page: str) -> str:
    """The lines of a page that have our figures."""
    return "".join(line + "\n" for line in page.splitlines() if line.startswith((BYTES, STEPS, *KEPT)))


def handover_figures(turns: Sequence[Sequence[EngineReading]]) -> dict[str, Any]:
    """Of readings of the same engines, turn by turn; turns without any are left out. {} where there are not two.
    `bytes` and `decode_steps`: what the decode engines counted between the first and the last turn. `kept_blocks`: of
    the prefill engines, the KV blocks that are computed and wait for decode engines, over the turns; `kept_over_time`
    has (seconds, blocks) of each."""
    turns = [turn for turn in turns if turn]
    if len(turns) < 2:
        return {}
    added = [last.parsed().since(first.parsed()) for first, last in zip(turns[0], turns[-1], strict=True)
             if first.role.decodes]
    moved = sum(engine.value(BYTES) for engine in added)
    kept = [[round(turn[0].at_s, 2), sum(one.parsed().value(name) for one in turn if one.role.prefills
                                         for name in KEPT)] for turn in turns]
    blocks = [count for _, count in kept]
    return {"bytes": int(moved), "megabytes": moved / 1e6, "decode_steps": int(sum(one.value(STEPS) for one in added)),
            "kept_blocks": {"mean": sum(blocks) / len(blocks), "max": max(blocks)}, "kept_over_time": kept}
