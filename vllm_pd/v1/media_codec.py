# SPDX-License-Identifier: Apache-2.0
"""An image, a video or a piece of audio of a prompt, as bytes: what vLLM's front end has made of it for the model
(`MultiModalKwargsItem`), and which tokens of its placeholder get embeddings.

    4 bytes    the length of the head
    head       msgpack: names, dtypes and shapes, and the mask of the placeholder
    the rest   the elements of all tensors, in the order of the head

Equal items are equal bytes, and the digest is that of these. Only kinds of data that are listed here are encoded, and
made of bytes: nothing is unpickled, and no name that a peer sends is looked up anywhere. Elements are in the order of
bytes of a little-endian machine, as all have that vLLM runs on.
"""
from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Annotated, Union

import msgspec
import torch
from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)

from vllm_pd.protocol.scope import MAX_MEDIA_BYTES

MAX_FIELDS = 64
MAX_PARTS = 4096  # tensors, numbers and lists of one item
MAX_DEPTH = 4  # of lists in lists
MAX_DIMENSIONS = 8
MAX_HEAD_BYTES = 1 << 20
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16", "uint8", "int8", "int16",
                                                  "int32", "int64", "bool")}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 4
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class MediaFault(ValueError):
    """An item that is not encoded, or bytes that are none. The text says why."""


class TensorHead(msgspec.Struct, frozen=True, array_like=True, tag="tensor"):
    """A tensor, without its elements."""
    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]

    @property
    def size(self) -> int:
        """In bytes. Raises MediaFault for a dtype that is not known."""
        if self.dtype not in DTYPES:
            raise MediaFault(f"dtype {self.dtype!r}")
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class NumberPart(msgspec.Struct, frozen=True, array_like=True, tag="number"):
    """A number, which some models have in the place of a tensor."""
    value: bool | int | float


class ListPart(msgspec.Struct, frozen=True, array_like=True, tag="list"):
    """Parts whose shapes may differ."""
    parts: Annotated[tuple[Union[TensorHead, NumberPart, ListPart], ...],  # noqa: UP007  of a name that is yet to be
                     msgspec.Meta(max_length=MAX_PARTS)]


Part = TensorHead | NumberPart | ListPart


class FieldHead(msgspec.Struct, frozen=True, array_like=True):
    """One keyword argument of the model. `kind`, `number` and `keeps_on_cpu` say how vLLM makes a batch of several
    items: see `_FIELDS`."""
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    kind: Annotated[str, msgspec.Meta(max_length=16)]
    number: Annotated[int, msgspec.Meta(ge=-MAX_DIMENSIONS, lt=1 << 31)]
    keeps_on_cpu: bool
    data: Part


class ItemHead(msgspec.Struct, frozen=True, array_like=True):
    """`mask`: a bit for each token of the placeholder, 1 where it gets an embedding; empty: all do."""
    fields: Annotated[tuple[FieldHead, ...], msgspec.Meta(min_length=1, max_length=MAX_FIELDS)]
    mask: Annotated[bytes, msgspec.Meta(max_length=MAX_HEAD_BYTES)] = b""


_head = msgspec.msgpack.Decoder(ItemHead)
_FIELDS: dict[type[BaseMultiModalField], tuple[str, str]] = {  # and what its number is
    MultiModalBatchedField: ("batched", ""),
    MultiModalFlatField: ("flat", "dim"),
    MultiModalSharedField: ("shared", "batch_size"),
}


def item_parts(item: MultiModalKwargsItem, position: PlaceholderRange) -> list[bytes | memoryview]:
    """The item as bytes, in parts, most of which are the memory of its tensors. Raises MediaFault for one that has
    something in it that is not carried."""
    head, tensors = describe(item, position)
    try:
        encoded = msgspec.msgpack.encode(head)
        _head.decode(encoded)  # by the bounds of its reader
    except (*_UNREADABLE, OverflowError, TypeError) as error:
        raise MediaFault(str(error)[:200]) from error
    if len(encoded) > MAX_HEAD_BYTES:
        raise MediaFault(f"{len(encoded)} bytes of names and shapes")
    return [len(encoded).to_bytes(_LENGTH_BYTES), encoded, *map(_elements, tensors)]


