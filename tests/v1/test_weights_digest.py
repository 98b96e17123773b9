# SPDX-License-Identifier: Apache-2.0
"""B42: weights that are no files of the model, for which the operator vouches (`weights_digest`), in V1's
configurations. What both engines have of it: tests/upstream/test_fingerprint.py."""
import os
import shutil
from pathlib import Path

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor import model_loader

from vllm_pd.errors import ConfigError, PeerMismatch
from vllm_pd.model.fingerprint import weights_state
from vllm_pd.model.store_checks import check_store
from vllm_pd.model.weights import digest_weights
from vllm_pd.transfer.layout import Layout
from vllm_pd.v1.claim import claim_configurations
from vllm_pd.v1.fingerprint import CacheShape, fingerprint
from vllm_pd.v1.plugin import register
from vllm_pd.v1.settings import given_weights
from vllm_pd.v1.store.connector import PDStoreConnector
from vllm_pd.v1.store.with_peers import store_config

MODEL = Path(os.environ["VLLM_PD_TINY_MODEL"])
BROKER = {"broker": "tcp://127.0.0.1:1"}
SHAPE = CacheShape("float32", 32, 2, Layout.KV_HEADS_FIRST)


@pytest.fixture(scope="module", autouse=True)
def activated():
    """As in tests/v1/test_claim.py."""
    upstream = VllmConfig._verify_kv_transfer_compat
    register()
    claim_configurations()
    yield
    VllmConfig._verify_kv_transfer_compat = upstream


@pytest.fixture
def bare(tmp_path) -> Path:
    """The model's folder without its weights."""
    weights = shutil.ignore_patterns("*.safetensors", "*.index.json")
    return Path(shutil.copytree(MODEL, tmp_path / "bare", ignore=weights))


def configured(model: Path, load_format: str, digest: str | None = None, connector: str = "PDConnector",
               **more) -> VllmConfig:
    extra = {} if connector == "PDStoreConnector" else {**BROKER, "transport": "torch"}
    kv = KVTransferConfig(kv_connector=connector, kv_role="kv_both", kv_load_failure_policy="recompute",
                          kv_connector_extra_config=extra | ({} if digest is None else {"weights_digest": digest}))
    return EngineArgs(model=str(model), dtype="float32", max_model_len=512, enforce_eager=True, load_format=load_format,
                      kv_transfer_config=kv, **more).create_engine_config()


@pytest.fixture(params=["tensorizer", "modelexpress", "ipc_cache", "elsewhere"])
def load_format(request, monkeypatch) -> str:
    """Those of vLLM that read no files of the model, and one that is registered."""
    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "elsewhere", model_loader.DefaultModelLoader)
    return request.param


def test_b42_each_format_is_let_in_with_a_digest_and_refused_without(bare, load_format):
    right = digest_weights(MODEL).hex()
    ours = fingerprint(configured(bare, load_format, right), SHAPE, "")
    files = fingerprint(configured(MODEL, "auto"), SHAPE, "")
    assert ours == files == fingerprint(configured(MODEL, "safetensors", right), SHAPE, "")
    with pytest.raises(ConfigError) as caught:
        configured(bare, load_format)
    assert caught.value.key == ("model" if load_format == "elsewhere" else "load_format")
    assert load_format == "elsewhere" or "weights_digest" in str(caught.value)


def test_b42_where_one_side_has_another_digest_both_values_are_named(bare, load_format):
    ours = fingerprint(configured(bare, load_format, "ab" * 32), SHAPE, "")
    theirs = fingerprint(configured(MODEL, "auto"), SHAPE, "")
    assert ours != fingerprint(configured(bare, load_format, "cd" * 32), SHAPE, "")
    difference = ours.first_difference(theirs)
    assert difference == ("model", ours.model, theirs.model)
    assert ours.model in str(PeerMismatch(*difference)) and theirs.model in str(PeerMismatch(*difference))


def test_b42_a_loader_of_the_users_without_a_digest_is_known_by_its_name_and_the_files(load_format):
    if load_format == "elsewhere":
        mine = fingerprint(configured(MODEL, load_format), SHAPE, "").model
        assert mine != fingerprint(configured(MODEL, "auto"), SHAPE, "").model


def test_b42_weights_in_a_bucket(bare):
    right = digest_weights(MODEL).hex()
    bucket = {"model_weights": "s3://bucket/model"}
    with pytest.raises(ConfigError, match="model='s3://bucket/model'.*weights_digest"):
        configured(bare, "runai_streamer", **bucket)
    assert (fingerprint(configured(bare, "runai_streamer", right, **bucket), SHAPE, "")
            == fingerprint(configured(MODEL, "auto"), SHAPE, ""))


def test_b80_a_digest_that_is_not_that_of_the_files():
    with pytest.raises(ConfigError, match=f"weights_digest='{'ab' * 32}'.*have {digest_weights(MODEL).hex()}"):
        configured(MODEL, "auto", "ab" * 32)
    with pytest.raises(ConfigError, match="weights_digest=.*dummy"):
        configured(MODEL, "dummy", "ab" * 32)
    with pytest.raises(ConfigError, match="weights_digest='AB.*vllm-pd digest FOLDER"):
        configured(MODEL, "auto", "AB" * 32)


def test_b104_the_store_takes_a_digest_too(bare):
    """Both connectors have one name for the weights, which no file that is looked at changes."""
    right = digest_weights(MODEL).hex()
    config = configured(bare, "tensorizer", right, "PDStoreConnector", prefix_caching_hash_algo="sha256")
    check_store(config, right)
    with pytest.raises(ConfigError, match="load_format='tensorizer'.*weights_digest"):
        check_store(config)
    beside = configured(bare, "tensorizer", right)
    assert fingerprint(config, SHAPE, "") == fingerprint(beside, SHAPE, "")
    beside.kv_transfer_config.kv_connector_extra_config["store"] = {"memory_gib": 1}
    assert given_weights(store_config(beside)) == right, "of an engine with both"
    before = weights_state(config, right)
    assert before == weights_state(beside, right)
    (bare / "model.safetensors").write_bytes(b"x")
    assert weights_state(config, right) == before
    config.kv_transfer_config.kv_connector_extra_config = {"weights_digest": "x"}
    with pytest.raises(ConfigError, match="weights_digest='x'"):
        PDStoreConnector(config, KVConnectorRole.SCHEDULER, None)
