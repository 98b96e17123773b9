# SPDX-License-Identifier: Apache-2.0
"""A plugin of vLLM that times how long an engine takes from its wake-up to the step that resumes a request. With
WORKER_SPIN_S each process of the engine spins for so many seconds after a message, instead of one second. With
WIRE_BYTES_PER_S the transfers that a rank makes go over an emulated wire of that speed.

It is found by the metadata that `servers.install_probe` writes. In EngineCore it wraps three of our methods and appends
the seconds to the file that WAKE_PROBE names.
"""

import os
import sys
import time


def install() -> None:
    """Times nothing but in EngineCore's process."""
    if "WORKER_SPIN_S" in os.environ:
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
        SpinCondition.__init__.__defaults__ = (float(os.environ["WORKER_SPIN_S"]), )
    if "WIRE_BYTES_PER_S" in os.environ:
        install_wire(float(os.environ["WIRE_BYTES_PER_S"]))
    if "vllm.v1.engine.core" not in sys.modules or "WAKE_PROBE" not in os.environ:
        return
    from vllm_pd.v1.engine_access import EngineAccess
    from vllm_pd.v1.scheduler import HandoverScheduling

    if "probed" in vars(EngineAccess):
        return
    EngineAccess.probed = True
    times = {"woken": 0.0, "resumed": 0.0}
    wake, resume_parked, schedule = EngineAccess.wake, HandoverScheduling.resume_parked, HandoverScheduling.schedule

    def timed_wake(access):
        if not access._woken.is_set():
            times["woken"] = time.perf_counter()
        wake(access)

    def timed_resume(scheduler, request):
        times["resumed"] = times["woken"]
        resume_parked(scheduler, request)

    def timed_schedule(scheduler, throttle_prefills=False):
        output = schedule(scheduler, throttle_prefills)
        if times["resumed"] and output.total_num_scheduled_tokens:
            with open(os.environ["WAKE_PROBE"], "a") as file:
                file.write(f"{time.perf_counter() - times['resumed']}\n")
            times["resumed"] = 0.0
        return output

    EngineAccess.wake, HandoverScheduling.resume_parked = timed_wake, timed_resume
    HandoverScheduling.schedule = timed_schedule


def install_wire(bytes_per_s: float) -> None:
    """Ranks of this process make their transports behind such a wire."""
    from vllm_pd.transfer.nixl import generations as nixl
    from vllm_pd.transfer.slow import EmulatedWire, SlowTransport

    if "behind_wire" in vars(nixl):
        return
    real = nixl.NixlGenerations

    def behind_wire(name, caches, description, **options):
        block_bytes = sum(cache.nbytes for cache in caches) // description.num_blocks
        return SlowTransport(real(name, caches, description, **options), EmulatedWire(0.0, bytes_per_s), block_bytes)

    nixl.NixlGenerations = nixl.behind_wire = behind_wire
