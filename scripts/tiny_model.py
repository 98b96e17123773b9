#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make a tiny random Llama for tests that need an engine but no sense in its answers.

    python scripts/tiny_model.py DEST --tokenizer MODEL [--experts N | --latent | --drafter | --states mamba | conv]
                                                      [--kv-heads N]

4 layers, 8 query and 4 KV heads of size 32, the vocabulary and the tokenizer of MODEL (the real small model's
folder); weights from a fixed seed, about 30 MB in bfloat16. With --experts a tiny Mixtral: 2 layers, of whose N experts
each token takes two. With --latent a tiny DeepSeek-V2: 2 dense layers with multi-head latent attention (MLA), whose KV
has the only size that vLLM's CPU kernel has, 576; it needs transformers 5. With --drafter an EAGLE head for the tiny
Llama: one random layer over the embedding of the next token. With --states every other layer has a recurrent state
instead of attention: a Mamba-2 state (Granite 4) or a short convolution (LFM2); these need transformers 5, too. DEST
appears as a whole or not at all.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
                   "generation_config.json", "added_tokens.json", "vocab.json", "merges.txt")  # fmt: skip


LATENT = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
          "num_key_value_heads": 8, "first_k_dense_replace": 2, "n_routed_experts": 2,
          "num_experts_per_tok": 1}  # fmt: skip
STATES = {
    "mamba": ("GraniteMoeHybrid", ["mamba", "attention"],
              {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 512, "mamba_n_heads": 16,
               "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
               "position_embedding_type": "rope"}),
    "conv": ("Lfm2", ["conv", "full_attention"],
             {"conv_L_cache": 3, "conv_dim": 256, "conv_dim_out": 256, "block_dim": 256, "block_ff_dim": 512,
              "block_auto_adjust_ff_dim": False}),
}  # fmt: skip


def make(tokenizer: Path, dest: Path, experts: int = 0, latent: bool = False, layers: int = 4,
         states: str = "", kv_heads: int = 4) -> None:
    import torch
    import transformers
    from transformers import AutoConfig

    real = AutoConfig.from_pretrained(tokenizer)
    name = "DeepseekV2" if latent else "Mixtral" if experts else "Llama"
    shape = {"num_key_value_heads": kv_heads, "head_dim": 32}
    if experts:
        shape |= {"num_local_experts": experts, "num_experts_per_tok": 2}
    if states:
        name, kinds, more = STATES[states]
        shape = {"num_key_value_heads": 4, "layer_types": kinds * (layers // 2), **more}
    config = getattr(transformers, f"{name}Config")(
        **(LATENT if latent else shape),
        vocab_size=real.vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2 if experts or latent else layers,
        num_attention_heads=8,
        max_position_embeddings=real.max_position_embeddings,
        rope_theta=getattr(real, "rope_theta", None) or real.rope_parameters["rope_theta"],  # transformers 4, or 5
        bos_token_id=real.bos_token_id,
        eos_token_id=real.eos_token_id,
        pad_token_id=real.pad_token_id,
        tie_word_embeddings=True,
        initializer_range=0.08,  # attention neither flat nor on one token: a wrong KV block shows
        torch_dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for weight in model.parameters() if states else ():  # these models have initial weights of their own
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=config.initializer_range)
    model.to(torch.bfloat16).save_pretrained(dest)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, dest / name)


def make_drafter(tokenizer: Path, dest: Path, kv_heads: int) -> None:
    """The tiny Llama with one layer, as a checkpoint of an EAGLE head has it: without embeddings, which are the
    target's, and with a layer that joins those and the target's last hidden states."""
    import torch
    from safetensors.torch import load_file, save_file

    make(tokenizer, dest, layers=1, kv_heads=kv_heads)
    file = dest / "model.safetensors"
    head = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()
            if name.startswith("model.layers.")}  # fmt: skip
    hidden = head["layers.0.post_attention_layernorm.weight"].numel()
    del head["layers.0.input_layernorm.weight"]  # the first layer of a head has none
    eye = torch.eye(hidden, dtype=torch.bfloat16)
    head["fc.weight"] = torch.cat([eye, 0.1 * eye], dim=1).contiguous()
    save_file(head, file, metadata={"format": "pt"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dest", type=Path, metavar="DEST", help="folder to make")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="MODEL", help="whose tokenizer to use")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--experts", type=int, default=0, metavar="N", help="a mixture of N experts instead")
    kind.add_argument("--latent", action="store_true", help="a model with multi-head latent attention instead")
    kind.add_argument("--drafter", action="store_true", help="a drafter for the tiny Llama instead")
    kind.add_argument("--states", choices=sorted(STATES), default="", help="a model with recurrent states instead")
    parser.add_argument("--kv-heads", type=int, default=4, metavar="N", help="of a Llama, a Mixtral or a drafter (4)")
    args = parser.parse_args()
    if args.dest.exists() and (not args.dest.is_dir() or any(args.dest.iterdir())):
        parser.error(f"DEST {args.dest}: name a folder that does not exist or is empty")
    partial = args.dest.with_name(args.dest.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if args.drafter:
        make_drafter(args.tokenizer, partial, args.kv_heads)
    else:
        make(args.tokenizer, partial, args.experts, args.latent, states=args.states, kv_heads=args.kv_heads)
    os.rename(partial, args.dest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
