# SPDX-License-Identifier: Apache-2.0
"""File descriptors: how many of them clients may take, and whether an error means that none was left."""
import errno
import os
import resource

WANTED = 1 << 16
RESERVED = 64  # for events, probes, the registry and files
FEWEST = 16
_OWN = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))


def raise_limit() -> None:
    """Let this process have as many as it may, up to `WANTED`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def for_clients() -> int:
    """How many connections clients may have so that each can be given one to a worker."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else max(FEWEST, (soft - RESERVED) // 2)


def are_short(error: BaseException) -> bool:
    """Whether it is this machine that lacks descriptors, memory or ports, so that an error says nothing of others. A
    resolver does not say why it has failed: so one is opened."""
    if not isinstance(error, OSError):
        return False
    if error.errno in _OWN:
        return True
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as own:
        return own.errno in _OWN
    return False
