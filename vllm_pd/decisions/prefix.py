# SPDX-License-Identifier: Apache-2.0
"""Whether a prefill engine reads the beginning of a prompt from the decode engine's cache, or computes it.

Both costs are estimated from what this engine has measured: how fast KV moved between it and its peers, and how fast it
computed prompts. The start values are replaced by measurements soon. The estimate decides about time only; a wrong one
costs some of it.
"""
from enum import StrEnum

from vllm_pd.decisions.job_order import START_TOKENS_PER_S
from vllm_pd.decisions.measured import MeasuredRate, StepSpeed

READ_OVERHEAD_S = 0.005  # a read costs a prompt one step at least
START_BYTES_PER_S = 2e9
MIN_BYTES = 1 << 20  # what is smaller tells about latencies, not about rates


class PrefixReads(StrEnum):
    """The values of the setting `prefix_reads`."""
    AUTO = "auto"  # read where it takes less time than computing
    ALWAYS = "always"
    NEVER = "never"


class PrefixCost:
    """One per prefill engine. `token_bytes` is the KV of one token, over all layers and ranks. `wanted` may be changed
    at any time."""

    def __init__(self, wanted: PrefixReads, token_bytes: int, speed: StepSpeed) -> None:
        self.wanted = wanted
        self._token_bytes = token_bytes
        self._speed = speed
        self._moves = MeasuredRate(START_BYTES_PER_S)

    def moved(self, tokens: int, seconds: float) -> None:
        """The KV of so many tokens went from one engine to another in this time."""
        if tokens * self._token_bytes >= MIN_BYTES and seconds > 0:
            self._moves.observe(tokens * self._token_bytes, seconds)

    def read_s(self, tokens: int) -> float:
        """How long a read of so many tokens' KV would take."""
        return READ_OVERHEAD_S + tokens * self._token_bytes / self._moves.per_s

    def compute_s(self, tokens: int) -> float:
        """How long computing them would take."""
        return tokens / (self._speed.tokens_per_s or START_TOKENS_PER_S)

    def worth_reading(self, tokens: int) -> bool:
        """Whether to read these tokens' KV, which the peer has and this engine has not."""
        if tokens <= 0 or self.wanted is PrefixReads.NEVER:
            return False
        return self.wanted is PrefixReads.ALWAYS or self.read_s(tokens) < self.compute_s(tokens)
