# SPDX-License-Identifier: Apache-2.0
"""Which worker holds the KV of how much of a prompt.

`PrefixIndex` is fed with what the workers' events say and asked by the policy. It keeps, per block name
(`vllm_pd.router.hashes`), one integer with a bit per worker, and per worker a map from that engine's own block hash to
the name. A prompt is matched block by block from its start, with the set of workers that hold everything so far; a
worker drops out at its first gap, whatever it holds behind it.

Life of a block: `stored` names it and sets the worker's bit; `removed` takes the bit back. A block whose parent is not
known has no name yet: it *waits*, unmatched, until the parent is announced (engines evict parents before children now
and then, and compute them again). What a worker loses as a whole (`cleared`, `drop`) is invisible at once, but its
bits are swept a little at each later event, so that no call takes long.

Not for use by several threads. Calls cost time in proportion to the blocks they name, but for `replace`, which takes a
whole snapshot: `replacing` does the same in steps.
"""
import heapq
import math
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_pd.errors import ConfigError, PeerMismatch
from vllm_pd.router.hashes import TOKEN_BYTES, apart, chain, packed, root

SWEEP_BLOCKS = 256  # dead bits taken back at each call that changes the index
MAX_WAITING_BLOCKS = 65536  # per worker, beyond those that waited after a snapshot; then it needs another one
SLICE_BLOCKS = 512  # of a snapshot, between two steps of `replacing`

Hash = int | bytes
Block = tuple[Hash, Hash | None, Sequence[int], int | str | None]
"""Of a snapshot: the engine's hash, that of the block before it (None for the first of a prompt), the token ids of
this block alone, the adapter."""


@dataclass
class IndexCounts:
    """What the index has seen, for metrics. All in blocks, but for `drops` (workers)."""
    stored: int = 0
    removed: int = 0
    unknown_removed: int = 0  # removed without having been announced: events were lost
    waited: int = 0  # announced before their parent
    refused: int = 0  # could not even wait: the worker needs a snapshot
    drops: int = 0


@dataclass(slots=True)
class _WorkerEntry:
    """One life of a worker in the index. The bit belongs to it until its last name has been swept."""
    bit: int
    room: float  # how many blocks may wait
    names: dict[Hash, int] = field(default_factory=dict)  # engine hash -> name
    copies: dict[Hash, int] = field(default_factory=dict)  # engine hash -> how many more, where an engine keeps several
    shared: dict[int, int] = field(default_factory=dict)  # name -> how many more engine hashes have it
    waiting: dict[Hash, dict[Hash, bytes]] = field(default_factory=dict)  # the parent's -> child's -> tokens, extras
    parents: dict[Hash, Hash] = field(default_factory=dict)  # engine hash of what waits -> that of its parent
    complete: bool = True  # nothing was refused since the last snapshot


