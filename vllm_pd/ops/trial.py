# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd doctor --try URL`: what one prompt shows that a prefill engine was asked to compute. The judgement; requests
are made in `vllm_pd.ops.trial_requests`.

Two requests with the same new prompt, greedy. The first one asks for a prefill engine (`pd: remote`), the second one
for the decode engine itself (`pd: local`), and is kept from using the KV that the first one has left in the cache
there: else it would read what came from the prefill engine, and equal tokens would say nothing about it.
"""
from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_pd.decisions.policy import Reason
from vllm_pd.errors import ConfigError, PDError
from vllm_pd.ops.finding import Finding
from vllm_pd.ops.options import PROMPT_TOKENS
from vllm_pd.ops.printing import three_digits

ANSWER_TOKENS = 16
_MS, _MB = 1e3, 1e6
_TIE = 0.05  # of log probability: about what 16 bits round away
_FLAG = """--kv-transfer-config '{"kv_connector": "PDConnector", "kv_role": "kv_consumer", """ \
        """"kv_connector_extra_config": {"broker": "tcp://HOST:5700"}}'"""
_STAY_CURES: Mapping[str, str] = {
    Reason.PEER: "start a prefill engine with the same model and settings and this engine's broker; `vllm-pd doctor "
                 "--broker ADDRESS` says which engines are there and fit, with --from ENGINE which path is closed",
    Reason.BROKER: "start the broker, or mend the way to it: `vllm-pd broker`, and the key `broker` of this engine",
    Reason.ROLE: "write the URL of a decode engine (kv_consumer, kv_both): this one only prefills, or has drained",
    Reason.THRESHOLD: "a whole block must be missing here: --prompt-tokens of some hundreds more",
    Reason.FEATURE: "something that this server adds to each request can't be prefilled elsewhere (docs/operations.md, "
                    "reason feature): look at its default sampling parameters and middleware",
    Reason.QUEUE: "too many jobs wait: try again, or start more prefill engines; `vllm-pd top` shows who is busy",
    Reason.CAP: "too many KV blocks or seats are set aside (max_parked_fraction): fewer --prompt-tokens, a larger KV "
                "cache, or try again when less is open",
    Reason.RETRY: "that of the line above; `vllm-pd doctor --broker ADDRESS --from ENGINE` tries the paths",
}
_OTHER_STAY_CURE = "docs/operations.md lists the reasons"


class TrialFailed(PDError):
    """There is nothing to compare. The `finding` says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.fact)
        self.finding = finding


class ServedModel(msgspec.Struct, frozen=True):
    """One entry of /v1/models. `max_model_len`: prompt and answer; None: the server does not say."""
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class ModelList(msgspec.Struct, frozen=True):
    """The answer of /v1/models."""
    data: list[ServedModel]


class StageTimes(msgspec.Struct, frozen=True):
    """`protocol.messages.Timings`, as a route shows them."""
    queue_s: float = 0.0
    claim_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    bytes: int = 0
    measured: bool = False
    last_bytes: int = 0


class PromptReport(msgspec.Struct, frozen=True):
    """The answer of /pd/prompts/NAME: a `protocol.messages.PromptRecord`. One of a later release may have more."""
    tokens: int
    decision: str
    reason: str
    attempts: int = 0
    cached_tokens: int = 0
    peer: str = ""
    address: str = ""
    outcome: str = ""
    detail: str = ""
    timings: StageTimes = StageTimes()
    parked_s: float | None = None
    first_step_s: float | None = None

    @property
    def went_remote(self) -> bool:
        """Whether a prefill engine computed it, and its KV came."""
        return self.decision == "remote" and self.outcome == "done"

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is expected. What was held by a prefill engine has no timings."""
        measured = self.timings.measured or self.reason == Reason.HELD
        return not self.went_remote or (measured and self.first_step_s is not None)


@dataclass(frozen=True)
class Answer:
    """One answer: its token ids, at each place the log probabilities of the likeliest tokens, seconds for all of it."""
    token_ids: tuple[int, ...]
    likeliest: tuple[Mapping[int, float], ...]
    took_s: float


def choose_model(models: Sequence[ServedModel], wanted: str | None) -> ServedModel:
    """The model to ask for: the one of that name, else the only one. Names of one model count as one, adapters as none.
    Raises ConfigError where it can't be chosen."""
    if wanted is not None:
        found = [model for model in models if model.id == wanted]
    else:
        bases = [model for model in models if model.parent is None]
        found = bases[:1] if len({model.root for model in bases}) == 1 else []
    if not found:
        raise ConfigError("--model", wanted, f"write one of {', '.join(model.id for model in models[:20]) or 'none'}: "
                          "that is what the server has")
    return found[0]


