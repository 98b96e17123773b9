# SPDX-License-Identifier: Apache-2.0
"""One rank of an offline group: `offline_rank.py MODEL TOKENS` generates a part, makes a call with a collective in it,
generates, says what came of it, and ends at once."""

import sys

from vllm import LLM, SamplingParams

from vllm_pd.dp import engine

if __name__ == "__main__":
    engine.LINGER_S = 60.0  # a rank that has ended waits so long for another that a machine may hold up
    llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=8,
              worker_extension_cls="vllm_pd.dpbench.probe.StepProbe")  # fmt: skip
    def served(tokens: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return len(llm.generate(["It was"], params, use_tqdm=False)[0].outputs[0].token_ids)

    most = int(sys.argv[2])
    served(most // 4 + 1)
    print("called", llm.collective_rpc("probe_collective"), "served", served(most), flush=True)
