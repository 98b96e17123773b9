#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tell in seconds whether the carried vLLM can run on this machine: its compiled kernels under this torch, NIXL, compilers.

    preflight.py            one line for each check; exit status: how many failed
"""
import importlib
import shutil
import subprocess
import sys
import time
import traceback

FAILED = []


def check(name):
    def run(function):
        began_s = time.monotonic()
        try:
            said = function() or "ok"
        except Exception as error:
            FAILED.append(name)
            said = f"FAILED {type(error).__name__}: {error}"
            traceback.print_exc(limit=-3)
        print(f"{name:<12} {time.monotonic() - began_s:6.1f} s  {said}", flush=True)
    return run


def agree(found, right):
    import torch
    torch.cuda.synchronize()
    off = ((found.float() - right).norm() / right.norm()).item()
    if not off < 5e-3:
        raise RuntimeError(f"off by {off}")
    return f"off by {off:.1e}"


@check("versions")
def _():
    found = []
    for name in ("torch", "triton", "transformers", "tokenizers", "numpy", "numba", "llvmlite", "pydantic", "zmq", "msgspec",
                 "google.protobuf", "PIL", "cv2", "aiohttp", "requests", "typing_extensions"):
        try:
            found.append(f"{name} {getattr(importlib.import_module(name), '__version__', '?')}")
        except Exception as error:
            found.append(f"{name}: {type(error).__name__} {error}")
    return "; ".join(found)


@check("machine")
def _():
    import os

    import torch
    about = torch.cuda.get_device_properties(0)
    tools = {one: shutil.which(one) for one in ("gcc", "g++", "nvcc", "ninja", "xz", "zstd", "nvidia-cuda-mps-control")}
    shm = shutil.disk_usage("/dev/shm")
    return (f"{about.name}, {about.total_memory / 2**30:.0f} GiB, torch {torch.__version__} CUDA {torch.version.cuda}, "
            f"{os.cpu_count()} cores, /dev/shm {shm.free / 2**30:.1f} GiB free, without: {[k for k, v in tools.items() if not v]}")


@check("rms_norm")
def _():
    import torch
    import vllm._C_stable_libtorch  # noqa: F401
    x, w = torch.randn(64, 576, device="cuda", dtype=torch.float16), torch.randn(576, device="cuda", dtype=torch.float16)
    out = torch.full_like(x, float("nan"))
    torch.ops._C.rms_norm(out, x, w, 1e-5)
    right = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5) * w.float())
    return agree(out, right)


@check("silu_and_mul")
def _():
    import torch
    x = torch.randn(64, 3072, device="cuda", dtype=torch.float16)
    out = torch.full((64, 1536), float("nan"), device="cuda", dtype=torch.float16)
    torch.ops._C.silu_and_mul(out, x)
    return agree(out, torch.nn.functional.silu(x[:, :1536].float()) * x[:, 1536:].float())


@check("cache+FA3")
def _():
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func
    torch.manual_seed(0)
    tokens, heads, kv_heads, size, block = 77, 9, 3, 64, 16
    q, k, v = (torch.randn(tokens, n, size, device="cuda", dtype=torch.float16) for n in (heads, kv_heads, kv_heads))
    caches = [torch.zeros(12, block, kv_heads, size, device="cuda", dtype=torch.float16) for _ in range(2)]
    table = torch.tensor([[7, 3, 9, 1, 5]], dtype=torch.int32, device="cuda")
    at = torch.arange(tokens, device="cuda")
    slots = table[0].long()[at // block] * block + at % block
    one = torch.ones(1, device="cuda")
    torch.ops._C_cache_ops.reshape_and_cache_flash(k, v, *caches, slots, "auto", one, one)
    lengths = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    out = flash_attn_varlen_func(q=q, k=caches[0], v=caches[1], max_seqlen_q=tokens, max_seqlen_k=tokens,
                                 cu_seqlens_q=torch.tensor([0, tokens], dtype=torch.int32, device="cuda"), seqused_k=lengths,
                                 block_table=table, causal=True, softmax_scale=size**-0.5, fa_version=3)
    right = torch.nn.functional.scaled_dot_product_attention(
        *(one.float().transpose(0, 1)[None] for one in (q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1))), is_causal=True)
    return agree(out, right[0].transpose(0, 1))


@check("triton")
def _():
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
    return agree(x, right)


@check("nixl")
def _():
    import torch
    from nixl._api import nixl_agent, nixl_agent_config
    agent = nixl_agent("preflight", nixl_agent_config(backends=["UCX"]))
    memory = torch.zeros(1 << 20, device="cuda")
    held = agent.register_memory(memory)
    agent.deregister_memory(held)
    return f"plugins {agent.plugin_list}"


@check("plugin")
def _():
    done = subprocess.run([sys.executable, "-c",
                           "from vllm.platforms import current_platform as p; from vllm_pd.v1.required import check_installed as c;"
                           "from vllm_pd.model.installation import find_installation as f; c(); print(p.device_name, f().world.value)"],
                          capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(done.stderr[-800:])
    return done.stdout.strip().splitlines()[-1]


sys.exit(len(FAILED))