def prompt_length(wanted: int | None, model: ServedModel) -> int:
    """How many tokens the prompt shall have. Raises ConfigError where prompt and answer are too long for the model."""
    most = None if model.max_model_len is None else model.max_model_len - ANSWER_TOKENS
    if most is not None and most < max(wanted or 1, 1):
        raise ConfigError("--prompt-tokens", wanted, f"the model takes {model.max_model_len} tokens (max_model_len), "
                          f"and the answer has {ANSWER_TOKENS}: write {most} or less")
    return wanted if wanted is not None else min(PROMPT_TOKENS, most if most is not None else PROMPT_TOKENS)


def draw_text(draw: random.Random, words: int) -> str:
    """Text that no cache has: so many random numbers."""
    return " ".join(str(draw.randrange(100_000)) for _ in range(words))


def request_body(model: str, prompt: Sequence[int], place: str, fresh: Mapping[str, object]) -> dict[str, Any]:
    """A completion of this prompt, prefilled at that `place`. `fresh`: what keeps it from using the prefix cache."""
    return {"model": model, "prompt": list(prompt), "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True, "temperature": 0, "seed": 0, "logprobs": 2, "return_tokens_as_token_ids": True,
            "kv_transfer_params": {"pd": place}, **fresh}


def read_answer(body: bytes, took_s: float) -> Answer:
    """The answer to a `request_body`. Raises ValueError for anything else."""
    found = msgspec.json.decode(body, type=_Completion)
    if len(found.choices) != 1 or (shown := found.choices[0].logprobs) is None or not shown.tokens:
        raise ValueError("it has no tokens")
    likeliest = [{_token_id(token): value for token, value in (one or {}).items()} for one in shown.top_logprobs]
    return Answer(tuple(map(_token_id, shown.tokens)), tuple(likeliest), took_s)


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


def _token_id(text: str) -> int:
    return int(text.removeprefix("token_id:"))


def no_flag(url: str) -> Finding:
    """A vLLM without disaggregation answers at the URL."""
    return Finding("server", f"{url} is a vLLM without disaggregation (there is no /pd/status)",
                   f"start it with {_FLAG}, and vllm-pd installed beside it (`vllm-pd doctor` on its machine)")


def judge_remote(report: PromptReport, degraded: str, took_s: float) -> list[Finding]:
    """What became of the prompt that was to be prefilled elsewhere. `degraded`: why the engine has nobody to work with,
    as it says; empty where it has. `took_s`: until the client had its whole answer."""
    if not report.went_remote:
        return list(_stayed(report, degraded))
    where = f"{report.peer[:12]} at {report.address}" if report.address else report.peer[:12] or "a prefill engine"
    cached = f", beside {report.cached_tokens} that the decode engine had" if report.cached_tokens else ""
    first = f" at attempt {report.attempts}" if report.attempts > 1 and report.detail else ""
    found = [Finding("remote", f"prefill engine {where} computed the prompt of {report.tokens} tokens{cached}{first}, "
                     f"reason {report.reason}")]
    times, stages = report.timings, []
    if times.measured:
        stages = [f"queue {_ms(times.queue_s)}", f"claim {_ms(times.claim_s)}", f"prefill {_ms(times.prefill_s)}",
                  f"transfer after it {_ms(times.transfer_s)}"]
    stages += [f"{name} {_ms(seconds)}" for name, seconds in (("parked in all", report.parked_s),
                                                              ("first step", report.first_step_s))
               if seconds is not None]
    found.append(Finding("stages", f"{', '.join(stages)}; the answer of {ANSWER_TOKENS} tokens took {_ms(took_s)}"))
    if times.measured:
        found.append(Finding("kv", _describe_write(times)))
    return found


