# SPDX-License-Identifier: Apache-2.0
"""The router's index, fed with the events of V1's own block manager, holds what that manager holds."""
import random

import pytest
import torch
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager, Request
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from vllm_pd.router.index import PrefixIndex

BLOCK_SIZE = 4
POOL_BLOCKS = 40


def manager() -> KVCacheManager:
    groups = [KVCacheGroupSpec(["layer"], FullAttentionSpec(BLOCK_SIZE, 1, 1, torch.float32, False))]
    return KVCacheManager(KVCacheConfig(POOL_BLOCKS, [], groups), max_model_len=1000, enable_kv_cache_events=True)


def request(number: int, token_ids: list[int], salt: str | None = None) -> Request:
    return Request(request_id=str(number), prompt_token_ids=token_ids, multi_modal_inputs=None,
                   multi_modal_hashes=None, multi_modal_placeholders=None,
                   sampling_params=SamplingParams(max_tokens=9), pooling_params=None, eos_token_id=1,
                   lora_request=None, cache_salt=salt)


def feed(index: PrefixIndex, engine: KVCacheManager) -> None:
    for event in engine.take_events():
        if isinstance(event, AllBlocksCleared):
            index.cleared("w")
        elif isinstance(event, BlockRemoved):
            index.removed("w", event.block_hashes)
        else:
            index.stored("w", event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size,
                         event.lora_id)


def held(engine: KVCacheManager) -> dict[int, int]:
    """How many blocks it has of each hash."""
    return {key.get_hash_value(): len(blocks) for key, blocks in
            engine.block_pool.cached_block_hash_to_block.items() if blocks}


@pytest.mark.parametrize("salts", [(None,), (None, "pepper")])
def test_b62_the_index_is_what_a_v1_engine_holds(salts):
    rng = random.Random(2)
    index, engine = PrefixIndex(BLOCK_SIZE), manager()
    prompts: list[list[int]] = []
    running: list[Request] = []
    copies = 0
    for number in range(1500):
        if rng.random() < 0.55 and len(running) < 4:
            base = rng.choice(prompts[-10:]) if prompts else []
            token_ids = (base[:rng.randint(0, len(base))] + rng.choices(range(9), k=rng.randint(1, 20)))[:30]
            if rng.random() < 0.2:  # the last token is computed again, and with it a second copy of its block
                token_ids = base[:len(base) // BLOCK_SIZE * BLOCK_SIZE] or token_ids
            new = request(number, token_ids, rng.choice(salts))
            computed, count = engine.get_computed_blocks(new)
            if engine.allocate_slots(new, len(token_ids) - count, count, computed) is not None:
                prompts.append(token_ids)
                running.append(new)
        elif running:
            old = running.pop(rng.randrange(len(running)))
            engine.free(old)
            engine.free_block_hashes(old)
        if rng.random() < 0.01 and not running:
            assert engine.reset_prefix_cache()
        feed(index, engine)
        table = held(engine)
        assert set(index.engine_hashes("w")) == set(table)
        copies = max(copies, *table.values(), 0)
        if salts == (None,):
            for token_ids in prompts[-10:]:
                theirs = engine.get_computed_blocks(request(-1, [*token_ids, 1]))[1] // BLOCK_SIZE
                engine.free_block_hashes(request(-1, token_ids))
                assert index.matches(index.hashes(token_ids)).get("w", 0) == theirs
    assert copies >= 2 and index.counts.removed > 200 and index.counts.unknown_removed == 0
