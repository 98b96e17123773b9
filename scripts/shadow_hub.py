#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make a shadow Hugging Face cache: every model name that upstream's tests ask for is one small local model.

    python scripts/shadow_hub.py MODEL HF_HOME
    HF_HOME=HF_HOME HF_HUB_OFFLINE=1 python -m pytest ...

MODEL: a checkpoint folder with a tokenizer. Its files are linked, not copied; its config is rewritten so that prompts
as long as the real models take fit. Made again over an older one, it is brought up to date.
"""

import argparse
import json
import os
import sys
from pathlib import Path

NAMES = [
    "JackFram/llama-160m",
    "JackFram/llama-68m",
    "HuggingFaceH4/zephyr-7b-beta",
    "NousResearch/Hermes-3-Llama-3.1-8B",
    "Qwen/QwQ-32B",
    "Qwen/Qwen1.5-7B",
    "Qwen/Qwen2-0.5B",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-0.6B",
    "bigcode/tiny_starcoder_py",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "distilbert/distilgpt2",
    "facebook/opt-125m",
    "google/gemma-1.1-2b-it",
    "gpt2",
    "hmellor/tiny-random-LlamaForCausalLM",
    "ibm-research/PowerMoE-3b",
    "ibm/PowerMoE-3b",
    "lmsys/vicuna-7b-v1.5",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Meta-Llama-3-8B",
    "meta-llama/Meta-Llama-3-8B-Instruct",
    "mistralai/Mistral-7B-Instruct-v0.1",
    "mistralai/Mistral-7B-Instruct-v0.2",
    "mistralai/Mistral-7B-v0.1",
    "openai-community/gpt2",
    "unsloth/Llama-3.2-1B-Instruct",
]
REVISION = "0" * 40  # the cache wants a commit
CONTEXT_TOKENS = 8192


def make(model: Path, home: Path, names: list[str] | None = None) -> None:
    """Lay out `home`/hub as the hub's client does: refs/main names a revision, snapshots/REVISION holds the files."""
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": CONTEXT_TOKENS}
    for name in NAMES if names is None else names:
        folder = home / "hub" / ("models--" + name.replace("/", "--"))
        snapshot = folder / "snapshots" / REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(REVISION)
        for old in snapshot.iterdir():
            old.unlink()
        for source in model.iterdir():
            if source.name != "config.json":
                os.symlink(source.resolve(), snapshot / source.name)
        (snapshot / "config.json").write_text(json.dumps(config, indent=2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("home", type=Path, metavar="HF_HOME")
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        parser.error(f"{args.model}: expected a checkpoint folder; it has no config.json")
    make(args.model, args.home)
    print(f"{args.home}: {len(NAMES)} names lead to {args.model}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
