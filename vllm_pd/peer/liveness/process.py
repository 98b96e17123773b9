# SPDX-License-Identifier: Apache-2.0
"""Whether a process still exists, as a fact.

A process is named by host id, pid and start time. The host id joins the boot with the namespaces of process ids and of
time: where one differs, a pid and a start time say nothing about the peer, and nothing is concluded from them. Virtual
machines that were restored from one snapshot have the same host id. So the peer's address must be one of this machine,
too.
"""
import functools
import multiprocessing
import os
import uuid
from urllib.parse import urlsplit

from vllm_pd.protocol.messages import Fingerprint, Load, Member, Process, Role
from vllm_pd.rpc.locality import is_own

_START_TIME_FIELD = 19  # of /proc/PID/stat, counted from the state, which follows the name in brackets


@functools.lru_cache(maxsize=1)
def host_id() -> str:
    """This boot of this machine, and these namespaces. Empty where the system does not tell, or where /proc is that of
    another process-id namespace."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()) or start_time(os.getpid()) is None:
            return ""
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        names = [boot, os.readlink("/proc/self/ns/pid")]
        if os.path.lexists("/proc/self/ns/time"):
            names.append(os.readlink("/proc/self/ns/time"))  # start times are shifted by it
        return "/".join(names)
    except OSError:
        return ""


def start_time(pid: int) -> int | None:
    """When the process began, in clock ticks since boot; None where there is no such process, or only its remains.
    OSError where that is not known, as for a process that /proc hides from us."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError) as error:
        if _exists(pid):
            raise OSError(f"process {pid} is there, but not in /proc") from error
        return None
    fields = stat[stat.rindex(b")") + 2:].split()
    if fields[0] in (b"Z", b"X") and _threads(pid) <= 1:
        return None
    return int(fields[_START_TIME_FIELD])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # there, but not ours; or no pid at all
        return True
    return True


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def is_visible(member: Member) -> bool:
    """Whether `is_gone` can judge this member: its processes have names that mean something here, and can be seen."""
    return _times(member) is not None


def is_gone(member: Member) -> bool:
    """True only where it is certain that every process of the member has ended."""
    times = _times(member)
    return times is not None and all(time != process.start_time
                                     for time, process in zip(times, member.processes, strict=True))


def _times(member: Member) -> list[int | None] | None:
    """The present start times under the member's pids; None where not all can be known, and compared with its own."""
    if not (member.host_id and member.host_id == host_id() and member.processes):
        return None
    if not all(process.start_time for process in member.processes):
        return None
    try:
        if member.address and not _is_here(urlsplit(member.address).hostname or ""):
            return None
        return [start_time(process.pid) for process in member.processes]
    except (OSError, ValueError):  # not known, or no address
        return None


_is_here = functools.lru_cache(maxsize=4096)(is_own)


def lost(member: Member) -> Process | None:
    """The first process of the calling engine that has ended; None where all are there, or where that is not known."""
    if not member.host_id:
        return None
    try:
        return next((process for process in member.processes
                     if process.start_time and start_time(process.pid) != process.start_time), None)
    except OSError:
        return None


def this_process() -> Process:
    """The calling process. Its start time is 0 where that is not known."""
    pid = os.getpid()
    try:
        return Process(pid, start_time(pid) or 0)
    except OSError:
        return Process(pid, 0)


def parent_pid() -> int:
    """The process that has started this one with `multiprocessing`, otherwise this one's parent."""
    parent = multiprocessing.parent_process()
    return os.getppid() if parent is None else parent.pid


def local_member(role: Role, fingerprint: Fingerprint) -> Member:
    """A registry entry for an engine in this process: a new incarnation. The agent fills in the addresses; an engine
    with workers in other processes adds those."""
    return Member(uuid.uuid4().hex, role, "", fingerprint, Load(), host_id(), (this_process(),))
