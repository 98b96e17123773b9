# SPDX-License-Identifier: Apache-2.0
"""The names of uvicorn that have no promise of stability and that `edge` uses, found at its import or refused there. A
uvicorn that lacks one would fail later, in the middle of a client's request. Whoever uses another one adds it here."""
from collections.abc import Mapping

import uvicorn

from vllm_pd.errors import ConfigError

CURE = "install a release that this package requires"

try:
    from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
except ImportError as error:
    if not (error.name or "").startswith("uvicorn."):  # another package is missing
        raise
    raise ConfigError("uvicorn", uvicorn.__version__, f"{error}: {CURE}") from error

__all__ = ["STATUS_LINE", "HttpToolsProtocol", "RequestResponseCycle"]

_MAKERS = ("__init__", "load", "on_message_begin")

# By class: methods, and what its instances have.
REQUIRED: Mapping[type, tuple[str, ...]] = {
    HttpToolsProtocol: (
        "loop", "logger", "parser", "config", "app", "cycle", "pipeline", "transport", "headers", "url",
        "_should_upgrade", "connection_made", "connection_lost", "data_received", "send_400_response", "pause_writing",
        "resume_writing", "handle_websocket_upgrade", "on_message_begin", "on_header", "on_headers_complete", "on_body",
        "on_message_complete", "on_response_complete"),
    RequestResponseCycle: (
        "transport", "disconnected", "message_event", "response_started", "response_complete", "keep_alive",
        "chunked_encoding", "expected_content_length", "send"),
    uvicorn.Config: ("loaded_app", "http_protocol_class"),
}


def missing_names(required: Mapping[type, tuple[str, ...]] = REQUIRED) -> list[str]:
    """Those that this uvicorn lacks, as `class.name`."""
    return [f"{owner.__name__}.{name}" for owner, names in required.items() for name in names
            if not _has(owner, name)]  # fmt: skip


def check(required: Mapping[type, tuple[str, ...]] = REQUIRED) -> None:
    """Raises ConfigError for a uvicorn that lacks some."""
    if missing := missing_names(required):
        raise ConfigError("uvicorn", uvicorn.__version__, f"it has no {', '.join(missing)}: {CURE}")


def _has(owner: type, name: str) -> bool:
    """Whether it is there at the class, or used in the methods that give an instance its attributes."""
    makers = [getattr(getattr(owner, maker, None), "__code__", None) for maker in _MAKERS]
    return hasattr(owner, name) or any(name in maker.co_names for maker in makers if maker is not None)


check()
