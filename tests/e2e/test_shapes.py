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
BEGINNINGS = [prompt(length, "shapes") for length in (1, 14, 15, 16, 99, 256, 400)]
TOKENS = 8


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_b101_a_remote_prompt_says_what_a_local_one_says(zygote, arguments):
    """D computes the last token of a prompt in a decode step, where 16 bits round otherwise than in a step of many
    tokens. So each prompt ends with a token that the single engine has generated, and computed in a decode step, too.
    One prompt after the other, so that all steps have the same shape."""
    with contextlib.ExitStack() as stack:
        pair = start_pair(zygote, stack, **arguments)
        mono = EngineProcess(zygote, None, 0, **arguments)
        stack.callback(mono.stop)
        for engine in (mono, pair.p, pair.d):
            engine.ready()
        pair.d.wait_for_peers()
        generated = [mono.tokens([tokens], max_tokens=TOKENS + 1)[0] for tokens in BEGINNINGS]
        prompts = [[*tokens, answer[0]] for tokens, answer in zip(BEGINNINGS, generated, strict=True)]
        expected = [answer[1:] for answer in generated]
        assert [pair.d.tokens([tokens], max_tokens=TOKENS)[0] for tokens in prompts] == expected
        assert len(set(map(tuple, expected))) == len(prompts)
        assert pair.d.counters()["attempts_total:done"] == len(prompts)
        pair.at_rest()
