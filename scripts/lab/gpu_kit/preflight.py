#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tell in a minute whether the carried vLLM can run on this machine: its kernels under this torch, NIXL, Triton.

    preflight.py            one line for each check; the exit status is how many failed

Each kernel's result is compared with the same computed by torch in float32: a kernel that loads may still be wrong.
"""
from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import time
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MOST_OFF = 5e-3  # relative; right kernels are off by 3e-4 in float16
PLUGIN_S = 80
SHOWN = ("torch", "triton", "transformers", "tokenizers", "numpy", "numba", "llvmlite", "pydantic", "zmq", "msgspec",
         "google.protobuf", "PIL", "cv2", "aiohttp", "requests")
TOOLS = ("gcc", "g++", "nvcc", "ninja", "xz")
PLUGIN = """
from vllm.platforms import current_platform
from vllm_pd.model.installation import find_installation
from vllm_pd.v1.required import check_installed
check_installed()
print(current_platform.device_name, find_installation().world.value)
"""


def compare(found: torch.Tensor, right: torch.Tensor) -> str:
    """How far a kernel's result is off. Raises RuntimeError if it is too far."""
    import torch

    torch.cuda.synchronize()
    off = ((found.float() - right).norm() / right.norm()).item()
    if not off < MOST_OFF:  # a NaN is not, either
        raise RuntimeError(f"off by {off}")
    return f"off by {off:.1e}"


def show_versions() -> str:
    """Versions of what the machine brings, and what cannot be imported."""
    found = []
    for name in SHOWN:
        try:
            found.append(f"{name} {getattr(importlib.import_module(name), '__version__', '?')}")
        except Exception as error:  # whatever a package raises: the kit may do without it
            found.append(f"{name}: {type(error).__name__} {error}")
    return "; ".join(found)


def show_machine() -> str:
    """GPU, cores, shared memory, and tools that are not there."""
    import torch

    about = torch.cuda.get_device_properties(0)
    without = [name for name in TOOLS if shutil.which(name) is None]
    return (f"{about.name}, {about.total_memory / 2**30:.0f} GiB, torch {torch.__version__} CUDA {torch.version.cuda}, "
            f"{os.cpu_count()} cores, /dev/shm {shutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB free, "
            f"without: {', '.join(without) or 'nothing'}")


def check_rms_norm() -> str:
    """vLLM's library of kernels loads, and one of them is right."""
    import torch
    import vllm._C_stable_libtorch  # noqa: F401

    x = torch.randn(64, 576, device="cuda", dtype=torch.float16)
    weight = torch.randn(576, device="cuda", dtype=torch.float16)
    out = torch.full_like(x, float("nan"))
    torch.ops._C.rms_norm(out, x, weight, 1e-5)
    return compare(out, x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float())


def check_silu_and_mul() -> str:
    """Another kernel of that library."""
    import torch

    x = torch.randn(64, 3072, device="cuda", dtype=torch.float16)
    out = torch.full((64, 1536), float("nan"), device="cuda", dtype=torch.float16)
    torch.ops._C.silu_and_mul(out, x)
    return compare(out, torch.nn.functional.silu(x[:, :1536].float()) * x[:, 1536:].float())


def check_attention() -> str:
    """Keys and values go into scattered blocks of a cache, and FlashAttention 3 reads them from there."""
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    torch.manual_seed(0)
    tokens, heads, kv_heads, size, block = 77, 9, 3, 64, 16
    q, k, v = (torch.randn(tokens, n, size, device="cuda", dtype=torch.float16) for n in (heads, kv_heads, kv_heads))
    keys, values = (torch.zeros(12, block, kv_heads, size, device="cuda", dtype=torch.float16) for _ in range(2))
    table = torch.tensor([[7, 3, 9, 1, 5]], dtype=torch.int32, device="cuda")
    at = torch.arange(tokens, device="cuda")
    slots = table[0].long()[at // block] * block + at % block
    one = torch.ones(1, device="cuda")
    torch.ops._C_cache_ops.reshape_and_cache_flash(k, v, keys, values, slots, "auto", one, one)
    ends = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    out = flash_attn_varlen_func(q=q, k=keys, v=values, max_seqlen_q=tokens, max_seqlen_k=tokens, cu_seqlens_q=ends,
                                 seqused_k=ends[1:], block_table=table, causal=True, softmax_scale=size**-0.5,
                                 fa_version=3)
    grouped = (q, k.repeat_interleave(heads // kv_heads, 1), v.repeat_interleave(heads // kv_heads, 1))
    right = torch.nn.functional.scaled_dot_product_attention(*(x.float().transpose(0, 1)[None] for x in grouped),
                                                             is_causal=True)
    return compare(out, right[0].transpose(0, 1))


def check_triton() -> str:
    """Triton compiles a kernel, for which it needs a C compiler."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def double(x, n, B: tl.constexpr):
        at = tl.program_id(0) * B + tl.arange(0, B)
        tl.store(x + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

    x = torch.randn(1000, device="cuda")
    right = x * 2
    double[(8, )](x, 1000, B=128)
    return compare(x, right)


def check_nixl() -> str:
    """NIXL registers memory of the GPU."""
    import torch
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("preflight", nixl_agent_config(backends=["UCX"]))
    agent.deregister_memory(agent.register_memory(torch.zeros(1 << 20, device="cuda")))
    return f"plugins {agent.plugin_list}"


def check_plugin() -> str:
    """vLLM finds its CUDA platform and our plugin, and has all names that the plugin uses. In a process of its
    own, as an engine starts."""
    done = subprocess.run([sys.executable, "-c", PLUGIN], capture_output=True, text=True, timeout=PLUGIN_S)
    if done.returncode:
        raise RuntimeError(done.stderr[-800:])
    return done.stdout.strip().splitlines()[-1]


CHECKS = {"versions": show_versions, "machine": show_machine, "rms_norm": check_rms_norm,
          "silu_and_mul": check_silu_and_mul, "cache+FA3": check_attention, "triton": check_triton, "nixl": check_nixl,
          "plugin": check_plugin}


def main() -> int:
    failed = 0
    for name, check in CHECKS.items():
        began_s = time.monotonic()
        try:
            said = check()
        except Exception as error:  # a failed check does not end the others
            failed += 1
            said = f"FAILED {type(error).__name__}: {error}"
            traceback.print_exc(limit=-3)
        print(f"{name:<12} {time.monotonic() - began_s:6.1f} s  {said}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
