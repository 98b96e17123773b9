# SPDX-License-Identifier: Apache-2.0
"""What the threads of a worker's transfers keep alive."""
import weakref

from vllm.platforms import current_platform

from vllm_pd.v0.worker import _enter


class Worker:
    """With a KV cache, and a device that holds it."""
    device = "cuda:0"


def test_b20_a_transfer_thread_does_not_keep_its_worker(monkeypatch):
    """The worker owns the thread: a reference back would leave its cache to the garbage collector."""
    monkeypatch.setattr(current_platform, "device_type", "cuda")
    worker = Worker()
    gone = weakref.ref(worker)
    enter = _enter(worker)
    del worker
    assert gone() is None and callable(enter)
