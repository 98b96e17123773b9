# SPDX-License-Identifier: Apache-2.0
"""Which requests go to workers. The router and the endpoint picker answer all others themselves."""

METHODS = ("GET", "POST", "OPTIONS")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
COMPLETING = frozenset((COMPLETIONS, CHAT))
GENERATING = COMPLETING | {
    "/v1/responses", "/v1/messages", "/v1/chat/completions/batch", "/inference/v1/generate", "/cohere/v2/chat",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/embeddings", "/v2/embed", "/pooling", "/classify",
    "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/generative_scoring", "/v1/systemone"}
FORWARDED = GENERATING | {
    "/v1/models", "/version", "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/completions/render",
    "/v1/chat/completions/render", "/v1/responses/render", "/v1/messages/render", "/cohere/v2/chat/render",
    "/v1/completions/derender", "/v1/chat/completions/derender"}


def generates(method: str, path: str) -> bool:
    """Whether the answer to such a request takes a step of an engine."""
    return method == "POST" and path in GENERATING


def completes(method: str, path: str) -> bool:
    """Whether it is a completion, whose prompt has an overlap with what workers hold."""
    return method == "POST" and path in COMPLETING
