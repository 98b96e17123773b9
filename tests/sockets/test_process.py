# SPDX-License-Identifier: Apache-2.0
"""What the process table says about a peer's life, and where it says nothing: then it lives."""
import builtins
import errno
import os
import subprocess
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from vllm_pd.peer.liveness import process
from vllm_pd.peer.liveness.monitor import LivenessMonitor
from vllm_pd.peer.liveness.rules import GRACE_S
from vllm_pd.protocol import messages as m

FINGERPRINT = m.Fingerprint(m.PROTOCOL, "model", "float32", "float32", 16, 2, 2, 64, "hnd")


@pytest.fixture(autouse=True)
def fresh_host_id():
    process.host_id.cache_clear()
    process._is_here.cache_clear()
    yield
    process.host_id.cache_clear()


@pytest.fixture
def child():
    with subprocess.Popen(["sleep", "60"]) as running:
        yield running
        running.kill()


@pytest.fixture
def proc(monkeypatch):
    """A /proc that can be changed: by path, an exception to be raised, or a link's other target."""
    changes = {}
    real_open, real_readlink = builtins.open, os.readlink

    def change(path):
        found = changes.get(path)
        if isinstance(found, OSError):
            raise found
        return found

    def opened(path, *arguments, **more):
        change(path)
        return real_open(path, *arguments, **more)

    monkeypatch.setattr(builtins, "open", opened)
    monkeypatch.setattr(os, "readlink", lambda path: change(path) or real_readlink(path))
    return changes


def member_of(*pids):
    here = process.local_member(m.Role.PREFILL, FINGERPRINT)
    return msgspec.structs.replace(here, processes=tuple(m.Process(pid, process.start_time(pid)) for pid in pids))


@pytest.mark.parametrize("refusal", [None, PermissionError()], ids=["ours", "another user's"])
def test_b22_a_process_that_proc_hides_is_not_dead(proc, monkeypatch, child, refusal):
    """As with hidepid: no such file, though the process lives. Its lifeline judges."""
    member = member_of(child.pid)
    assert process.is_visible(member)
    proc[f"/proc/{child.pid}/stat"] = FileNotFoundError()

    def kill(pid, number):
        raise refusal

    with monkeypatch.context() as patch:
        if refusal is not None:
            patch.setattr(os, "kill", kill)
        with pytest.raises(OSError, match="not in /proc"):
            process.start_time(child.pid)
        assert not process.is_gone(member) and not process.is_visible(member)
        assert process.lost(member) is None


def test_b21_a_process_that_proc_hid_is_dead_when_it_has_ended(proc, child):
    member = member_of(child.pid)
    proc[f"/proc/{child.pid}/stat"] = FileNotFoundError()
    child.kill()
    child.wait(60)
    assert process.start_time(child.pid) is None and process.is_gone(member)


def test_b22_no_pid_at_all_is_not_a_dead_process():
    for pid in (0, 2**40):
        with pytest.raises(OSError):
            process.start_time(pid)


@pytest.mark.parametrize("path", ["/proc/self", "/proc/self/stat"])
def test_b22_without_a_name_of_its_own_an_engine_is_judged_by_its_lifeline_only(proc, path):
    """As in a process-id namespace with the outer /proc."""
    if path == "/proc/self":
        proc[path] = "4711"
    else:
        proc[f"/proc/{os.getpid()}/stat"] = FileNotFoundError()
        assert process.this_process() == m.Process(os.getpid(), 0)
    assert process.host_id() == ""
    member = process.local_member(m.Role.PREFILL, FINGERPRINT)
    assert not process.is_visible(member) and not process.is_gone(member) and process.lost(member) is None


def test_b22_a_start_time_that_is_not_known_is_no_other_one(child):
    """One rank could not read its own."""
    member = msgspec.structs.replace(member_of(child.pid), processes=(m.Process(child.pid, 0),))
    assert not process.is_visible(member) and not process.is_gone(member) and process.lost(member) is None


def test_b22_another_time_namespace_is_another_host(proc):
    """There the same process has another start time."""
    if not os.path.lexists("/proc/self/ns/time"):
        pytest.skip("this kernel has no time namespaces")
    member = process.local_member(m.Role.PREFILL, FINGERPRINT)
    assert process.is_visible(member)
    process.host_id.cache_clear()
    proc["/proc/self/ns/time"] = "time:[1]"
    assert member.host_id != process.host_id() and not process.is_visible(member)


def test_at_the_descriptor_limit_no_rank_is_lost(proc, child):
    member = member_of(child.pid)
    proc[f"/proc/{child.pid}/stat"] = OSError(24, "Too many open files")
    assert process.lost(member) is None and not process.is_gone(member)
    del proc[f"/proc/{child.pid}/stat"]
    child.kill()
    child.wait(60)
    assert process.lost(member) == member.processes[0]


@pytest.mark.parametrize("address, is_here", [
    ("", True), ("tcp://127.0.0.1:1", True), ("tcp://127.1.2.3:1", True), ("tcp://192.0.2.1:1", False),
    ("tcp://[2001:db8::1]:1", False), ("tcp://a-name:1", False), ("tcp://[", False), ("ipc://name", False)])
def test_b22_a_machine_that_was_restored_from_the_same_snapshot_is_another_one(child, address, is_here):
    """It has the same boot id, and its process ids mean nothing here. The lifelines of its engines judge."""
    member = msgspec.structs.replace(member_of(child.pid), address=address)
    assert process.is_visible(member) is is_here
    child.kill()
    child.wait()
    assert process.is_gone(member) is is_here


def test_b22_where_no_descriptor_is_left_it_is_not_known_whose_an_address_is(child, monkeypatch):
    member = msgspec.structs.replace(member_of(child.pid), address="tcp://192.0.2.1:1")

    def lack():
        raise OSError(errno.EMFILE, "")

    monkeypatch.setattr(psutil, "net_if_addrs", lack)
    assert not process.is_visible(member)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [SimpleNamespace(address="192.0.2.1")]})
    assert process.is_visible(member), "later it is"


def test_b21_what_is_gone_is_buried_at_a_second_look():
    """What it had on the way may still come and be copied in between. The loop wakes for that look."""
    monitor = LivenessMonitor()
    monitor.watch(10.0, {}, set())
    assert monitor.next_timeout() is None
    assert monitor.confirm_gone(10.0, ["p"]) == []
    assert monitor.next_timeout() == 10.0 + GRACE_S and monitor.is_due(10.0 + GRACE_S)
    monitor.watch(10.1, {}, set())  # hastened
    assert monitor.confirm_gone(10.1, ["p", "q"]) == []
    assert monitor.next_timeout() == 10.0 + GRACE_S
    monitor.watch(10.0 + GRACE_S, {}, set())
    assert monitor.confirm_gone(10.0 + GRACE_S, ["p", "q"]) == ["p"]
    assert monitor.next_timeout() == 10.1 + GRACE_S
    monitor.watch(10.1 + GRACE_S, {}, set())
    assert monitor.confirm_gone(10.1 + GRACE_S, ["q"]) == ["q"] and monitor.next_timeout() is None


def test_b22_a_process_that_is_back_at_the_second_look_is_not_buried():
    monitor = LivenessMonitor()
    for now, gone in ((1.0, ["p"]), (1.0 + GRACE_S, []), (1.0 + 2 * GRACE_S, ["p"])):
        monitor.watch(now, {}, set())
        assert monitor.confirm_gone(now, gone) == []
