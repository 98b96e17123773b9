# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench policies`: hit rate and TTFT of the router's policies, from the same conversations with running
engines.

In each round every policy has its turn, in random order: a router is started before the same engines, the
engines empty their prefix caches, the router is awaited until it knows them, and then the conversations are held
through it. Hits follow from what was computed, because an engine announces each block that it computes once:

    hits = full blocks of the prompts - (blocks announced - blocks that the answers have filled)

The hit rate is the tokens of these blocks by the tokens of the prompts. Beside it stands `oracle.bound`, which no
placement could beat, for the prompts of that turn and the pools of all engines together.
"""

import asyncio
import math
import random
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from vllm_pd.bench.checks import require_at_least, require_healthy
from vllm_pd.bench.connection import LoadError, call, served_model
from vllm_pd.bench.conversations import Conversation, ConversationTurn, hold, make
from vllm_pd.bench.options import ConversationShape
from vllm_pd.bench.report import MS, ShowLine, summary
from vllm_pd.bench.servers import RouterCommand, Server, Servers, log_to
from vllm_pd.bench.simulation import oracle
from vllm_pd.bench.simulation.trace import Arrival
from vllm_pd.errors import ConfigError, PDError
from vllm_pd.ops.scrape import scrape
from vllm_pd.router.options import NO_TOKENIZER
from vllm_pd.router.policy import Policy

KNOWN_TIMEOUT_S = 30.0
DEFAULT = (Policy.KV, Policy.ROUND_ROBIN, Policy.LEAST_LOAD)
FIGURES = "p50 p90 p99 mean"


@dataclass(frozen=True)
class PolicyBench:
    """The command line of `vllm-pd bench policies`. `settle_s`: a pause in which events in flight arrive."""
    workers: tuple[str, ...]
    tokenizer: str
    policies: tuple[Policy, ...] = DEFAULT
    rounds: int = 1
    chats: ConversationShape = ConversationShape()
    settle_s: float = 1.0

    def check(self) -> None:
        """Raises ConfigError for numbers that measure nothing, and for engines that do not answer."""
        require_at_least([("--worker", len(self.workers), 2), ("--rounds", self.rounds, 1),
                          ("--conversations", self.chats.conversations, 1), ("--turns", self.chats.turns, 1),
                          ("--system-prompts", self.chats.system_prompts, 1),
                          ("--system-words", self.chats.system_words, 0), ("--policy", len(self.policies), 1)])
        if not 0 < self.chats.conversations_per_s < math.inf:
            raise ConfigError("--conversations-per-s", self.chats.conversations_per_s, "write a number above 0")
        require_healthy("--worker", self.workers)


def measure(bench: PolicyBench, log: Path, show: ShowLine = print) -> dict[str, Any]:
    """Runs it all. The report, ready for JSON; `failed` has a line for each turn of a policy that failed after others
    were measured. Raises PDError for an engine that can't be measured."""
    bench.check()
    try:
        model, pools = served_model(bench.workers[0]), _pools(bench.workers)
    except OSError as error:
        raise PDError(f"an engine does not answer: {error}") from None
    conversations = make(bench.chats)
    draw = random.Random(bench.chats.seed)
    tokenize = _tokenizer(bench.tokenizer)
    runs: list[dict[str, Any]] = []
    failed: list[str] = []
    with log.open("w") as output:
        for number in range(bench.rounds):
            for policy in draw.sample(bench.policies, len(bench.policies)):
                try:
                    turns, computed, events = _take_turn(bench, policy, model, conversations, output)
                except (PDError, OSError) as error:
                    failed.append(f"{policy.value}, round {number}: {error}")
                    if not runs:
                        raise PDError(failed[0]) from None
                    show(failed[-1])
                    continue
                runs.append(_run(policy, number, turns, computed, pools, tokenize) | {"events": events})
                show("{policy}, round {round}: {hit_rate:.1%} of the prompt tokens were hits, bound {bound:.1%}, TTFT "
                     "p50 {ttft_ms[p50]:.0f} ms".format(**runs[-1]))
    settings = {**asdict(bench), "policies": [policy.value for policy in bench.policies],
                "tokenizer": Path(bench.tokenizer).name}
    return {"settings": settings, "policies": by_policy(runs), "runs": runs, "failed": failed}


def _take_turn(bench: PolicyBench, policy: Policy, model: str, conversations: Sequence[Conversation], log: TextIO
               ) -> tuple[list[ConversationTurn], int, list[Any]]:
    """Holds the conversations through a router with this policy. The turns, how many blocks the engines have computed,
    and what the router says of their events. Raises PDError and OSError."""
    tokenizer = shlex.quote(bench.tokenizer) if policy is Policy.KV else NO_TOKENIZER
    command = RouterCommand.ours(f"{policy.value}=--policy {policy.value} --tokenizer {tokenizer}")
    with Servers(log_to(log)) as servers:
        router = servers.router(command, bench.workers, Server.is_healthy)
        _empty_caches(bench)
        _await_known(bench, policy, router)
        before = _computed_blocks(bench.workers)
        turns = asyncio.run(hold(router.url, model, bench.chats, conversations))
        time.sleep(bench.settle_s)
        computed = _computed_blocks(bench.workers) - before
        return turns, computed, [worker["events"] for worker in call(router.url, "GET", "/workers")["workers"]]