def digest(parts: list[bytes | memoryview]) -> tuple[bytes, int]:
    """The SHA-256 of these parts together, and how many bytes they are."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.digest(), sum(map(len, parts))


def describe(item: MultiModalKwargsItem, position: PlaceholderRange) -> tuple[ItemHead, list[torch.Tensor]]:
    """The head of an item, and its tensors in the order of that. Raises MediaFault."""
    tensors: list[torch.Tensor] = []
    try:
        fields = tuple(_field_head(name, item[name], tensors) for name in sorted(item))
    except (TypeError, ValueError, OverflowError) as error:
        raise error if isinstance(error, MediaFault) else MediaFault(str(error)) from error
    head = ItemHead(fields, _mask(position))
    _check(head)
    return head, tensors


def make_item(data: bytes, length: int) -> tuple[ItemHead, MultiModalKwargsItem, torch.Tensor | None]:
    """The item that these bytes are, with its head and the mask of its placeholder of `length` tokens; None: all get an
    embedding. Its tensors share no memory with the bytes. Raises MediaFault for all others."""
    head, rest = _split(data)
    if sum(map(_size, _leaves(head))) != len(rest):
        raise MediaFault("another size than its tensors have")
    mask = _read_mask(head.mask, length)
    reader = _Elements(rest)
    item = MultiModalKwargsItem({one.name: MultiModalFieldElem(data=reader.make(one.data), field=_field(one))
                                 for one in head.fields})
    if len(item) != len(head.fields):
        raise MediaFault("two fields have one name")
    return head, item, mask


def _field_head(name: str, elem: MultiModalFieldElem, tensors: list[torch.Tensor]) -> FieldHead:
    kind, number = _FIELDS.get(type(elem.field), ("", ""))
    if not kind:
        raise MediaFault(f"field {name!r} is of the kind {type(elem.field).__name__}")
    return FieldHead(name, kind, int(getattr(elem.field, number)) if number else 0, bool(elem.field.keep_on_cpu),
                     _part(name, elem.data, tensors))


def _part(name: str, value: object, tensors: list[torch.Tensor], depth: int = 0) -> Part:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout is not torch.strided or value.dtype not in _NAMES:
            raise MediaFault(f"field {name!r} is of {value.dtype}, {value.layout} on {value.device}")
        tensors.append(value)
        return TensorHead(_NAMES[value.dtype], tuple(value.shape))
    if isinstance(value, bool | int | float):
        return NumberPart(value)
    if isinstance(value, list | tuple) and depth < MAX_DEPTH:
        return ListPart(tuple(_part(name, one, tensors, depth + 1) for one in value))
    raise MediaFault(f"field {name!r} has {type(value).__name__} in it")


def _elements(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


def _mask(position: PlaceholderRange) -> bytes:
    if position.is_embed is None:
        return b""
    mask = position.is_embed
    if mask.device.type != "cpu" or mask.dtype != torch.bool or tuple(mask.shape) != (position.length, ):
        raise MediaFault("its mask is not of its placeholder")
    bits = int("1" + "".join("1" if one else "0" for one in mask.tolist()), 2)
    return bits.to_bytes(bits.bit_length() // 8 + 1)


def _read_mask(encoded: bytes, length: int) -> torch.Tensor | None:
    if not encoded:
        return None
    bits = f"{int.from_bytes(encoded):b}"
    if len(bits) != length + 1 or len(encoded) != (length + 1) // 8 + 1 or "1" not in bits[1:]:
        raise MediaFault("its mask is not of its placeholder")
    return torch.tensor([one == "1" for one in bits[1:]], dtype=torch.bool)


def _split(data: bytes) -> tuple[ItemHead, memoryview]:
    """Its head, which was checked, and the elements."""
    view = memoryview(data)
    end = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES])
    if len(view) > MAX_MEDIA_BYTES or not _LENGTH_BYTES < end <= min(len(view), _LENGTH_BYTES + MAX_HEAD_BYTES):
        raise MediaFault("no head of a size that is allowed")
    try:
        head = _head.decode(view[_LENGTH_BYTES:end])
    except _UNREADABLE as error:
        raise MediaFault(str(error)[:200]) from error
    _check(head)
    return head, view[end:]


def _check(head: ItemHead) -> None:
    """Raises MediaFault for what no type of a field says."""
    count, leaves = 0, [(one.data, 0) for one in head.fields]
    while leaves:
        part, depth = leaves.pop()
        count += 1
        if count > MAX_PARTS or depth > MAX_DEPTH:
            raise MediaFault("too many parts")
        if isinstance(part, ListPart):
            leaves += [(one, depth + 1) for one in part.parts]
        elif isinstance(part, TensorHead) and part.size > MAX_MEDIA_BYTES:
            raise MediaFault(f"a tensor of {part.size} bytes")
    for one in head.fields:
        if one.kind not in (kind for kind, _ in _FIELDS.values()):
            raise MediaFault(f"field {one.name!r} is of the kind {one.kind!r}")


def _leaves(head: ItemHead) -> Iterator[Part]:
    left = [one.data for one in head.fields]
    while left:
        part = left.pop()
        if isinstance(part, ListPart):
            left += part.parts
        else:
            yield part


def _size(part: Part) -> int:
    return part.size if isinstance(part, TensorHead) else 0


def _field(head: FieldHead) -> BaseMultiModalField:
    """As the front end has made it, but for `slices`: by these it has cut the item out of several."""
    if head.kind == "batched":
        return MultiModalBatchedField(keep_on_cpu=head.keeps_on_cpu)
    if head.kind == "flat":
        return MultiModalFlatField(slices=(), dim=head.number, keep_on_cpu=head.keeps_on_cpu)
    return MultiModalSharedField(batch_size=head.number, keep_on_cpu=head.keeps_on_cpu)


class _Elements:
    """Makes tensors of what comes next in these bytes."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def make(self, part: Part) -> torch.Tensor | bool | int | float | list:
        if isinstance(part, NumberPart):
            return part.value
        if isinstance(part, ListPart):
            return [self.make(one) for one in part.parts]
        data, self._view = self._view[:part.size], self._view[part.size:]
        elements = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        if part.dtype == "bool" and len(data) and int(elements.max()) > 1:
            raise MediaFault("a bool that is neither 0 nor 1")
        try:
            return elements.view(DTYPES[part.dtype]).reshape(part.shape)
        except RuntimeError as error:  # of an empty one with more elements than a number can say
            raise MediaFault(f"a tensor of the shape {part.shape}") from error
