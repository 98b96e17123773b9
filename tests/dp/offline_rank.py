# SPDX-License-Identifier: Apache-2.0
"""One rank of an offline group: `offline_rank.py MODEL TOKENS [OTHER]` generates a part, makes a call with a collective
in it, generates, says what came of it, and ends at once. With OTHER it waits before the last part until another rank
has said something in that file, and then for PAUSE_S."""

import sys
import time
from pathlib import Path

from vllm import LLM, SamplingParams

PAUSE_S = 5.0  # a rank that had nothing to do for 3 s once ended although others were not done
BOUND_S = 100.0


def wait_for(other: Path) -> None:
    until = time.monotonic() + BOUND_S
    while "served" not in other.read_text() and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(PAUSE_S)


if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=8,
              worker_extension_cls="vllm_pd.bench.dp.probe.StepProbe")  # fmt: skip
    def served(tokens: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return len(llm.generate(["It was"], params, use_tqdm=False)[0].outputs[0].token_ids)

    most = int(sys.argv[2])
    served(most // 4 + 1)
    called = llm.collective_rpc("probe_collective")
    for other in sys.argv[3:]:
        wait_for(Path(other))
    print("called", called, "served", served(most), flush=True)
