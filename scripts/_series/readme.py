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
_WORDS_INTRODUCTION = """\
## Which word is which

For readers of Dynamo's patch of vLLM 0.8.

"""
_WORDS = (
    ("`_finished_prefills`, `_finished_transfers`: fields of the engine, filled from workers' counters",
     "the arguments `finished_prefills` and `finished_transfers` of `Scheduler.schedule`, beside `failed_prefills` and "
     "`read_prefixes`, from `LLMEngine.disagg`. They hold *attempts*, not request ids: a request may be tried again"),
    ("`remote_prefilling`, `prefill_sending`: queues",
     "the same names, by attempt; and `quarantined`: blocks that a peer may still write, without their group"),
    ("`remote_prefill_params`, `is_remote_prefill`: decided above the engine, before it has the request",
     "nothing: the scheduler asks `choose_remote_prefill` when it would admit the group, whose prefix hit it knows"),
    ("`remote_prefill_request_callback`: from the worker above; puts a request on the PrefillQueue",
     "nothing: `start_remote_prefill`; a thread of the engine has the connection to the broker"),
    ("`RemotePrefillRequest`: what goes on the queue",
     "`Job` of `vllm_pd.protocol.messages`, without block ids: only a `Grant`, the answer to a claim, names blocks"),
    ("`is_remote_decode`: a flag of the prefill engine's group", "`Sequence.remote_decode`: the attempt, or None"),
    ("`MemoryTransferRequest`, in `memory_transfer_requests` of `ExecuteModelRequest`",
     "the same field, with `Write`, `Read` and others of `vllm_pd.transfer.requests`. `WorkerBase.transfer` queues "
     "them for a thread, and the step does not wait for them"),
    ("`request_notif_counter`, `request_done_counter`: in the workers' results",
     "nothing in the results: an `ArrivalNotice` names attempt and rank, and each rank counts once; a `Finished` comes "
     "from the transfer thread"),
    ("`event_manager` of the block allocator: `enqueue_stored_event`, `enqueue_removed_event`",
     "`event_sink`: `registered`, `computed`, `removed`, `cleared`. A block is announced when it is full and its KV is "
     "there, in the messages of vLLM's V1"),
    ("the NIXL agent, made above the engine", "made with `disagg`, in `vllm_pd.v0.worker`: no part of a patch"),
)


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


def words() -> str:
    """What the names of Dynamo's patch are here, as a Markdown table."""
    rows = ["| in Dynamo's patch | here |", "|---|---|", *(f"| {theirs} | {ours} |" for theirs, ours in _WORDS)]
    return _WORDS_INTRODUCTION + "\n".join(rows) + "\n"


def _cell(value: str) -> str:
    return value.replace("|", "\\|")


def render(series: List[Patch], whole: str) -> str:
    return f"{_INTRODUCTION}{totals(series, whole)}\n\n{table(series)}\n{words()}"
