# SPDX-License-Identifier: Apache-2.0
"""Whether a process still exists, as a fact.

A process is named by (host id, pid, start time). The host id joins the boot with the process-id namespace: where either
differs, a pid says nothing about the peer, and nothing is concluded from it.
"""
import functools
import os
import uuid

from vllm_pd.core.messages import Fingerprint, Load, Member, Role

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


def is_gone(member: Member) -> bool:
    """True only where it is certain that the member's process has ended."""
    if not member.host_id or member.host_id != host_id() or not member.pid or not member.start_time:
        return False
    try:
        return start_time(member.pid) != member.start_time
    except OSError:
        return False


def local_member(role: Role, fingerprint: Fingerprint) -> Member:
    """A registry entry for this process: a new incarnation. The agent fills in the address."""
    pid = os.getpid()
    return Member(uuid.uuid4().hex, role, "", fingerprint, Load(), host_id(), pid, start_time(pid) or 0)
