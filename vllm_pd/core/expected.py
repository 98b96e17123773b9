# SPDX-License-Identifier: Apache-2.0
"""When a prompt would have its first token if it is prefilled here, and if a prefill engine does it. Pure.

The model of an engine is the same on both sides: prompts are computed in the order in which they came, in steps of a
bounded number of tokens, together with the running decodes. A step takes `step_s`, and `1 / tokens_per_s` more for each
prompt token in it. All rates are what the engines have measured (`vllm_pd.core.measured`).

Each input can only push one way: more work or a slower engine here speaks for a peer, more work, a slower engine or a
slower hand-over there speaks against it. `tests/unit/test_expected.py` has that as properties.
"""
import math
from collections.abc import Iterable

import msgspec

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
    waiting, computing nor writing. `prompts_per_s`: how many prompts this decode engine hands over."""
    queued_tokens: int
    busy: tuple[tuple[int, float], ...]
    transfer_s: float
    overhead_s: float
    prompts_per_s: float = 0.0


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
        return (
            f"here {self.here_s:.3f} s and {self.others_here_s:.3f} s of others ({here.tokens_before} tokens before it,"
            f" {here.tokens_per_s:.0f} tokens/s, {here.decodes} decoding in steps of {here.step_s:.4f} s, with this "
            f"prompt {self.step_s:.4f} s, {here.prompts_per_s:.2f} prompts/s), there {self.there_s:.3f} s and "
            f"{self.others_there_s:.3f} s of others ({there.queued_tokens} tokens queued, prefill engines: {busy}; "
            f"transfer {there.transfer_s:.3f} s, overhead {there.overhead_s:.3f} s, {there.prompts_per_s:.2f} "
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
    begun_s, computing_s = _there_s(tokens, there)
    there_s = begun_s + computing_s + there.transfer_s + there.overhead_s + 2 * here.step_s
    return Expected(tokens, here_s, there_s,
                    _others_s(before_s, here_s - before_s, here.prompts_per_s),
                    _others_s(begun_s, computing_s + here.step_s, there.prompts_per_s / len(there.busy)),
                    here.step_s + min(most, work) / rate, here, there)


def _others_s(before_s: float, takes_s: float, prompts_per_s: float) -> float:
    """How long later prompts wait for one that begins in `before_s` and takes so long. Who comes before it begins waits
    for all of it, who comes while it is computed for half of it on average."""
    return prompts_per_s * takes_s * (before_s + takes_s / 2)


def _there_s(tokens: int, there: There) -> tuple[float, float]:
    """When the prefill engine that would end first could begin, after all that was queued before, and how long it
    computes. A queued job goes to the engine that is free first."""
    ends = sorted((done / max(MIN_TOKENS_PER_S, rate), max(MIN_TOKENS_PER_S, rate)) for done, rate in there.busy)
    begun_s = _begun_s(there.queued_tokens, ends)
    return min(((max(begun_s, end_s), tokens / rate) for end_s, rate in ends), key=sum)


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
