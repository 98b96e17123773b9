# SPDX-License-Identifier: Apache-2.0
"""A search for the best placement of requests on workers, by one who knows the whole trace and chooses only the worker.

`oracle.bound` may keep in its cache what it likes; engines keep what was used last, each in a cache of its own. This is
the counterpart for those. The search starts from the placement that a policy made and moves a conversation, or the end
of one, or one request, to another worker. It keeps what hits more, and also what hits less at first, with a probability
that falls (simulated annealing). A move is tried in a millisecond, because it is computed with caches that evict the
least recently used and know no time: nobody waits, and what a request computes is there at once. How much the placement
that was found really hits, the simulation says, with the engines' own allocators.

It is no bound, because a longer search finds a little more. And it is nothing that a router could do: it ignores load,
and knows which conversation goes on and which text comes again.
"""
import math
import random
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_pd.bench.simulation.trace import Arrival
from vllm_pd.router.index import PrefixIndex

WHOLE, END = 0.6, 0.2  # how often a move is of a conversation, of its end; else of one request


@dataclass(frozen=True)
class BlockRuns:
    """A trace as runs of blocks, a run being blocks that are always used together. `lengths`: of each run, in blocks.
    `prompts`: for each request the runs of its prompt. `backwards`: those of its prompt and answer, the last one
    first."""
    lengths: list[int]
    prompts: list[list[int]]
    backwards: list[list[int]]

    @classmethod
    def of(cls, trace: Sequence[Arrival], block_size: int) -> "BlockRuns":
        """The runs of a trace for workers with blocks of `block_size` tokens."""
        namer = PrefixIndex(block_size)
        chains = [namer.hashes(arrival.prompt + arrival.answer[:-1]) for arrival in trace]
        users: dict[int, list[int]] = defaultdict(list)
        for number, chain in enumerate(chains):
            for name in chain:
                users[name].append(number)
        lengths: list[int] = []
        run_of: dict[int, int] = {}
        prompts, backwards = [], []
        for arrival, chain in zip(trace, chains, strict=True):
            prompt_blocks = len(arrival.prompt) // block_size
            runs, prompt_runs, start = [], 0, 0
            while start < len(chain):
                end = start + 1
                run = run_of.get(chain[start])
                if run is None:
                    while end < len(chain) and end != prompt_blocks and users[chain[end]] == users[chain[start]]:
                        end += 1
                    run = len(lengths)
                    lengths.append(end - start)
                    run_of |= dict.fromkeys(chain[start:end], run)
                start += lengths[run]
                runs.append(run)
                prompt_runs += start <= prompt_blocks
            prompts.append(runs[:prompt_runs])
            backwards.append(runs[::-1])
        return cls(lengths, prompts, backwards)

    def hits(self, requests: Sequence[int], cache_blocks: int) -> int:
        """How many prompt blocks of these requests, in this order, are hits in a cache of `cache_blocks`, which evicts
        what was used least recently, and of that the end first, as the engines' does."""
        lengths = self.lengths
        held: OrderedDict[int, int] = OrderedDict()  # run -> how many blocks of it, from its start
        used = hits = 0
        for request in requests:
            for run in self.prompts[request]:
                have = held.get(run, 0)
                hits += have
                if have < lengths[run]:
                    break
            for run in self.backwards[request]:
                used += lengths[run] - held.get(run, 0)
                held[run] = lengths[run]
                held.move_to_end(run)
            while used > cache_blocks:
                run = next(iter(held))
                gone = min(used - cache_blocks, held[run])
                used -= gone
                if gone < held[run]:
                    held[run] -= gone
                else:
                    del held[run]
        return hits


class PlacementSearch:
    """The search on workers with `worker_blocks` each. `start` has the number of a worker for each request;
    `heat_blocks`: how many hits a move may lose at first, once in e times."""

    def __init__(self, trace: Sequence[Arrival], block_size: int, worker_blocks: int, start: Sequence[int],
                 workers: int, seed: int, heat_blocks: float = 10.0) -> None:
        self._runs = BlockRuns.of(trace, block_size)
        self._worker_blocks = worker_blocks
        self._placed = list(start)
        self._heat_blocks = heat_blocks
        self._rng = random.Random(seed)
        talks: dict[int, list[int]] = defaultdict(list)
        for number, arrival in enumerate(trace):
            talks[arrival.conversation].append(number)
        self._talks = list(talks.values())
        self._lists = [[number for number, worker in enumerate(start) if worker == mine] for mine in range(workers)]
        self._hits = [self._runs.hits(requests, worker_blocks) for requests in self._lists]

    @property
    def hits(self) -> int:
        """The hits of the present placement, in blocks."""
        return sum(self._hits)

    def best(self, moves: int) -> list[int]:
        """The best placement that is found in `moves` moves, the start included: a worker's number for each request."""
        best, best_hits = list(self._placed), self.hits
        for number in range(moves):
            self._try(self._heat_blocks * (1 - number / moves))
            if self.hits > best_hits:
                best, best_hits = list(self._placed), self.hits
        return best

    def _try(self, heat_blocks: float) -> None:
        """Tries one move: the requests that `_drawn` gives, to a worker drawn at random. It is kept where no hits are
        lost; where `n` are, with the probability exp(-n / heat_blocks)."""
        target = self._rng.randrange(len(self._lists))
        moved = {number for number in self._drawn() if self._placed[number] != target}
        if not moved:
            return
        lists = {target: sorted([*self._lists[target], *moved])}
        for source in {self._placed[number] for number in moved}:
            lists[source] = [number for number in self._lists[source] if number not in moved]
        hits = {worker: self._runs.hits(requests, self._worker_blocks) for worker, requests in lists.items()}
        gain = sum(hits.values()) - sum(self._hits[worker] for worker in hits)
        if gain < 0 and self._rng.random() >= math.exp(gain / max(heat_blocks, 1e-9)):
            return
        for worker in lists:
            self._lists[worker], self._hits[worker] = lists[worker], hits[worker]
        for number in moved:
            self._placed[number] = target

    def _drawn(self) -> list[int]:
        talk = self._rng.choice(self._talks)
        first, kind = self._rng.randrange(len(talk)), self._rng.random()
        return talk if kind < WHOLE else talk[first:] if kind < WHOLE + END else talk[first:first + 1]
