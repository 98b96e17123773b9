# SPDX-License-Identifier: Apache-2.0
"""Which requests of a V1 engine can have their prompt prefilled by another engine.

All sampling stays on the decode engine, so whatever only shapes the choice of tokens (grammars, penalties, seeds, stop
conditions, priority) goes remote unharmed. What a prompt step computes beside KV, or needs beside token ids, does not.
"""
from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pd.protocol.messages import MAX_ID_CHARS
from vllm_pd.protocol.scope import NO_SCOPE, NOBODYS, PromptScope, fits_salt

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    from vllm_pd.v1.adapters import AdapterBook
    from vllm_pd.v1.media import MediaBook


def scores_prompt(params: SamplingParams) -> bool:
    """Whether the answer has something of each token of the prompt, which only the step gives that computes it."""
    return params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None


def scope_of(request: Request, adapters: AdapterBook, media: MediaBook) -> PromptScope:
    """What decides, beside its tokens, whose KV the prompt of a request may use: as the request says, also where it
    can't go remote any more. An adapter that has no digest here, or media that no job carries, are nobody else's."""
    salt, adapter = request.cache_salt or "", b""
    if request.lora_request is not None:
        adapter = adapters.digest(request.lora_request) or NOBODYS
    items = media.note(request) if request.mm_features else ()
    return PromptScope(salt, adapter, items, media.encoder if items else "") if salt or adapter or items else NO_SCOPE


def can_go_remote(request: Request, adapters: AdapterBook, media: MediaBook) -> bool:
    """Whether another engine may prefill this request's prompt."""
    params = request.sampling_params
    if params is None or scores_prompt(params) or request.skip_reading_prefix_cache:
        return False  # pooled, or computed in the prompt step only; the latter's connector's answer is ignored upstream
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return False  # the prompt is more than token ids and media
    if not fits_salt(request.cache_salt or ""):
        return False  # a job carries no salt of any length
    if request.lora_request is not None and not adapters.is_usable(request.lora_request):
        return False  # nobody could say whether another engine has the same
    if request.resumable:
        return False  # the prompt goes on while it is prefilled
    if request.mm_features and not media.can_go(request):
        return False  # no job carries them
    return len(request.request_id) <= MAX_ID_CHARS
