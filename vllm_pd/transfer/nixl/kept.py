# SPDX-License-Identifier: Apache-2.0
"""The KV caches of this process that peers can reach over NIXL: kept until it is certain that none does.

One-sided reads and writes need no help of the process whose memory they touch. On one host they need no registration
either: the kernel copies whatever is at the address by then. So the caches of an engine that has closed must neither be
freed nor used for anything else while a peer may still read or write there, which may not have heard of the end. They
are `release`d where that is certain, as where an engine could not start, and stay as they are until the end of the
process everywhere else. With that end every such transfer fails.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_caches: dict[str, list[torch.Tensor]] = {}  # of the process and not of an object, for it is to outlive all of them


def keep(name: str, caches: list[torch.Tensor]) -> None:
    """Keep the caches of the rank with this transport name (`rank_name`)."""
    _caches[name] = caches


def release(incarnation: str) -> None:
    """No peer reaches the caches of this engine any more. Forget those of its ranks that are in this process; ranks in
    other processes end with the engine."""
    for name in [one for one in _caches if one.rpartition("/")[0] == incarnation]:
        del _caches[name]
