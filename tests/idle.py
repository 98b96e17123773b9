# SPDX-License-Identifier: Apache-2.0
"""What this process uses while nothing is asked of it."""
import time

WINDOWS = 3  # in some of which the machine may have had something of its own to do


def least_used_s(window_s: float) -> float:
    """Processor time of the whole process in the quietest of some windows of that length."""
    used_s = []
    for _ in range(WINDOWS):
        before_s = time.process_time()
        time.sleep(window_s)
        used_s.append(time.process_time() - before_s)
    return min(used_s)
