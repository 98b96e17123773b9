# SPDX-License-Identifier: Apache-2.0
"""The transport parts of scripts/lab/gpu_check.py on the CPU pass, and what they are there to find they find (B3)."""
import pytest
import torch
from _gpu_check import bits, order, rates
from _gpu_check.caches import LAYOUTS, ORDER_LAYOUT, SHAPES, PatternCache
from _gpu_check.child import PartRun
from _gpu_check.ends import TransferEnd, two_ends
from _gpu_check.harness import CheckSettings
from _gpu_check.results import PartFailed
from _gpu_check.streams import BusyKernels

from vllm_pd.transfer.layout import Layout
from vllm_pd.transfer.requests import Write

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(),
                                                                                 reason="there is no GPU")])]


def run_on(device: str, tmp_path) -> PartRun:
    return PartRun(CheckSettings(device, str(tmp_path)), tmp_path / "part.json", 600.0)


@pytest.mark.parametrize("device", DEVICES)
def test_b3_all_layouts_pass(device, tmp_path):
    run = run_on(device, tmp_path)
    bits.check(run)
    assert list(run.figures["layouts"]) == [layout.name for layout in LAYOUTS]
    for figures in run.figures["layouts"].values():
        assert min(figures["kernel_turns"].values()) > 0
        assert figures["blocks_compared"] == 6 * (SHAPES[device].blocks - 1)  # four writes, two reads


@pytest.mark.parametrize("device", DEVICES)
def test_b3_a_transfer_that_waits_is_right_and_one_that_does_not_is_found(device, tmp_path, monkeypatch):
    monkeypatch.setattr(order, "ROUNDS", 6)
    run = run_on(device, tmp_path)
    order.check(run)
    assert list(run.figures["ways"]) == ["write", "read", "overwrite"]
    for figures in run.figures["ways"].values():
        assert figures["wrong_after_waiting"] == 0
        assert device == "cuda" or figures["wrong_without"] >= 1  # a busy machine may make a transfer late by itself
    assert device == "cuda" or run.figures["not_shown"] == ""


@pytest.mark.parametrize("device", DEVICES)
def test_b3_a_block_is_one_piece_where_its_layers_are_neighbours(device, tmp_path, monkeypatch):
    """The bits of the first write of each order are compared. How fast they are is not asserted."""
    monkeypatch.setattr(rates, "ROUNDS", 2)
    run = run_on(device, tmp_path)
    rates.check(run)
    pieces = {layout: figures["pieces_of_a_block"] for layout, figures in run.figures["layouts"].items()}
    layers, heads = rates.SHAPES[device].layers, rates.SHAPES[device].heads
    assert pieces == {"V1 LBHNC": layers, "V1 LBNHC": layers, "V1 BLHNC": 1, "V1 BLNHC": 1, "V1 BHLNC": 1,
                      "V1 LHBNC": layers * heads}
    assert all(figures["scattered_gb_per_s"] > 0 for figures in run.figures["layouts"].values())


def test_a_wrong_transfer_after_the_wait_fails_the_part():
    order.refuse({"write": {"wrong_after_waiting": 0, "wrong_without": 9}})
    with pytest.raises(PartFailed, match="'read': 2"):
        order.refuse({"read": {"wrong_after_waiting": 2, "wrong_without": 9}})


@pytest.mark.parametrize("spoilt", ["D", "P"])
def test_b3_a_block_that_should_not_have_changed_is_found(spoilt, monkeypatch):
    """P writes one block more than D expects; a block of P changes."""
    transfer = TransferEnd.transfer

    def also_another(self, request, ordered):
        if isinstance(request, Write) and request.key == "falling":
            if spoilt == "D":
                transfer(self, Write("more", request.peer, [3], [33], [b""]), False)
        elif not isinstance(request, Write) and spoilt == "P":
            self.cache.blocks[-1, 0, 0] += 1
        return transfer(self, request, ordered)

    monkeypatch.setattr(TransferEnd, "transfer", also_another)
    with two_ends("cpu") as (p, d), pytest.raises(PartFailed, match=rf"{spoilt}, .*: 1 blocks are wrong"):
        bits.check_layout(p, d, LAYOUTS[0].name)


def test_kernels_that_do_not_run_are_found(monkeypatch):
    with two_ends("cpu") as (p, d), pytest.raises(PartFailed, match="no kernels ran"):
        monkeypatch.setattr(BusyKernels, "_run", lambda self: None)
        bits.check_layout(p, d, LAYOUTS[0].name)


def test_an_error_of_the_other_process_is_reported():
    with two_ends("cpu") as (_, d):
        with pytest.raises(PartFailed, match="no such layout|StopIteration"):
            d.ask("open", "no such layout", 1)
        assert d.ask("open", ORDER_LAYOUT.name, 1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_cache_is_what_its_layout_says(layout):
    cache = PatternCache(layout, SHAPES["cpu"], 1, "cpu")
    described = {"V1": {"LBNHC": Layout.KV_TOKENS_FIRST, "BLNHC": Layout.KV_TOKENS_FIRST},
                 "V0": {"NHD": Layout.TOKENS_FIRST, "HND": Layout.HEADS_FIRST}}[layout.name[:2]]
    assert cache.description.layout is described.get(layout.name.split()[-1], Layout.KV_HEADS_FIRST)
    assert cache.wrong_blocks() == [] and cache.busy_turns() == 0
    assert cache.blocks.unique().numel() == cache.blocks.numel()
    assert not set(cache.blocks.flatten().tolist()) & set(cache.pattern_of(2).flatten().tolist())
    assert torch.equal(cache.blocks, cache.pattern_of(1))
    cache.blocks[5, 0, 0] += 1
    cache.blocks[cache.busy_block] += 3
    assert cache.wrong_blocks() == [5] and cache.busy_turns() == 3
    cache.blocks[cache.busy_block, 0] += 1
    assert cache.busy_turns() is None


def test_pairs_are_pairs_and_leave_some_blocks_alone():
    for blocks in (40, 256):
        pairs = bits.draw_pairs(blocks)
        written = {block for _, theirs in pairs.values() for block in theirs}
        for ours, theirs in pairs.values():
            assert len(ours) == len(theirs) == len(set(ours)) == len(set(theirs)) > 1
            assert min(ours + theirs) > 0 and max(ours + theirs) < blocks
        assert not written & set(bits.d_untouched(blocks)) and bits.d_untouched(blocks)
