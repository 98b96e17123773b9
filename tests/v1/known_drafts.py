# SPDX-License-Identifier: Apache-2.0
"""Drafts beside recurrent states, on a CPU engine that is right.

vLLM 0.32's CPU build updates both parts of a Mamba-2 state as if all drafts were accepted. Its convolution does not
read how many were. Its other kernel does not, either: it begins with a request's first block whatever was accepted,
goes on in that block, and so leaves there the state after the last draft in place of the one after the first token.
`update_convolution` and `update_states` are these kernels as vLLM's Triton forms have them. And a tiny model of random
weights repeats nothing, so an n-gram drafter would have nothing accepted: here it knows the answers.
"""
import functools
import json
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional


def draft_known(file: str) -> None:
    """From now on an engine that is forked from this process, with `ngram`, drafts as the sequences of tokens in this
    file go on, and does so wrongly now and then: of `count` drafts the first 0 to `count` are right."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    update = GPUModelRunner._update_states

    @functools.wraps(update)
    def replacing(runner: Any, step: Any) -> Any:
        GPUModelRunner._update_states = update
        _replace(file)  # with the first step: vLLM looks at all kernels that are imported before it loads a model
        return update(runner, step)

    GPUModelRunner._update_states = replacing


def _replace(file: str) -> None:
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    def propose(_: Any, count: int, sampled: list[list[int]], lengths: Any, token_ids: Any,
                *more: Any, **others: Any) -> list[list[int]]:
        known = json.loads(Path(file).read_text(encoding="utf-8"))
        return [_go_on(known, token_ids[row, :lengths[row]].tolist(), count) if one else []
                for row, one in enumerate(sampled)]

    NgramProposer.propose = propose
    mamba_mixer2.causal_conv1d_update = update_convolution
    mamba_mixer2.selective_state_update = update_states


def _go_on(known: list[list[int]], tokens: list[int], count: int) -> list[int]:
    for one in known:
        if one[:len(tokens)] == tokens:
            right = zlib.crc32(json.dumps(tokens).encode()) % (count + 2)  # one more: nothing is drafted
            drafts = one[len(tokens):len(tokens) + count]
            return [] if right > count else [token if at < right else 7 for at, token in enumerate(drafts)]
    return []


def update_convolution(x: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                       activation: str | None, conv_state_indices: torch.Tensor,
                       num_accepted_tokens: torch.Tensor | None, query_start_loc: torch.Tensor | None,
                       **_: Any) -> torch.Tensor:
    """`x`: [tokens, channels] of all requests, `conv_state`: [blocks, channels, tokens that are kept], `weight`:
    [channels, width]. A request's state is in its first block, behind as many tokens as were accepted but one."""
    rows, past, out = len(conv_state_indices), weight.shape[1] - 1, torch.empty_like(x)
    starts = range(rows + 1) if query_start_loc is None else query_start_loc.tolist()
    accepted = [1] * rows if num_accepted_tokens is None else num_accepted_tokens.tolist()
    for row, block in enumerate(conv_state_indices.reshape(rows, -1)[:, 0].tolist()):
        first, end, kept = starts[row], starts[row + 1], conv_state[block]
        before = kept[:, accepted[row] - 1:accepted[row] - 1 + past]
        joined = torch.cat([before, x[first:end].T.to(kept.dtype)], dim=1)
        found = functional.conv1d(joined[None].to(weight.dtype), weight[:, None], bias, groups=len(weight))[0]
        out[first:end] = (functional.silu(found) if activation else found).T.to(out.dtype)
        kept[:, :joined.shape[1] - 1] = joined[:, 1:].clone()
    return out


def update_states(state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
                  c: torch.Tensor, d: torch.Tensor, dt_bias: torch.Tensor, dt_softplus: bool,
                  state_batch_indices: torch.Tensor, dst_state_batch_indices: torch.Tensor, out: torch.Tensor,
                  num_accepted_tokens: torch.Tensor | None, cu_seqlens: torch.Tensor | None, **_: Any) -> None:
    """`state`: [blocks, heads, size, state size], `x`, `dt` and `out`: [tokens, heads, size] of all requests, `b` and
    `c`: [tokens, groups, state size]. A request's state is in the block of the last token that was accepted; the one
    after its n-th token goes to its n-th block. Each token is one call of vLLM's kernel, which is right for one."""
    from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import selective_state_update
    rows = len(state_batch_indices)
    starts = range(rows + 1) if cu_seqlens is None else cu_seqlens.tolist()
    accepted = [1] * rows if num_accepted_tokens is None else num_accepted_tokens.tolist()
    sources = state_batch_indices.reshape(rows, -1).tolist()
    for row, blocks in enumerate(dst_state_batch_indices.reshape(rows, -1).tolist()):
        one = state[sources[row][accepted[row] - 1]].clone()[None]
        for block, token in zip(blocks, range(starts[row], starts[row + 1]), strict=False):
            at = slice(token, token + 1)
            selective_state_update(one, x[at], dt[at], a, b[at], c[at], d, dt_bias=dt_bias, dt_softplus=dt_softplus,
                                   out=out[at], null_block_id=-1)
            state[block] = one[0]
