# SPDX-License-Identifier: Apache-2.0
"""B115: an image, a video or a piece of audio as bytes: what comes out is what went in, and of bytes that are none
comes nothing but MediaFault."""
import random

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)

from vllm_pd.protocol.scope import MAX_MEDIA_BYTES
from vllm_pd.v1 import media_codec as codec

PLACE = PlaceholderRange(3, 5)
FIELDS = (MultiModalBatchedField(), MultiModalBatchedField(keep_on_cpu=True), MultiModalFlatField(slices=[slice(0, 2)]),
          MultiModalFlatField(slices=[(slice(None), slice(0, 2))], dim=-1), MultiModalSharedField(batch_size=3))


def tensor(draw, dtype, shape):
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.tensor([draw.random() < 0.5 for _ in range(count)], dtype=torch.bool).reshape(shape)
    raw = bytearray(draw.randbytes(count * dtype.itemsize))
    return (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).reshape(shape)


def data(draw, depth=0):
    kind = draw.randrange(8)
    if kind == 0 and depth < codec.MAX_DEPTH:
        return [data(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 1:
        return draw.choice((3, 2.5, True, float("inf"), -7))
    return tensor(draw, draw.choice(list(codec.DTYPES.values())), [draw.randrange(5) for _ in range(draw.randrange(4))])


def item(draw):
    return MultiModalKwargsItem({f"f{number}": MultiModalFieldElem(data=data(draw), field=draw.choice(FIELDS))
                                 for number in range(draw.randrange(1, 5))})


def encode(one, place=PLACE) -> bytes:
    parts = codec.item_parts(one, place)
    made = b"".join(parts)
    assert codec.digest(parts)[1] == len(made)
    return made


def are_equal(one, other) -> bool:
    """To the bit, as NaN is not."""
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and (
            bytes(codec._elements(one)) == bytes(codec._elements(other)))
    if isinstance(one, list):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return type(one) is type(other) and one == other


def simple(**fields):
    return MultiModalKwargsItem({name: MultiModalFieldElem(data=value, field=MultiModalBatchedField())
                                 for name, value in fields.items()})


@pytest.mark.parametrize("seed", range(60))
def test_what_comes_out_is_what_went_in(seed):
    draw = random.Random(seed)
    one = item(draw)
    length = draw.randrange(1, 40)
    mask = torch.tensor([True, *(draw.random() < 0.5 for _ in range(length - 1))]) if seed % 2 else None
    place = PlaceholderRange(7, length, mask)
    made = encode(one, place)
    _, found, found_mask = codec.make_item(made, length)
    assert found.keys() == one.keys()
    for name, elem in one.items():
        other = found[name]
        assert are_equal(elem.data, other.data) and type(elem.field) is type(other.field)
        assert elem.field.keep_on_cpu is other.field.keep_on_cpu
        assert [getattr(elem.field, key, None) for key in ("dim", "batch_size")] == [
            getattr(other.field, key, None) for key in ("dim", "batch_size")]
    assert found_mask is None if mask is None else torch.equal(found_mask, mask)
    assert encode(found, PlaceholderRange(0, length, found_mask)) == made, "the same bytes, wherever it is"


def test_items_are_the_same_bytes_only_if_all_of_them_is_the_same():
    one = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    others = [simple(a=one), simple(b=one), simple(a=one, b=one), simple(a=one.reshape(3, 2)), simple(a=one.double()),
              simple(a=one + 1), simple(a=[one]), simple(a=list(one)), simple(a=1), simple(a=1.0), simple(a=True),
              *(MultiModalKwargsItem({"a": MultiModalFieldElem(data=one, field=field)}) for field in FIELDS[1:])]
    made = [encode(each) for each in others]
    made += [encode(others[0], PlaceholderRange(0, 4, torch.tensor(mask))) for mask in (
        [True, True, True, True], [True, True, True, False], [True, False, True, True])]
    assert len(set(made)) == len(made)
    assert encode(simple(a=one.t().contiguous().t())) == made[0], "how it lies in memory is nobody's concern"
    assert encode(simple(b=one, a=one)) == made[2], "nor the order of names"


@pytest.mark.parametrize("value", ["text", None, b"bytes", 1 << 70, torch.zeros(2, dtype=torch.complex64),
                                   torch.zeros(2, device="meta"), torch.eye(2).to_sparse(), [[[[[[1]]]]]],
                                   [1] * codec.MAX_PARTS, torch.zeros((1, ) * 9),
                                   torch.zeros(MAX_MEDIA_BYTES + 1, dtype=torch.uint8)],
                         ids=["text", "none", "bytes", "large number", "complex", "meta", "sparse", "deep",
                              "many parts", "many dimensions", "large tensor"])
def test_what_is_not_carried_is_a_fault(value):
    with pytest.raises(codec.MediaFault):
        encode(simple(a=value))


@pytest.mark.parametrize("place", [PlaceholderRange(0, 3, torch.ones(2, dtype=torch.bool)),
                                   PlaceholderRange(0, 2, torch.ones(2))])
def test_a_mask_of_something_else_is_a_fault(place):
    with pytest.raises(codec.MediaFault):
        encode(simple(a=1), place)


def head(*fields, mask=b"", rest=b""):
    encoded = msgspec.msgpack.encode([list(fields), mask])
    return len(encoded).to_bytes(4) + encoded + rest


def field(name="a", kind="batched", number=0, on_cpu=False, data=("number", 1)):
    return [name, kind, number, on_cpu, list(data)]


@pytest.mark.parametrize("bad", [
    b"", b"\0\0\0\0", b"\0\0\0\5abc", b"\xff\xff\xff\xff" + bytes(99), head(), head(field(), field()),
    head(field(kind="pickled")), head(field(kind="__class__")), head(field(data=("tensor", "object", [1])), rest=b"x"),
    head(field(data=("tensor", "Tensor", [1])), rest=b"x"), head(field(data=("tensor", "int8", [2])), rest=b"x"),
    head(field(data=("tensor", "int8", [1])), rest=b"xx"), head(field(data=("tensor", "int8", [-1]))),
    head(field(data=("tensor", "bool", [1])), rest=b"\2"),
    head(field(data=("tensor", "int64", [1 << 30]))), head(field(data=("list", [["number", 1]] * 5000))),
    head(field(number=1 << 40)), head(field(name="")), head(field(data=("call", "os.system"))),
    head(field(), mask=b"\x20"), head(field(), mask=b"\0\x3f"), head(field(), mask=b"\x40" + bytes(9)),
])
def test_bytes_that_are_no_item_are_a_fault(bad):
    with pytest.raises(codec.MediaFault):
        codec.make_item(bad, 5)


def test_lists_in_lists_without_end_are_a_fault():
    nested = b"\x92\xa4list\x91" * 100_000 + b"\x92\xa6number\x01"
    for part in (nested, b"\x92\xa4list\x91" * 6 + b"\x92\xa6number\x01"):
        encoded = b"\x92\x91\x95\xa1a\xa7batched\x00\xc2" + part + b"\xc4\x00"
        with pytest.raises(codec.MediaFault):
            codec.make_item(len(encoded).to_bytes(4) + encoded, 5)


def test_an_item_made_of_bytes_shares_no_memory_with_them():
    made = bytearray(encode(simple(a=torch.ones(4))))
    _, found, _ = codec.make_item(made, 5)
    made[-16:] = bytes(16)
    assert found["a"].data.tolist() == [1, 1, 1, 1]


GOOD = [encode(item(random.Random(seed))) for seed in range(20)]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(GOOD), st.lists(st.tuples(st.integers(0, 400), st.binary(min_size=0, max_size=3)), max_size=4),
       st.integers(0, 50))
def test_any_other_bytes_are_an_item_or_a_fault(good, changes, cut):
    made = bytearray(good)
    for at, replacement in changes:
        made[at:at + 1] = replacement
    made = bytes(made[:len(made) - cut])
    try:
        _, found, mask = codec.make_item(made, 5)
    except codec.MediaFault:
        return
    assert encode(found, PlaceholderRange(0, 5, mask))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_noise_is_a_fault(noise):
    with pytest.raises(codec.MediaFault):
        codec.make_item(len(noise).to_bytes(4) + noise, 5)
