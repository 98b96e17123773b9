# SPDX-License-Identifier: Apache-2.0
"""Which workers serve the same model, and what they hold of it.

Workers that name a model alike are a family: prompts for it have one tokenizer, and what its workers hold is comparable
where their blocks have the same size. So a family has an index for each size. It ends with its last worker.
"""
from collections.abc import Iterable, Iterator, Sequence

from vllm_pd.router.index import Block, Hash, PrefixIndex
from vllm_pd.router.workers import RouterWorker


class Family:
    """`name` is the least of the `names` by which its first worker serves the model."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.names: set[str] = set()
        self.indexes: dict[int, PrefixIndex] = {}  # by the size of a block
        self.members: set[str] = set()  # URLs

    def index(self, block_size: int) -> PrefixIndex:
        """That of workers with such blocks."""
        if block_size not in self.indexes:
            self.indexes[block_size] = PrefixIndex(block_size)
        return self.indexes[block_size]


class Families:
    """Belongs to the router's event loop."""

    def __init__(self) -> None:
        self._by_name: dict[str, Family] = {}
        self._by_url: dict[str, Family] = {}

    def join(self, worker: RouterWorker) -> Family:
        """The worker's; its first one, by the models that it says it serves, until it leaves."""
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

    def is_another(self, worker: RouterWorker) -> bool:
        """Whether the worker serves nothing any more of what its family does."""
        family = self._by_url.get(worker.url)
        return family is not None and family.names.isdisjoint(_names(worker))

    def leave(self, url: str) -> Family | None:
        """The worker is gone. Its family, where that has ended with it."""
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
        """That of whoever is asked for this model; `serving` are the workers that may know it as an adapter. Where no
        model is named it is the only family that there is."""
        if model in self._by_name:
            return self._by_name[model]
        if model is not None:
            for worker in serving:
                if model in worker.models and worker.url in self._by_url:
                    return self._by_url[worker.url]
        found = {id(family): family for family in self._by_url.values()}
        return next(iter(found.values())) if len(found) == 1 else None

    def indexes(self) -> Iterator[PrefixIndex]:
        """Of all families."""
        for family in {id(family): family for family in self._by_name.values()}.values():
            yield from family.indexes.values()


def _names(worker: RouterWorker) -> frozenset[str]:
    return worker.base_models or worker.models or frozenset({""})


class UnsizedIndex:
    """The index of one rank of a worker (`vllm_pd.events.subscriber.Index`) whose blocks' size its first event says."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._index: PrefixIndex | None = None

    @property
    def block_size(self) -> int:
        """0 where it is not known yet."""
        return 0 if self._index is None else self._index.block_size

    def stored(self, worker: str, block_hashes: Sequence[Hash], parent: Hash | None, token_ids: Sequence[int],
               block_size: int | None = None, lora: int | str | None = None,
               extras: Sequence[str | None] | None = None, counted: bool = True) -> bool:
        if self._index is None:
            self._index = self._family.index(block_size)
        return self._index.stored(worker, block_hashes, parent, token_ids, block_size, lora, extras, counted)

    def removed(self, worker: str, block_hashes: Iterable[Hash]) -> None:
        if self._index is not None:
            self._index.removed(worker, block_hashes)

    def looks_ahead(self, worker: str, blocks: int) -> None:
        if self._index is not None:
            self._index.looks_ahead(worker, blocks)

    def cleared(self, worker: str) -> None:
        if self._index is not None:
            self._index.cleared(worker)

    def drop(self, worker: str) -> None:
        """The next life of the engine may have others."""
        if self._index is not None:
            self._index.drop(worker)
            self._index = None

    def replacing(self, worker: str, blocks: Iterable[Block]) -> Iterator[int]:
        raise NotImplementedError("only an engine of ours sends a snapshot, and it tells the size of its blocks")
