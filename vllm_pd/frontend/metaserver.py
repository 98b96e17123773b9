# SPDX-License-Identifier: Apache-2.0
"""The prefill engine's end of the metaserver form: a request that carries a decode engine's job.

Its proxy has sent it because the decode engine posted that job (`vllm_pd.core.metaserver`). It is answered by the
engine's control thread, which claims the job; vLLM does not see it. The prompt is what the job says, and not what the
body says: it is the decode engine's blocks that are filled.
"""
from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import JSONResponse

from vllm_pd.core.messages import Job
from vllm_pd.core.metaserver import JOB_KEY, carried_job
from vllm_pd.core.policy import PARAMS_KEY
from vllm_pd.errors import ControlError
from vllm_pd.frontend.asgi import error_response, posts_json, read_body, route_path

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class DirectJobMiddleware:
    """ASGI middleware that has `run` do the job of a request, and answers at its end as for one token. `run` returns
    why the prompt was not written, empty where it was, and may raise ControlError."""

    def __init__(self, app: ASGIApp, run: Callable[[Job], Awaitable[str]]) -> None:
        self._app = app
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if not posts_json(scope) or route_path(scope) not in (COMPLETIONS, CHAT):
            await self._app(scope, receive, send)
            return
        body, receive = await read_body(receive)
        request = _carrier(body)
        if request is None:
            await self._app(scope, receive, send)
            return
        try:
            job = carried_job(request.kv_transfer_params.pd_job)
            problem = await self._run(job)
        except ValueError as error:
            answer = error_response(HTTPStatus.BAD_REQUEST,
                                    f"{PARAMS_KEY}.{JOB_KEY} can't be used: {error}; pass on what the decode engine "
                                    "posted, as it is")
        except ControlError as error:
            answer = error_response(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        else:
            answer = (error_response(HTTPStatus.CONFLICT, f"job {job.attempt.number} was not done here: {problem}")
                      if problem else JSONResponse(one_token(route_path(scope), str(request.model or ""), job)))
        await answer(scope, receive, send)


def one_token(path: str, model: str, job: Job) -> dict[str, Any]:
    """The answer to a request whose prompt was computed and written: that of one token, without its text."""
    is_chat, tokens, now = path == CHAT, len(job.token_ids), int(time.time())
    choice = {"index": 0, "logprobs": None, "finish_reason": "length",
              **({"message": {"role": "assistant", "content": ""}} if is_chat else {"text": ""})}
    return {"id": f"{'chatcmpl' if is_chat else 'cmpl'}-pd-{job.attempt.number}",
            "object": "chat.completion" if is_chat else "text_completion", "created": now, "model": model,
            "choices": [choice], PARAMS_KEY: None,
            "usage": {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}}


class _JobParams(msgspec.Struct):
    pd_job: Any = None
    do_remote_decode: bool = False


class _CarryingBody(msgspec.Struct):
    """All other fields are skipped. What these may be, beyond what they must be: vLLM must not compute a job."""
    kv_transfer_params: _JobParams | None = None
    model: Any = None


def _carrier(body: bytes) -> _CarryingBody | None:
    """The fields of a body that carries a job; None for any other, which is vLLM's."""
    if JOB_KEY.encode() not in body:
        return None
    try:
        request = msgspec.json.decode(body, type=_CarryingBody)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    params = request.kv_transfer_params
    return request if params is not None and params.pd_job is not None and params.do_remote_decode else None
