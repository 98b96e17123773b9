# SPDX-License-Identifier: Apache-2.0
"""Which drafters can be with disaggregation, what peers compare of them, and when a step with one has ended (B42, B80,
B95, B113)."""
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from tests.v1.test_worker import TOKENS, make_caches, make_config, place, write_model
from vllm_pd.errors import ConfigError
from vllm_pd.model.drafter import check_drafter, drafter_digest, pin_drafter
from vllm_pd.transfer.layout import CacheDescription, Layout, Memory
from vllm_pd.transfer.steps import ComputedSteps
from vllm_pd.v1.binding import StepMetadata
from vllm_pd.v1.connector import PDConnector
from vllm_pd.v1.fingerprint import fingerprint, token_bytes
from vllm_pd.v1.worker import RankWorker

TARGET = Path(os.environ["VLLM_PD_TINY_MODEL"])
EAGLE = {"method": "eagle", "model": str(TARGET.with_name("tiny-eagle")), "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def engine(drafter: dict | None = None, **more) -> VllmConfig:
    """The configuration of a stock engine with this drafter."""
    return EngineArgs(**{"model": str(TARGET), "dtype": "float32", "max_model_len": 512, "enforce_eager": True,
                         "speculative_config": drafter and dict(drafter), **more}).create_engine_config()


def edited(tmp_path: Path, **changes) -> dict:
    """Our EAGLE head in another folder, with these changes of its configuration."""
    folder = shutil.copytree(EAGLE["model"], tmp_path / f"head{len(list(tmp_path.iterdir()))}")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return {**EAGLE, "model": str(folder)}


# What is refused.


@pytest.mark.parametrize("drafter", [None, NGRAM, {**NGRAM, "method": "ngram_gpu"}, EAGLE,
                                     {**EAGLE, "method": "draft_model", "model": str(TARGET)}], ids=str)
def test_b113_these_can_take_part(drafter):
    check_drafter(engine(drafter))


@pytest.mark.parametrize("method, why", [
    ("dspark", "a block of tokens at once"), ("dflash", "a block of tokens at once"), ("custom_class", "keeps KV"),
    ("extract_hidden_states", "hidden states"), ("medusa", "not tried"), ("mlp_speculator", "not tried")])
def test_b80_b113_other_methods_are_refused_by_name(method, why):
    config = engine(NGRAM)
    config.speculative_config.method = method
    with pytest.raises(ConfigError, match=rf"speculative_config.method='{method}'.*use one of \['draft_model'.*{why}"):
        check_drafter(config)


def test_b80_b113_several_modules_are_refused_where_several_would_draft():
    config = engine(EAGLE)
    config.speculative_config.method = "mtp"
    check_drafter(config)
    config.speculative_config.draft_model_config.hf_config.num_nextn_predict_layers = 2
    with pytest.raises(ConfigError, match="speculative_config.num_speculative_tokens=3.*write 1: .*several modules"):
        check_drafter(config)
    config.speculative_config.num_speculative_tokens = 1
    check_drafter(config)


def test_b80_b113_a_drafter_whose_kv_is_no_further_layer_of_the_target_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"speculative_config.model=.*head0.*are \(2, 32\), of the target \(4, 32\)"):
        check_drafter(engine(edited(tmp_path, num_key_value_heads=2)))
    config = engine(EAGLE)
    config.speculative_config.kv_cache_dtype = "fp8"
    with pytest.raises(ConfigError, match="speculative_config.kv_cache_dtype='fp8'.*whose type is auto"):
        check_drafter(config)
    config.speculative_config.kv_cache_dtype, config.parallel_config.pipeline_parallel_size = "auto", 2
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2.*last stage"):
        check_drafter(config)
    config.speculative_config.method = "ngram"
    check_drafter(config)


# What peers compare.


def of(config: VllmConfig):
    """The fingerprint of such an engine, with a cache of some layers."""
    cache = CacheDescription(layout=Layout.KV_HEADS_FIRST, memory=Memory.DRAM, device_id=0, dtype="float32",
                             num_blocks=5, block_size=TOKENS, head_size=64, first_head=0, kv_heads=4, first_layer=0,
                             layers=1, block_bytes=4 * TOKENS * 64 * 4, block_stride_bytes=4 * TOKENS * 64 * 4,
                             planes=(4096, ))
    return fingerprint(config, cache, "engine")


def test_b42_b113_a_drafter_on_one_side_only_does_not_fit_and_both_are_named():
    plain, drafting = of(engine()), of(engine(EAGLE))
    key, ours, theirs = drafting.first_difference(plain)
    assert (key, theirs) == ("model", plain.model) and ours.startswith(f"{plain.model} with eagle:")
    assert plain.first_difference(of(engine(NGRAM))) is None, "a prefill engine needs none of those without KV"


