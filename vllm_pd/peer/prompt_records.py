# SPDX-License-Identifier: Apache-2.0
"""What became of the last prompts of a decode engine, one by one: for an operator who asks about a request that he has
sent himself. The metrics have the sums.
"""
import time
from collections.abc import Callable
from typing import Any

import msgspec

from vllm_pd.protocol.messages import MAX_ID_CHARS, MAX_PROMPTS, PromptRecord

MAX_DETAIL_CHARS = 1000


class PromptRecords:
    """The records of the last `MAX_PROMPTS` prompts that were decided about, the newest last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, PromptRecord] = {}
        self._decided_at: dict[str, float] = {}

    def decided(self, request_id: str, again: bool, **fields: Any) -> None:
        """A decision about this request's prompt: `again`, after an attempt, of which all that is known stays. Else it
        is a new request, whatever had its id before."""
        request_id = request_id[:MAX_ID_CHARS]
        record = self._records.pop(request_id, None)
        if record is None or not again:
            record = PromptRecord(request_id)
        self._records[request_id] = msgspec.structs.replace(record, **fields)
        self._decided_at[request_id] = self._clock()
        if len(self._records) > MAX_PROMPTS:
            oldest = next(iter(self._records))
            del self._records[oldest], self._decided_at[oldest]

    def note(self, request_id: str, **fields: Any) -> None:
        """More of a request that was decided about. Nothing of one that is forgotten."""
        record = self._records.get(request_id[:MAX_ID_CHARS])
        if record is not None:
            if "detail" in fields:
                fields["detail"] = fields["detail"][:MAX_DETAIL_CHARS]
            self._records[record.request_id] = msgspec.structs.replace(record, **fields)

    def find(self, name: str) -> PromptRecord:
        """The newest one of a request of this name; an empty one where there is none."""
        return next((record for record in reversed(self._records.values()) if record.is_of(name)),
                    PromptRecord(name[:MAX_ID_CHARS]))

    def newest(self, count: int) -> tuple[PromptRecord, ...]:
        """So many of the newest ones, or all, the newest last, each with its age."""
        now = self._clock()
        return tuple(msgspec.structs.replace(record, age_s=max(0.0, now - self._decided_at[name]))
                     for name, record in list(self._records.items())[-min(count, MAX_PROMPTS):])
