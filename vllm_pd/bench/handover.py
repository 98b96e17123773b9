# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench handover`: what a remote prefill costs beside the work that has to be done anyway.

One request at a time goes to a decode engine, each with a prompt of its own, so that nothing waits for anything else
and no prefix is found. Around each, the decode engine's /metrics are read; with one request in between, the
differences of the stages' sums are that request's own stages. Then, per request,

    control plane = parked - prefill - transfer
    overhead      = TTFT   - prefill - transfer - first step

Parked is the decode engine's own figure: from the moment at which the request would have been prefilled here until the
scheduler has taken it back. Prefill and transfer are the prefill engine's, as it reports them. So the control plane
holds the queue, the claim, the wake-ups of every process on the way, the notices and the commit of the blocks.

TTFT is the client's: from before it connects until the first token's part of the stream is read. The first step is this
request's own, for steps differ by more than what is measured here. So the overhead holds, beside the control plane, the
HTTP server, the admission and the detokeniser: what any request takes, disaggregation or not. To show that nothing else
hides there a request with a prompt of a few tokens, which stays local, follows each measured one, and

    outside = TTFT - parked - first step       front end = TTFT of the short one - its prefill (the engine's figure)

should be the same.

Fencing costs a round trip between the engines, for the claim, and nothing else on this path: its share of the TTFT is
reported too.
"""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm_pd.client import Answer, Question, ask, is_healthy, served_model
from vllm_pd.errors import ConfigError, PDError
from vllm_pd.metrics import STAGES
from vllm_pd.scrape import Snapshot, scrape, scrape_after_request

FORMULA = "control plane = parked - prefill - transfer; overhead = TTFT (client) - prefill - transfer - first step"
FIRST_TOKEN_ID, LAST_TOKEN_ID = 10, 999
SHORT_TOKENS = 4


@dataclass(frozen=True)
class HandoverBench:
    """The command line of `vllm-pd bench handover`."""
    decode: str
    prefill: tuple[str, ...]
    requests: int = 50
    prompt_tokens: int = 256
    max_tokens: int = 8
    warm_up: int = 3
    seed: int = 0

    def check(self) -> None:
        """Raises ConfigError for numbers that measure nothing, and for engines that do not answer."""
        for key, value, least in (("--requests", self.requests, 1), ("--prompt-tokens", self.prompt_tokens, 2),
                                  ("--max-tokens", self.max_tokens, 3), ("--warm-up", self.warm_up, 0)):
            if value < least:
                raise ConfigError(key, value, f"write at least {least}")
        for key, url in (("--decode", self.decode), *(("--prefill", url) for url in self.prefill)):
            if not is_healthy(url):
                raise ConfigError(key, url, "no healthy engine answers there: start it, or write its URL")


@dataclass(frozen=True)
class HandoverSample:
    """One measured request. `stages_s` are the decode engine's figures for it, by stage; so is `parked_s`."""
    ttft_s: float
    stages_s: dict[str, float]
    parked_s: float
    transfer_bytes: float
    gaps_s: tuple[float, ...]
    front_end_s: float = 0.0  # of the short request that followed

    @property
    def control_plane_s(self) -> float:
        return self.parked_s - self.stages_s["prefill"] - self.stages_s["transfer"]

    @property
    def outside_s(self) -> float:
        """Before it was parked and after its first token."""
        return self.ttft_s - self.parked_s - self.stages_s["first_step"]

    @property
    def overhead_s(self) -> float:
        return self.outside_s + self.control_plane_s


def measure_handover(bench: HandoverBench) -> dict[str, Any]:
    """Runs the benchmark and returns its report, ready for JSON. Raises PDError when no request went remote."""
    bench.check()
    model = served_model(bench.decode)
    prompts = random.Random(bench.seed)
    samples: list[HandoverSample] = []
    local: dict[str, int] = {}
    before = scrape(bench.decode)
    for number in range(-bench.warm_up, bench.requests):
        prompt = [prompts.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(bench.prompt_tokens)]
        answer = ask(bench.decode, model, Question(prompt, bench.max_tokens, stream=True, ignore_eos=True))
        after = scrape_after_request(bench.decode, before)
        short = ask(bench.decode, model, Question(prompt[:SHORT_TOKENS], 1, stream=True, ignore_eos=True))
        last = scrape_after_request(bench.decode, after)
        front_end_s = short.ttft_s - last.since(after).value("vllm:request_prefill_time_seconds_sum")
        if number >= 0:
            added = after.since(before)
            if went_remote(added):
                samples.append(sample_of(answer, added, front_end_s))
            else:
                for (reason, ), count in added.by("vllm:pd_decisions_total", "reason").items():
                    if count:
                        local[reason] = local.get(reason, 0) + int(count)
        before = last
    if not samples:
        why = ", ".join(f"{count} x {reason}" for reason, count in local.items()) or "the engine decided nothing"
        raise PDError(f"no request was prefilled remotely ({why}); start the decode engine with "
                      f"max_local_prefill_tokens below {bench.prompt_tokens}, and a prefill engine")
    return report(bench, samples, local)


def went_remote(added: Snapshot) -> bool:
    """Whether the one request between two snapshots was prefilled remotely, from decision to end."""
    return (added.value("vllm:pd_decisions_total", decision="remote") == 1
            and added.value("vllm:pd_attempts_total", outcome="done") == 1)


def sample_of(answer: Answer, added: Snapshot, front_end_s: float) -> HandoverSample:
    """The sample of one request from its answer, what it has added to the decode engine's figures, and what the
    front end took of the short one that followed."""
    stages_s = {stage: added.value("vllm:pd_handover_seconds_sum", stage=stage) for stage in STAGES}
    return HandoverSample(answer.ttft_s, stages_s, added.value("vllm:pd_parked_seconds_sum"),
                  added.value("vllm:pd_transfer_bytes_total"), tuple(answer.gaps_s), front_end_s)


def report(bench: HandoverBench, samples: Sequence[HandoverSample], local: dict[str, int]) -> dict[str, Any]:
    """All figures in milliseconds; `local` are the requests that were not prefilled remotely, by reason."""
    transfer_s = sum(sample.stages_s["transfer"] for sample in samples)
    moved = sum(sample.transfer_bytes for sample in samples)
    return {
        "formula": FORMULA,
        "settings": asdict(bench),
        "measured": len(samples),
        "local": local,
        "control_plane_ms": spread([sample.control_plane_s for sample in samples]),
        "overhead_ms": spread([sample.overhead_s for sample in samples]),
        "outside_ms": spread([sample.outside_s for sample in samples]),
        "front_end_ms": spread([sample.front_end_s for sample in samples]),
        "fencing_share_of_ttft": statistics.median(sample.stages_s["claim"] / sample.ttft_s for sample in samples),
        "ttft_ms": spread([sample.ttft_s for sample in samples]),
        "decode_step_ms": spread([gap for sample in samples for gap in sample.gaps_s]),
        "stages_ms": {stage: spread([sample.stages_s[stage] for sample in samples]) for stage in STAGES},
        "transfer_bytes": moved,
        "transfer_gb_per_s": moved / transfer_s / 1e9 if transfer_s else None,
        "samples_ms": [{"ttft": 1e3 * s.ttft_s, "overhead": 1e3 * s.overhead_s, "parked": 1e3 * s.parked_s,
                        "control_plane": 1e3 * s.control_plane_s, "outside": 1e3 * s.outside_s,
                        "front_end": 1e3 * s.front_end_s,
                        **{stage: 1e3 * s.stages_s[stage] for stage in STAGES}} for s in samples],
    }


def spread(values_s: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile (nearest rank), mean and extremes, in milliseconds."""
    ordered = sorted(values_s)

    def percentile(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    figures = {"p50": percentile(0.5), "p99": percentile(0.99), "mean": statistics.fmean(ordered), "min": ordered[0],
               "max": ordered[-1]}
    return {name: round(1e3 * value, 3) for name, value in figures.items()}
