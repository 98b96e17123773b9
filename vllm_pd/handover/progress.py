# SPDX-License-Identifier: Apache-2.0
"""What the parts of the binding exchange: the progress for the scheduler, and the notice that comes with a write."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_pd.protocol.messages import Attempt
from vllm_pd.rpc.codec import UNREADABLE


@dataclass
class Progress:
    """The keyword arguments of the patched `Scheduler.schedule`, as they gather between two steps; its docstring says
    what each means. `sent_blocks` is V1's alone: blocks of attempts that are still computed, whose write has ended."""
    finished_prefills: list[Attempt] = field(default_factory=list)
    failed_prefills: list[Attempt] = field(default_factory=list)
    finished_transfers: list[Attempt] = field(default_factory=list)
    read_prefixes: dict[Attempt, int] = field(default_factory=dict)
    sent_blocks: list[tuple[Attempt, list[int]]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(vars(self).values())

    @property
    def brings_kv(self) -> bool:
        """Whether the step that follows may use KV that came over the network."""
        return bool(self.finished_prefills or self.read_prefixes)

    def arguments(self) -> dict[str, Any]:
        """For `schedule(**arguments)`."""
        return {name: value for name, value in vars(self).items() if name != "sent_blocks"}


class ArrivalNotice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Delivered at the decode engine after all that this rank writes for the attempt."""
    attempt: Attempt
    rank: int

    def encode(self) -> bytes:
        """The bytes of the notice, for the transport."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, payload: bytes) -> ArrivalNotice | None:
        """The notice in these bytes; None where they are none."""
        try:
            return msgspec.msgpack.decode(payload, type=cls)
        except UNREADABLE:
            return None
