# SPDX-License-Identifier: Apache-2.0
"""The probe of a group in which a test may shorten the time that a call waits for ranks that are not told of it. With
a short one from the start, any call would fail where a machine holds a rank up for as long."""

from vllm_pd.bench.dp.probe import StepProbe


class CallWaitProbe(StepProbe):
    """For `worker_extension_cls`. `probe_start` comes first."""

    def probe_call_wait(self, seconds: float) -> float:
        """From now on `call_wait_s` is that. Gives what it was."""
        calls = self._probe_engine.dp_sync.calls
        before, calls.wait_s = calls.wait_s, seconds
        return before
