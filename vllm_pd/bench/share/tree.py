# SPDX-License-Identifier: Apache-2.0
"""A radix tree of prompts: which prefixes come again, and how many tokens that is.

Each node stands for some tokens after those of its parent. It counts the prompts that go through it. Where prompts part
or one ends, a node is split. So all tokens of a node have been used by equally many prompts, and each use after the
first repeats them.

All nodes are in a few arrays and one dictionary, about 200 bytes each; a prompt adds two at most. A token that is not
a repetition takes 4 bytes more.
"""
import heapq
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy

from vllm_pd.protocol.hashes import TOKEN_BYTES


class SharedPrefix(NamedTuple):
    """A prefix that `uses` prompts begin with. `tokens`: its length. `own_tokens`: how many of them come after the next
    shorter prefix in the tree. `line`: where the file has it first."""
    tokens: int
    own_tokens: int
    uses: int
    line: int

    @property
    def saved_tokens(self) -> int:
        """What a cache with this node and those before it saves beyond one with those before it alone."""
        return (self.uses - 1) * self.own_tokens


class PrunedTree(NamedTuple):
    """What is left of a tree after pruning. `nodes`: how many. `leaves`: how many of them have none below them that is
    left: the longest prefixes. `prefixes`: those of them that save most, in that order.
    `repeated_tokens`: how many prompt tokens repeat a prefix that is left; `distinct_tokens`: how many tokens all nodes
    together have, which is what a cache must hold for that."""
    nodes: int
    leaves: int
    prefixes: Sequence[SharedPrefix]
    repeated_tokens: int
    distinct_tokens: int


class PromptTree:
    """The radix tree of all prompts that were added. Node 0 is the root, which has no tokens."""

    def __init__(self) -> None:
        self._tokens = bytearray()
        self._starts = array("Q", [0])  # by node: where its tokens are in `_tokens`, in tokens
        self._sizes = array("I", [0])  # how many it has
        self._depths = array("I", [0])  # how many there are from the root to its end
        self._parents = array("I", [0])
        self._uses = array("I", [0])
        self._lines = array("I", [0])  # of the first use
        self._children: dict[int, int] = {}  # the parent << 32 | the first token -> node

    def __len__(self) -> int:
        """How many nodes there are, without the root."""
        return len(self._starts) - 1

    def add(self, packed: bytes, line: int) -> int:
        """Adds a prompt, as `vllm_pd.protocol.hashes.pack_tokens` gives it. Returns how many tokens at its start are
        also the start of an earlier prompt."""
        prompt = numpy.frombuffer(packed, numpy.uint32)
        node = at = 0
        self._uses[0] += 1
        while at < len(prompt):
            key = node << 32 | int(prompt[at])
            child = self._children.get(key)
            if child is None:
                self._children[key] = self._append(node, len(self._tokens) // TOKEN_BYTES, len(prompt) - at, 1, line)
                self._tokens += packed[at * TOKEN_BYTES:]
                return at
            same = self._common(child, prompt[at:])
            if same < self._sizes[child]:
                child = self._split(child, key, same)
            self._uses[child] += 1
            node, at = child, at + same
        return at

    def prune(self, min_count: int, min_tokens: int, shown: int) -> PrunedTree:
        """Leaves the prefixes of at least `min_tokens` tokens that at least `min_count` prompts begin with. Of each
        prompt the longest such prefix counts, from its first token on; a prompt without one doesn't count. At most
        `shown` prefixes are listed."""
        left = array("I")
        repeated = distinct = leaves = 0
        inner = bytearray(len(self._uses))  # by node: one below it is left
        uses = array("I", bytes(4 * len(self._uses)))  # by those prompts that have such a prefix
        for node in numpy.argsort(numpy.asarray(self._depths))[::-1].tolist():  # children before their parents
            if self._uses[node] >= min_count and self._depths[node] >= min_tokens:
                uses[node] = self._uses[node]
                left.append(node)
                leaves += not inner[node]
                inner[self._parents[node]] = True
            if node and uses[node]:
                uses[self._parents[node]] += uses[node]
                repeated += (uses[node] - 1) * self._sizes[node]
                distinct += self._sizes[node]
        most = heapq.nlargest(shown, map(self._prefix, left), key=lambda prefix: prefix.saved_tokens)
        return PrunedTree(len(left), leaves, most, repeated, distinct)

    def _prefix(self, node: int) -> SharedPrefix:
        return SharedPrefix(self._depths[node], self._sizes[node], self._uses[node], self._lines[node])

    def _append(self, parent: int, start: int, size: int, uses: int, line: int) -> int:
        self._starts.append(start)
        self._sizes.append(size)
        self._depths.append(self._depths[parent] + size)
        self._parents.append(parent)
        self._uses.append(uses)
        self._lines.append(line)
        return len(self._starts) - 1

    def _split(self, node: int, key: int, size: int) -> int:
        """Gives the first `size` tokens of a node to a new one between it and its parent; the new one."""
        start = self._starts[node]
        upper = self._append(self._parents[node], start, size, self._uses[node], self._lines[node])
        self._starts[node] += size
        self._sizes[node] -= size
        self._parents[node] = upper
        self._children[key] = upper
        self._children[upper << 32 | self._token(start + size)] = node
        return upper

    def _common(self, node: int, rest: numpy.ndarray) -> int:
        """How many tokens at the start of `rest` are those of the node."""
        size = min(self._sizes[node], len(rest))
        own = numpy.frombuffer(self._tokens, numpy.uint32, size, self._starts[node] * TOKEN_BYTES)
        different = own != rest[:size]
        return int(different.argmax()) if different.any() else size

    def _token(self, place: int) -> int:
        return int(numpy.frombuffer(self._tokens, numpy.uint32, 1, place * TOKEN_BYTES)[0])
