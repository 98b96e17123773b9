# SPDX-License-Identifier: Apache-2.0
"""Whether a process still exists, as a fact.

A process is named by host id, pid and start time. The host id joins the boot with the process-id namespace: where
either differs, a pid says nothing about the peer, and nothing is concluded from it.
"""
import functools
import os
import uuid

from vllm_pd.core.messages import Fingerprint, Load, Member, Process, Role

_START_TIME_FIELD = 19  # of /proc/PID/stat, counted from the state, which follows the name in brackets


@functools.lru_cache(maxsize=1)
def host_id() -> str:
    """This boot of this machine, and this process-id namespace. Empty where the system does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_time(pid: int) -> int | None:
    """When the process began, in clock ticks since boot; None where there is no such process, or only its remains."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2:].split()
    if fields[0] in (b"Z", b"X") and _threads(pid) <= 1:
        return None
    return int(fields[_START_TIME_FIELD])


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def is_visible(member: Member) -> bool:
    """Whether `is_gone` can judge this member: its processes have names that mean something here."""
    return bool(member.host_id and member.host_id == host_id() and member.processes)


def is_gone(member: Member) -> bool:
    """True only where it is certain that every process of the member has ended."""
    if not is_visible(member):
        return False
    try:
        return all(start_time(process.pid) != process.start_time for process in member.processes)
    except OSError:
        return False


def lost(member: Member) -> Process | None:
    """The first process of the calling engine that has ended; None where all are there."""
    return next((process for process in member.processes if start_time(process.pid) != process.start_time), None)


def this_process() -> Process:
    """The calling process."""
    pid = os.getpid()
    return Process(pid, start_time(pid) or 0)


def local_member(role: Role, fingerprint: Fingerprint) -> Member:
    """A registry entry for an engine in this process: a new incarnation. The agent fills in the addresses; an engine
    with workers in other processes adds those."""
    return Member(uuid.uuid4().hex, role, "", fingerprint, Load(), host_id(), (this_process(),))
