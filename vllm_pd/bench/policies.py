# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench policies`: what the router's policies make of the same conversations with running engines.

In each round every policy has its turn, in an order drawn anew: a router is started before the same engines, the
engines forget their prefix caches, the router is awaited until it knows them, and then the conversations are held
through it (`chats`). What was hit follows from what was not: engines announce each block that they compute, once, so

    hits = full blocks of the prompts - (blocks announced - blocks that the answers have filled)

and the hit rate is the tokens of these blocks by the tokens of the prompts. Beside it stands the bound, which no
placement could beat (`oracle.bound`), for the prompts of that very turn and the pools of all engines together.
"""

import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from vllm_pd.bench.conversations import ConversationShape, ConversationTurn, hold, make, without_words
from vllm_pd.bench.router import quantiles
from vllm_pd.bench.servers import Say, Server, Servers
from vllm_pd.bench.simulation import oracle
from vllm_pd.bench.simulation.trace import Arrival
from vllm_pd.client import fetch, is_healthy, served_model
from vllm_pd.errors import ConfigError, PDError
from vllm_pd.router.options import NO_TOKENIZER
from vllm_pd.router.policy import Policy
from vllm_pd.scrape import scrape

KNOWN_TIMEOUT_S = 30.0
UP, LIVE = "up", "live"  # as /workers says
INFORMED = (Policy.KV, Policy.LEAST_LOAD)
DEFAULT = (Policy.KV, Policy.ROUND_ROBIN, Policy.LEAST_LOAD)


@dataclass(frozen=True)
class PolicyBench:
    """The command line of `vllm-pd bench policies`."""
    workers: tuple[str, ...]
    tokenizer: str
    policies: tuple[Policy, ...] = DEFAULT
    rounds: int = 1
    chats: ConversationShape = ConversationShape()
    settle_s: float = 1.0

    def check(self) -> None:
        """Raises ConfigError for numbers that measure nothing, and for engines that do not answer."""
        for key, value, least in (("--worker", len(self.workers), 2), ("--rounds", self.rounds, 1),
                                  ("--conversations", self.chats.conversations, 1), ("--turns", self.chats.turns, 1),
                                  ("--policy", len(self.policies), 1)):
            if value < least:
                raise ConfigError(key, value, f"write at least {least}")
        if not 0 < self.chats.conversations_per_s < math.inf:
            raise ConfigError("--conversations-per-s", self.chats.conversations_per_s, "write a number above 0")
        for url in self.workers:
            if not is_healthy(url):
                raise ConfigError("--worker", url, "no healthy engine answers there: start it, or write its URL")


def measure(bench: PolicyBench, log: Path, say: Say = print) -> dict[str, Any]:
    """Runs it all. The report, ready for JSON. Raises PDError for an engine that can't be measured."""
    bench.check()
    model = served_model(bench.workers[0])
    conversations = make(bench.chats)
    draw = random.Random(bench.chats.seed)
    tokenize, pools = _tokenizer(bench.tokenizer), _pools(bench.workers)
    runs: list[dict[str, Any]] = []
    with log.open("w") as output:
        for number in range(bench.rounds):
            for policy in draw.sample(bench.policies, len(bench.policies)):
                with Servers((), (), output) as stage:
                    tokenizer = bench.tokenizer if policy is Policy.KV else NO_TOKENIZER
                    router = stage.ours(policy.value, bench.workers,
                                        ["--policy", policy.value, "--tokenizer", tokenizer])
                    asyncio.run(_forget(bench, policy, router))
                    before = _computed_blocks(bench.workers)
                    turns = asyncio.run(hold(router.url, model, bench.chats, conversations))
                    time.sleep(bench.settle_s)
                    computed = _computed_blocks(bench.workers) - before
                    events = [worker["events"] for worker in json.loads(fetch(router.url, "/workers")[1])["workers"]]
                runs.append(_run(policy, number, turns, computed, pools, tokenize) | {"events": events})
                say("{policy}, round {round}: {hit_rate:.1%} of the prompt tokens were hits, bound {bound:.1%}, TTFT "
                    "p50 {ttft_ms[p50]:.0f} ms".format(**runs[-1]))
    settings = {**asdict(bench), "policies": [policy.value for policy in bench.policies],
                "tokenizer": Path(bench.tokenizer).name}
    return {"settings": settings, "policies": summary(runs), "runs": runs}


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By policy, over its rounds: hit rate, its share of the bound, TTFT."""
    found = {}
    for policy in dict.fromkeys(run["policy"] for run in runs):
        own = [run for run in runs if run["policy"] == policy]
        rate = sum(run["hit_tokens"] for run in own) / sum(run["prompt_tokens"] for run in own)
        bound = statistics.fmean(run["bound"] for run in own)
        found[policy] = {"hit_rate": rate, "bound": bound, "of_bound": rate / bound if bound else None,
                         "ttft_ms": quantiles([turn["ttft_s"] for run in own for turn in run["turns"]])}
    return found


def _run(policy: Policy, number: int, turns: Sequence[ConversationTurn], computed_blocks: int, pools: dict[str, int],
         tokenize: Callable[[ConversationTurn], Arrival]) -> dict[str, Any]:
    size = pools["block_size"]
    prompt = sum(turn.prompt_tokens for turn in turns)
    filled = sum(answer_blocks(turn, size) for turn in turns)
    hits = sum(turn.prompt_tokens // size for turn in turns) - (computed_blocks - filled)
    return {"policy": policy.value, "round": number, "prompt_tokens": prompt, "computed_blocks": computed_blocks,
            "hit_tokens": hits * size, "hit_rate": hits * size / prompt,
            "bound": oracle.bound([tokenize(turn) for turn in turns], size, pools["pool_blocks"]),
            "ttft_ms": quantiles([turn.ttft_s for turn in turns]),
            "workers": {url: sum(turn.worker == url for turn in turns) for url in {turn.worker for turn in turns}},
            **pools, "turns": [without_words(turn) for turn in turns]}


def answer_blocks(turn: ConversationTurn, size: int) -> int:
    """How many blocks an answer fills. Its last token is never computed."""
    return (turn.prompt_tokens + turn.answer_tokens - 1) // size - turn.prompt_tokens // size


def _computed_blocks(urls: Sequence[str]) -> int:
    """How many blocks the engines have announced. Raises PDError where they count none."""
    pages = [scrape(url) for url in urls]
    if not all(page.by("vllm:pd_events_total", "kind") for page in pages):
        raise PDError("an engine counts no KV events: start all with --kv-events-config and --kv-transfer-config")
    return int(sum(page.value("vllm:pd_events_total", kind="stored_blocks") for page in pages))


async def _forget(bench: PolicyBench, policy: Policy, router: Server) -> None:
    """Empty the engines' caches, and wait until the router knows what its policy needs to know of each of them."""
    deadline = time.monotonic() + KNOWN_TIMEOUT_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10.0)) as session:
        for url in bench.workers:
            async with session.post(f"{url}/reset_prefix_cache") as reply:
                if reply.status != 200:
                    raise PDError(f"{url}/reset_prefix_cache: {reply.status}; start the engines with "
                                  "VLLM_SERVER_DEV_MODE=1")
        await asyncio.sleep(bench.settle_s)
        while True:
            async with session.get(f"{router.url}/workers") as reply:
                known = await reply.json()
            workers = known["workers"]
            able = [worker for worker in workers if worker["state"] == UP and (
                policy not in INFORMED or (worker["events"] or {}).get("state") == LIVE)]
            if len(able) == len(bench.workers) and (policy is not Policy.KV or known["tokenizer"] == "ok"):
                return
            if time.monotonic() > deadline:
                raise PDError(f"the router of {policy} does not know all engines: {known}; are they started with "
                              "--kv-events-config?")
            await asyncio.sleep(0.2)


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
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (rates, times) = pyplot.subplots(1, 2, figsize=(10, 3.6))
    for place, (policy, found) in enumerate(report["policies"].items()):
        bar = rates.barh(place, 100 * found["hit_rate"], color=f"C{place}")
        rates.bar_label(bar, [f"{found['hit_rate']:.1%}"], padding=2, fontsize=8)
        rates.plot([100 * found["bound"]] * 2, [place - 0.4, place + 0.4], color="black",
                   label=None if place else "bound")
        ordered = sorted(1e3 * turn["ttft_s"] for run in report["runs"] if run["policy"] == policy
                         for turn in run["turns"])
        times.plot(ordered, [(rank + 1) / len(ordered) for rank in range(len(ordered))], color=f"C{place}",
                   label=policy)
    rates.set_yticks(range(len(report["policies"])), report["policies"])
    rates.set_xlim(0, 100)
    rates.set_xlabel("prompt tokens that were hits, %")
    rates.legend(fontsize=8)
    times.set_xlabel("TTFT, ms")
    times.set_ylabel("share of the requests")
    times.legend(fontsize=8)
    times.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
