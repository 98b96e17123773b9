# SPDX-License-Identifier: Apache-2.0
"""What `vllm-pd doctor` says of a GPU machine: driver, device, compiled kernels, NIXL's build, shared memory.

The facts are read by a process of its own, because a wrong driver or library may end it. What they mean is decided by
`judge_gpu`, which needs no GPU.
"""

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import msgspec

from vllm_pd.model.installation import version_of
from vllm_pd.ops.finding import Finding, run_native

LEAST_SHM_BYTES = 256 << 20  # vLLM's ranks send each other messages through it, and UCX what processes of a host share
SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
DESCRIBE = """
import ctypes, importlib.util, json
import torch

def words(error):
    return (str(error).strip().splitlines() or [repr(error)])[0]

found = {"cuda": torch.version.cuda or "", "driver": "", "error": "", "name": "", "capability": [], "kernels": ""}
try:
    number = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    found["driver"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
except OSError:
    pass
try:
    torch.cuda.init()
    found["name"], found["capability"] = torch.cuda.get_device_name(0), list(torch.cuda.get_device_capability(0))
except Exception as error:
    found["error"] = words(error)
if found["name"]:
    try:
        names = [name for name in ("_C_stable_libtorch", "_C") if importlib.util.find_spec("vllm." + name)]
        if names:
            importlib.import_module("vllm." + names[0])
            row = torch.ones(1, 64, device="cuda", dtype=torch.float16)
            torch.ops._C.rms_norm(torch.empty_like(row), row, row[0].clone(), 1e-5)
            torch.cuda.synchronize()
    except Exception as error:
        found["kernels"] = words(error)
print(json.dumps(found))
"""


class GpuFacts(msgspec.Struct, frozen=True):
    """What DESCRIBE has found. `cuda`: which CUDA torch was built for; `driver`: the newest that the driver knows, ""
    without a driver. `error`: why torch can use no device; `kernels`: why a kernel of vLLM does not run."""
    cuda: str = ""
    driver: str = ""
    error: str = ""
    name: str = ""
    capability: list[int] = []
    kernels: str = ""


def check_gpu(v1: bool) -> Iterator[Finding]:
    """For a torch that was built for CUDA."""
    described = run_native("gpu", DESCRIBE, "run `nvidia-smi`, and `python -c 'import torch'`: one of them says why")
    if not described.ok:
        yield described
        return
    installed = [name for name in ("nixl-cu12", "nixl-cu13") if version_of(name)]
    shm_bytes = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    yield from judge_gpu(msgspec.json.decode(described.fact, type=GpuFacts), installed, shm_bytes,
                         v1 and find_spec("flashinfer") is None and os.environ.get(SAMPLER) != "0")


def judge_gpu(facts: GpuFacts, nixl: Sequence[str], shm_bytes: int, sampler_fails: bool) -> Iterator[Finding]:
    """The findings. `nixl`: the builds of NIXL that are installed; `sampler_fails`: vLLM will import a FlashInfer that
    is not there."""
    what = f"torch for CUDA {facts.cuda}, driver for CUDA {facts.driver or 'none'}"
    if not facts.driver:
        yield Finding("gpu", f"{what}: there is no libcuda.so.1", "install NVIDIA's driver; in a container, start it "
                      "with `--gpus all`")
    elif _version(facts.driver)[:1] < _version(facts.cuda)[:1]:
        yield Finding("gpu", what, f"install a driver for CUDA {facts.cuda}, or a torch for CUDA {facts.driver}")
    elif facts.error:
        yield Finding("gpu", f"{what}: {facts.error}", "look at `nvidia-smi`, and at CUDA_VISIBLE_DEVICES="
                      f"{os.environ.get('CUDA_VISIBLE_DEVICES', '(not set)')}")
    elif facts.kernels:
        yield Finding("gpu", f"{facts.name}, compute capability {'.'.join(map(str, facts.capability))}: a kernel of "
                      f"vllm does not run: {facts.kernels}", "install a vllm that was built for this device and this "
                      "torch")
    else:
        yield Finding("gpu", f"{facts.name}; {what}")
    wanted = f"nixl-cu{(*_version(facts.cuda), 0)[0]}"
    if nixl and wanted not in nixl:
        yield Finding("nixl", f"{', '.join(nixl)} beside a torch for CUDA {facts.cuda}",
                      f"pip install --no-deps {wanted}=={version_of(nixl[0])}")
    if sampler_fails:
        yield Finding("sampler", "vllm's sampler imports flashinfer, which is not installed: each engine ends with an "
                      "ImportError", f"install the flashinfer-python that vllm requires, or set {SAMPLER}=0")
    if shm_bytes < LEAST_SHM_BYTES:
        yield Finding("shm", f"/dev/shm has {shm_bytes >> 20} MiB", "start the container with `--ipc host`, or with "
                      "`--shm-size 2g`")


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))
