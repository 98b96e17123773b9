# SPDX-License-Identifier: Apache-2.0
"""The picture of a run over time: requests in flight; free, parked, sending and quarantined blocks; every blow."""
from pathlib import Path

from _chaos.blows import Blow
from _chaos.report import RunRecord

COLOURS = {Blow.KILL_P: "tab:red", Blow.KILL_D: "black", Blow.KILL_BROKER: "tab:purple", Blow.STOP_P: "tab:orange",
           Blow.STOP_D: "dimgray", Blow.STOP_BROKER: "violet"}
STEP_S = 0.5


def draw(record: RunRecord, path: Path, title: str) -> None:
    """Writes the PNG. Gauges are summed over all engines; a stopped one counts with its last."""
    from matplotlib.figure import Figure

    began, length = record.began_at, record.ended_at - record.began_at
    series = _series(record)
    times = [STEP_S * index for index in range(len(series["free"]))]
    figure = Figure(figsize=(14, 8), layout="tight")
    axes = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.3))
    axes[0].plot(times, series["in_flight"], color="tab:blue", lw=0.7)
    axes[0].set_ylabel("requests in flight")
    for name, colour in (("parked", "tab:blue"), ("quarantined", "tab:red"), ("sending", "tab:green")):
        axes[1].plot(times, series[name], color=colour, lw=0.8, label=name)
    axes[1].set_ylabel("KV blocks")
    free = axes[1].twinx()
    free.plot(times, series["free"], color="silver", lw=0.6, label="free (right)")
    free.set_ylabel("free KV blocks")
    handles = [*axes[1].get_lines(), *free.get_lines()]
    axes[1].legend(handles, [line.get_label() for line in handles], loc="upper right", ncols=4)
    kinds = list(Blow)
    for struck in record.struck:
        at = struck.at - began
        axes[2].plot([at, at + struck.pause_s], [kinds.index(struck.blow)] * 2, color=COLOURS[struck.blow],
                     marker="x" if struck.blow.is_kill else "|", lw=2, ms=5)
    axes[2].set_yticks(range(len(kinds)), [blow.value for blow in kinds])
    axes[2].set_ylim(-0.7, len(kinds) - 0.3)
    axes[2].set_xlabel("seconds")
    axes[2].set_xlim(0, length)
    axes[2].grid(axis="y", alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=80)


def _series(record: RunRecord) -> dict[str, list[int]]:
    """Each gauge every STEP_S, summed over the engines. A killed engine counts until its successor sends gauges."""
    names = ("free", "parked", "quarantined", "sending", "in_flight")
    samples = sorted(record.samples, key=lambda sample: sample.time)
    last: dict[str, dict] = {}
    series: dict[str, list[int]] = {name: [] for name in names}
    position = 0
    for step in range(1 + int((record.ended_at - record.began_at) / STEP_S)):
        until = record.began_at + STEP_S * step
        while position < len(samples) and samples[position].time <= until:
            last[samples[position].place] = samples[position].gauges
            position += 1
        for name in names:
            series[name].append(sum(gauges.get(name, 0) for gauges in last.values()))
    return series
