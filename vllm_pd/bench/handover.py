# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd bench handover`: what a remote prefill costs beside the prefill, the transfer and the first decode step.

One request at a time goes to a decode engine, each with a new prompt, so that no request waits for another and no
prefix is found. The decode engine's /metrics are read before and after each request; the differences of the stages'
sums are the stages of that request. For each request

    control plane = parked - prefill - transfer
    overhead      = TTFT   - prefill - transfer - first step

*Parked* is the decode engine's figure: from the moment at which it would have prefilled the request itself until the
scheduler has the request back. *Prefill* and *transfer* are the prefill engine's figures. So the control plane is the
queue, the claim, the wake-ups of all processes on the way, the notices, and the commit of the blocks.

*TTFT* is the client's figure, from before it connects until it has the first token. The *first step* is that of the
same request, because steps differ by more than what is measured here. So the overhead also holds what every request
needs, with disaggregation or without: HTTP server, admission, detokeniser. To show that it holds nothing else, each
measured request is followed by a short one, which stays local, and these two should be equal:

    outside   = TTFT - parked - first step
    front end = TTFT of the short request - its prefill (the engine's figure)

Fencing costs one round trip between the engines, for the claim. Its share of the TTFT is reported.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm_pd.bench.checks import require_at_least, require_healthy
from vllm_pd.bench.connection import LoadError, served_model
from vllm_pd.bench.load import GenerationAnswer, GenerationRequest, ask
from vllm_pd.bench.report import MS, summary
from vllm_pd.errors import PDError
from vllm_pd.handover.metrics import STAGES
from vllm_pd.ops.scrape import MetricsSnapshot, scrape, scrape_after_request

FORMULA = "control plane = parked - prefill - transfer; overhead = TTFT (client) - prefill - transfer - first step"
FIRST_TOKEN_ID, LAST_TOKEN_ID = 10, 999
SHORT_TOKENS = 4
FIGURES = "p50 p99 mean min max"


@dataclass(frozen=True)
class HandoverBench:
    """The command line of `vllm-pd bench handover`. `seed` None: another one in each run, because the decode engine has
    the prompts of an earlier run in its prefix cache."""
    decode: str
    prefill: tuple[str, ...]
    requests: int = 50
    prompt_tokens: int = 256
    max_tokens: int = 8
    warm_up: int = 3
    seed: int | None = None

    def check(self) -> None:
        """Raises ConfigError for numbers that measure nothing, and for engines that do not answer."""
        require_at_least([("--requests", self.requests, 1), ("--prompt-tokens", self.prompt_tokens, 2),
                          ("--max-tokens", self.max_tokens, 3), ("--warm-up", self.warm_up, 0)])
        require_healthy("--decode", [self.decode])
        require_healthy("--prefill", self.prefill)


@dataclass(frozen=True)
class HandoverSample:
    """One measured request. `stages_s` (by stage) and `parked_s` are the decode engine's figures for it. `front_end_s`
    is what the front end took of the short request that followed it."""
    ttft_s: float
    stages_s: dict[str, float]
    parked_s: float
    transfer_bytes: float
    gaps_s: tuple[float, ...]
    front_end_s: float = 0.0

    @property
    def control_plane_s(self) -> float:
        return self.parked_s - self.stages_s["prefill"] - self.stages_s["transfer"]

    @property
    def outside_s(self) -> float:
        """What passed before the request was parked and after its first step."""
        return self.ttft_s - self.parked_s - self.stages_s["first_step"]

    @property
    def overhead_s(self) -> float:
        return self.outside_s + self.control_plane_s

    def figures_ms(self) -> dict[str, float]:
        """Its figures by name, the stages among them."""
        named = {name: getattr(self, f"{name}_s")
                 for name in ("ttft", "overhead", "parked", "control_plane", "outside", "front_end")}
        return {name: MS * value_s for name, value_s in (named | self.stages_s).items()}


def measure(bench: HandoverBench) -> dict[str, Any]:
    """Runs the benchmark and returns its report, ready for JSON, with the seed. It ends with the first request that
    fails; `failed` says why. Raises PDError when no request went remote."""
    bench.check()
    again = "" if bench.seed is None else f"; after a run with the same seed ({bench.seed}), leave out --seed"
    if bench.seed is None:
        bench = replace(bench, seed=random.randrange(1 << 32))
    samples: list[HandoverSample] = []
    local: dict[str, int] = {}
    failed = ""
    try:
        _measure_each(bench, samples, local)
    except (LoadError, OSError) as error:
        failed = f"{bench.decode}: {error}"
    if not samples:
        if failed:
            raise PDError(failed)
        why = ", ".join(f"{count} x {reason}" for reason, count in local.items()) or "the engine decided nothing"
        raise PDError(f"no request was prefilled remotely ({why}); start the decode engine with "
                      f"max_local_prefill_tokens below {bench.prompt_tokens}, and a prefill engine{again}")
    return report(bench, samples, local) | {"failed": failed}


def _measure_each(bench: HandoverBench, samples: list[HandoverSample], local: dict[str, int]) -> None:
    """Adds a sample for each request, or why it stayed local. Raises LoadError and OSError."""
    model = served_model(bench.decode)
    prompts = random.Random(bench.seed)
    before = scrape(bench.decode)
    for number in range(-bench.warm_up, bench.requests):
        prompt = [prompts.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(bench.prompt_tokens)]
        answer = ask(bench.decode, model, GenerationRequest(prompt, bench.max_tokens, stream=True, ignore_eos=True))
        after = scrape_after_request(bench.decode, before)
        short = ask(bench.decode, model, GenerationRequest(prompt[:SHORT_TOKENS], 1, stream=True, ignore_eos=True))
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


def went_remote(added: MetricsSnapshot) -> bool:
    """Whether the one request between two snapshots was prefilled remotely, from decision to end."""
    return (added.value("vllm:pd_decisions_total", decision="remote") == 1
            and added.value("vllm:pd_attempts_total", outcome="done") == 1)


def sample_of(answer: GenerationAnswer, added: MetricsSnapshot, front_end_s: float) -> HandoverSample:
    """The sample of one request, from its answer and what it has added to the decode engine's figures."""
    stages_s = {stage: added.value("vllm:pd_handover_seconds_sum", stage=stage) for stage in STAGES}
    return HandoverSample(answer.ttft_s, stages_s, added.value("vllm:pd_parked_seconds_sum"),
                          added.value("vllm:pd_transfer_bytes_total"), tuple(answer.gaps_s), front_end_s)


def report(bench: HandoverBench, samples: Sequence[HandoverSample], local: dict[str, int]) -> dict[str, Any]:
    """All figures in milliseconds; `local` are the requests that were not prefilled remotely, by reason."""
    transfer_s = sum(sample.stages_s["transfer"] for sample in samples)
    moved = sum(sample.transfer_bytes for sample in samples)
    of_each = [sample.figures_ms() for sample in samples]

    def spread(name: str) -> dict[str, float]:
        return summary((figures[name] for figures in of_each), FIGURES)

    return {
        "formula": FORMULA,
        "settings": asdict(bench),
        "measured": len(samples),
        "local": local,
        **{f"{name}_ms": spread(name) for name in ("control_plane", "overhead", "outside", "front_end")},
        "fencing_share_of_ttft": statistics.median(sample.stages_s["claim"] / sample.ttft_s for sample in samples),
        "ttft_ms": spread("ttft"),
        "decode_step_ms": summary((gap for sample in samples for gap in sample.gaps_s), FIGURES, MS),
        "stages_ms": {stage: spread(stage) for stage in STAGES},
        "transfer_bytes": moved,
        "transfer_gb_per_s": moved / transfer_s / 1e9 if transfer_s else None,
        "samples_ms": of_each,
    }
