# SPDX-License-Identifier: Apache-2.0
"""What of an answer must be equal: its status, its type, and its content without ids and times.

How many tokens an event of a stream has depends on how fast it is read. So the events of a stream are joined: what one
choice says in several events becomes one.
"""
import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

DRAWN = frozenset(("id", "item_id", "response_id", "request_id", "created", "created_at", "completed_at",
                   "sequence_number", "system_fingerprint"))
JOINED = frozenset(("content", "text", "delta", "arguments", "partial_json", "reasoning", "reasoning_content"))
TOLERANCE = 2e-3  # of log-probabilities: a prompt that is computed in other pieces has other rounding
DONE = "[DONE]"


@dataclass(frozen=True)
class FormAnswer:
    """The answer to a form, as far as it is compared."""
    status: int
    kind: str
    content: Any

    @classmethod
    def of(cls, status: int, kind: str, body: bytes) -> "FormAnswer":
        """Of what was received. `kind` is the Content-Type."""
        kind = kind.partition(";")[0]
        if kind == "text/event-stream":
            return cls(status, kind, join_events(body))
        try:
            return cls(status, kind, without_drawn(json.loads(body)))
        except ValueError:
            return cls(status, kind, body.decode(errors="replace"))


def without_drawn(value: Any) -> Any:
    """The value without what differs from request to request."""
    if isinstance(value, dict):
        return {key: without_drawn(one) for key, one in value.items() if key not in DRAWN}
    return [without_drawn(one) for one in value] if isinstance(value, list) else value


def join_events(body: bytes) -> list[Any]:
    """The events of a stream, those that follow each other with the same type joined, and all without a type."""
    joined: list[tuple[Any, Any]] = []
    for block in body.decode(errors="replace").strip().split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in block.splitlines())
        data = fields.get("data", block)
        value = data if data == DONE else without_drawn(json.loads(data))
        kind = fields.get("event") or (value.get("type") if isinstance(value, dict) else value)
        if joined and joined[-1][0] == kind and isinstance(value, dict):
            joined[-1] = kind, merge(joined[-1][1], value)
        else:
            joined.append((kind, merge({}, value) if isinstance(value, dict) else value))
    return [list(one) for one in joined]


def merge(before: Any, after: Any, key: str = "") -> Any:
    """Two events, or the parts of them at `key`, as one: texts and lists continue, the last of all others counts."""
    if isinstance(after, dict):
        found = dict(before) if isinstance(before, dict) else {}
        for name, value in after.items():
            found[name] = merge(found.get(name), value, name)
        return found
    if isinstance(after, list):
        if after and isinstance(after[0], dict) and "index" in after[0]:
            choices = {one["index"]: one for one in before or ()}
            for one in after:
                choices[one["index"]] = merge(choices.get(one["index"], {}), one)
            return [choices[index] for index in sorted(choices)]
        return [*(before or ()), *after]
    if after is None:
        return before
    return before + after if key in JOINED and isinstance(before, str) and isinstance(after, str) else after


def difference(one: Any, other: Any, at: str = "", ignored: Collection[str] = ()) -> str | None:
    """Where two contents differ first, in words; None where they do not. Numbers may differ by TOLERANCE, and what is
    under an ignored key at all."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in (key for key in {**one, **other} if key not in ignored):
            if key not in one or key not in other:
                return f"{at}.{key} is only in the {'first' if key in one else 'second'}"
            if (found := difference(one[key], other[key], f"{at}.{key}", ignored)) is not None:
                return found
        return None
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return f"{at} has {len(one)} and {len(other)} elements"
        pairs = (difference(a, b, f"{at}[{number}]", ignored)
                 for number, (a, b) in enumerate(zip(one, other, strict=True)))
        return next((found for found in pairs if found is not None), None)
    if isinstance(one, float) and isinstance(other, float) and math.isclose(one, other, rel_tol=0, abs_tol=TOLERANCE):
        return None
    return None if one == other and type(one) is type(other) else f"{at}: {one!r:.120} and {other!r:.120}"


def compare(one: FormAnswer, other: FormAnswer, ignored: Collection[str] = ()) -> str | None:
    """Where two answers differ first, in words; None where they do not. What is under an ignored key does not count."""
    if (one.status, one.kind) != (other.status, other.kind):
        return (f"{one.status} {one.kind} and {other.status} {other.kind}: "
                f"{one.content!r:.120} and {other.content!r:.120}")
    return difference(one.content, other.content, ignored=ignored)
