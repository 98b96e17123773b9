# SPDX-License-Identifier: Apache-2.0
"""B114: states in the blocks of a cache: a block that goes whole has all of them, or the cache is refused."""
import pytest
import torch

from vllm_pd.errors import ConfigError
from vllm_pd.transfer.layout import describe_views, regions
from vllm_pd.transfer.plan import plan
from vllm_pd.transfer.states import views_of_states

BLOCKS, HEADS, TOKENS, CONTENT = 5, 2, 16, 8
PAGE = HEADS * TOKENS * CONTENT  # elements
CONV, STATE = (3, 10), (4, 6, 6)


def strided(memory: torch.Tensor, start: int, stride: int, shape: tuple[int, ...]) -> torch.Tensor:
    """[blocks, *shape] from that element on, a block each `stride` elements."""
    inner = [1]
    for size in reversed(shape[1:]):
        inner.insert(0, inner[0] * size)
    return memory.as_strided((BLOCKS, *shape), (stride, *inner), start)


def caches(pages: int, order: str, shared: int) -> tuple[torch.Tensor, dict]:
    """Memory of so many layers' pages, as LBHNC or BLHNC, and what is registered: a layer with KV on each of the first
    `shared` pages, and one with a state on each page."""
    memory = torch.arange(pages * BLOCKS * PAGE, dtype=torch.float32)
    start, stride = (BLOCKS * PAGE, PAGE) if order == "LBHNC" else (PAGE, pages * PAGE)
    found: dict = {}
    for page in range(pages):
        first = page * start
        found[f"layers.{2 * page}.mixer"] = [
            strided(memory, first, stride, CONV), strided(memory, first + 30, stride, STATE)]
        if page < shared:
            found[f"layers.{2 * page + 1}.attn"] = strided(memory, first, stride, (HEADS, TOKENS, CONTENT))
    return memory, found


def split(found: dict) -> tuple[dict, dict]:
    """The layers with KV, and those with states."""
    return ({name: cache for name, cache in found.items() if "attn" in name},
            {name: cache for name, cache in found.items() if "attn" not in name})


def described(found: dict) -> tuple:
    kv, states = split(found)
    views = [*kv.values(), *views_of_states(states, kv)]
    return describe_views(views, num_blocks=BLOCKS, block_size=TOKENS), views


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("shared", [3, 2, 1])
def test_b114_each_state_is_in_what_goes(order, shared):
    """Also where a page has states only. Between both orders of the axes, too."""
    memory, found = caches(3, order, shared)
    ours, views = described(found)
    other_memory, other = caches(3, "LBHNC", shared)
    theirs, _ = described(other)
    assert ours.layers == 3 and sum(size for _, size in regions(views)) == memory.nbytes
    lanes = plan(ours, theirs)
    assert sum(lane.bytes for lane in lanes) == 3 * PAGE * 4
    for name, parts in found.items():
        for part, part_of_other in zip(parts if isinstance(parts, list) else [parts],
                                       other[name] if isinstance(parts, list) else [other[name]], strict=True):
            start, remote = part.data_ptr(), part_of_other.data_ptr()
            nbytes = part[0].numel() * 4
            assert any(lane.local <= start and start + nbytes <= lane.local + lane.bytes
                       and remote - lane.remote == start - lane.local for lane in lanes), name


def test_b114_a_state_as_bytes():
    """So V1 registers it: all parts of a block as one, in bytes."""
    memory, found = caches(2, "LBHNC", 1)
    pages = memory.view(torch.uint8).reshape(2, BLOCKS, 1, 1, PAGE * 4)
    for page in range(2):
        found[f"layers.{2 * page}.mixer"] = pages[page, ..., :700]
    ours, views = described(found)
    assert ours.layers == 2 and views[1].data_ptr() == pages[1].data_ptr() and views[1].dtype is torch.float32


def test_b114_a_state_that_is_not_in_one_block_is_refused():
    memory, found = caches(2, "LBHNC", 2)
    kv, states = split(found)
    longer = strided(memory, 30, PAGE, (PAGE, ))
    with pytest.raises(ConfigError, match=r"layers.0.mixer: a state of shape \(5, 256\).*not inside one block of 1024"):
        views_of_states({"layers.0.mixer": [*states["layers.0.mixer"], longer]}, kv)
    apart = strided(memory, 0, 2 * PAGE - 1, CONV)
    with pytest.raises(ConfigError, match="one every 1024 bytes: set VLLM_KV_CACHE_LAYOUT"):
        views_of_states({"layers.0.mixer": [apart]}, kv)
    fewer = strided(memory, 0, PAGE, CONV)[:4]
    with pytest.raises(ConfigError, match="of 5, one every"):
        views_of_states({"layers.0.mixer": [fewer]}, kv)


def test_b114_states_that_begin_inside_a_page_are_refused():
    """What would be sent from there is the next page's, too."""
    memory, found = caches(3, "LBHNC", 2)
    kv, _ = split(found)
    inside = strided(memory, 2 * BLOCKS * PAGE + 7, PAGE, CONV)
    with pytest.raises(ConfigError, match="layers.4.mixer: a state 10268 bytes into its memory"):
        views_of_states({"layers.4.mixer": [inside]}, kv)
    alone = strided(torch.zeros(BLOCKS * PAGE + 7), 7, PAGE, CONV)
    with pytest.raises(ConfigError, match="a state 28 bytes into its memory"):
        views_of_states({"layers.4.mixer": [alone]}, kv)
    short = strided(torch.zeros(BLOCKS * PAGE - 1), 0, PAGE, CONV)
    with pytest.raises(ConfigError, match="blocks of 1024 bytes do not begin there"):
        views_of_states({"layers.4.mixer": [short]}, kv)


def test_b114_heads_apart_and_no_attention_are_refused():
    _, found = caches(2, "LBHNC", 2)
    kv, states = split(found)
    heads = torch.zeros(HEADS, BLOCKS, TOKENS, CONTENT).transpose(0, 1)
    with pytest.raises(ConfigError, match="heads of a block are apart"):
        views_of_states(states, {"layers.1.attn": heads})
    with pytest.raises(ConfigError, match="attention in no layer"):
        views_of_states(states, {})
    assert not views_of_states({}, kv)