def test_b42_b113_another_drafter_does_not_fit(tmp_path):
    """Each of these would draft otherwise from a peer's KV. An equal one elsewhere, or more drafts, would not."""
    weights = edited(tmp_path)
    file = Path(weights["model"]) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    others = [{**EAGLE, "method": "eagle3"}, {**EAGLE, "method": "draft_model", "model": str(TARGET)}, weights,
              edited(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5.0}),
              edited(tmp_path, eagle_aux_hidden_state_layer_ids=[1, 2]), {**EAGLE, "parallel_drafting": True}]
    found = [of(engine(one)).model for one in (EAGLE, *others)]
    assert len(set(found)) == len(found) and {one.split(" with ")[0] for one in found} == {of(engine()).model}
    head = edited(tmp_path, num_lookahead_tokens=3)  # vLLM writes the number of drafts there
    same = [engine(edited(tmp_path)), engine({**EAGLE, "num_speculative_tokens": 5}), engine(head),
            engine({**head, "num_speculative_tokens": 5}), engine(EAGLE, max_model_len=8192),
            engine(edited(tmp_path, max_position_embeddings=256))]
    assert [of(one).model for one in same] == found[:1] * len(same)


def test_b42_b113_a_drafter_without_weights_to_compare_is_refused(tmp_path):
    drafter = edited(tmp_path)
    (Path(drafter["model"]) / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="head0.*weights can't be told"):
        pin_drafter(engine(drafter))
    assert not drafter_digest(engine(NGRAM))
    pin_drafter(engine(NGRAM))


def test_b5_a_drafters_layers_count_in_what_a_token_takes():
    assert token_bytes(engine(EAGLE)) * 4 == token_bytes(engine()) * 5


# When a step has ended.


class Device:
    """The kernels that were launched, in order; an event is done when all before it have run."""

    def __init__(self) -> None:
        self.launched, self.run = 0, 0

    def record(self):
        at = self.launched
        return SimpleNamespace(query=lambda: self.run >= at)


@pytest.fixture
def drafting_rank(tmp_path, monkeypatch):
    """The worker of an engine with an EAGLE head, its connector, and its device."""
    place(monkeypatch)
    config = make_config(write_model(tmp_path))
    config.speculative_config = SimpleNamespace(method="eagle")
    made = RankWorker(config)
    config.speculative_config = None  # of which vLLM would ask more
    made.register_kv_caches(make_caches())
    device = Device()
    made._steps = ComputedSteps(device)
    connector = PDConnector.__new__(PDConnector)
    connector.binding, connector._rank = None, made
    yield made, connector, device
    made.close()


def step_of_runner_v1(connector, device: Device, number: int) -> None:
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as Mixin
    output = SimpleNamespace(kv_connector_metadata=StepMetadata(number, False), has_sync_kv_loads=False,
                             finished_req_ids=set())
    with set_forward_context(None, connector._rank._config), \
            Mixin._get_kv_connector_output(output, defer_finalize=True):
        device.launched += 1
    device.launched += 1  # the drafter
    Mixin.finalize_kv_connector()


def step_of_runner_v2(connector, device: Device, number: int) -> None:
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
    runner = ActiveKVConnector.__new__(ActiveKVConnector)
    runner.vllm_config, runner._pending_load_kwargs, runner._disabled = connector._rank._config, None, False
    runner.kv_connector = connector
    runner.pre_forward(SimpleNamespace(kv_connector_metadata=StepMetadata(number, False), has_sync_kv_loads=False))
    device.launched += 2
    runner.post_forward(set())


@pytest.mark.parametrize("step", [step_of_runner_v1, step_of_runner_v2])
def test_b95_b113_blocks_leave_when_the_drafter_has_run(drafting_rank, step, monkeypatch):
    """Model runner V1 calls `get_transfer_results` before it. An event of then would be done too early."""
    rank, connector, device = drafting_rank
    monkeypatch.setattr("vllm.distributed.kv_transfer.kv_transfer_state._KV_CONNECTOR_AGENT", connector)
    for number in (1, 2):
        step(connector, device, number)
        device.run = device.launched - 1
        assert not rank._steps.reached(number)
        device.run = device.launched
        assert rank._steps.reached(number)


def test_b95_b113_a_drafter_that_raises_ends_no_step(drafting_rank):
    """Model runner V1 asks the connector for nothing more then, and for the next step it does."""
    rank, _, device = drafting_rank
    rank.end_forward(1)
    rank.end_forward(2)
    rank.end_drafts(2)
    device.run = 9
    assert not rank._steps.reached(1) and not rank._steps.reached(2)
