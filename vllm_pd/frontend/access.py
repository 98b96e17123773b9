# SPDX-License-Identifier: Apache-2.0
"""Who may use an operator's routes. A server with an API key asks for it. At a server without one, requests that change
something, or ask for the names of all requests, must come from this machine, and not from a web page.

A browser on this machine sends what any web page tells it to send. Three rules keep such requests out. They carry the
header `Origin`, which is refused. A page may send JSON only after a preflight request, which fails here, so any other
content type is refused. And where the owner of a name has made it resolve to this machine, `Host` holds that name.
"""
from __future__ import annotations

import ipaddress
import logging
import secrets
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger("vllm.pd")

_MIDDLEWARE = "AuthenticationMiddleware"
# A proxy adds them, or a liar, who replaces the client's address with them.
_FORWARDED = (b"x-forwarded-for", b"forwarded", b"via", b"x-real-ip")
_JSON = b"application/json"


def keys_of(app: FastAPI) -> tuple[str, ...]:
    """The server's API keys, none where it asks for none: what vLLM's own middleware knows, which checks some paths
    only. One that nobody has where they can't be found, so that everybody is refused."""
    for entry in app.user_middleware:
        given = entry.kwargs.get("tokens", entry.kwargs.get("api_token"))  # of engine V1, of V0
        keys = (given, ) if isinstance(given, str) else given
        if isinstance(keys, (list, tuple)) and keys and all(isinstance(key, str) for key in keys):
            return tuple(keys)
        if getattr(entry.cls, "__name__", "") == _MIDDLEWARE:
            logger.error("the server's --api-key can't be found: vLLM's %s has %s in place of tokens or api_token. All "
                         "operator routes are refused; use a release of vLLM that docs/rebasing.md names", _MIDDLEWARE,
                         ", ".join(sorted(entry.kwargs)) or "nothing")
            return (secrets.token_urlsafe(), )
    return ()


def has_key(authorization: bytes, keys: Sequence[str]) -> bool:
    """Whether the value of an Authorization header holds one of the keys. Takes equally long for right and wrong
    ones."""
    return any([secrets.compare_digest(authorization, f"Bearer {key}".encode()) for key in keys])


def refusal(scope: Mapping[str, Any], keys: Sequence[str], *, guarded: bool) -> tuple[HTTPStatus, str] | None:
    """Status and reason with which a request to an operator's route is refused; None where it is allowed. `scope` is
    the request's, as ASGI defines it; `keys` are the server's; `guarded` says whether the route changes anything, or
    names other clients' requests."""
    if keys:
        allowed = has_key(dict(scope["headers"]).get(b"authorization", b""), keys)
        return None if allowed else (HTTPStatus.UNAUTHORIZED, "Unauthorized")
    problem = objection(scope) if guarded else None
    return None if problem is None else (HTTPStatus.FORBIDDEN, problem)


def objection(scope: Mapping[str, Any], option: str = "--api-key") -> str | None:
    """Why a server without a key refuses a request to a guarded route; None where it accepts it. `option` is the
    key's."""
    headers = dict(scope["headers"])
    if not _is_here(scope.get("client")) or any(name in headers for name in _FORWARDED):
        return f"there is no {option}, so this is for this machine only"
    if (problem := reading_objection(scope, option)) is not None:
        return problem
    if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != _JSON:
        return f"there is no {option}: add the header Content-Type: application/json"
    return None


def reading_objection(scope: Mapping[str, Any], option: str = "--api-key") -> str | None:
    """Why a server without a key refuses a request that only reads what is no web page's business; None where it
    accepts it. A client on another machine is no browser here, whatever `Host` it sends."""
    headers = dict(scope["headers"])
    if b"origin" in headers:
        return f"there is no {option}, so this is for no web page"
    if _is_here(scope.get("client")) and not _names_loopback(headers.get(b"host", b"").decode("latin-1")):
        return f"there is no {option}: write 127.0.0.1 or localhost into the URL"
    return None


def _is_here(client: tuple[str, int] | None) -> bool:
    return client is not None and _is_loopback(client[0])


def _names_loopback(authority: str) -> bool:
    """Of `HOST` or `HOST:PORT`, where an IPv6 address has brackets."""
    host = authority.partition("]")[0].strip("[") if authority.startswith("[") else authority.partition(":")[0]
    return host.lower() == "localhost" or _is_loopback(host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