def by_policy(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The hit rate of each policy over all its rounds, its share of the bound, and its TTFT."""
    found = {}
    for policy in dict.fromkeys(run["policy"] for run in runs):
        own = [run for run in runs if run["policy"] == policy]
        rate = sum(run["hit_tokens"] for run in own) / sum(run["prompt_tokens"] for run in own)
        bound = statistics.fmean(run["bound"] for run in own)
        ttfts_s = [turn["ttft_s"] for run in own for turn in run["turns"]]
        found[policy] = {"hit_rate": rate, "bound": bound, "of_bound": rate / bound if bound else None,
                         "requests": len(ttfts_s), "ttft_ms": summary(ttfts_s, FIGURES, MS)}
    return found


def _run(policy: Policy, number: int, turns: Sequence[ConversationTurn], computed_blocks: int, pools: dict[str, int],
         tokenize: Callable[[ConversationTurn], Arrival]) -> dict[str, Any]:
    """The figures of one policy's turn in one round, ready for JSON; the module has the formula. `computed_blocks` are
    those that all engines have announced meanwhile; `pools` is from `_pools`."""
    size = pools["block_size"]
    prompt = sum(turn.prompt_tokens for turn in turns)
    filled = sum(answer_blocks(turn, size) for turn in turns)
    hits = sum(turn.prompt_tokens // size for turn in turns) - (computed_blocks - filled)
    return {"policy": policy.value, "round": number, "prompt_tokens": prompt, "computed_blocks": computed_blocks,
            "hit_tokens": hits * size, "hit_rate": hits * size / prompt,
            "bound": oracle.bound([tokenize(turn) for turn in turns], size, pools["pool_blocks"]),
            "ttft_ms": summary((turn.ttft_s for turn in turns), FIGURES, MS),
            "workers": {url: sum(turn.worker == url for turn in turns) for url in {turn.worker for turn in turns}},
            **pools, "turns": [turn.figures() for turn in turns]}


def answer_blocks(turn: ConversationTurn, size: int) -> int:
    """How many blocks an answer fills. Its last token is never computed."""
    return (turn.prompt_tokens + turn.answer_tokens - 1) // size - turn.prompt_tokens // size


def _computed_blocks(urls: Sequence[str]) -> int:
    """How many blocks the engines have announced. Raises PDError where they count none."""
    pages = [scrape(url) for url in urls]
    if not all(page.by("vllm:pd_events_total", "kind") for page in pages):
        raise PDError("an engine counts no KV events: start all with --kv-events-config and --kv-transfer-config")
    return int(sum(page.value("vllm:pd_events_total", kind="stored_blocks") for page in pages))


def _empty_caches(bench: PolicyBench) -> None:
    """Empties the prefix caches of the engines."""
    for url in bench.workers:
        try:
            call(url, "POST", "/reset_prefix_cache")
        except LoadError as error:
            raise PDError(f"{error}; start the engines with VLLM_SERVER_DEV_MODE=1") from None
    time.sleep(bench.settle_s)


def _await_known(bench: PolicyBench, policy: Policy, router: Server) -> None:
    """Waits until the router knows of each engine what its policy needs to know."""
    deadline = time.monotonic() + KNOWN_TIMEOUT_S
    while not router.knows(len(bench.workers), policy):
        if time.monotonic() > deadline:
            known = call(router.url, "GET", "/workers")
            raise PDError(f"the router of {policy} does not know all engines: {known}; are they started with "
                          "--kv-events-config?")
        time.sleep(0.2)


def _pools(urls: Sequence[str]) -> dict[str, int]:
    """The size of a block, and of all engines' pools together. Raises PDError where engines don't fit together."""
    found = [scrape(url).by("vllm:cache_config_info", "block_size", "num_gpu_blocks") for url in urls]
    sizes = {size for labels in found for size, _ in labels}
    if len(sizes) != 1:
        raise PDError(f"the engines' blocks have {sorted(sizes)} tokens: start all with one --block-size")
    return {"block_size": int(sizes.pop()), "pool_blocks": sum(int(blocks) for labels in found for _, blocks in labels)}


def _tokenizer(name: str) -> Callable[[ConversationTurn], Arrival]:
    """What turns a request into the oracle's form."""
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(name)

    def tokenize(turn: ConversationTurn) -> Arrival:
        said = [{"role": role, "content": content} for role, content in turn.messages]
        prompt = tokenizer.apply_chat_template(said[:-1], add_generation_prompt=True)
        answer = tokenizer(said[-1]["content"], add_special_tokens=False).input_ids
        return Arrival(turn.at_s, turn.conversation, turn.turn, tuple(prompt), tuple(answer))

    return tokenize


def picture(report: dict[str, Any], path: Path) -> None:
    """Hit rates beside the bound, and the distributions of TTFT."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="tight")
    rates, times = figure.subplots(1, 2)
    for place, (policy, found) in enumerate(report["policies"].items()):
        bar = rates.barh(place, 100 * found["hit_rate"], color=f"C{place}")
        rates.bar_label(bar, [f"{found['hit_rate']:.1%}"], padding=2, fontsize=8)
        rates.plot([100 * found["bound"]] * 2, [place - 0.4, place + 0.4], color="black",
                   label=None if place else "bound")
        ttfts_ms = [MS * turn["ttft_s"] for run in report["runs"] if run["policy"] == policy for turn in run["turns"]]
        times.ecdf(ttfts_ms, color=f"C{place}", label=policy)
    rates.set_yticks(range(len(report["policies"])), report["policies"])
    rates.set_xlim(0, 100)
    rates.set_xlabel("prompt tokens that were hits, %")
    rates.legend(fontsize=8)
    times.set_xlabel("TTFT, ms")
    times.set_ylabel("share of the requests")
    times.legend(fontsize=8)
    times.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
