# SPDX-License-Identifier: Apache-2.0
"""What the threads of a worker's transfers keep alive, and what is left of an engine that could not start."""
import gc
import socket
import weakref
from types import SimpleNamespace

import pytest
from vllm.platforms import current_platform

from vllm_pd.errors import ConfigError, ControlError
from vllm_pd.peer.agent import ControlAgent
from vllm_pd.peer.liveness.process import local_member
from vllm_pd.protocol.messages import PROTOCOL, Fingerprint, Role
from vllm_pd.transfer.nixl import kept
from vllm_pd.transfer.transport import rank_name
from vllm_pd.v0 import engine as engine_module
from vllm_pd.v0 import worker as worker_module
from vllm_pd.v0.engine import V0Handover
from vllm_pd.v0.worker import _enter, attach_transfer

MEMBER = local_member(Role.DECODE, Fingerprint(PROTOCOL, "model", "f", "f", 16, 1, 1, 64, "hnd"))
NAME = rank_name(MEMBER.incarnation, 0)


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


@pytest.fixture
def caches(monkeypatch):
    """The caches that are kept."""
    monkeypatch.setattr(kept, "_caches", {})
    return kept._caches


@pytest.mark.parametrize("error", [ConfigError, ControlError], ids=["its address is taken", "a rank is gone"])
def test_b20_an_engine_that_cannot_start_keeps_no_cache(monkeypatch, caches, error):
    """Its transport is there, but no peer was granted anything. `LLM` may be tried again in the same process."""
    closed = []

    def hold(descriptor):
        raise ControlError("a rank is gone")

    def attach(*arguments):
        kept.keep(NAME, [])
        return MEMBER, b"", SimpleNamespace(hold=hold, close=lambda: not closed.append(True))

    monkeypatch.setattr(engine_module, "PendingBlocks", lambda manager: None)
    monkeypatch.setattr(engine_module, "attach_transfer", attach)
    agents = []
    monkeypatch.setattr(engine_module, "ControlAgent", lambda *arguments, **options: agents.append(
        ControlAgent(*arguments, **options)) or agents[0])
    engine = SimpleNamespace(scheduler=[SimpleNamespace(block_manager=None)],
                             scheduler_contexts=[SimpleNamespace(output_queue=None)],
                             model_config=SimpleNamespace(served_model_name="m"))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(error):
        port = taken.getsockname()[1] if error is ConfigError else 0
        V0Handover(engine, {"kv_role": "kv_consumer", "extra": {"broker": "tcp://127.0.0.1:9",
                                                                    "bind": f"tcp://127.0.0.1:{port}"}})
    gc.collect()
    assert not caches and closed == [True]
    assert agents[0].thread is None or not agents[0].thread.is_alive()


def test_b20_an_engine_one_rank_of_which_cannot_start_keeps_no_cache(monkeypatch, caches):
    def attach_ranks(*arguments, **options):
        kept.keep(NAME, [])
        raise TimeoutError

    monkeypatch.setattr(worker_module, "fingerprint", lambda *arguments: MEMBER.fingerprint)
    monkeypatch.setattr(worker_module, "local_member", lambda *arguments: MEMBER)
    engine = SimpleNamespace(vllm_config=None, model_executor=SimpleNamespace(collective_rpc=attach_ranks))
    with pytest.raises(TimeoutError):
        attach_transfer(engine, Role.DECODE, None)
    assert not caches
