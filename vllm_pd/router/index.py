# SPDX-License-Identifier: Apache-2.0
"""Which worker holds the KV blocks of how much of a prompt.

`PrefixIndex` is fed with the workers' KV events. It keeps, for each block name (`vllm_pd.protocol.hashes`), one integer
with a bit for each worker that holds the block, and for each worker a dictionary from the engine's own block hashes to
names. A prompt is matched block by block from its start, with the set of workers that hold everything so far. A worker
drops out at its first missing block, whatever it holds after that.

Life of a block: `stored` gives it a name and sets the worker's bit, `removed` clears the bit. The name depends on the
previous block (the parent). A block whose parent is unknown *waits* without a name and matches nothing until its parent
is stored; engines sometimes evict a parent before its children and compute it again later. When a worker loses all
blocks (`cleared`, `drop`), they stop matching at once. Their bits are cleared a few at a time, at each later change,
so that no call takes long.

An engine may have KV cache groups that need only the last blocks before a position (sliding windows, recurrent states;
`vllm_pd.router.windows`). `stored` and `removed` are about the groups that need all blocks. What the others hold is
*marked* (`mark`), in tables of the same form. A mark may come before its block is stored, and ends with the block.

Not thread-safe. The time of a call is proportional to the number of blocks it names. `replacing` takes a large snapshot
in steps.
"""
import heapq
import math
from collections.abc import Collection, Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass, field

from vllm_pd.errors import ConfigError, PeerMismatch
from vllm_pd.protocol.hashes import TOKEN_BYTES, chain, chain_with_extras, pack_tokens, root_seed
from vllm_pd.router.windows import longest_hits

SWEEP_BLOCKS = 256  # bits of lost blocks cleared at each change of the index
MAX_WAITING_BLOCKS = 65536  # per worker, besides those that waited after a snapshot; beyond, it needs a new snapshot
SLICE_BLOCKS = 512  # of a snapshot, in one step of `replacing`

Hash = int | bytes
Block = tuple[Hash, Hash | None, Sequence[int], int | str | None]
"""A block of a snapshot: the engine's hash of it, that of its parent (None for the first block of a prompt), the token
ids of this block only, the LoRA adapter."""


@dataclass
class IndexCounts:
    """Totals for the metrics, in blocks; `drops` in workers."""
    stored: int = 0
    removed: int = 0
    unknown_removed: int = 0  # removed without having been stored: events were lost
    waited: int = 0  # stored before their parent
    refused: int = 0  # too many wait already: the worker needs a snapshot
    drops: int = 0


@dataclass(slots=True)
class _WorkerEntry:
    """What a worker holds, from its first event to its loss of everything. `bit` is not given to another worker before
    it has been cleared everywhere."""
    bit: int
    max_waiting: float  # how many blocks may wait
    names: dict[Hash, int] = field(default_factory=dict)  # engine hash -> name
    copies: dict[Hash, int] = field(default_factory=dict)  # engine hash -> number of further blocks with the same hash
    shared: dict[int, int] = field(default_factory=dict)  # name -> number of further engine hashes with the same name
    waiting: dict[Hash, dict[Hash, bytes]] = field(default_factory=dict)  # parent -> waiting block -> tokens and extras
    parents: dict[Hash, Hash] = field(default_factory=dict)  # waiting block -> its parent
    unnamed: dict[int, set[Hash]] = field(default_factory=dict)  # reach of groups -> marked blocks without a name


@dataclass(slots=True)
class _Marks:
    """What the groups with one reach hold."""
    users: int = 0  # bits of the workers with such groups
    holders: dict[int, int] = field(default_factory=dict)  # name -> bits of the workers that hold the block there, too


