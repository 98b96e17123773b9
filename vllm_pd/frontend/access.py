# SPDX-License-Identifier: Apache-2.0
"""Whose requests an operator's routes take. A server with a key asks for it; at one without, requests that change
something must come from this machine, and from no web page.

A browser on this machine sends what any page asks of it. It then says so by `Origin`, has to ask first where the body
is JSON, and names the page's host where a name of its owner's has been made to mean this machine.
"""
from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

_VIA_PROXY = (b"x-forwarded-for", b"forwarded")  # with which a proxy, or a liar, has the client's address replaced
_JSON = b"application/json"


def key_of(app: FastAPI) -> str | None:
    """What vLLM's own middleware asks for, which looks at paths under /v1 only."""
    return next((entry.kwargs["api_token"] for entry in app.user_middleware if "api_token" in entry.kwargs), None)


def shows(authorization: bytes, key: str) -> bool:
    """Whether that header's value has the key. Takes as long for a nearly right one as for any other."""
    return secrets.compare_digest(authorization, f"Bearer {key}".encode())


def objection(scope: Mapping[str, Any]) -> str | None:
    """Why such a request, as ASGI gives it, is refused; None where it is not."""
    headers = dict(scope["headers"])
    if not _is_here(scope.get("client")) or any(name in headers for name in _VIA_PROXY):
        return "there is no --api-key, so this is for this machine only"
    if b"origin" in headers:
        return "there is no --api-key, so this is for no web page"
    if not _names_loopback(headers.get(b"host", b"").decode("latin-1")):
        return "there is no --api-key: write 127.0.0.1 or localhost into the URL"
    if headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != _JSON:
        return "there is no --api-key: add the header Content-Type: application/json"
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
