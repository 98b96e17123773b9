# SPDX-License-Identifier: Apache-2.0
"""When a prompt would have its first token if it is prefilled here, and if a prefill engine does it. Pure.

Here prompts are computed in the order in which they came, in steps of a bounded number of tokens, together with the
running decodes. A step takes `step_s`, and `1 / tokens_per_s` more for each prompt token in it. There the order is that
of `vllm_pd.decisions.job_order`: a prompt passes longer ones, as far as they are this engine's and so known, and waits
for the step that is under way; later ones that are shorter pass it. All rates are what the engines have measured
(`vllm_pd.decisions.measured`).

Each input can only push one way: more work or a slower engine here speaks for a peer, more work, a slower engine or a
slower hand-over there speaks against it. `tests/unit/test_expected.py` has that as properties.
"""
import math
from collections.abc import Iterable

import msgspec

from vllm_pd.decisions.job_order import JobOrder

MIN_TOKENS_PER_S = 1e-3  # a slower engine counts as this fast: no time is infinite
ITL_TOLERANCE = 0.1  # a step that is at most so much longer than one without a prompt does not break the target


class Here(msgspec.Struct, frozen=True):
    """This decode engine. `tokens_before`: prompt tokens that are computed here first. `tokens_per_s`: of prompts,
    beyond the time of a step without any; 0: not known, at no engine. `step_s`: a step of the running decodes without
    a prompt, 0 where there was none. `decodes`: requests that decode now. `batch_tokens`: the most tokens of a step.
    `prompts_per_s`: how many prompts come, wherever they are prefilled."""
    tokens_before: int
    tokens_per_s: float
    step_s: float
    decodes: int
    batch_tokens: int
    prompts_per_s: float = 0.0


class There(msgspec.Struct, frozen=True):
    """The prefill engines. `queued_tokens`: prompt tokens that wait at the broker, which no engine has taken. `busy`:
    for each prefill engine that fits (prompt tokens that it has taken and not computed, tokens per second). Then what
    follows the computation of this prompt: `transfer_s`, its KV is written; `overhead_s`, all that is neither
    waiting, computing nor writing. `prompts_per_s`: how many prompts this decode engine hands over. `order`: how their
    jobs are ordered, None: first in, first out. `ours`: for each engine in `busy` this engine's jobs there, (tokens,
    seconds since it has them), which count in `busy`. `later_tokens`: of some prompts like those that come later.
    `paths_s`: for each engine in `busy` what takes the place of `transfer_s`, empty: nothing does."""
    queued_tokens: int
    busy: tuple[tuple[int, float], ...]
    transfer_s: float
    overhead_s: float
    prompts_per_s: float = 0.0
    order: JobOrder | None = None
    ours: tuple[tuple[tuple[int, float], ...], ...] = ()
    later_tokens: tuple[int, ...] = ()
    paths_s: tuple[float, ...] = ()

    @property
    def transfers_s(self) -> tuple[float, ...]:
        """How long the KV is written afterwards, for each engine in `busy`."""
        return self.paths_s or (self.transfer_s, ) * len(self.busy)


class Expected(msgspec.Struct, frozen=True):
    """What is expected of a prompt with `tokens` to compute. Seconds from now to the first token: `here_s`, `there_s`.
    Seconds that later prompts would wait for it, all together: `others_here_s`, `others_there_s`. `step_s`: the longest
    step that the running decodes would wait for if it is computed here. `here` and `there` are the inputs."""
    tokens: int
    here_s: float
    there_s: float
    others_here_s: float
    others_there_s: float
    step_s: float
    here: Here
    there: There

    @property
    def sooner_there(self) -> bool:
        """Whether a prefill engine is better for the first tokens: of this prompt, and of those that come after it."""
        return self.there_s + self.others_there_s < self.here_s + self.others_here_s

    def breaks(self, itl_target_s: float | None) -> bool:
        """Whether running decodes would wait for a step that is longer than the target, because of this prompt."""
        if itl_target_s is None or not self.here.decodes:
            return False
        return self.step_s > max(itl_target_s, (1 + ITL_TOLERANCE) * self.here.step_s)

    def explained(self) -> str:
        """All inputs and results in one line."""
        here, there = self.here, self.there
        busy = ", ".join(f"{tokens} tokens at {rate:.0f}/s" for tokens, rate in there.busy)
        transfers = ", ".join(f"{seconds:.3f}" for seconds in there.paths_s or (there.transfer_s, ))
        return (
            f"here {self.here_s:.3f} s and {self.others_here_s:.3f} s of others ({here.tokens_before} tokens before it,"
            f" {here.tokens_per_s:.0f} tokens/s, {here.decodes} decoding in steps of {here.step_s:.4f} s, with this "
            f"prompt {self.step_s:.4f} s, {here.prompts_per_s:.2f} prompts/s), there {self.there_s:.3f} s and "
            f"{self.others_there_s:.3f} s of others ({there.queued_tokens} tokens queued, prefill engines: {busy}; "
            f"transfer {transfers} s, overhead {there.overhead_s:.3f} s, {there.prompts_per_s:.2f} "
            "prompts/s)")