class PrefixIndex:
    """See the module. `block_size` is in tokens and the same for all workers of the index."""

    def __init__(self, block_size: int):
        if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
            raise ConfigError("block_size", block_size, "give the workers' --block-size, 1 or more")
        self.block_size = block_size
        self.counts = IndexCounts()
        self._holders: dict[int, int] = {}  # name -> bits of the workers that hold the block
        self._workers: dict[str, _WorkerEntry] = {}
        self._by_bit: dict[int, str] = {}
        self._lookahead: dict[str, int] = {}  # worker -> see `set_lookahead`
        self._live = 0  # bits of the workers in _workers
        self._free_bits: list[int] = []
        self._bits_made = 0
        # Bit of a lost worker, names for which it is still set, its reaches.
        self._dying: list[tuple[int, Iterator[int], Collection[int]]] = []
        self._expected: dict[int, dict[int, float]] = {}  # name -> bit -> until when, on the caller's clock
        self._expiries: list[tuple[float, int, list[int]]] = []  # heap: until, bit, names
        self._marks: dict[int, _Marks] = {}  # by reach, in blocks

    # Queries.

    def hashes(self, token_ids: Sequence[int], lora: int | str | None = None) -> list[int]:
        """The names of the full blocks of a prompt, in order. Raises ConfigError for anything but token ids."""
        return chain(pack_tokens(token_ids), self.block_size, root_seed(lora))

    def matches(self, hashes: Sequence[int], now_s: float | None = None) -> dict[str, int]:
        """How many blocks from the start of the prompt are a prefix hit at each worker. `hashes` are their names;
        workers with none are left out. With `now_s`, blocks that are expected until a later time (`expect`) count as
        held."""
        found = self.beginnings(hashes, now_s)
        if self._marks and found:
            self._shorten(found, hashes, now_s)
        return found

    def beginnings(self, hashes: Sequence[int], now_s: float | None = None) -> dict[str, int]:
        """As `matches`, but only by the groups that need all blocks. Where these lack a block of the prompt, no longer
        prompt has a hit behind it."""
        if now_s is not None and self._expiries and self._expiries[0][0] <= now_s:
            self.expire(now_s)
        holders, expected = self._holders, {} if now_s is None else self._expected
        found: dict[str, int] = {}
        matching, depth = self._live, 0  # the workers that hold all of the first `depth` blocks
        for name in hashes:
            bits = holders.get(name, 0)
            if expected and (expected_bits := expected.get(name)) is not None:
                for bit, until_s in expected_bits.items():
                    if until_s > now_s:
                        bits |= bit
            bits &= matching
            if bits != matching:
                if depth:
                    self._record(matching & ~bits, depth, found)
                matching = bits
                if not matching:
                    break
            depth += 1
        if depth and matching:
            self._record(matching, depth, found)
        if self._lookahead:
            self._subtract_lookahead(found)
        return found

    def _subtract_lookahead(self, found: dict[str, int]) -> None:
        """The last blocks that match depend on tokens after them, which may differ, so they may be no hits."""
        for worker in self._lookahead.keys() & found.keys():
            found[worker] -= self._lookahead[worker]
            if found[worker] <= 0:
                del found[worker]

    def _shorten(self, found: dict[str, int], hashes: Sequence[int], now_s: float | None) -> None:
        """To what the groups that need only the last blocks allow."""
        lengths: dict[int, int] = {}
        reaches: set[int] = set()
        for worker in list(found):
            if (state := self._workers[worker]).unnamed:
                length = found.pop(worker)
                lengths[length] = lengths.get(length, 0) | state.bit
                reaches.update(state.unnamed)
        expected = {} if now_s is None else self._expected
        tables = {reach: (self._marks[reach].users, self._marks[reach].holders) for reach in reaches}

        def lacks(number: int, reach: int) -> int:
            name, (users, holders) = hashes[number], tables[reach]
            bits = users & ~holders.get(name, 0)
            if bits and expected and (expected_bits := expected.get(name)) is not None:
                for bit, until_s in expected_bits.items():
                    if until_s > now_s:
                        bits &= ~bit
            return bits

        for length, bits in longest_hits(lengths, tables, lacks).items():
            self._record(bits, length, found)

    def _record(self, bits: int, depth: int, found: dict[str, int]) -> None:
        while bits:
            bit = bits & -bits
            found[self._by_bit[bit]] = depth
            bits ^= bit

    # Events of the workers.

    def stored(self, worker: str, block_hashes: Sequence[Hash], parent: Hash | None, token_ids: Sequence[int],
               block_size: int | None = None, lora: int | str | None = None,
               extras: Sequence[str | None] | None = None, counted: bool = True) -> bool:
        """`worker` now holds these consecutive blocks. `block_hashes` are the engine's hashes, `parent` is that of the
        block before the first, `token_ids` are those of all blocks. `extras` has one entry for each block, which
        distinguishes it from blocks with the same tokens. With `counted`, a block that is stored twice must be removed
        twice. Returns False if too many blocks wait already, so that some were not kept: the worker needs a snapshot.
        Raises PeerMismatch for another block size, ConfigError for a wrong number of tokens."""
        if block_size is not None and block_size != self.block_size:
            raise PeerMismatch("block_size", self.block_size, block_size)
        if len(token_ids) != len(block_hashes) * self.block_size:
            raise ConfigError("token_ids", f"{len(token_ids)} for {len(block_hashes)} blocks",
                              f"send {self.block_size} for each block")
        data = pack_tokens(token_ids)
        if self._dying:
            self.sweep()
        state = self._workers.get(worker) or self._join(worker)
        seed = root_seed(lora) if parent is None else state.names.get(parent)
        if seed is None:
            assert parent is not None
            return self._wait(state, block_hashes, parent, data, extras, counted)
        names, waiting, bit = state.names, state.waiting, state.bit
        holders, expected = self._holders, self._expected
        self.counts.stored += len(block_hashes)
        new_names = (chain(data, self.block_size, seed) if extras is None else
                     chain_with_extras(data, self.block_size, seed, extras))
        for engine_hash, name in zip(block_hashes, new_names, strict=True):
            others = holders.get(name, 0)
            if engine_hash in names or engine_hash in waiting or others & bit:
                self._hold(state, engine_hash, name, counted)
                continue
            names[engine_hash] = name  # by far the most frequent case of `_hold`, inlined
            holders[name] = others | bit
            if name in expected:
                self._unexpect(name, bit)
        if state.unnamed:
            for engine_hash, name in zip(block_hashes, new_names, strict=True):
                self._mark_named(state, engine_hash, name)
        return True

    def mark(self, worker: str, reach: int, block_hashes: Iterable[Hash]) -> None:
        """The groups of `worker` that need only the last `reach` blocks before a position hold these blocks now. From
        the first call on, which may name none, hits at the worker need them. The caller bounds the number of marked
        blocks. A mark ends with its block."""
        if self._dying:
            self.sweep()
        state = self._workers.get(worker) or self._join(worker)
        marks, unnamed = self._marks.setdefault(reach, _Marks()), state.unnamed.setdefault(reach, set())
        marks.users |= state.bit
        for engine_hash in block_hashes:
            name = state.names.get(engine_hash)
            if name is None:
                unnamed.add(engine_hash)
            else:
                marks.holders[name] = marks.holders.get(name, 0) | state.bit

    def unmark(self, worker: str, reach: int, block_hashes: Iterable[Hash]) -> None:
        """One of these groups does not hold these blocks any more."""
        state = self._workers.get(worker)
        if state is not None and reach in state.unnamed:
            self._unmark(state, (reach, ), block_hashes)

    def _unmark(self, state: _WorkerEntry, reaches: Iterable[int], block_hashes: Iterable[Hash]) -> None:
        for engine_hash in block_hashes:
            name = state.names.get(engine_hash)
            for reach in reaches:
                if name is None:
                    state.unnamed[reach].discard(engine_hash)
                else:
                    _clear_bit(self._marks[reach].holders, name, state.bit)

    def set_lookahead(self, worker: str, blocks: int) -> None:
        """The worker's block hashes depend on the tokens of `blocks` following blocks, so that the last `blocks` ones
        of a match may be no hits."""
        if worker not in self._workers:
            self._join(worker)
        self._lookahead[worker] = blocks

    def removed(self, worker: str, block_hashes: Iterable[Hash]) -> None:
        """`worker` no longer holds these blocks. Their children stay known, and match again once these are stored
        again."""
        if self._dying:
            self.sweep()
        state = self._workers.get(worker) or self._join(worker)
        if state.unnamed:
            block_hashes = list(block_hashes)
            self._unmark(state, state.unnamed, block_hashes)
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
        """`worker` holds no blocks any more."""
        if worker in self._workers:
            self._retire(worker)
        self._join(worker)
        self.sweep()

    def drop(self, worker: str) -> None:
        """Forget `worker`: it has left, or what is known of it can't be trusted any more."""
        if worker in self._workers:
            self._retire(worker)
            self.counts.drops += 1
        self.sweep()

    def replace(self, worker: str, blocks: Iterable[Block]) -> None:
        """Replace what is known of `worker` by a snapshot: it holds exactly these blocks."""
        for _ in self.replacing(worker, blocks):
            pass

    def replacing(self, worker: str, blocks: Iterable[Block]) -> Iterator[int]:
        """As `replace`, in steps of SLICE_BLOCKS blocks. Yields the number of blocks taken so far. Other workers may be
        changed between two steps, not this one. Blocks may come in any order, and any number of them may wait:
        otherwise an engine with many such blocks would be asked for one snapshot after the other."""
        self.cleared(worker)
        state = self._workers[worker]
        state.max_waiting = math.inf
        taken = 0
        for engine_hash, parent, token_ids, lora in blocks:
            if state is not self._workers.get(worker):
                return  # dropped between two steps
            self.stored(worker, (engine_hash,), parent, token_ids, None, lora)
            taken += 1
            if taken % SLICE_BLOCKS == 0:
                yield taken
        state.max_waiting = len(state.parents) + MAX_WAITING_BLOCKS
        yield taken

    # Blocks expected of requests that were just sent.

    def expect(self, worker: str, hashes: Sequence[int], until_s: float) -> None:
        """A prompt with these block names was just sent to `worker`. Until `until_s` the blocks count as held there in
        `matches` with `now_s`, unless the worker's events store or remove them before."""
        state = self._workers.get(worker) or self._join(worker)
        bit, holders = state.bit, self._holders
        # Groups that need only the last blocks may lack some that the others hold.
        names = list(hashes) if state.unnamed else [name for name in hashes if not holders.get(name, 0) & bit]
        for name in names:
            expected_bits = self._expected.setdefault(name, {})
            expected_bits[bit] = max(until_s, expected_bits.get(bit, until_s))
        if names:
            heapq.heappush(self._expiries, (until_s, bit, names))

    def expire(self, now_s: float) -> None:
        """Forget blocks whose time has passed. `matches` calls this itself."""
        while self._expiries and self._expiries[0][0] <= now_s:
            _, bit, names = heapq.heappop(self._expiries)
            for name in names:
                expected_bits = self._expected.get(name)
                if expected_bits is not None and expected_bits.get(bit, now_s + 1) <= now_s:
                    self._unexpect(name, bit)

    # Inspection.

    def workers(self) -> list[str]:
        """The workers that have sent events since they were last dropped."""
        return list(self._workers)

    def __contains__(self, worker: str) -> bool:
        """Whether the worker has sent events since it was last dropped."""
        return worker in self._workers

    def blocks(self, worker: str) -> int:
        """The number of blocks that the worker holds, waiting ones included."""
        state = self._workers.get(worker)
        return len(state.names) + len(state.parents) if state else 0

    def engine_hashes(self, worker: str) -> KeysView[Hash]:
        """The engine's own hashes of the blocks with a name."""
        state = self._workers.get(worker)
        return state.names.keys() if state else {}.keys()

    def sizes(self) -> dict[str, int]:
        """The number of entries of each table, for metrics and leak checks."""
        return {"names": len(self._holders), "workers": len(self._workers), "dying": len(self._dying),
                "waiting": sum(len(state.parents) for state in self._workers.values()),
                "waited_for": sum(len(state.waiting) for state in self._workers.values()),
                "expected": len(self._expected), "expiries": len(self._expiries),
                "marked": sum(len(marks.holders) for marks in self._marks.values()), "reaches": len(self._marks),
                "unnamed": sum(len(hashes) for state in self._workers.values() for hashes in state.unnamed.values())}

    def sweep(self, blocks: int | None = None) -> None:
        """Clear at most `blocks` bits (default: SWEEP_BLOCKS) of lost workers. Every change calls this itself."""
        if blocks is None:
            blocks = SWEEP_BLOCKS
        while self._dying and blocks > 0:
            bit, names, reaches = self._dying[-1]
            for name in names:
                self._release(name, bit)
                for reach in reaches:
                    if (marks := self._marks.get(reach)) is not None:
                        _clear_bit(marks.holders, name, bit)
                blocks -= 1
                if blocks <= 0:
                    return
            self._dying.pop()
            self._free_bits.append(bit)
            for reach in reaches:
                marks = self._marks.get(reach)
                if marks is not None and not marks.users and not marks.holders:
                    del self._marks[reach]

    # Internals.

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
        """The worker has lost everything: it matches no more, and nothing is expected of it. `sweep` clears its bit in
        the names of its blocks later, and then frees the bit."""
        state = self._workers.pop(worker)
        self._lookahead.pop(worker, None)
        bit = state.bit
        self._live &= ~bit
        del self._by_bit[bit]
        for reach in state.unnamed:
            self._marks[reach].users &= ~bit
        kept = []
        for until_s, other, names in self._expiries:
            if other != bit:
                kept.append((until_s, other, names))
                continue
            for name in names:
                self._unexpect(name, bit)
        heapq.heapify(kept)
        self._expiries = kept
        self._dying.append((bit, iter(state.names.values()), tuple(state.unnamed)))

    def _hold(self, state: _WorkerEntry, engine_hash: Hash, name: int, counted: bool = True) -> None:
        """Record the block under its name, and then the blocks that waited for it."""
        ready = [(engine_hash, name)]
        while ready:
            engine_hash, name = ready.pop()
            known = state.names.get(engine_hash)
            if known == name:  # a second block of the same content: V1 engines keep both
                if counted:
                    state.copies[engine_hash] = state.copies.get(engine_hash, 0) + 1
            else:
                if known is not None:
                    self._unmark(state, state.unnamed, [engine_hash])
                    self._lose(state, known)
                self._gain(state, engine_hash, name)
            if state.waiting and (children := state.waiting.pop(engine_hash, None)):
                for child, data in children.items():
                    del state.parents[child]
                    self.counts.stored += 1
                    ready.append((child, self._named(data, name)))

    def _named(self, data: bytes, seed: int) -> int:
        """The name of a block that has waited. `data` is its tokens followed by its extras."""
        step = self.block_size * TOKEN_BYTES
        extra = data[step:].decode() or None
        return chain_with_extras(data[:step], self.block_size, seed, [extra])[0]

    def _gain(self, state: _WorkerEntry, engine_hash: Hash, name: int) -> None:
        state.names[engine_hash] = name
        holders = self._holders.get(name, 0)
        if holders & state.bit:  # the engine distinguishes two blocks by something not in its events, like a cache salt
            state.shared[name] = state.shared.get(name, 0) + 1
        else:
            self._holders[name] = holders | state.bit
            if self._expected:
                self._unexpect(name, state.bit)
        if state.unnamed:
            self._mark_named(state, engine_hash, name)

    def _mark_named(self, state: _WorkerEntry, engine_hash: Hash, name: int) -> None:
        """The block has a name now. It may have been marked before."""
        for reach, unnamed in state.unnamed.items():
            if engine_hash in unnamed:
                unnamed.discard(engine_hash)
                holders = self._marks[reach].holders
                holders[name] = holders.get(name, 0) | state.bit

    def _lose(self, state: _WorkerEntry, name: int) -> None:
        more = state.shared.pop(name, 0) if state.shared else 0
        if not more:
            self._release(name, state.bit)
        elif more > 1:
            state.shared[name] = more - 1

    def _wait(self, state: _WorkerEntry, block_hashes: Sequence[Hash], parent: Hash, data: bytes,
              extras: Sequence[str | None] | None, counted: bool) -> bool:
        """Keep consecutive blocks, `parent` before them, until the name of the one before each is known; those for
        which it is known get theirs now. Returns False, and keeps none, where too many would wait."""
        if len(state.parents) + len(block_hashes) > state.max_waiting:
            self.counts.refused += len(block_hashes)
            return False
        step = self.block_size * TOKEN_BYTES
        for index, engine_hash in enumerate(block_hashes):
            block_data = data[index * step:(index + 1) * step]
            if extras is not None and extras[index]:
                block_data += extras[index].encode()
            seed = state.names.get(parent)
            if seed is not None:
                self.counts.stored += 1
                self._hold(state, engine_hash, self._named(block_data, seed), counted)
            elif engine_hash in state.names or engine_hash in state.parents:
                if counted:
                    state.copies[engine_hash] = state.copies.get(engine_hash, 0) + 1
            else:
                state.waiting.setdefault(parent, {})[engine_hash] = block_data
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
        bits = self._holders.get(name, 0) & ~bit
        if bits:
            self._holders[name] = bits
        else:
            self._holders.pop(name, None)

    def _unexpect(self, name: int, bit: int) -> None:
        """This block is not expected any more at the worker that has this bit. Nothing changes if it was not."""
        expected_bits = self._expected.get(name)
        if expected_bits is not None and expected_bits.pop(bit, None) is not None and not expected_bits:
            del self._expected[name]


def _clear_bit(holders: dict[int, int], name: int, bit: int) -> None:
    bits = holders.get(name, 0) & ~bit
    if bits:
        holders[name] = bits
    else:
        holders.pop(name, None)
