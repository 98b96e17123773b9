# SPDX-License-Identifier: Apache-2.0
"""The KV blocks that the requests of a trace use, in about 12 bytes for each use: traces have millions."""
from array import array
from collections.abc import Iterator, Sequence

import numpy


class BlockNames:
    """Collects the names of blocks, request by request."""

    def __init__(self) -> None:
        self._names = array("Q")
        self._ends = array("Q")
        self._prompts = array("I")

    def add(self, names: Sequence[int], prompt_blocks: int) -> None:
        """The next request: the names (`vllm_pd.protocol.hashes`) of its full blocks. The first `prompt_blocks` of them
        are its prompt's, the others its answer's."""
        self._names.extend(names)
        self._ends.append(len(self._names))
        self._prompts.append(prompt_blocks)

    def uses(self) -> "BlockUses":
        """All requests that were added. Equal names have got equal numbers."""
        names, numbers = numpy.unique(numpy.asarray(self._names), return_inverse=True)
        return BlockUses(numbers.astype(numpy.int32), self._ends, self._prompts, len(names))


class BlockUses:
    """The requests in their order. Iterating gives, for each, the numbers of its blocks, from 0 to `distinct` - 1, and
    how many of them are its prompt's."""

    def __init__(self, numbers: numpy.ndarray, ends: Sequence[int], prompts: Sequence[int], distinct: int) -> None:
        self.distinct = distinct
        self.numbers = numbers
        self._ends = ends
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[tuple[list[int], int]]:
        start = 0
        for end, prompt_blocks in zip(self._ends, self._prompts, strict=True):
            yield self.numbers[start:end].tolist(), prompt_blocks
            start = end

    def next_uses(self) -> array:
        """For each use, in order, the number of the next request whose prompt has the same block; -1 where none has."""
        following = array("i", [-1]) * len(self.numbers)
        later = array("i", [-1]) * self.distinct
        end = len(self.numbers)
        for request in range(len(self) - 1, -1, -1):
            start = self._ends[request - 1] if request else 0
            blocks = self.numbers[start:end].tolist()
            following[start:end] = array("i", [later[block] for block in blocks])
            for block in blocks[:self._prompts[request]]:
                later[block] = request
            end = start
        return following