def expect(tokens: int, here: Here, there: There) -> Expected | None:
    """Both times for a prompt with so many tokens to compute, at least 1. None where there is nothing to compare: no
    prefill engine, or no engine whose speed is known."""
    if here.tokens_per_s <= 0 or not there.busy or min(rate for _, rate in there.busy) <= 0:
        return None
    rate = max(MIN_TOKENS_PER_S, here.tokens_per_s)
    most = max(1, here.batch_tokens - here.decodes)  # prompt tokens of one step
    work = here.tokens_before + tokens
    before_s = math.ceil(here.tokens_before / most) * here.step_s + here.tokens_before / rate
    here_s = math.ceil(work / most) * here.step_s + work / rate
    # A peer computes it, in a step of its own; then its KV is written, and a step here makes the token.
    begun_s, computing_s, transfer_s = _there_s(tokens, there)
    passed_s, others_there_s = _later_s(tokens, begun_s, computing_s, here.step_s, there)
    there_s = begun_s + computing_s + passed_s + transfer_s + there.overhead_s + 2 * here.step_s
    return Expected(tokens, here_s, there_s,
                    _others_s(before_s, here_s - before_s, here.prompts_per_s),
                    others_there_s, here.step_s + min(most, work) / rate, here, there)


def _others_s(before_s: float, takes_s: float, prompts_per_s: float, pass_until_s: float = 0.0,
              step_s: float = 0.0) -> float:
    """How long later prompts wait for one that begins in `before_s` and takes so long. Who comes before it begins waits
    for all of it, who comes while it is computed for what is left. But those that come within `pass_until_s` pass it:
    they wait for half a step at most."""
    left_s = min(takes_s, max(0.0, before_s + takes_s - pass_until_s))  # of it, when nobody passes it any more
    steps_s = _sum_below(takes_s, step_s / 2) - _sum_below(left_s, step_s / 2)
    return prompts_per_s * (takes_s * max(0.0, before_s - pass_until_s) + left_s * left_s / 2 + steps_s)


def _sum_below(value: float, most: float) -> float:
    """The integral of `min(x, most)` from 0 to `value`."""
    low = min(value, most)
    return low * low / 2 + most * (value - low)


def _later_s(tokens: int, begun_s: float, computing_s: float, step_s: float, there: There) -> tuple[float, float]:
    """What a prompt that begins there in `begun_s` waits for later ones that pass it, and they, all together, for it.
    They come to all engines alike."""
    per_s, order, rate = there.prompts_per_s / len(there.busy), there.order, tokens / computing_s
    if order is None or not there.later_tokens:
        return 0.0, _others_s(begun_s, computing_s + step_s, per_s)
    due_s, passed_s, others_s = order.due_s(0.0, tokens, rate), 0.0, 0.0
    for later in there.later_tokens:
        pass_until_s = max(0.0, due_s - order.due_s(0.0, later, rate))
        passed_s += per_s * later / rate * min(pass_until_s, begun_s + computing_s)
        others_s += _others_s(begun_s, computing_s + step_s, per_s, pass_until_s, order.step_s)
    return passed_s / len(there.later_tokens), others_s / len(there.later_tokens)


def _there_s(tokens: int, there: There) -> tuple[float, float, float]:
    """When the prefill engine could begin from which the KV would be here first, how long it computes, and how long the
    writing goes on. A job that waits at the broker goes to the engine that is free first, and passes nobody before."""
    ends = [(done / max(MIN_TOKENS_PER_S, rate), max(MIN_TOKENS_PER_S, rate)) for done, rate in there.busy]
    begun_s = _begun_s(there.queued_tokens, sorted(ends))
    if there.order is not None and there.ours and not there.queued_tokens:
        begun_s = 0.0
        ends = [(_turn_s(tokens, end_s, rate, ours, there.order), rate)
                for (end_s, rate), ours in zip(ends, there.ours, strict=True)]
    return min(((max(begun_s, end_s), tokens / rate, transfer_s)
                for (end_s, rate), transfer_s in zip(ends, there.transfers_s, strict=True)), key=sum)


def _turn_s(tokens: int, end_s: float, rate: float, ours: Iterable[tuple[int, float]], order: JobOrder) -> float:
    """When an engine that has computed all its jobs in `end_s` begins a new one of so many tokens: before those of ours
    that are due later."""
    due_s = order.due_s(0.0, tokens, rate)
    passes_s = min(end_s, sum(job / rate for job, age_s in ours if order.due_s(-age_s, job, rate) > due_s))
    return end_s - passes_s + min(passes_s, order.step_s / 2)


def _begun_s(queued: float, ends: Iterable[tuple[float, float]]) -> float:
    """When all that is queued is given out, if each engine is free at its time and then works at its rate."""
    level_s, together = 0.0, 0.0
    for end_s, rate in ends:
        until = (end_s - level_s) * together
        if together and until >= queued:
            break
        queued -= until
        level_s, together = end_s, together + rate
    return level_s + max(0.0, queued) / together
