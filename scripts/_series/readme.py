# SPDX-License-Identifier: Apache-2.0
"""The table of the series, for patches/README.md and for `series.py table`."""
from typing import List, Tuple

from .patch import Patch

GOAL_LINES = 450
GOAL_FILES = 14
_INTRODUCTION = """\
# Patches on upstream

Made by `scripts/series.py export`; do not edit. `series` gives the order, `SHA256SUMS` the touched files afterwards,
[docs/patching.md](../docs/patching.md) says how to change something.

A *fix* mends upstream, a *backport* is upstream's own later change, a *seam* is a generic opening that upstream could
merge, a *hook* is one call into `vllm_pd.v0.hooks`, a *queue* belongs to the scheduler's two queues for parked
requests.

The patches that `vllm_pd.v0.dp` needs are counted as those for data parallelism, and stand last. Some of the fixes
among them help V1 without data parallelism too, with tensor parallelism or a pipeline for example: their text says so.

"""


def totals(series: List[Patch], whole: str) -> str:
    """Size of the series in one paragraph; `whole` is the diff of the whole series at once."""
    one = Patch("", "", "", whole)
    text = (f"{len(series)} patches, +{len(one.added())} -{len(one.removed())} lines in {len(one.paths)} upstream "
            f"files, {len(whole):,} characters of diff.")
    for_dp = [patch for patch in series if is_for_dp(patch)]
    lines, files = _size([patch for patch in series if not is_for_dp(patch)])
    dp_lines, dp_files = _size(for_dp)
    return text + (f" Without data parallelism: {lines} changed lines in {files} files (goal: {GOAL_LINES} in "
                   f"{GOAL_FILES} at most). For data parallelism, the last {len(for_dp)} patches: {dp_lines} in "
                   f"{dp_files}.")


def is_for_dp(patch: Patch) -> bool:
    """Whether the step sync of data-parallel ranks needs this patch, and prefill/decode disaggregation does not."""
    return patch.subject.startswith("dp:") or "vllm_pd.v0.dp" in patch.trailers.get("Used-By", "")


def _size(series: List[Patch]) -> Tuple[int, int]:
    """Changed lines, and how many files they are in."""
    return (sum(len(patch.added()) + len(patch.removed()) for patch in series),
            len({path for patch in series for path in patch.paths}))


def table(series: List[Patch]) -> str:
    """A Markdown table, one row a patch."""
    rows = ["| patch | kind | +/- | files | why not outside | drop when |", "|---|---|---|---|---|---|"]
    for patch in series:
        said = patch.trailers
        files = " ".join(f"`{path}`" for path in patch.paths)
        rows.append(f"| [{patch.subject}]({patch.name}) | {said.get('Kind', '')} "
                    f"| +{len(patch.added())} -{len(patch.removed())} | {files} "
                    f"| {_cell(said.get('Why-Not-Plugin', ''))} | {_cell(said.get('Drop-When', ''))} |")
    return "\n".join(rows) + "\n"


def _cell(value: str) -> str:
    return value.replace("|", "\\|")


def render(series: List[Patch], whole: str) -> str:
    return f"{_INTRODUCTION}{totals(series, whole)}\n\n{table(series)}"
