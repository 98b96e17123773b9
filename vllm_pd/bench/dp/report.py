# SPDX-License-Identifier: Apache-2.0
"""The report of `vllm-pd bench dp` for people: a table, and a picture of how a group comes to rest."""

from pathlib import Path
from typing import Any

from rich.table import Table

from vllm_pd.bench.dp.probe import FORWARD
from vllm_pd.bench.report import MS, side_by_side

COLOURS = {True: "tab:blue", False: "tab:orange"}


def table(report: dict[str, Any]) -> Table:
    """One line for each figure, one column for each group."""
    entries = report["entries"]
    lines = [
        ("dummy passes per drain, mean (max)", lambda e: "{mean:.1f} ({max:.0f})".format(**e["drain_dummies"])),
        ("... of requests that end by length", lambda e: f"{e['drain_dummies_by_length']['mean']:.1f}"),
        ("... of requests that end early", lambda e: f"{e['drain_dummies_early']['mean']:.1f}"),
        ("messages per burst", lambda e: f"{e['messages_per_burst']:.1f}"),
        ("request at rank 0 to peer's pass, ms", lambda e: _spread(e["wake_up_ms"])),
        ("TTFT after idle, ms", lambda e: _spread(e["ttft_idle_ms"])),
        ("forward passes per load, all ranks", lambda e: f"{e['passes_per_load']:.0f}"),
        ("... of them dummies", lambda e: f"{e['dummies_per_load']:.0f}"),
        ("... collectives beside the passes' own, a rank", lambda e: f"{e['collectives_per_load']:.1f}"),
        ("... messages, all ranks", lambda e: f"{e['messages_per_load']:.0f}"),
        ("tokens/s under load, median of the rounds", lambda e: f"{e['tokens_per_s']:.0f}"),
        ("... least and most", lambda e: f"{min(e['tokens_per_s_rounds']):.0f} .. {max(e['tokens_per_s_rounds']):.0f}"),
        ("... to the first tree's, median of the pairs", lambda e: f"{e['tokens_per_s_ratio']:.2f}"),
        ("ITL while no other rank works, ms", lambda e: _spread(e["itl_alone_ms"])),
        ("ITL beside a rank that prefills, ms", lambda e: _spread(e["itl_beside_ms"])),
        ("TTFT of a short prompt beside it, ms", lambda e: _spread(e["ttft_beside_ms"])),
        ("TTFT of the long prompts, ms", lambda e: _spread(e["ttft_long_ms"])),
        ("CPU of an idle engine, % of a core", lambda e: f"{e['idle_cpu_percent']:.1f}"),
        ("CPU of its idle front end and coordinator", lambda e: f"{e['idle_front_cpu_percent']:.1f}"),
    ]
    return side_by_side([f"{entry['model']} x {entry['size']}\n{entry['tree']}" for entry in entries], entries, lines)


def picture(report: dict[str, Any], path: Path) -> None:
    """Each rank's forward passes over time, around the end of one request: real ones and dummies."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    entries = report["entries"]
    figure = Figure(figsize=(10, 1.0 + 1.3 * len(entries)), layout="tight")
    axes = figure.subplots(len(entries), 1, squeeze=False, sharex=True)
    for axis, entry in zip(axes[:, 0], entries, strict=True):
        for rank, steps in enumerate(entry["steps"]):
            for real in (True, False):
                bars = [(MS * began, max(MS * (ended - began), 0.3)) for began, ended, kind in steps
                        if (kind == FORWARD) is real]
                axis.broken_barh(bars, (rank - 0.35, 0.7), facecolors=COLOURS[real], edgecolor="white", linewidth=0.4)
        axis.set_yticks(range(entry["size"]), [f"rank {rank}" for rank in range(entry["size"])], fontsize=7)
        axis.set_title(f"{entry['model']}, {entry['size']} ranks, {entry['tree']}", fontsize=8, loc="left")
    handles = [Patch(color=COLOURS[real]) for real in (True, False)]
    figure.legend(handles, ["forward pass", "dummy pass"], loc="upper right", fontsize=8)
    axes[-1, 0].set_xlabel("ms after a request that ends early was sent to rank 0 of an idle group")
    figure.savefig(path, dpi=110)


def _spread(spread: dict[str, float] | None) -> str:
    """Median and largest, and the 99th percentile where there is one."""
    if spread is None:
        return "-"
    keys = [key for key in ("p50", "p99", "max") if key in spread]
    return " ".join(f"{key} {spread[key]:.1f}" for key in keys)

