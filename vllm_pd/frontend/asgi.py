# SPDX-License-Identifier: Apache-2.0
"""What every middleware of this package needs: the path and the body of a request, and errors in the form of vLLM's
own.
"""
from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from vllm_pd.frontend.errors import error_body, installed_form

if TYPE_CHECKING:
    from starlette.types import Receive, Scope


def route_path(scope: Scope) -> str:
    """The path of a request as routes name it, without the server's --root-path."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def error_response(status: HTTPStatus, text: str, headers: Mapping[str, str] | None = None,
                   path: str = "") -> Response:
    """A response with this error as JSON, in the form of the installed vLLM for requests to `path`."""
    return Response(error_body(status, text, installed_form(), path), status.value, headers, "application/json")


def posts_json(scope: Scope) -> bool:
    """Whether this is a POST request with a JSON body."""
    return (scope["type"] == "http" and scope["method"] == "POST"
            and any(name == b"content-type" and b"json" in value.lower() for name, value in scope["headers"]))


async def read_body(receive: Receive) -> tuple[bytes, Receive]:
    """The body of a request, and an ASGI `receive` that gives it again, as it came, and then what follows."""
    messages = [await receive()]
    while messages[-1]["type"] == "http.request" and messages[-1].get("more_body", False):
        messages.append(await receive())
    return b"".join(message.get("body", b"") for message in messages), receive_first(messages, receive)


def receive_first(messages: Iterable[dict[str, Any]], receive: Receive) -> Receive:
    """An ASGI `receive` that gives these messages, and then what `receive` does."""
    unread = collections.deque(messages)

    async def receive_again() -> dict[str, Any]:
        return unread.popleft() if unread else await receive()

    return receive_again