class PrefixIndex:
    """See the module. `block_size` in tokens; it must be that of all workers."""

    def __init__(self, block_size: int):
        if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
            raise ConfigError("block_size", block_size, "give the workers' --block-size, 1 or more")
        self.block_size = block_size
        self.counts = IndexCounts()
        self._holders: dict[int, int] = {}  # name -> bits of the workers that hold the block
        self._workers: dict[str, _WorkerEntry] = {}
        self._by_bit: dict[int, str] = {}
        self._ahead: dict[str, int] = {}  # worker -> blocks that its hashes look ahead
        self._live = 0  # bits of the workers in _workers
        self._free_bits: list[int] = []
        self._bits_made = 0
        self._dying: list[tuple[int, Iterator[int]]] = []  # bit, the names it is still set for
        self._expected: dict[int, dict[int, float]] = {}  # name -> bit -> until, in the clock of the caller
        self._expiries: list[tuple[float, int, list[int]]] = []  # heap: until, bit, names

    # asking

    def hashes(self, token_ids: Sequence[int], lora: int | str | None = None) -> list[int]:
        """The names of the full blocks of a prompt, in order. ConfigError for what is no list of token ids."""
        return chain(packed(token_ids), self.block_size, root(lora))

    def matches(self, hashes: Sequence[int], now_s: float | None = None) -> dict[str, int]:
        """Per worker how many blocks from the start of the prompt it holds without a gap; workers with none are left
        out. With `now_s`, blocks that are expected (`expect`) until a later time count as held."""
        if now_s is not None and self._expiries and self._expiries[0][0] <= now_s:
            self.expire(now_s)
        holders, expected = self._holders, {} if now_s is None else self._expected
        found: dict[str, int] = {}
        left, depth = self._live, 0
        for name in hashes:
            still = holders.get(name, 0)
            if expected and (soon := expected.get(name)) is not None:
                for bit, until_s in soon.items():
                    if until_s > now_s:
                        still |= bit
            still &= left
            if still != left:
                if depth:
                    self._note(left & ~still, depth, found)
                left = still
                if not left:
                    break
            depth += 1
        if depth and left:
            self._note(left, depth, found)
        if self._ahead:
            self._look_back(found)
        return found

    def _look_back(self, found: dict[str, int]) -> None:
        """A block that is held behind the last one that matches shows that what it was looking at is the same."""
        for worker in self._ahead.keys() & found.keys():
            found[worker] -= self._ahead[worker]
            if found[worker] <= 0:
                del found[worker]

    def _note(self, bits: int, depth: int, found: dict[str, int]) -> None:
        while bits:
            bit = bits & -bits
            found[self._by_bit[bit]] = depth
            bits ^= bit

    # what the workers announce

    def stored(self, worker: str, block_hashes: Sequence[Hash], parent: Hash | None, token_ids: Sequence[int],
               block_size: int | None = None, lora: int | str | None = None,
               extras: Sequence[str | None] | None = None, counted: bool = True) -> bool:
        """Consecutive blocks that `worker` holds from now on: `parent` is the engine's hash of the block before the
        first. `extras`, one for each, tell a block apart from others with the same tokens. Unless `counted`, a block
        that is told of twice is there once. False if some of them can't be kept, for want of room to wait in: the
        worker needs a snapshot."""
        if block_size is not None and block_size != self.block_size:
            raise PeerMismatch("block_size", self.block_size, block_size)
        if len(token_ids) != len(block_hashes) * self.block_size:
            raise ConfigError("token_ids", f"{len(token_ids)} for {len(block_hashes)} blocks",
                              f"send {self.block_size} for each block")
        data = packed(token_ids)
        if self._dying:
            self.sweep()
        state = self._workers.get(worker) or self._join(worker)
        seed = root(lora) if parent is None else state.names.get(parent)
        if seed is None:
            assert parent is not None
            return self._wait(state, block_hashes, parent, data, extras, counted)
        names, waiting, bit = state.names, state.waiting, state.bit
        holders, expected = self._holders, self._expected
        self.counts.stored += len(block_hashes)
        chained = chain(data, self.block_size, seed) if extras is None else apart(data, self.block_size, seed, extras)
        for engine_hash, name in zip(block_hashes, chained, strict=True):
            others = holders.get(name, 0)
            if engine_hash in names or engine_hash in waiting or others & bit:
                self._hold(state, engine_hash, name, counted)
                continue
            names[engine_hash] = name  # by far the most frequent case; what `_hold` does for it
            holders[name] = others | bit
            if name in expected:
                self._unexpect(name, bit)
        return True

    def looks_ahead(self, worker: str, blocks: int) -> None:
        """The worker's hashes depend on so many blocks behind: the last ones that match may not be hits."""
        if worker not in self._workers:
            self._join(worker)
        self._ahead[worker] = blocks

    def removed(self, worker: str, block_hashes: Iterable[Hash]) -> None:
        """Blocks that `worker` holds no longer. What has been computed on top of them stays known, and matches again
        when they are stored again."""
        if self._dying:
            self.sweep()
        state = self._workers.get(worker) or self._join(worker)
        for engine_hash in block_hashes:
            more = state.copies.pop(engine_hash, 0) if state.copies else 0
            if more:
                if more > 1:
                    state.copies[engine_hash] = more - 1
                self.counts.removed += 1
                continue
            name = state.names.pop(engine_hash, None)
            if name is not None:
                self._lose(state, name)
            elif not self._forget_waiting(state, engine_hash):
                self.counts.unknown_removed += 1
                continue
            self.counts.removed += 1

    def cleared(self, worker: str) -> None:
        """`worker` holds nothing any more."""
        if worker in self._workers:
            self._retire(worker)
        self._join(worker)
        self.sweep()

    def drop(self, worker: str) -> None:
        """`worker` is gone, or not to be counted on until it says anew what it holds."""
        if worker in self._workers:
            self._retire(worker)
            self.counts.drops += 1
        self.sweep()

    def replace(self, worker: str, blocks: Iterable[Block]) -> None:
        """`worker` holds these blocks and no others: a snapshot."""
        for _ in self.replacing(worker, blocks):
            pass

    def replacing(self, worker: str, blocks: Iterable[Block]) -> Iterator[int]:
        """As `replace`, in steps of at most SLICE_BLOCKS blocks, and yields how many it has taken; let others work in
        between, but nothing that feeds the same worker. Blocks may come in any order, and as many may wait as there
        are: else an engine that holds so many would be asked for one snapshot after the other."""
        self.cleared(worker)
        state = self._workers[worker]
        state.room = math.inf
        taken = 0
        for engine_hash, parent, token_ids, lora in blocks:
            if state is not self._workers.get(worker):
                return  # dropped meanwhile
            self.stored(worker, (engine_hash,), parent, token_ids, None, lora)
            taken += 1
            if taken % SLICE_BLOCKS == 0:
                yield taken
        state.room = len(state.parents) + MAX_WAITING_BLOCKS
        yield taken

    # what was just sent there

    def expect(self, worker: str, hashes: Sequence[int], until_s: float) -> None:
        """A prompt was just sent to `worker`: `matches` with a time before `until_s` counts its blocks there, until the
        worker's own events have said so or it has removed them."""
        state = self._workers.get(worker) or self._join(worker)
        bit, holders = state.bit, self._holders
        names = [name for name in hashes if not holders.get(name, 0) & bit]
        for name in names:
            soon = self._expected.setdefault(name, {})
            soon[bit] = max(until_s, soon.get(bit, until_s))
        if names:
            heapq.heappush(self._expiries, (until_s, bit, names))

    def expire(self, now_s: float) -> None:
        """Forget what was expected until now and never came; `matches` does it by itself."""
        while self._expiries and self._expiries[0][0] <= now_s:
            _, bit, names = heapq.heappop(self._expiries)
            for name in names:
                soon = self._expected.get(name)
                if soon is not None and soon.get(bit, now_s + 1) <= now_s:
                    self._unexpect(name, bit)

    # looking in

    def workers(self) -> list[str]:
        """Those that have said something since they were dropped last."""
        return list(self._workers)

    def __contains__(self, worker: str) -> bool:
        """Whether the worker has said something since it was dropped last."""
        return worker in self._workers

    def blocks(self, worker: str) -> int:
        """How many blocks the worker is known to hold, those that wait for a parent included."""
        state = self._workers.get(worker)
        return len(state.names) + len(state.parents) if state else 0

    def complete(self, worker: str) -> bool:
        """False where something the worker said could not be kept: it needs a snapshot."""
        state = self._workers.get(worker)
        return state is None or state.complete

    def engine_hashes(self, worker: str) -> KeysView[Hash]:
        """The engine's own hashes of the blocks that it is known to hold and that have a name."""
        state = self._workers.get(worker)
        return state.names.keys() if state else {}.keys()

    def names(self, worker: str) -> Mapping[Hash, int]:
        """From the engine's own hash to the name, for each block with a name. Not to be changed."""
        state = self._workers.get(worker)
        return state.names if state else {}

    def sizes(self) -> dict[str, int]:
        """Entries of each table, for metrics and leak checks."""
        return {"names": len(self._holders), "workers": len(self._workers), "dying": len(self._dying),
                "waiting": sum(len(state.parents) for state in self._workers.values()),
                "waited_for": sum(len(state.waiting) for state in self._workers.values()),
                "expected": len(self._expected), "expiries": len(self._expiries)}

    def sweep(self, blocks: int | None = None) -> None:
        """Take back at most so many bits (default: SWEEP_BLOCKS) of workers that are gone. Every change does this by
        itself."""
        if blocks is None:
            blocks = SWEEP_BLOCKS
        while self._dying and blocks > 0:
            bit, names = self._dying[-1]
            for name in names:
                self._release(name, bit)
                blocks -= 1
                if blocks <= 0:
                    return
            self._dying.pop()
            self._free_bits.append(bit)

    # inside

    def _join(self, worker: str) -> _WorkerEntry:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = 1 << self._bits_made
            self._bits_made += 1
        self._live |= bit
        self._by_bit[bit] = worker
        state = self._workers[worker] = _WorkerEntry(bit, MAX_WAITING_BLOCKS)
        return state

    def _retire(self, worker: str) -> None:
        state = self._workers.pop(worker)
        self._ahead.pop(worker, None)
        bit = state.bit
        self._live &= ~bit
        del self._by_bit[bit]
        kept = []
        for until_s, other, names in self._expiries:
            if other != bit:
                kept.append((until_s, other, names))
                continue
            for name in names:
                self._unexpect(name, bit)
        heapq.heapify(kept)
        self._expiries = kept
        self._dying.append((bit, iter(state.names.values())))

    def _hold(self, state: _WorkerEntry, engine_hash: Hash, name: int, counted: bool = True) -> None:
        """The block has a name now, and so has all that waited for it."""
        ready = [(engine_hash, name)]
        while ready:
            engine_hash, name = ready.pop()
            known = state.names.get(engine_hash)
            if known == name:  # a second block of the same content: V1 engines keep both
                if counted:
                    state.copies[engine_hash] = state.copies.get(engine_hash, 0) + 1
            else:
                if known is not None:
                    self._lose(state, known)
                self._gain(state, engine_hash, name)
            if state.waiting and (children := state.waiting.pop(engine_hash, None)):
                for child, data in children.items():
                    del state.parents[child]
                    self.counts.stored += 1
                    ready.append((child, self._named(data, name)))

    def _named(self, data: bytes, seed: int) -> int:
        """The name of one block that has waited: its tokens, and its extras behind them."""
        step = self.block_size * TOKEN_BYTES
        extra = data[step:].decode() or None
        return apart(data[:step], self.block_size, seed, [extra])[0]

    def _gain(self, state: _WorkerEntry, engine_hash: Hash, name: int) -> None:
        state.names[engine_hash] = name
        holders = self._holders.get(name, 0)
        if holders & state.bit:  # a key that the events do not carry, like a cache salt, tells the two apart
            state.shared[name] = state.shared.get(name, 0) + 1
        else:
            self._holders[name] = holders | state.bit
            if self._expected:
                self._unexpect(name, state.bit)

    def _lose(self, state: _WorkerEntry, name: int) -> None:
        more = state.shared.pop(name, 0) if state.shared else 0
        if not more:
            self._release(name, state.bit)
        elif more > 1:
            state.shared[name] = more - 1

    def _wait(self, state: _WorkerEntry, block_hashes: Sequence[Hash], parent: Hash, data: bytes,
              extras: Sequence[str | None] | None, counted: bool) -> bool:
        if len(state.parents) + len(block_hashes) > state.room:
            self.counts.refused += len(block_hashes)
            state.complete = False
            return False
        step = self.block_size * TOKEN_BYTES
        for number, engine_hash in enumerate(block_hashes):
            piece = data[number * step:(number + 1) * step]
            if extras is not None and extras[number]:
                piece += extras[number].encode()
            seed = state.names.get(parent)
            if seed is not None:
                self.counts.stored += 1
                self._hold(state, engine_hash, self._named(piece, seed), counted)
            elif engine_hash in state.names or engine_hash in state.parents:
                if counted:
                    state.copies[engine_hash] = state.copies.get(engine_hash, 0) + 1
            else:
                state.waiting.setdefault(parent, {})[engine_hash] = piece
                state.parents[engine_hash] = parent
                self.counts.waited += 1
            parent = engine_hash
        return True

    def _forget_waiting(self, state: _WorkerEntry, engine_hash: Hash) -> bool:
        parent = state.parents.pop(engine_hash, None)
        if parent is None:
            return False
        children = state.waiting[parent]
        del children[engine_hash]
        if not children:
            del state.waiting[parent]
        return True

    def _release(self, name: int, bit: int) -> None:
        left = self._holders.get(name, 0) & ~bit
        if left:
            self._holders[name] = left
        else:
            self._holders.pop(name, None)

    def _unexpect(self, name: int, bit: int) -> None:
        soon = self._expected.get(name)
        if soon is not None and soon.pop(bit, None) is not None and not soon:
            del self._expected[name]
