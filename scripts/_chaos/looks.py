# SPDX-License-Identifier: Apache-2.0
"""Small looks at an engine's process and at its answers."""


def margin_of(logprobs: list | None) -> list[float]:
    """The least distance between the first and the second choice, in log-probability, where it was asked for."""
    if logprobs is None:
        return []
    values = [sorted((entry.logprob for entry in entries.values()), reverse=True) for entries in logprobs]
    return [min(first - second for first, second, *_ in values)]


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))
