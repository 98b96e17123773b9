# SPDX-License-Identifier: Apache-2.0
"""What it brings, and costs, that blocks leave a prefill engine while it computes the rest (B100)."""

import itertools
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

from _bench_v1.servers import BenchServer
from vllm_pd.bench.connection import served_model
from vllm_pd.bench.handover import HandoverBench, measure
from vllm_pd.bench.load import GenerationRequest, ask
from vllm_pd.bench.report import MS, summary

CHATS = 4
CHAT_PROMPT_TOKENS = 30
LEAD_S = 1.0  # for how long the chats run before the prompt comes
GOAL_MS = 10.0
FIGURES = "p50 p90 p99 mean max"
ARMS = ("whole", "chunks")
LOADS = ("alone", "computed elsewhere", *ARMS)


@dataclass(frozen=True)
class PushComparison:
    """Two fleets of a decode and a prefill engine, which take turns. Those of `chunks` push them. Prompts have `tokens`
    tokens and are computed `chunk_tokens` at a step."""
    fleets: dict[str, tuple[BenchServer, BenchServer]]
    tokens: int
    chunk_tokens: int
    rounds: int

    def measure(self) -> dict[str, Any]:
        """Both comparisons."""
        return {"tokens": self.tokens, "chunk_tokens": self.chunk_tokens, "rounds": self.rounds,
                **self._first_tokens(), "itl_ms": self._gaps()}

    def _first_tokens(self) -> dict[str, Any]:
        """TTFT of single remote prompts without the prefill at P, and the part of it that is the transfer."""

        samples: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
        for number in range(self.rounds):
            for arm in ARMS if number % 2 else reversed(ARMS):
                decode, prefill = self.fleets[arm]
                bench = HandoverBench(decode.url, (prefill.url, ), 1, self.tokens, 3, warm_up=not number, seed=number)
                samples[arm] += measure(bench)["samples_ms"]
        beside = {arm: [one["ttft"] - one["prefill"] for one in samples[arm]] for arm in ARMS}
        transfer = {arm: summary((one["transfer"] for one in samples[arm]), FIGURES) for arm in ARMS}
        return {"ttft_minus_prefill_ms": {arm: summary(beside[arm], FIGURES) for arm in ARMS},
                "transfer_ms": transfer,
                "prefill_ms": {arm: summary((one["prefill"] for one in samples[arm]), FIGURES) for arm in ARMS},
                "goal_ms": GOAL_MS + transfer["whole"]["p50"] * self.chunk_tokens / self.tokens, "samples_ms": samples}

    def _gaps(self) -> dict[str, dict[str, float]]:
        """Inter-token latencies of `CHATS` chats on the decode engine while a prompt is computed and arrives. Alone:
        without a prompt. Computed elsewhere: the prefill engine computes one of its own client, so nothing is sent."""

        found: dict[str, list[float]] = {load: [] for load in LOADS}
        for number in range(self.rounds):
            for load in LOADS if number % 2 else reversed(LOADS):
                decode, prefill = self.fleets[load if load in ARMS else ARMS[number % 2]]
                target = {"alone": None, "computed elsewhere": prefill}.get(load, decode)
                found[load] += self._gaps_during(decode, target, f"{load} {number}")
        return {load: summary(found[load], FIGURES, MS) for load in LOADS}

    def _gaps_during(self, decode: BenchServer, target: BenchServer | None, seed: str) -> list[float]:
        """The gaps between tokens of the chats that end while `target` answers a prompt; None: all after the begin.
        Each load of a round needs a `seed` of its own: two of them share engines, which keep the KV of a prompt."""

        draw = random.Random(f"gaps {seed}")
        model, answers = served_model(decode.url), []
        tokens = max(300, self.tokens // 8)

        def chat(prompt: list[int]) -> None:
            began = time.perf_counter()
            answer = ask(decode.url, model, GenerationRequest(prompt, tokens, stream=True, ignore_eos=True))
            answers.append([began + moment for moment in answer.arrivals_s])

        chats = [threading.Thread(target=chat, args=([draw.randint(10, 999) for _ in range(CHAT_PROMPT_TOKENS)], ))
                 for _ in range(CHATS)]
        for one in chats:
            one.start()
        time.sleep(LEAD_S)
        began = time.perf_counter()
        if target is not None:
            prompt = [draw.randint(10, 999) for _ in range(self.tokens)]
            ask(target.url, model, GenerationRequest(prompt, 1, stream=True, ignore_eos=True))
        ended = time.perf_counter() if target is not None else float("inf")
        for one in chats:
            one.join()
        return [later - earlier for arrivals in answers for earlier, later in itertools.pairwise(arrivals)
                if began <= later and earlier <= ended]
