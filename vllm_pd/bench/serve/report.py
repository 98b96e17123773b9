# SPDX-License-Identifier: Apache-2.0
"""The report of `vllm-pd bench serve` in words: a block for each arm, tables, and a summary."""

from typing import Any

from rich.table import Table

from vllm_pd.bench.report import LEAST_P99, side_by_side
from vllm_pd.bench.serve import comparison
from vllm_pd.bench.serve.comparison import (
    FIGURES,
    ITL_P99,
    PAUSE_P90,
    RATIOS,
    TOKENS_PER_EVENT,
    TTFT_LONG,
    TTFT_SHORT,
    base_of,
    over_rounds,
    ratio,
)
from vllm_pd.bench.serve.settings import ServeLoad

WIDTH = 50  # of a block, as vLLM has it
COUNTS = (("Successful requests:", "requests", 0), ("Benchmark duration (s):", "took_s", 2),
          ("Total input tokens:", "prompt_tokens", 0), ("Total generated tokens:", "answer_tokens", 0),
          ("Request throughput (req/s):", "requests_per_s", 2), ("Request goodput (req/s):", "good_per_s", 2),
          ("Output token throughput (tok/s):", "answer_tokens_per_s", 2),
          ("Total Token throughput (tok/s):", "tokens_per_s", 2))
LATENCIES = (("Time to First Token", "TTFT", "ttft_ms"), ("Time per Output Token (excl. 1st token)", "TPOT", "tpot_ms"),
             ("Inter-token Latency", "ITL", "itl_ms"))
PERCENTILES = (("Mean", "mean"), ("Median", "p50"), ("P99", "p99"))
SHOWN_PROBLEMS = 20


def block(report: dict[str, Any], arm: str, label: str) -> str:
    """What `vllm bench serve` prints, for one arm and point: medians over the rounds, and their spread."""
    lines = [f"{arm} ({report['arms'][arm]['where']}), {label}", f"{' Serving Benchmark Result ':=^{WIDTH}}"]
    lines += [_line(text, over_rounds(report, arm, label, path), digits) for text, path, digits in COUNTS]
    for title, name, path in LATENCIES:
        lines.append(f"{title:-^{WIDTH}}")
        lines += [_line(f"{text} {name} (ms):", over_rounds(report, arm, label, f"{path}.{figure}"), 2)
                  for text, figure in PERCENTILES]
    return "\n".join([*lines, "=" * WIDTH])


def _line(text: str, found: dict[str, float], digits: int) -> str:
    return f"{text:<40} {cell(found, digits, ' ')}".rstrip()


def cell(found: dict[str, float], digits: int, space: str = "\n") -> str:
    """A median, and the smallest and largest where they differ."""
    if not found:
        return "-"
    shown, least, most = (f"{found[key]:,.{digits}f}" for key in ("median", "min", "max"))
    return shown if least == most else f"{shown}{space}({least} to {most})"


def table(report: dict[str, Any], label: str) -> Table:
    """Figures and ratios of all arms at one point. How many tokens an event has is shown where it is not one."""
    def figure(path: str, digits: int) -> Any:
        return lambda arm: cell(over_rounds(report, arm, label, path), digits)

    def divided(base: str, path: str) -> Any:
        return lambda arm: "1" if arm == base_of(report, base) else cell(ratio(report, arm, base, label, path), 2)

    merged = any(round(found["median"], 2) != 1 for arm in report["arms"]
                 if (found := over_rounds(report, arm, label, TOKENS_PER_EVENT)))
    lines = [(_named(report, label, path, text), figure(path, digits)) for path, (text, digits) in FIGURES.items()
             if path != TOKENS_PER_EVENT or merged]
    lines += [(text.replace("mixed", base_of(report, base) or base), divided(base, path))
              for text, path, base in RATIOS if base_of(report, base)]
    lines = [line for line in lines if any(line[1](arm) not in ("-", "1") for arm in report["arms"])]
    return side_by_side(list(report["arms"]), list(report["arms"]), lines, label)


def _named(report: dict[str, Any], label: str, path: str, text: str) -> str:
    """The text of a figure: "max" for the "p99" of a figure with one value for each answer, where no round has enough
    of them to tell the two apart."""
    answers, one_each, _ = path.partition(".ttft_ms.")
    counts = [over_rounds(report, arm, label, f"{answers}.answers").get("max", 0) for arm in report["arms"]]
    return text.replace("p99", "max") if one_each and 0 < max(counts) < LEAST_P99 else text


def summary(report: dict[str, Any]) -> list[str]:
    """The last lines: what it gains, what it costs, whether the answers are the same, and what failed."""
    arms, lines = report["arms"], []
    for label in comparison.labels(report):
        for arm in arms:
            lines.append(f"{label}, {arm}: {_words(report, arm, label)}")
    rates = report["settings"]["load"]["load"] in (ServeLoad.RATE, ServeLoad.TRACE)
    for arm in arms:
        best = comparison.goodput(report, arm)
        if best is not None:
            lines.append(f"goodput, {arm}: {best:g} {'requests/s' if rates else 'streams'} is the most at which "
                         f"{comparison.GOOD_SHARE:.0%} of the requests were within the limits")
    different = report["different"]
    lines += different[:SHOWN_PROBLEMS] + ["..."] * (len(different) > SHOWN_PROBLEMS)
    lines += [f"{arm} was not measured to its end: {error}" for arm, error in report["failed"].items()]
    unit = "tokens" if report["settings"]["compare"] == "tokens" else "texts"
    verdict = (f"NO, {len(different)} answers differ or failed" if different else
               f"yes, {report['compared']} answers compared" if report["compared"] else "nothing to compare")
    return [*lines, f"the same {unit} from every arm: {verdict}"]


def _words(report: dict[str, Any], arm: str, label: str) -> str:
    """One arm at one point: ITL p99, pauses, TTFTs, cores, each beside the bases; and what was handed over."""
    parts = []
    for text, path in (("ITL p99", ITL_P99), ("longest pause of an answer p90", PAUSE_P90), ("TTFT short", TTFT_SHORT),
                       ("TTFT long", TTFT_LONG)):
        found = over_rounds(report, arm, label, path)
        if not found:
            continue
        bases = ("alone", "mixed") if path in (ITL_P99, PAUSE_P90) else ("mixed", )
        beside = [f"{times['median']:.2f} x {base_of(report, base)}" for base in bases
                  if (times := ratio(report, arm, base, label, path))]
        parts.append(f"{text} {found['median']:,.0f} ms" + (f" ({', '.join(beside)})" if beside else ""))
    busy = over_rounds(report, arm, label, "cpu_share")
    parts += [f"{busy['median']:.0%} of the cores in use"] if busy else []
    moved, steps, mean, most = (over_rounds(report, arm, label, f"handover.{name}") for name in (
        "megabytes", "decode_steps", "kept_blocks.mean", "kept_blocks.max"))
    if moved:
        parts.append(f"{moved['median']:,.0f} MB handed over, {steps['median']:,.0f} steps of decode engines, "
                     f"{mean['median']:,.1f} blocks kept at prefill engines ({most['median']:,.0f} at most)")
    return "; ".join(parts)
