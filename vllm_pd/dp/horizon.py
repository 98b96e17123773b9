# SPDX-License-Identifier: Apache-2.0
"""How many steps ahead to agree on, from measured costs.

Two things cost. Agreed steps that no rank has work for are dummy forwards: at most as many as the horizon, when the
last request ends before its rank expected it. And step requests are messages. Too small a lead costs most: ranks
without work fall asleep before the message about the next step arrives, and all ranks wait for them in the collective.

    lead    ceil(T / t)               a message takes T, a forward t: it must be sent that many steps ahead
    stride  sqrt(2 c / (p t))         a request costs c; a rank runs out of work early with probability p per step

This stride costs least. Per step, requests cost c / stride. An early end wastes stride / 2 forwards on average, which
is p t stride / 2 per step. The sum is least where both parts are equal. (How often to write a checkpoint follows the
same formula: work lost at a failure against the time that writing takes.) A request that ends when its rank expects it,
by length, wastes nothing at any horizon, because `Lookahead.target` never exceeds the remaining forwards.
"""
import math

from vllm_pd.dp.core import Lookahead

MESSAGE_S = 60e-6  # CPU time of one message, for its sender, its receiver and their interpreters
_GAIN = 0.125  # weight of a new sample
_FIRST_RUN_STEPS = 32.0  # how long a rank's work is expected to last before any was seen


class Meter:
    """Measures the forwards and answers of one rank of `size`. `lookahead` is the result. Pure: it takes durations."""

    def __init__(self, size: int, horizon: int):
        self._request_s = MESSAGE_S * (size + 1)  # one message to the coordinator, one to each rank
        self._horizon = horizon
        self._step_s: float | None = None
        self._answer_s: float | None = None
        self._spread_s = 0.0
        self._run_steps = _FIRST_RUN_STEPS
        self._worked = 0
        self.lookahead = self._compute()

    def stepped(self, seconds: float) -> None:
        """A forward has ended after that time."""
        self._step_s = seconds if self._step_s is None else self._step_s + _GAIN * (seconds - self._step_s)
        self.lookahead = self._compute()

    def answered(self, seconds: float) -> None:
        """A step request was answered after that time. Smoothed, with its spread, as in RFC 6298."""
        if self._answer_s is None:
            self._answer_s, self._spread_s = seconds, seconds / 2
        else:
            self._spread_s += 0.25 * (abs(seconds - self._answer_s) - self._spread_s)
            self._answer_s += _GAIN * (seconds - self._answer_s)
        self.lookahead = self._compute()

    def worked(self) -> None:
        """A forward with work has begun."""
        self._worked += 1

    def ran_out(self, early: bool) -> None:
        """This rank has no more work. `early`: it had requested later steps."""
        if not early or not self._worked:
            return
        self._run_steps += _GAIN * (self._worked - self._run_steps)
        self._worked = 0
        self.lookahead = self._compute()

    def _compute(self) -> Lookahead:
        if not self._step_s or self._answer_s is None:
            return Lookahead(1, 1)
        lead = math.ceil((self._answer_s + 4 * self._spread_s) / self._step_s)
        lead = min(max(lead, 1), self._horizon)
        early_end_probability = 1.0 / max(self._run_steps, 1.0)
        stride = round(math.sqrt(2 * self._request_s / (early_end_probability * self._step_s)))
        return Lookahead(lead, min(max(stride, 1), self._horizon - lead + 1))
