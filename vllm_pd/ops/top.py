# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd top`: the engines of a fleet in one table. What is pure of it: from readings of their figures to rows, and
the table. `vllm_pd.ops.top_readings` reads them.
"""
from __future__ import annotations

from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from vllm_pd.ops.printing import printable, three_digits
from vllm_pd.ops.scrape import MetricsSnapshot
from vllm_pd.protocol.messages import Member

MAX_CELL_CHARS = 120
MAX_FIGURES = 20_000  # some dozens for each data-parallel rank
MAX_LINE_CHARS = 4096
OK = "ok"
NONE = "-"  # in a cell: not known, or nothing happened
_MS = 1e3
_STAGES = ("queue", "prefill", "transfer", "first_step")
# What is read of a page of metrics; everything else is left out before it is parsed.
WANTED = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
          "vllm:gpu_cache_usage_perc", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
          "vllm:pd_parked_blocks", "vllm:pd_quarantined_blocks", "vllm:pd_sending_blocks", "vllm:pd_held_blocks",
          "vllm:pd_decisions_total", "vllm:pd_attempts_total", "vllm:pd_jobs_total", "vllm:pd_transfer_bytes_total",
          "vllm:pd_handover_seconds_sum", "vllm:pd_handover_seconds_count", "vllm:pd_degraded", "vllm:pd_control_dead")
TITLES = ("engine", "role", "at", "run", "wait", "KV", "parked", "fenced", "sending", "held", "remote/s", "local/s",
          "jobs/s", "MB/s", "failed", "queue", "prefill", "transfer", "first", "hits", "state")
_WORDS = ("engine", "role", "at", "state")  # columns of text, to the left


@dataclass(frozen=True)
class MemberReading:
    """One engine at one moment, `at_s` by the reader's clock. `figures`: what its page of metrics has, None where it
    could not be read, which `fault` explains. `degraded`: why it has nobody to work with, in its own words, where it
    was asked."""
    member: Member
    at_s: float
    figures: MetricsSnapshot | None = None
    fault: str = ""
    degraded: str = ""


@dataclass(frozen=True)
class FleetReading:
    """All engines that the broker knows, in its order, and its queue. `fault`: why it does not answer; the engines are
    then those that it named last."""
    engines: tuple[MemberReading, ...] = ()
    queue_length: int = 0
    fault: str = ""


def make_rows(before: FleetReading | None, after: FleetReading) -> list[dict[str, str]]:
    """The cells of each engine by `TITLES`: first those that are not well, then decode engines. Rates, times of stages,
    hits and failed attempts are of what was counted between the two readings. Without an earlier one of an engine,
    times, hits and failures are of all since its start, and there are no rates."""
    earlier = {} if before is None else {one.member.incarnation: one for one in before.engines}
    ordered = sorted(after.engines, key=lambda one: (_state(one) == OK, not one.member.role.decodes,
                                                     one.member.incarnation))
    return [_make_row(earlier.get(one.member.incarnation), one) for one in ordered]


def _make_row(before: MemberReading | None, now: MemberReading) -> dict[str, str]:
    member, load = now.member, now.member.load
    row = dict.fromkeys(TITLES, NONE)
    row |= {"engine": member.incarnation[:12], "role": member.role.value, "at": member.http or member.address,
            "run": str(load.running), "wait": str(load.waiting), "state": _state(now)}
    if now.figures is not None:
        row |= _gauges(now.figures) | _rates(before, now)
    return {title: _cell(text) for title, text in row.items()}


def _gauges(figures: MetricsSnapshot) -> dict[str, str]:
    """What holds at this moment. Of several ranks of one server: the sum, and of the shares the largest."""
    used = [value for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
            for value in figures.by(name, "engine").values()]
    return {"run": f"{figures.value('vllm:num_requests_running'):.0f}",
            "wait": f"{figures.value('vllm:num_requests_waiting'):.0f}",
            "KV": f"{max(used):.0%}" if used else NONE,
            "parked": f"{figures.value('vllm:pd_parked_blocks'):.0f}",
            "fenced": f"{figures.value('vllm:pd_quarantined_blocks'):.0f}",
            "sending": f"{figures.value('vllm:pd_sending_blocks'):.0f}",
            "held": f"{figures.value('vllm:pd_held_blocks'):.0f}"}


def _rates(before: MemberReading | None, now: MemberReading) -> dict[str, str]:
    """What was counted between the two readings, or since the start."""
    added, passed_s = now.figures, 0.0
    if before is not None and before.figures is not None and now.at_s > before.at_s:
        added, passed_s = now.figures.since(before.figures), now.at_s - before.at_s

    def rate(name: str, unit: float = 1.0, **labels: str) -> str:
        count = added.value(name, **labels)  # below 0: the page's counters began anew
        return three_digits(count / unit / passed_s) if passed_s and count >= 0 else NONE

    failed = sum(max(0.0, added.value("vllm:pd_attempts_total", outcome=one)) for one in ("failed", "expired"))
    return {"remote/s": rate("vllm:pd_decisions_total", decision="remote"),
            "local/s": rate("vllm:pd_decisions_total", decision="local"), "jobs/s": rate("vllm:pd_jobs_total"),
            "MB/s": rate("vllm:pd_transfer_bytes_total", 1e6), "failed": f"{failed:.0f}",
            **{stage.removesuffix("_step"): _mean(added, stage) for stage in _STAGES},
            "hits": _share(added.value("vllm:prefix_cache_hits_total"), added.value("vllm:prefix_cache_queries_total"))}


def _mean(added: MetricsSnapshot, stage: str) -> str:
    count = added.value("vllm:pd_handover_seconds_count", stage=stage)
    seconds = added.value("vllm:pd_handover_seconds_sum", stage=stage)
    return NONE if count <= 0 or seconds < 0 else _seconds(seconds / count)


def _seconds(seconds: float) -> str:
    return f"{three_digits(seconds * _MS)} ms" if seconds < 1 else f"{three_digits(seconds)} s"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 and 0 <= part <= whole else NONE


def _state(now: MemberReading) -> str:
    """The worst that is known of an engine, in words; OK where it is well. The engine's own reason for being degraded
    goes before that of its metrics."""
    if now.fault:
        return now.fault
    figures = now.figures
    if figures is not None and figures.value("vllm:pd_control_dead"):
        return "control thread has ended: restart it"
    if now.degraded:
        return f"degraded, {now.degraded}"
    if reason := degraded_reason(figures):
        return f"degraded: {reason}"
    unreached = len(now.member.unreached)
    return (f"can't reach {unreached} decode engine{'s' * (unreached > 1)}" if unreached else
            "draining" if now.member.draining else OK)


def degraded_reason(figures: MetricsSnapshot | None) -> str:
    """The reason for which the page says that its engine is degraded; empty where it is not."""
    found = {} if figures is None else figures.by("vllm:pd_degraded", "reason")
    return next((reason for (reason, ), value in found.items() if value), "")


def _cell(text: str) -> str:
    """What engines say in their names, addresses and reasons may not move the cursor, nor fill the screen."""
    text = printable(text)
    return text if len(text) <= MAX_CELL_CHARS else text[:MAX_CELL_CHARS - 3] + "..."


class FleetTable:
    """The table of one fleet. Columns in which no engine has anything but 0 are left out; one that was there stays."""

    def __init__(self, broker: str) -> None:
        self._broker = _cell(broker)
        self._shown = {*_WORDS, "run", "wait"}

    def render(self, before: FleetReading | None, after: FleetReading) -> Group:
        """All rows, below a line about the broker."""
        rows = make_rows(before, after)
        self._shown.update(title for title in TITLES if any(row[title] not in (NONE, "0", "0%") for row in rows))
        of = "since each engine's start" if before is None else "since the last reading"
        jobs = f"{after.queue_length} jobs wait" if not after.fault else _cell(after.fault)
        engines = f"{len(rows)} engine{'s' * (len(rows) != 1)}"
        table = Table(box=box.SIMPLE, pad_edge=False)
        shown = [title for title in TITLES if title in self._shown]
        for name in shown:
            table.add_column(Text(name), justify="left" if name in _WORDS else "right", no_wrap=name != "state")
        for row in rows:
            table.add_row(*(Text(row[name]) for name in shown))
        return Group(Text(f"{self._broker}: {engines}, {jobs}; counts and times {of}"), table)


def wanted_lines(page: str, names: tuple[str, ...] = WANTED) -> str:
    """The lines of a page of metrics that begin with one of `names`. Raises ValueError where they are more than any
    engine has, which would take long to parse."""
    lines = [line for line in page.split("\n") if line.startswith(names)]
    if len(lines) > MAX_FIGURES or any(len(line) > MAX_LINE_CHARS for line in lines):
        raise ValueError(f"/metrics has more than {MAX_FIGURES:,} figures of ours, or longer ones than "
                         f"{MAX_LINE_CHARS:,} characters")
    return "\n".join(lines) + "\n"
