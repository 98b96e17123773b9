# SPDX-License-Identifier: Apache-2.0
"""B1, B3 on a device: kernels see what a peer has written before the CPU was told so. With a fake driver: what a real
one does with these calls is not shown here."""

import ctypes
from types import SimpleNamespace

import pytest

from vllm_pd.handover.progress import Progress
from vllm_pd.protocol.messages import Attempt
from vllm_pd.transfer.device import (
    FLUSH_WRITES_OPTIONS,
    OPTION_HOST,
    WRITES_ORDERING,
    CudaDevice,
    HostDevice,
    OrderedTransfer,
)
from vllm_pd.transfer.requests import CancelTransfer, DropTransferPeer, Flush
from vllm_pd.v0.engine import V0Handover
from vllm_pd.v0.turns import DecodeTurns

NONE, OWNER, ALL_DEVICES = 0, 100, 200
ATTEMPT = Attempt("decode-incarnation", "request", 1)


class Cuda:
    """As much of `torch.cuda` as is used; `calls` is shared with the driver."""

    def __init__(self, calls: list) -> None:
        self.calls = calls
        self.idle = True

    def current_device(self) -> int:
        return 3

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def current_stream(self) -> SimpleNamespace:
        return SimpleNamespace(query=lambda: self.idle)


class Driver:
    """libcuda.so.1 with these attributes of device 3; the flush ends with `result`."""

    def __init__(self, calls: list, ordering: int, options: int, result: int = 0) -> None:
        self.calls = calls
        self.attributes = {WRITES_ORDERING: ordering, FLUSH_WRITES_OPTIONS: options}
        self.result = result

    def cuDeviceGet(self, device: ctypes.Array, ordinal: int) -> int:
        device._obj.value = ordinal + 10
        return 0

    def cuDeviceGetAttribute(self, value: ctypes.Array, attribute: int, device: ctypes.c_int) -> int:
        assert device.value == 13
        value._obj.value = self.attributes.get(attribute, 0)
        return 0 if attribute in self.attributes else 1

    def cuFlushGPUDirectRDMAWrites(self, target: int, scope: int) -> int:
        self.calls.append(("flush", target, scope))
        return self.result


@pytest.mark.parametrize("ordering", [OWNER, ALL_DEVICES])
def test_b3_a_device_that_orders_remote_writes_is_left_alone(ordering):
    calls = []
    device = CudaDevice(Cuda(calls), Driver(calls, ordering, OPTION_HOST))
    assert not device.needs_flush
    device.flush()
    assert calls == []


@pytest.mark.parametrize("options, expected", [(OPTION_HOST, ("flush", 0, OWNER)), (2, "synchronize")])
def test_b3_one_that_does_not_is_flushed_or_synchronised(options, expected):
    calls = []
    device = CudaDevice(Cuda(calls), Driver(calls, NONE, options))
    assert device.needs_flush
    device.flush()
    assert calls == [expected]


@pytest.mark.parametrize("driver", ["no such call", "no such attribute"])
def test_b3_one_that_can_not_be_asked_is_synchronised(driver):
    """B3: what is not known is not taken to be right."""
    calls = []
    known = Driver(calls, ALL_DEVICES, OPTION_HOST)
    known.attributes.clear()
    device = CudaDevice(Cuda(calls), SimpleNamespace() if driver == "no such call" else known)
    device.flush()
    assert device.needs_flush and calls == ["synchronize"]


def test_b3_a_flush_that_fails_is_replaced_from_then_on(caplog):
    calls = []
    device = CudaDevice(Cuda(calls), Driver(calls, NONE, OPTION_HOST, result=719))
    device.flush()
    device.flush()
    assert calls == [("flush", 0, OWNER), "synchronize", "synchronize"] and "719" in caplog.text


def test_b3_the_flush_comes_before_all_else_of_its_step():
    calls = []
    device = SimpleNamespace(flush=lambda: calls.append("flush"))
    transfer = OrderedTransfer(SimpleNamespace(execute=calls.append), device)
    transfer.execute([DropTransferPeer("p"), Flush(), CancelTransfer("k")])
    transfer.execute([Flush()])
    transfer.execute([CancelTransfer("k")])
    assert calls == ["flush", [DropTransferPeer("p"), CancelTransfer("k")], "flush", [CancelTransfer("k")]]


def binding(device, progress: Progress) -> SimpleNamespace:
    """As much of a decode engine's `V0Handover` as these steps use."""
    return SimpleNamespace(
        _device=device, transfer=device, _progress=progress, _flush_due=False, _requests=[], in_loop=True,
        _collect=lambda: None,
        _update_metrics=lambda: None, _note_stall=lambda outputs: None, prefill_jobs=None, _was_busy=False,
        _turns=DecodeTurns(), _timer=None, _end_step=lambda: None, _finished_ids=[], _split_requests={},
        _scheduler=SimpleNamespace(remote_prefilling={}, _finished_requests_ids=[]),
        remote_prefills=SimpleNamespace(scheduled=lambda: None))


def flushes(one: SimpleNamespace) -> list:
    """What the step after `take_progress` carries down."""
    outputs = SimpleNamespace(memory_transfer_requests=[], ignored_seq_groups=[], num_prefill_groups=0)
    V0Handover.take_progress(one)
    V0Handover.after_schedule(one, outputs)
    return outputs.memory_transfer_requests


@pytest.mark.parametrize("progress, flushed", [
    (Progress(), False), (Progress(finished_prefills=[ATTEMPT]), True), (Progress(failed_prefills=[ATTEMPT]), False),
    (Progress(read_prefixes={ATTEMPT: 32}), True), (Progress(finished_transfers=[ATTEMPT]), False),
], ids=["nothing", "written", "failed", "read", "sent"])
def test_b3_the_step_that_may_use_what_has_come_flushes(progress, flushed):
    """B3: on every rank, as it rides with the step. Once; and not on the CPU."""
    one = binding(SimpleNamespace(needs_flush=True), progress)
    assert flushes(one) == [Flush()] * flushed
    assert flushes(one) == []
    assert flushes(binding(HostDevice(), progress)) == []


def test_b3_a_step_that_is_given_up_leaves_the_flush_to_the_next():
    one = binding(SimpleNamespace(needs_flush=True), Progress(finished_prefills=[ATTEMPT]))
    V0Handover.return_transfer_requests(one, SimpleNamespace(memory_transfer_requests=flushes(one)))
    assert flushes(one) == [Flush()]


def test_b22_blocks_are_offered_only_when_the_device_is_done(caplog):
    """B22, B3: that sampling has waited for it is looked at, and said once where it has not."""
    calls = []
    cuda = Cuda(calls)
    one = binding(CudaDevice(cuda, Driver(calls, OWNER, OPTION_HOST)), Progress())
    for idle in (True, False, False):
        cuda.idle = idle
        V0Handover._settle_device(one)
    assert calls == ["synchronize"] * 3
    assert caplog.text.count("the device was busy between two steps") == 1
