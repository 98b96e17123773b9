# SPDX-License-Identifier: Apache-2.0
"""File descriptors: how many connections clients may have, and whether an error means that this machine ran out."""
import errno
import os
import resource

WANTED = 1 << 16
RESERVED = 64  # for events, probes and files
RESERVED_REGISTRY = 16  # for a broker's registry
MIN_CLIENTS = 16
_SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))


def raise_limit() -> None:
    """Raise this process' soft limit of descriptors to its hard limit, at most to `WANTED`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def for_clients(registry: bool) -> int:
    """How many connections clients may have: half of the descriptors, so that each has one to a worker as well.
    `registry`: whether the router reads a broker's."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    reserved = RESERVED + RESERVED_REGISTRY * registry
    return WANTED if soft == resource.RLIM_INFINITY else max(MIN_CLIENTS, (soft - reserved) // 2)


def is_shortage(error: BaseException) -> bool:
    """Whether the error means that this machine lacks descriptors, memory or ports: then it says nothing about a
    worker. A failed name lookup hides its reason, so this opens a descriptor to find out."""
    if not isinstance(error, OSError):
        return False
    if error.errno in _SHORTAGES:
        return True
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as failure:
        return failure.errno in _SHORTAGES
    return False
