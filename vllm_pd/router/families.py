# SPDX-License-Identifier: Apache-2.0
"""Workers grouped by the model they serve, each group with its prefix indexes.

Workers that give their model the same name are a family. A family has one tokenizer, and one `PrefixIndex` for each
block size among its workers, because blocks of different sizes can't be compared. It ends with its last worker.
"""
from collections.abc import Iterable, Iterator, Sequence

from vllm_pd.router.index import Block, Hash, PrefixIndex
from vllm_pd.router.workers import RouterWorker


class Family:
    """One model's workers. `names` are the model's names, `name` is the first worker's alphabetically first one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.names: set[str] = set()
        self.indexes: dict[int, PrefixIndex] = {}  # by block size, in tokens
        self.members: set[str] = set()  # URLs

    def index(self, block_size: int) -> PrefixIndex:
        """The index of the workers with this block size (tokens); made where there is none."""
        if block_size not in self.indexes:
            self.indexes[block_size] = PrefixIndex(block_size)
        return self.indexes[block_size]


class Families:
    """All families, by model name and by worker URL. Belongs to the router's event loop."""

    def __init__(self) -> None:
        self._by_name: dict[str, Family] = {}
        self._by_url: dict[str, Family] = {}

    def join(self, worker: RouterWorker) -> Family:
        """The worker's family. The worker's models decide at the first call; it then stays there until `leave`."""
        names = _names(worker)
        family = self._by_url.get(worker.url)
        if family is None:
            family = next((self._by_name[name] for name in sorted(names) if name in self._by_name), None)
            family = family or Family(min(names))
        family.members.add(worker.url)
        self._by_url[worker.url] = family
        for name in names:
            if self._by_name.setdefault(name, family) is family:
                family.names.add(name)
        return family

    def has_changed_model(self, worker: RouterWorker) -> bool:
        """Whether the worker serves none of its family's models any more."""
        family = self._by_url.get(worker.url)
        return family is not None and family.names.isdisjoint(_names(worker))

    def leave(self, url: str) -> Family | None:
        """Remove a worker. Returns its family where that has ended with it, else None."""
        family = self._by_url.pop(url, None)
        if family is None:
            return None
        family.members.discard(url)
        for index in family.indexes.values():
            index.drop(url)
        if family.members:
            return None
        for name in family.names:
            del self._by_name[name]
        return family

    def of_model(self, model: str | None, serving: Iterable[RouterWorker]) -> Family | None:
        """The family for a request's `model`, or None. `serving` are the workers to look at for an adapter of that
        name. For an unknown model or None it is the only family, where there is exactly one."""
        if model in self._by_name:
            return self._by_name[model]
        if model is not None:
            for worker in serving:
                if model in worker.models and worker.url in self._by_url:
                    return self._by_url[worker.url]
        found = {id(family): family for family in self._by_url.values()}
        return next(iter(found.values())) if len(found) == 1 else None

    def indexes(self) -> Iterator[PrefixIndex]:
        """The indexes of all families."""
        for family in {id(family): family for family in self._by_name.values()}.values():
            yield from family.indexes.values()


def _names(worker: RouterWorker) -> frozenset[str]:
    return worker.base_models or worker.models or frozenset({""})


class UnsizedIndex:
    """A `vllm_pd.router.events.holdings.SubscribedIndex` for a rank whose block size is unknown until its first
    event, which selects the family's index of that size."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._index: PrefixIndex | None = None

    @property
    def block_size(self) -> int:
        """In tokens; 0 while it is unknown."""
        return 0 if self._index is None else self._index.block_size

    def stored(self, worker: str, block_hashes: Sequence[Hash], parent: Hash | None, token_ids: Sequence[int],
               block_size: int | None = None, lora: int | str | None = None,
               extras: Sequence[str | None] | None = None, counted: bool = True) -> bool:
        """See `PrefixIndex`. The first call selects the index, by `block_size`."""
        if self._index is None:
            self._index = self._family.index(block_size)
        return self._index.stored(worker, block_hashes, parent, token_ids, block_size, lora, extras, counted)

    def removed(self, worker: str, block_hashes: Iterable[Hash]) -> None:
        """See `PrefixIndex`."""
        if self._index is not None:
            self._index.removed(worker, block_hashes)

    def set_lookahead(self, worker: str, blocks: int) -> None:
        """See `PrefixIndex`."""
        if self._index is not None:
            self._index.set_lookahead(worker, blocks)

    def mark(self, worker: str, reach: int, block_hashes: Iterable[Hash]) -> None:
        """See `PrefixIndex`."""
        if self._index is not None:
            self._index.mark(worker, reach, block_hashes)

    def unmark(self, worker: str, reach: int, block_hashes: Iterable[Hash]) -> None:
        """See `PrefixIndex`."""
        if self._index is not None:
            self._index.unmark(worker, reach, block_hashes)

    def blocks(self, worker: str) -> int:
        """See `PrefixIndex`."""
        return 0 if self._index is None else self._index.blocks(worker)

    def cleared(self, worker: str) -> None:
        """See `PrefixIndex`."""
        if self._index is not None:
            self._index.cleared(worker)

    def drop(self, worker: str) -> None:
        """See `PrefixIndex`. The engine's next life may have another block size."""
        if self._index is not None:
            self._index.drop(worker)
            self._index = None

    def replacing(self, worker: str, blocks: Iterable[Block]) -> Iterator[int]:
        """Never called: only our own engines send snapshots, and those report their block size."""
        raise NotImplementedError("a snapshot came from an engine that does not report its block size")
