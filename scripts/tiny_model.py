#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make a tiny random Llama for tests that need an engine but no sense in its answers.

    python scripts/tiny_model.py DEST --tokenizer MODEL [--experts N]

4 layers, 8 query and 4 KV heads of size 32, the vocabulary and the tokenizer of MODEL (the real small model's
folder); weights from a fixed seed, about 30 MB in bfloat16. With --experts a tiny Mixtral: 2 layers, of whose N experts
each token takes two. DEST appears as a whole or not at all.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
                   "generation_config.json", "added_tokens.json", "vocab.json", "merges.txt")  # fmt: skip


def make(tokenizer: Path, dest: Path, experts: int = 0) -> None:
    import torch
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    real = AutoConfig.from_pretrained(tokenizer)
    shape = {"num_local_experts": experts, "num_experts_per_tok": 2} if experts else {}
    config = (MixtralConfig if experts else LlamaConfig)(
        **shape,
        vocab_size=real.vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2 if experts else 4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
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
    (MixtralForCausalLM if experts else LlamaForCausalLM)(config).to(torch.bfloat16).save_pretrained(dest)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, dest / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dest", type=Path, metavar="DEST", help="folder to make")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="MODEL", help="whose tokenizer to use")
    parser.add_argument("--experts", type=int, default=0, metavar="N", help="a mixture of N experts instead")
    args = parser.parse_args()
    partial = args.dest.with_name(args.dest.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    make(args.tokenizer, partial, args.experts)
    os.rename(partial, args.dest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
