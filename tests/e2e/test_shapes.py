# SPDX-License-Identifier: Apache-2.0
"""Two engines with another model, or other types, than a Llama in float32: the tokens of one engine with the same
(B1, B2, B101).
"""
import contextlib
import os
from pathlib import Path

import pytest
from harness import EngineProcess, prompt, start_pair

pytestmark = pytest.mark.heavy
EXPERTS = Path(os.environ["VLLM_PD_TINY_MODEL"]).with_name("tiny-mixtral")
ARGUMENTS = {
    "a mixture of experts": {"model": str(EXPERTS)},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
}
PROMPTS = [prompt(length, "shapes") for length in (1, 15, 16, 17, 100, 257, 400)]


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_b101_a_remote_prompt_says_what_a_local_one_says(zygote, arguments):
    """One prompt after the other, so that all steps have the same shape, and round alike."""
    with contextlib.ExitStack() as stack:
        pair = start_pair(zygote, stack, **arguments)
        mono = EngineProcess(zygote, None, 0, **arguments)
        stack.callback(mono.stop)
        for engine in (mono, pair.p, pair.d):
            engine.ready()
        pair.d.wait_for_peers()
        expected = [mono.tokens([tokens])[0] for tokens in PROMPTS]
        assert [pair.d.tokens([tokens])[0] for tokens in PROMPTS] == expected
        assert len(set(map(tuple, expected))) == len(PROMPTS)
        assert pair.d.counters()["attempts_total:done"] == len(PROMPTS)
        pair.at_rest()
