# SPDX-License-Identifier: Apache-2.0
"""Drafters for the tiny Llama with its own shape of KV, of random weights: their drafts are nearly never right."""
from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

STD = 0.08  # of the tiny Llama's own weights
WEIGHTS = "model.safetensors"
LAYERS = [1, 2, 3]  # of the target's four; those that vLLM takes by itself would be two


def make_drafter(method: str, target: Path, folder: Path) -> Path:
    """A model for `speculative_config` in `folder`, which is made: for "draft_model" a Llama as `target` is, for
    "eagle3" a head of one layer over hidden states of three layers, with the target's embedding."""
    shutil.copytree(target, folder)
    weights, draw = load_file(target / WEIGHTS), torch.Generator().manual_seed(3)
    if method == "eagle3":
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "tie_word_embeddings": False,
                   "draft_vocab_size": config["vocab_size"], "eagle_aux_hidden_state_layer_ids": LAYERS}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        weights = _head(weights, config["hidden_size"])
    drawn = {name: torch.randn(one.shape, generator=draw).mul(STD).to(one.dtype) if one.dim() > 1 else one
             for name, one in weights.items()}
    save_file(drawn, folder / WEIGHTS, {"format": "pt"})
    return folder


def _head(weights: dict[str, torch.Tensor], hidden: int) -> dict[str, torch.Tensor]:
    """Of the shapes that an EAGLE3 head has: its attention reads an embedding and a hidden state."""
    first = "model.layers.0."
    layer = {name.removeprefix(first): one for name, one in weights.items() if name.startswith(first)}
    for name in ("q", "k", "v"):
        layer[f"self_attn.{name}_proj.weight"] = layer[f"self_attn.{name}_proj.weight"].repeat(1, 2)
    layer["hidden_norm.weight"] = layer["input_layernorm.weight"].clone()
    embedding = weights["model.embed_tokens.weight"]
    return {**{f"midlayer.{name}": one for name, one in layer.items()}, "norm.weight": weights["model.norm.weight"],
            "fc.weight": embedding.new_empty(hidden, 3 * hidden), "lm_head.weight": embedding}
