# SPDX-License-Identifier: Apache-2.0
"""Figures of the tables of gain and cost, and of the README's choice of them, are those of the JSON files that their
measurement wrote. Each row of the two tables in docs/benchmarks.md is named here, with its files.
"""
import json
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
FIGURE = re.compile(r"\d[\d,]*\.\d+|\d[\d,]*\d|\d+(?= wrong| unfinished| leaked| hang)")


def read(name: str) -> Any:
    """A result file."""
    return json.loads((RESULTS / name).read_text())


def served(name: str, arm: str, figure: str) -> float:
    """The median of a figure of an arm of `vllm-pd bench serve`."""
    [table] = read(name)["table"].values()
    return table[arm]["figures"][figure]["median"]


def short(name: str, figure: str, first: str = "") -> Iterator[str]:
    """This figure of the short prompts with each arm that the table compares, in ms."""
    found = {arm: f"{served(name, arm, f'short.{figure}'):,.0f}"
             for arm in ("pd", "mixed-rr", "chunked-256", "chunked-64", "alone")}
    yield f"| {found['pd']} ms | two mixed engines {first}{found['mixed-rr']} ms; "
    yield f" {found['chunked-256']} / {found['chunked-64']} ms; without long prompts {found['alone']} ms |"


def ttft(name: str, group: str) -> Iterator[str]:
    """TTFT: of short prompts in ms, where the p99 of so few is the longest; of long ones in s."""
    for arm, said in (("pd", "| "), ("mixed-rr", "two mixed engines "), ("chunked-64", "chunked 64: ")):
        if group == "short":
            p50, longest = (served(name, arm, f"short.ttft_ms.{which}") for which in ("p50", "p99"))
            yield f"{said}{p50:,.0f} and {longest:,.0f} ms"
        else:
            yield f"{said}{served(name, arm, 'long.ttft_ms.p50') / 1000:.2f} s"


def chaos() -> Iterator[str]:
    """What both runs have in common, and how soon a killed prefill engine's jobs fall back."""
    for name, of_which in (("chaos", "fallback {} s"), ("chaos_v1", "(V1: {} s)")):
        found = read(f"{name}/chaos.json")
        yield f"{found['kills']} kills and {found['stops']} stops of engines and broker in {found['requests']:,} req"
        yield (f"{found['wrong_answers']} wrong answers, {found['unfinished']} unfinished, "
               f"{found['leaked_blocks']} leaked blocks")
        yield of_which.format(f"{found['from_kill_of_p_to_fallback_s']['p50']:.2f}")


def stopped_decode_engine() -> Iterator[str]:
    """The decode engine is stopped for longer than a lease."""
    faults = {name: by_fault["d-stopped"] for name, by_fault in read("connectors_v1.json")["faults"].items()}
    ours, pull, push = (faults[name] for name in ("PDConnector", "NixlConnector", "NixlPushConnector"))
    yield f"{ours['wrong']} wrong, {ours['hang']} hang"
    yield f"`NixlConnector` {pull['wrong']} wrong answers"
    yield f"`NixlPushConnector` {push['hang']} hang, {push['leaked_blocks']} blocks leaked"
    yield f"{sum(ours[end] for end in ('right', 'error', 'hang', 'wrong', 'aborted'))} requests"


def hits() -> Iterator[str]:
    """Prefix hits behind the router, by the size of the caches."""
    summary = read("router_hits.json")["summary"]
    yield " / ".join(f"{100 * one['pool_share']:.0f}" for one in summary) + " % of a trace"
    for policy in ("kv", "round-robin"):
        yield " / ".join(f"{100 * one['policies'][policy]['hit_share']:.1f}" for one in summary) + " %"


def dummies() -> Iterator[str]:
    """Dummy forward passes of two ranks of a Mixtral."""
    means = {entry["tree"]: entry["drain_dummies"]["mean"] for entry in read("dp_bench.json")["entries"]
             if entry["model"] == "tiny-mixtral" and entry["size"] == 2}
    yield f"| {means['step sync']:.1f} | upstream {means['waves']:.1f} |"


def demo() -> Iterator[str]:
    """Two questions of the demo: with disaggregation, and without."""
    asked = {one["name"]: one for one in read("demo_v0.json")["questions"]}
    both = asked["a page"], asked["a chapter"]
    yield " / ".join(f"{one['prompt_tokens']:,}" for one in both) + " tokens"
    for place in ("ttft_s", "ttft_off_s"):
        yield " / ".join(f"{one[place]:.2f}" for one in both) + " s"


def pauses() -> Iterator[str]:
    """The longest pause of a running answer."""
    for arm, text in (("pd", "| {:.2f} s |"), ("off", "without disaggregation {:.2f} s")):
        yield text.format(read("demo_v0.json")["pause"][arm]["longest_s"])


def routers() -> Iterator[str]:
    """What each policy adds to a request in one piece, at the median."""
    added = [next(entry["total_added_ms"]["p50"] for entry in read(name)["entries"]
                  if entry["router"] == router and (entry["phase"], entry["kind"]) == ("alone", "plain"))
             for name, router in (("router_latency.json", "vllm-pd round-robin"),
                                  ("router_latency_kv.json", "vllm-pd kv"))]
    yield " / ".join(f"{one:.2f}" for one in added) + " ms"


def control_plane(found: dict) -> Iterator[str]:
    """The time parked beyond prefill and transfer."""
    times = found["control_plane_ms"]
    few = found["measured"] < 100
    yield f"{times['p50']:.1f} ms ({'at most' if few else 'p99'} {times['max' if few else 'p99']:.1f} ms)"


