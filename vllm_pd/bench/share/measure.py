# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench share`: reads a trace once, then looks at what came again in it.

While reading, each prompt goes into the radix tree, and the names of its blocks into a list. Nothing else of a request
is kept. Then the list is replayed: against the bound, and against the caches of D, P and a fleet.
"""
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from vllm_pd.bench import report
from vllm_pd.bench.report import ShowLine
from vllm_pd.bench.share.caches import FleetHits, Routing, replay
from vllm_pd.bench.share.counting import Count, CountedRequest, counted, tokenizer_count, unit_count
from vllm_pd.bench.share.options import ShareBench
from vllm_pd.bench.share.records import TraceRecord, read_records, refused
from vllm_pd.bench.share.requests import NoRequestError, Skip, requests_of
from vllm_pd.bench.share.tree import PromptTree
from vllm_pd.bench.simulation.oracle import most_hits
from vllm_pd.bench.simulation.uses import BlockNames, BlockUses
from vllm_pd.errors import ConfigError
from vllm_pd.protocol.hashes import TOKEN_BYTES, chain

DEFAULT_SHARES = (0.1, 0.3, 1.0)  # of the distinct blocks
SHOW_EVERY_TOKENS = 1_000_000


class TraceReader:
    """Reads a trace once. Keeps the tree of its prompts and the names of its blocks, and counts."""

    def __init__(self, bench: ShareBench, show: ShowLine) -> None:
        self.tree = PromptTree()
        self.names = BlockNames()
        self.requests = 0
        self.answers = 0
        self.texts = 0  # requests that were not given as token ids
        self.prompt_tokens = 0
        self.read_tokens = 0  # of prompts and answers
        self.repeated_tokens = 0
        self.stopped_line: int | None = None  # where --max-tokens ended the reading
        self.skipped: Counter[Skip] = Counter()
        self._bench = bench
        self._show = show

    def read(self) -> None:
        """Reads it all, or as much as --max-tokens allows. Raises ConfigError for a file that is no trace."""
        bench = self._bench
        count = unit_count(bench.unit) if bench.tokenizer is None else tokenizer_count(bench.tokenizer)
        for line, request in self._requests(count):
            if self.read_tokens + len(request.computed) // TOKEN_BYTES > bench.max_tokens:
                self.stopped_line = line
                break
            self._add(request, line)
        if self.stopped_line is not None and not self.requests:
            raise ConfigError("--max-tokens", bench.max_tokens, "write more: the first prompt, in line "
                              f"{self.stopped_line}, has {len(request.computed) // TOKEN_BYTES} tokens with its answer")
        if not self.requests:
            raise ConfigError("FILE", str(bench.file), f"nothing counts ({_listed(self.skipped) or 'it is empty'})"
                                                       ": give a file with prompts")

    def _requests(self, count: Count) -> Iterator[tuple[int, CountedRequest]]:
        for record in read_records(self._bench.file):
            for request in self._counted(record, count):
                yield record.line, request

    def _counted(self, record: TraceRecord, count: Count) -> Iterator[CountedRequest]:
        """The requests of one record whose prompts have tokens. The others are counted in `skipped`; of what a
        tokenizer or a chat template refuses the first one is shown. Raises ConfigError for what is no request, and for
        token ids out of range."""
        try:
            requests = requests_of(record.value)
        except NoRequestError as error:
            raise refused(self._bench.file, record.line, error.value, str(error)) from None
        if isinstance(requests, Skip):
            self.skipped[requests] += 1
            return
        for request in requests:
            try:
                found = counted(request, count)
            except ConfigError as error:  # token ids out of range
                raise refused(self._bench.file, record.line, error.value, error.cure) from None
            except Exception as error:  # the library's, or that of a chat template
                if not self.skipped[Skip.REFUSED]:
                    self._show(f"line {record.line:,}: skipped, {type(error).__name__}: {error}")
                self.skipped[Skip.REFUSED] += 1
                continue
            if found is None or not found.prompt:
                self.skipped[Skip.NO_TEXT if found is None else Skip.EMPTY] += 1
                continue
            self.answers += request.answer is not None
            self.texts += not isinstance(request.prompt.prompt, list)
            yield found

    def _add(self, request: CountedRequest, line: int) -> None:
        tokens = len(request.prompt) // TOKEN_BYTES
        if (self.prompt_tokens + tokens) // SHOW_EVERY_TOKENS > self.prompt_tokens // SHOW_EVERY_TOKENS:
            self._show(f"line {line:,}: {self.requests:,} prompts, {self.prompt_tokens:,} tokens")
        self.requests += 1
        self.prompt_tokens += tokens
        self.read_tokens += len(request.computed) // TOKEN_BYTES
        self.repeated_tokens += self.tree.add(request.prompt, line)
        self.names.add(chain(request.computed, self._bench.block_size, 0), tokens // self._bench.block_size)


def measure(bench: ShareBench, show: ShowLine = print) -> dict[str, Any]:
    """Measures a trace, showing a line now and then. The report, ready for JSON; all shares are of the prompts'
    tokens."""
    bench = bench.checked()
    trace = TraceReader(bench, show)
    trace.read()
    tree = trace.tree.prune(bench.min_count, bench.min_tokens, bench.prefixes)
    uses = trace.names.uses()
    sizes = bench.cache_blocks or tuple(sorted({max(1, round(share * uses.distinct)) for share in DEFAULT_SHARES}))
    caches = []
    for size in sizes:
        show(f"replaying {trace.requests:,} prompts with caches of {size:,} blocks")
        caches.append(_cache_figures(bench, uses, size, trace.prompt_tokens))
    return {
        "file": bench.file.name, "tokenizer": bench.tokenizer,
        "unit": bench.unit if bench.unit is not None and trace.texts else "tokens",
        "requests": trace.requests, "answers": trace.answers, "prompt_tokens": trace.prompt_tokens,
        "skipped": {kind.value: times for kind, times in trace.skipped.items()}, "stopped_line": trace.stopped_line,
        "block_size": bench.block_size, "distinct_blocks": uses.distinct, "engines": bench.engines,
        "repeated_share": trace.repeated_tokens / trace.prompt_tokens,
        "pruned": {
            "min_count": bench.min_count, "min_tokens": bench.min_tokens, "nodes": tree.nodes,
            "leaves": tree.leaves, "leaves_per_prompt": tree.leaves / trace.requests,
            "repeated_share": tree.repeated_tokens / trace.prompt_tokens, "distinct_tokens": tree.distinct_tokens,
            "prefixes": [prefix._asdict() | {"saved_share": prefix.saved_tokens / trace.prompt_tokens}
                         for prefix in tree.prefixes]},
        "caches": caches}


def _cache_figures(bench: ShareBench, uses: BlockUses, size: int, prompt_tokens: int) -> dict[str, Any]:
    """What caches of `size` blocks would have hit, as shares of `prompt_tokens`: for one engine, and for the fleet with
    each routing. The bounds are for one such cache, and for one as large as all those of the fleet together."""
    def share(blocks: int) -> float:
        return blocks * bench.block_size / prompt_tokens

    def fleet(hits: FleetHits) -> dict[str, float]:
        return {"d": share(hits.d_blocks), "p_adds": share(hits.p_blocks), "imbalance": hits.imbalance}

    fleets = {routing: fleet(replay(uses, bench.engines, size, routing)) for routing in Routing}
    return {
        "cache_blocks": size, "bound": share(most_hits(uses, size)),
        "fleet_bound": share(most_hits(uses, size * bench.engines)),
        "one_engine": fleet(replay(uses, 1, size, Routing.ROUND_ROBIN)),
        **{routing.value: figures for routing, figures in fleets.items()},
        "router_adds": fleets[Routing.PREFIX]["d"] - fleets[Routing.ROUND_ROBIN]["d"]}


def _listed(skipped: Counter[Skip]) -> str:
    return ", ".join(f"{times} {kind.value}" for kind, times in sorted(skipped.items()))


def summary(found: dict[str, Any]) -> str:
    """What the trace is, in a few lines."""
    pruned = found["pruned"]
    skipped = _listed(Counter({Skip(kind): times for kind, times in found["skipped"].items()}))
    stopped = "" if found["stopped_line"] is None else f", read up to line {found['stopped_line']:,}"
    unit = found["unit"]
    return "\n".join([
        f"{found['file']}: {found['requests']:,} prompts with {found['prompt_tokens']:,} {unit}{stopped}; "
        f"{found['answers']:,} with their answers; skipped: {skipped or 'none'}",
        f"{found['repeated_share']:.1%} of the {unit} repeat the beginning of an earlier prompt",
        f"{pruned['repeated_share']:.1%} do so in prefixes of {pruned['min_tokens']} or more {unit} that "
        f"{pruned['min_count']} or more prompts have; there are {pruned['nodes']:,}, and a cache needs "
        f"{pruned['distinct_tokens']:,} {unit} for them",
        f"{pruned['leaves']:,} of them begin no longer one: {pruned['leaves_per_prompt']:.1%} of the number of "
        "prompts"])


def prefix_table(found: dict[str, Any]) -> Table:
    """The prefixes that save most."""
    return report.table(["first in line", "prompts", f"length, {found['unit']}", "after the one before", "saves"],
                        ([f"{prefix['line']:,}", f"{prefix['uses']:,}", f"{prefix['tokens']:,}",
                          f"{prefix['own_tokens']:,}", f"{prefix['saved_share']:.1%}"]
                         for prefix in found["pruned"]["prefixes"]))


def cache_table(found: dict[str, Any]) -> Table:
    """What caches of each size can hit, in shares of the prompts' tokens."""
    engines = found["engines"]
    lines = [
        ("best of any one cache of this size", lambda each: f"{each['bound']:.1%}"),
        ("D: one engine, evicting the least recently used", lambda each: f"{each['one_engine']['d']:.1%}"),
        (f"D: {engines} engines, round robin", lambda each: f"{each['round_robin']['d']:.1%}"),
        ("... and P's cache adds", lambda each: f"{each['round_robin']['p_adds']:+.1%}"),
        (f"router: {engines} engines, by prefix", lambda each: f"{each['prefix']['d']:.1%}"),
        ("... which is more by", lambda each: f"{each['router_adds']:+.1%}"),
        ("... and P's cache adds", lambda each: f"{each['prefix']['p_adds']:+.1%}"),
        ("... computed by the busiest engine, over the mean", lambda each: f"{each['prefix']['imbalance']:.2f}"),
        (f"best of any cache of {engines} engines together", lambda each: f"{each['fleet_bound']:.1%}")]
    columns = [f"{each['cache_blocks']:,} blocks" for each in found["caches"]]
    return report.side_by_side(columns, found["caches"], lines, f"prompt {found['unit']} that hit, caches of")