def _stayed(report: PromptReport, degraded: str) -> Sequence[Finding]:
    """Why the decode engine computed the prompt itself."""
    found = []
    if report.outcome == "done":
        return [Finding("remote", f"prefill engine {report.peer[:12]} computed the prompt, but then the decode engine "
                        "preempted the request and computed it again", "it has too few free KV blocks for what it "
                        "runs: try again when less is open")]
    if report.outcome:
        peer = f"prefill engine {report.peer[:12]}" if report.peer else "no prefill engine"
        found.append(Finding("attempt", f"{peer} had it; that attempt has {report.outcome}: {report.detail}",
                             "the reason is explained in docs/operations.md; `vllm-pd doctor --broker ADDRESS --from "
                             "ENGINE` tries the paths between both engines"))
    because = f"; the engine is degraded, {degraded}" if degraded else ""
    found.append(Finding("remote", f"the prompt of {report.tokens} tokens was prefilled by the decode engine itself, "
                         f"reason {report.reason}{because}", _STAY_CURES.get(report.reason, _OTHER_STAY_CURE)))
    return found


def _describe_write(times: StageTimes) -> str:
    text = f"{three_digits(times.bytes / _MB)} MB"
    if not times.transfer_s:
        return text
    last = times.last_bytes or times.bytes
    rate = f"{three_digits(last / times.transfer_s / _MB)} MB/s"
    return (f"{text} at {rate}" if last == times.bytes else
            f"{text}; the last {three_digits(last / _MB)} MB, after the prompt was computed, at {rate}")


def judge_tokens(remote: Answer, local: Answer) -> Finding:
    """Whether both answers have the same tokens."""
    count = min(len(remote.token_ids), len(local.token_ids))
    place = next((number for number in range(count) if remote.token_ids[number] != local.token_ids[number]), None)
    if place is None and len(remote.token_ids) == len(local.token_ids):
        return Finding("tokens", f"all {count} are those that the decode engine gives alone, from a prompt that it has "
                       f"computed itself; that took {_ms(local.took_s)}")
    if place is None:
        return Finding("tokens", f"{len(remote.token_ids)} came, and {len(local.token_ids)} from the decode engine "
                       "alone", "what ends answers early here? See the server's default sampling parameters")
    gap = _gap(local, place, remote.token_ids[place])
    known = "" if gap is None else f"; alone the engine finds the latter likelier by {gap:.3g} (log probability)"
    cure = ("so small a difference is one of rounding: batches and chunks round differently, two runs of one engine "
            "may differ like this. Try again with other --prompt-tokens" if gap is not None and gap < _TIE else
            "this is no rounding: the KV that came is not what this engine computes. Do both engines have the same "
            "weights, vLLM and drivers? `vllm-pd doctor` on both machines; then report it (CONTRIBUTING.md)")
    return Finding("tokens", f"token {place + 1} is {remote.token_ids[place]} after the remote prefill, and "
                   f"{local.token_ids[place]} from the decode engine alone{known}", cure)


def _gap(local: Answer, place: int, other: int) -> float | None:
    """By how much the local answer's token is likelier than the other one there. None: not known; so it is large."""
    known = local.likeliest[place] if place < len(local.likeliest) else {}
    ours, theirs = known.get(local.token_ids[place]), known.get(other)
    return None if ours is None or theirs is None else ours - theirs


def _ms(seconds: float) -> str:
    return f"{seconds * _MS:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