def transfers() -> Iterator[str]:
    """Our transport beside raw NIXL: median and range of all shapes."""
    ratios = [row["ours_over_raw"] for row in read("transfer.json")["rows"]]
    yield f"{statistics.median(ratios):.2f} times ({min(ratios):.2f} to {max(ratios):.2f})"


def step(verdict: dict) -> Iterator[str]:
    """CPU time of a step beside one without what is ours: ratio, and its 95 % interval."""
    yield f"{verdict['cpu_ratio']:.3f} times [{verdict['low']:.3f}, {verdict['high']:.3f}]"


FILED: dict[str, Callable[[], Iterator[str]]] = {
    "longest pause of an answer while long prompts arrive": lambda: short(
        "serve_v1.json", "pause_ms.p90", "on the same cores "),
    "ITL p99 in the same runs, V1": lambda: short("serve_v1.json", "itl_ms.p99"),
    "longest pause on V0": lambda: short("serve_pause_v0.json", "pause_ms.p90"),
    "ITL p99 in the same runs, V0": lambda: short("serve_pause_v0.json", "itl_ms.p99"),
    "longest pause of a running answer": pauses,
    "73 kills": chaos,
    "V1: the decode engine is stopped": stopped_decode_engine,
    "prompt tokens that are prefix hits": hits,
    "dummy forward passes": dummies,
    "TTFT of short prompts in the first runs above": lambda: ttft("serve_v1.json", "short"),
    "TTFT of prompts of about 1,300 tokens, p50, V1": lambda: ttft("serve_v1.json", "long"),
    "TTFT of short prompts, V0's runs above": lambda: ttft("serve_pause_v0.json", "short"),
    "TTFT of prompts of about 1,300 tokens, p50, V0": lambda: ttft("serve_pause_v0.json", "long"),
    "TTFT of a remote prompt": demo,
    "router, added": routers,
    "control plane:": lambda: control_plane(read("v1_figures.json")["handover, workers that spin less"]),
    "the same on V0, control plane": lambda: control_plane(read("handover_v0.json")),
    "transfer, beside": transfers,
    "a step of V1": lambda: step(read("v1_figures.json")["engine"]["verdicts"]["on, in one process"]),
    "a step of V0": lambda: step(next(one for one in read("step_v0.json") if one["kind"] == "engine")),
}


def rows(page: str = "docs/benchmarks.md", heading: str = "## At a glance") -> list[str]:
    """All rows of the tables of gain and cost but their heads."""
    section = (ROOT / page).read_text().partition(heading)[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [line for line in lines if not line.startswith(("| gain |", "| cost |"))]


def figures(row: str) -> set[str]:
    """The figures of a row, without those of its last column."""
    return set(FIGURE.findall("|".join(row.split("|")[:-2])))


def test_the_readme_chooses_rows_and_changes_no_figure():
    chosen = rows("README.md", "## What it gains")
    assert len(chosen) == 6
    for row in chosen:
        assert figures(row) and any(figures(row) <= figures(other) for other in rows()), row


def test_every_row_is_named_once():
    for row in rows():
        assert sum(row.startswith(f"| {beginning}") for beginning in FILED) == 1, row
    assert len(rows()) == len(FILED)


@pytest.mark.parametrize("beginning", FILED)
def test_its_figures_are_those_of_the_file(beginning):
    [row] = [row for row in rows() if row.startswith(f"| {beginning}")]
    for figure in FILED[beginning]():
        assert figure in row


def point(name: str, arm: str, turn: int, number: int = 0) -> dict[str, Any]:
    """One point of one round of an arm, as it was measured."""
    return read(name)["arms"][arm]["rounds"][turn]["points"][number]


@pytest.mark.parametrize("other", ["single", "mixed-rr"])
def test_the_ratios_beside_the_published_ones_are_those_of_the_burst(other):
    def ratios(figure: Callable[[dict[str, Any]], float], digits: int) -> str:
        """Of both rounds."""
        ours, theirs = ([figure(point("burst_v1.json", arm, turn)) for turn in (0, 1)] for arm in ("pd", other))
        return ", ".join(f"{one / another:.{digits}f}" for one, another in zip(ours, theirs, strict=True))

    row = " | ".join([f"| here: `pd` over `{other}`, each round", ratios(lambda one: one["answer_tokens_per_s"], 2),
                      ratios(lambda one: one["ttft_ms"]["mean"], 1), ratios(lambda one: one["tpot_ms"]["mean"], 2),
                      ratios(lambda one: one["itl_ms"]["p99"], 2)])
    assert f"{row} |" in (ROOT / "docs" / "benchmarks.md").read_text()


def test_more_load_weighs_as_the_page_says():
    low, high = (point("rate_v1.json", "mixed-rr", 0, number) for number in (0, 3))
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text().split())
    p50, mean, itl = ([figure(one) for one in (low, high)] for figure in (
        lambda one: one["short"]["ttft_ms"]["p50"], lambda one: one["ttft_ms"]["mean"] / 1000,
        lambda one: one["itl_ms"]["mean"]))
    assert f"TTFT of short prompts, p50, {p50[0]:.0f} to {p50[1]:.0f} ms (1.8 times)" in text
    assert (f"2.9 times the TTFT ({mean[0]:.2f} to {mean[1]:.2f} s, all prompts) and 2.8 times the ITL "
            f"({itl[0]:.0f} to {itl[1]:.0f} ms)") in text
