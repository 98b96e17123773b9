# SPDX-License-Identifier: Apache-2.0
"""A load that `vllm-pd bench serve --export` has written is what vLLM's own benchmark sends."""

import json
import os

from transformers import AutoTokenizer
from vllm.benchmarks.datasets import ShareGPTDataset

from vllm_pd.bench.serve.settings import LoadShape, ServeLoad
from vllm_pd.bench.serve.sharegpt import exported
from vllm_pd.bench.serve.words import tokens_of


def test_upstreams_tool_reads_the_exported_load_unchanged(tmp_path):
    shape = LoadShape(load=ServeLoad.CONVERSATIONS, conversations=8)
    entries = exported(shape)
    (tmp_path / "load.json").write_text(json.dumps(entries))
    tokenizer = AutoTokenizer.from_pretrained(os.environ["VLLM_PD_TINY_MODEL"])
    read = ShareGPTDataset(dataset_path=str(tmp_path / "load.json")).sample(tokenizer, len(entries))
    said = {entry["conversations"][0]["value"]: tokens_of(entry["conversations"][0]["value"]) for entry in entries}
    assert len(read) == 24 and {one.prompt for one in read} == said.keys()
    for one in read:
        assert abs(one.prompt_len - said[one.prompt]) <= 0.1 * one.prompt_len
        assert abs(one.expected_output_len - shape.answer_tokens) <= 0.2 * shape.answer_tokens
