# SPDX-License-Identifier: Apache-2.0
"""What a prefill engine samples for a prompt that a decode engine is to read: as little as possible.

Such a request (`do_remote_decode`, for one token) is there for its KV. The decode engine samples all tokens of the
answer, with the client's own parameters, so nobody reads the one that comes with P's answer. The server's front end has
checked the client's parameters by then, and answers by its own copy of them.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams

from vllm_pd.protocol.holds import PARAMS_KEY, asks_for_hold

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

# Without the logprobs that the client asks for, the front end could not answer.
_KEPT = ("skip_reading_prefix_cache", *(name for name in SamplingParams.__struct_fields__ if "logprob" in name))


def spare_sampling(request: EngineCoreRequest) -> None:
    """Change the sampling parameters of a request that asks that its prompt be kept: greedy, without penalties, grammar
    or any other work on its logits, and without a seed, with which a prompt that takes several steps ends an engine on
    the CPU. Its one token ends it, whichever it is. One that asks for more tokens only loses its seed."""
    params = request.sampling_params
    if params is None or not asks_for_hold(params.extra_args):
        return
    if params.max_tokens == 1:
        request.sampling_params = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False,
            extra_args={PARAMS_KEY: params.extra_args[PARAMS_KEY]}, **{name: getattr(params, name) for name in _KEPT})
    else:
        params.seed = None
