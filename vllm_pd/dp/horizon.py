# SPDX-License-Identifier: Apache-2.0
"""How far ahead to agree: the costs, measured.

Two things cost. Agreed steps that nobody has work for are dummy forwards; there are at most as many as the horizon,
when the last request ends before its rank expected it. And asks are messages. Too small a lead costs most: ranks
without work fall asleep before the word of the next step arrives, and everyone waits in the collective for them.

    lead    ceil(T / t)               the word takes T, a forward t: it has to leave that many steps ahead
    stride  sqrt(2 c / (p t))         an ask costs c; a rank runs out of work early with probability p a step

The second is the stride that costs least: asks cost c / stride a step, an early end wastes stride / 2 forwards on
average, so p t stride / 2 a step; the sum is least where both are equal. (The same as how often to write a checkpoint:
work lost at a failure against the time that writing takes.) Requests that end when their rank expects it, by length,
waste nothing, whatever the horizon is: `Reach.target` is bounded by what is left.
"""
import math

from vllm_pd.dp.core import Reach

MESSAGE_S = 60e-6  # processor time that one message costs its sender, its receiver and their interpreters
_GAIN = 0.125  # weight of a new sample
_FIRST_RUN_STEPS = 32.0  # a rank's work is expected to last that long before any was seen


class Meter:
    """Measures one rank's forwards and answers; `reach` is what follows. Pure: durations in, numbers out."""

    def __init__(self, size: int, horizon: int):
        self._ask_s = MESSAGE_S * (size + 1)  # one to the coordinator, one to each rank
        self._horizon = horizon
        self._step_s: float | None = None
        self._answer_s: float | None = None
        self._spread_s = 0.0
        self._run_steps = _FIRST_RUN_STEPS
        self._worked = 0
        self.reach = self._compute()

    def stepped(self, seconds: float) -> None:
        """A forward took so long."""
        self._step_s = seconds if self._step_s is None else self._step_s + _GAIN * (seconds - self._step_s)
        self.reach = self._compute()

    def answered(self, seconds: float) -> None:
        """The answer to an ask took so long. Smoothed, with its spread, as RFC 6298 does."""
        if self._answer_s is None:
            self._answer_s, self._spread_s = seconds, seconds / 2
        else:
            self._spread_s += 0.25 * (abs(seconds - self._answer_s) - self._spread_s)
            self._answer_s += _GAIN * (seconds - self._answer_s)
        self.reach = self._compute()

    def worked(self) -> None:
        """A forward with work has begun."""
        self._worked += 1

    def ran_out(self, early: bool) -> None:
        """This rank has no more work; `early`: before the last step that it had asked for."""
        if not early or not self._worked:
            return
        self._run_steps += _GAIN * (self._worked - self._run_steps)
        self._worked = 0
        self.reach = self._compute()

    def _compute(self) -> Reach:
        if not self._step_s or self._answer_s is None:
            return Reach(1, 1)
        lead = math.ceil((self._answer_s + 4 * self._spread_s) / self._step_s)
        lead = min(max(lead, 1), self._horizon)
        hazard = 1.0 / max(self._run_steps, 1.0)
        stride = round(math.sqrt(2 * self._ask_s / (hazard * self._step_s)))
        return Reach(lead, min(max(stride, 1), self._horizon - lead + 1))
