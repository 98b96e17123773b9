# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd plan --model`: what a load needs, from a model's shape and measured speeds."""
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from vllm_pd import cli
from vllm_pd.errors import ConfigError
from vllm_pd.ops.sizing import BUSY, ModelCache, Sizing, SizingOptions, shape_of, size

LLAMA_8B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
SMOLLM2 = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
DEEPSEEK_V3 = {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
               "hidden_size": 7168, "num_key_value_heads": 128}
MHA = {"num_hidden_layers": 12, "num_attention_heads": 12, "hidden_size": 768}
GEMMA = {**SMOLLM2, "layer_types": ["sliding_attention", "full_attention"] * 15}
LOAD = SizingOptions(prefill_speed=25_000, decode_speed=2_500, link_gbit_s=200)


@pytest.mark.parametrize("config, dtype, token_bytes", [
    (LLAMA_8B, "bfloat16", 131_072), (LLAMA_8B, "fp8", 65_536), (LLAMA_8B, "float32", 262_144),
    (SMOLLM2, "float16", 23_040), (GEMMA, "float16", 23_040), (DEEPSEEK_V3, "bfloat16", 70_272),
    (MHA, "float16", 36_864)])
def test_the_kv_of_a_token(config, dtype, token_bytes):
    assert shape_of(config, "m").token_bytes(dtype) == token_bytes


def test_an_8b_model_at_10000_tokens_a_second():
    """1.3 GB/s: each prompt token is sent once."""
    found = Sizing(LOAD, shape_of(LLAMA_8B, "m"))
    assert found.bytes_per_s == pytest.approx(1.31072e9)
    assert (found.prefill, found.decode) == (1, 1)
    assert found.link_shares == pytest.approx({"prefill": 131_072 * 25e3 * 8 / 200e9, "decode": 1.31072e9 * 8 / 200e9})
    assert found.transfer_s == pytest.approx(131_072 * 2000 * 8 / 200e9)
    assert found.parked_s == pytest.approx(0.08 * (1 + 0.4 / 1.2) + found.transfer_s)
    assert found.parked_blocks == -(-5 * found.parked_s * 125 // 1)
    assert "prefill to decode: 1 to 1.0" in found.lines()


@pytest.mark.parametrize("link_gbit_s, said", [
    (10, ["a prefill engine needs 262% of its link: NOT enough", "a decode engine needs 105% of its link: NOT enough"]),
    (12, ["a prefill engine needs 218% of its link: NOT enough", "a decode engine needs 87% of its link: little room"]),
    (200, ["a prefill engine needs 13% of its link: enough", "a decode engine needs 5% of its link: enough"])])
def test_a_slow_link_is_said(link_gbit_s, said):
    assert Sizing(replace(LOAD, link_gbit_s=link_gbit_s), shape_of(LLAMA_8B, "m")).lines()[-2:] == said


def test_what_all_prefill_engines_send_enters_few_decode_engines():
    found = Sizing(replace(LOAD, tokens_per_s=160_000, answer_tokens=20, link_gbit_s=100), shape_of(LLAMA_8B, "m"))
    assert (found.prefill, found.decode) == (8, 1) and found.lines()[-1].endswith("NOT enough")


def test_what_was_not_measured_is_asked_for_and_nothing_is_made_up():
    found = Sizing(SizingOptions(), shape_of(LLAMA_8B, "m"))
    assert [found.prefill, found.decode, found.parked_s, found.parked_blocks, found.transfer_s] == [None] * 5
    assert found.link_shares == {}
    assert [line for line in found.lines() if "--prefill-speed" in line or "--decode-speed" in line]
    json.dumps(found.as_json())


@given(st.floats(1, 1e7), st.floats(1, 1e6), st.floats(1, 1e6), st.floats(1, 1e5))
def test_no_engine_is_busier_than_it_may_be_and_none_is_idle(tokens_per_s, speed, answers, prompt):
    found = Sizing(SizingOptions(tokens_per_s=tokens_per_s, prefill_speed=speed, decode_speed=answers,
                                 prompt_tokens=prompt), ModelCache(1, 1, 1, ""))
    assert tokens_per_s <= found.prefill * speed * BUSY * (1 + 1e-9)
    assert (found.prefill - 1) * speed * BUSY < tokens_per_s
    assert found.parked_s >= prompt / speed and found.parked_blocks >= 1


@pytest.mark.parametrize("changes, said", [
    ({"layer_types": ["full_attention", "linear_attention"]}, "its layer_types are .*linear_attention.* by hand"),
    ({"layer_types": 5}, "its layer_types are 5"), ({"layer_types": [["a"]]}, "its layer_types are"),
    ({"multi_query": True}, "has multi_query, so its layers"), ({"hybrid_override_pattern": "M*-"}, "hybrid_override"),
    ({"hidden_size": 16}, "its 32 heads are more than its hidden_size"),
    ({"num_hidden_layers": 0}, "no num_hidden_layers above 0, but 0"),
    ({"num_attention_heads": None}, "no num_attention_heads above 0, but None"),
    ({"num_key_value_heads": "8"}, "no num_key_value_heads above 0, but '8'"),
    ({"head_dim": 0.5}, "no head_dim above 0, but 0.5"), ({"hidden_size": None}, "no hidden_size"),
    ({"kv_lora_rank": 512}, "no qk_rope_head_dim")])
def test_a_model_that_can_not_be_sized_is_named(changes, said):
    with pytest.raises(ConfigError, match=said) as error:
        shape_of(LLAMA_8B | changes, "my-model")
    assert "my-model" in str(error.value)


@pytest.mark.parametrize("options, key", [
    ({"dtype": "int3"}, "--dtype"), ({"tokens_per_s": 0}, "--tokens-per-s"), ({"prompt_tokens": -1}, "--prompt-tokens"),
    ({"answer_tokens": float("nan")}, "--answer-tokens"), ({"prefill_speed": -1}, "--prefill-speed"),
    ({"prefill_speed": 1e-320}, "--prefill-speed"),
    ({"link_gbit_s": float("inf")}, "--link-gbit-s"), ({"block_size": 0}, "--block-size"), ({}, "--model")])
def test_bad_options_are_named(options, key, tmp_path):
    with pytest.raises(ConfigError) as error:
        size(SizingOptions(model=str(tmp_path), **options))
    assert key in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"text_config": 3}', "{}"])
def test_a_bad_configuration_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        size(SizingOptions(model=str(tmp_path)))


@pytest.mark.parametrize("arguments, said", [
    (["--tokens-per-s", "40000"], "--tokens-per-s=40000.0 can't be used: it says what a load needs: add --model"),
    (["--model", "m", "--decode-tp", "4"], "--decode-tp=4 can't be used: it is of the table of ranks")])
def test_options_that_would_be_ignored_are_refused(arguments, said):
    shown = CliRunner().invoke(cli.app, ["plan", *arguments])
    assert shown.exit_code and said in str(shown.exception or shown.output)


def test_the_command(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA_8B}))
    shown = CliRunner().invoke(cli.app, ["plan", "--model", str(tmp_path), "--prefill-speed", "5000"])
    assert shown.exit_code == 0
    assert "KV of a token: 131,072 bytes (32 layers, 8 KV heads of 128, bfloat16)" in shown.output
    assert "prefill engines: 3" in shown.output
    as_json = CliRunner().invoke(cli.app, ["plan", "--model", str(tmp_path), "--json"])
    assert json.loads(as_json.output)["token_bytes"] == 131_072
