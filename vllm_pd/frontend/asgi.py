# SPDX-License-Identifier: Apache-2.0
"""What every middleware of this package needs: the path of a request, and errors in the form of vLLM's own."""
from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.responses import Response

from vllm_pd.frontend.edge import error_body

if TYPE_CHECKING:
    from starlette.types import Scope


def route_path(scope: Scope) -> str:
    """The path of a request as routes name it, without the server's --root-path."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def error_response(status: HTTPStatus, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """A response with this error as JSON."""
    return Response(error_body(status, text), status.value, headers, "application/json")
