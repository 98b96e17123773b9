# SPDX-License-Identifier: Apache-2.0
"""Which beginnings of prompts a prefill engine was given, and so probably has in its prefix cache. Pure.

Whoever chooses the engine remembers what it has chosen; the engines' KV events are not needed for it. So a prompt
counts from the moment that it is on its way, before the engine has computed anything that it could announce, and the
broker decodes no events. What the engine has evicted and is remembered here costs a worse choice, nothing else.
"""
import collections
from collections.abc import Sequence

from vllm_pd.protocol import messages as m
from vllm_pd.protocol.hashes import chain, pack_tokens, scope_seed

BLOCK_TOKENS = 128  # more than engines have: less to remember; a hit counts for up to 127 tokens less
MAX_BLOCKS = 8192  # remembered of one engine: a million tokens


def block_names(job: m.Job) -> list[int]:
    """The names of the full blocks of the job's prompt in its scope, as many as a memory can hold."""
    token_ids = job.token_ids[:MAX_BLOCKS * BLOCK_TOKENS]
    return chain(pack_tokens(token_ids), BLOCK_TOKENS, scope_seed(job.scope))


class PromptMemory:
    """The blocks that one engine was given, the latest `max_blocks`. As in an engine's cache, the end of a prompt is
    forgotten before its beginning."""

    def __init__(self, max_blocks: int = MAX_BLOCKS):
        self._max_blocks = max_blocks
        self._names: collections.OrderedDict[int, None] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def held_tokens(self, names: Sequence[int]) -> int:
        """How many tokens at the beginning of the prompt with these blocks the engine was given before."""
        held = 0
        for name in names:
            if name not in self._names:
                break
            held += BLOCK_TOKENS
        return held

    def add(self, names: Sequence[int]) -> None:
        """The engine gets the prompt with these blocks."""
        for name in reversed(names):
            self._names[name] = None
            self._names.move_to_end(name)
        self._forget()

    def limit(self, tokens: int) -> None:
        """The engine's cache holds at most so many tokens."""
        self._max_blocks = min(MAX_BLOCKS, max(1, tokens // BLOCK_TOKENS))
        self._forget()

    def _forget(self) -> None:
        while len(self._names) > self._max_blocks:
            self._names.popitem(last=False)
