# SPDX-License-Identifier: Apache-2.0
"""One rank of an offline group: `offline_rank.py MODEL TOKENS` generates, counts its tokens aloud, and ends at once."""

import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=8)
    params = SamplingParams(temperature=0.0, max_tokens=int(sys.argv[2]), ignore_eos=True)
    print("served", len(llm.generate(["It was"], params, use_tqdm=False)[0].outputs[0].token_ids), flush=True)
