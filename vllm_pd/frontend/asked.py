# SPDX-License-Identifier: Apache-2.0
"""Refusing a request that asks for a place that does not exist, before vLLM begins to answer it.

A request may say where its prompt is to be prefilled: `"kv_transfer_params": {"pd": "remote"}`, or `"local"`, or
`"auto"`. vLLM itself brings that field of the body to the engine, where `vllm_pd.decisions.policy.asked_place` reads
it.
"""
from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

import msgspec

from vllm_pd.decisions.policy import PLACE_KEY, PLACES
from vllm_pd.frontend.asgi import error_response, posts_json, read_body, route_path
from vllm_pd.protocol.holds import PARAMS_KEY

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

SHOWN_BYTES = 80  # of a value that is refused


class AskedMiddleware:
    """ASGI middleware that answers 400 where the JSON body of a request asks for a place that does not exist. It keeps
    a body until its end, as vLLM does, and passes it on as it came."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if not posts_json(scope):
            await self._app(scope, receive, send)
            return
        body, receive = await read_body(receive)
        refused = place_refusal(body)
        if refused is not None:
            await error_response(HTTPStatus.BAD_REQUEST, refused, path=route_path(scope))(scope, receive, send)
            return
        await self._app(scope, receive, send)


def place_refusal(body: bytes) -> str | None:
    """Why a request with this body is refused; None where it is not. A body that is no JSON object, or whose transfer
    parameters are none, is left to vLLM. Should vLLM read it all the same, the engine counts what it asks for as
    `AskedPlace.OTHER`."""
    try:
        params = msgspec.json.decode(body, type=_Body).kv_transfer_params
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if params is None or _is_place(params.pd):
        return None
    value = bytes(params.pd)
    shown = value[:SHOWN_BYTES].decode(errors="replace") + "..." * (len(value) > SHOWN_BYTES)
    places = ", ".join(f'"{place}"' for place in PLACES)
    return f"{PARAMS_KEY}.{PLACE_KEY}={shown} can't be used: write one of {places}, or leave it out"


class _Params(msgspec.Struct):
    pd: msgspec.Raw = msgspec.Raw(b'"auto"')  # as it was written: nothing is made of it


class _Body(msgspec.Struct):
    """All other fields are skipped."""
    kv_transfer_params: _Params | None = None


def _is_place(value: msgspec.Raw) -> bool:
    try:
        return len(bytes(value)) <= SHOWN_BYTES and msgspec.json.decode(value) in PLACES
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
