# SPDX-License-Identifier: Apache-2.0
"""B115: what vLLM's CPU build adds to tokens without an adapter, and that it adds nothing with ours. Random weights."""
import importlib

import pytest
import torch

from vllm_pd.v1 import cpu_adapters

SLOTS = torch.tensor([1, -1, 0, -1, 1])  # of five tokens; -1: none


@pytest.fixture
def ops():
    """The functions that the CPU calls, as they are in vLLM before and after."""
    modules = [importlib.import_module(name) for name in cpu_adapters._CALLED_IN]
    stock = {(module, name): getattr(module, name) for module in modules for name in cpu_adapters.EXPANDING}
    yield modules[1]
    for (module, name), function in stock.items():
        setattr(module, name, function)


def expanded(call, output: torch.Tensor, *more: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(len(SLOTS), 8, generator=draw)
    call(inputs, torch.randn(2, 1, 16, 8, generator=draw), output, SLOTS, *more)
    return output


@pytest.mark.parametrize("name, more", [("bgmv_expand", ()), ("bgmv_expand_slice", (2, 16))])
def test_tokens_without_an_adapter_stay_as_they_are(ops, name, more):
    before = torch.randn(len(SLOTS), 20, generator=torch.Generator().manual_seed(4))
    stock = expanded(getattr(ops, name), before.clone(), *more)
    assert not torch.equal(stock[SLOTS < 0], before[SLOTS < 0]), "vLLM has mended it: cpu_adapters can go"
    for _ in range(2):
        cpu_adapters.leave_base_tokens()
    ours = expanded(getattr(ops, name), before.clone(), *more)
    assert torch.equal(ours[SLOTS < 0], before[SLOTS < 0])
    assert torch.equal(ours[SLOTS >= 0], stock[SLOTS >= 0])


def test_whole_prompts_too(ops):
    """Of three prompts, with an adapter, without and with another."""
    cpu_adapters.leave_base_tokens()
    draw = torch.Generator().manual_seed(5)
    inputs, weights = torch.randn(9, 8, generator=draw), torch.randn(2, 1, 16, 8, generator=draw)
    output, lengths = torch.zeros(9, 16), torch.tensor([2, 4, 3])
    ops.sgmv_expand(inputs, weights, output, torch.tensor([0, 2, 6]), lengths, torch.tensor([0, -1, 1]), 3, 4, 9, True)
    assert not output[2:6].any() and output[:2].all() and output[6:].all()
