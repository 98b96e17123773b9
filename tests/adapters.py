# SPDX-License-Identifier: Apache-2.0
"""Folders with LoRA adapters, as far as a test needs them."""
import json
from pathlib import Path


def write_stub(folder: Path, content: str) -> Path:
    """The files of one that nobody loads."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    (folder / "adapter_model.bin").write_text(content)
    return folder


def write_lora(folder: Path, model: Path, seed: int) -> Path:
    """One with random weights for the attention of this model, a Llama."""
    import torch
    from safetensors.torch import save_file

    shape = json.loads((model / "config.json").read_text())
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    size = shape.get("head_dim") or hidden // heads
    outputs = {"q_proj": heads * size, "k_proj": shape["num_key_value_heads"] * size,
               "v_proj": shape["num_key_value_heads"] * size}
    draw, weights = torch.Generator().manual_seed(seed), {}
    for layer in range(shape["num_hidden_layers"]):
        for name, width in outputs.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(8, hidden, generator=draw) * 0.3
            weights[f"{at}.lora_B.weight"] = torch.randn(width, 8, generator=draw) * 0.3
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "target_modules": list(outputs),
        "bias": "none", "base_model_name_or_path": str(model)}))
    return folder
