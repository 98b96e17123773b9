# SPDX-License-Identifier: Apache-2.0
"""The servers' part in the metaserver form.

That of a prefill engine gets requests that carry a decode engine's job: their proxy sends them because the decode
engine posted that job (`vllm_pd.protocol.metaserver`). Such a request is answered by the engine's control thread, which
claims the job; vLLM does not see it. The prompt is what the job says, and not what the body says: it is the decode
engine's blocks that are filled. That of a decode engine decides which requests must not be posted.
"""
from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

import pydantic
from starlette.responses import JSONResponse

from vllm_pd.errors import ControlError
from vllm_pd.frontend.asgi import error_response, posts_json, read_body, receive_first, route_path
from vllm_pd.protocol.holds import PARAMS_KEY, transfer_params
from vllm_pd.protocol.messages import Job
from vllm_pd.protocol.metaserver import JOB_KEY, URL_KEY, carried_job

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_samples = pydantic.TypeAdapter(int | None)  # as vLLM reads `n`: "2", 2.0 and true are numbers, too
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
            job = carried_job(request.pd_job)
            problem = await self._run(job)
        except ValueError as error:
            answer = error_response(HTTPStatus.BAD_REQUEST,
                                    f"{PARAMS_KEY}.{JOB_KEY} can't be used: {error}; pass on what the decode engine "
                                    "posted, as it is")
        except ControlError as error:
            answer = error_response(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        else:
            answer = (error_response(HTTPStatus.CONFLICT, f"job {job.attempt.number} was not done here: {problem}")
                      if problem else JSONResponse(one_token(route_path(scope), request.model, job)))
        await answer(scope, receive, send)


class SeveralAnswersMiddleware:
    """ASGI middleware for the server of an engine that posts jobs: those of a request for several answers are not
    posted, but go through the broker. The proxy knows all samples of a prompt by one id. Of several prompts it may send
    none before the last one was posted, and this engine may keep some of them, or have one wait for another."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if posts_json(scope) and route_path(scope) in (COMPLETIONS, CHAT):
            following = receive
            body, receive = await read_body(receive)
            changed = without_metaserver(body)
            if changed is not None:
                receive = receive_first([{"type": "http.request", "body": changed, "more_body": False}], following)
        await self._app(scope, receive, send)


def without_metaserver(body: bytes) -> bytes | None:
    """This body of a request without the URL of its metaserver; None where it names none, or asks for one answer."""
    fields = _read(body, URL_KEY)
    params = transfer_params(fields)
    if URL_KEY not in params or not _is_for_several(fields):
        return None
    rest = {name: value for name, value in params.items() if name != URL_KEY}
    return json.dumps({**fields, PARAMS_KEY: rest}).encode()


def one_token(path: str, model: str, job: Job) -> dict[str, Any]:
    """The answer to a request whose prompt was computed and written: that of one token, without its text."""
    is_chat, tokens, now = path == CHAT, len(job.token_ids), int(time.time())
    choice = {"index": 0, "logprobs": None, "finish_reason": "length",
              **({"message": {"role": "assistant", "content": ""}} if is_chat else {"text": ""})}
    return {"id": f"{'chatcmpl' if is_chat else 'cmpl'}-pd-{job.attempt.number}",
            "object": "chat.completion" if is_chat else "text_completion", "created": now, "model": model,
            "choices": [choice], PARAMS_KEY: None,
            "usage": {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}}


class _CarryingBody(NamedTuple):
    """What is used of a body that carries a job."""
    pd_job: Any
    model: str


def _is_for_several(fields: dict[str, Any]) -> bool:
    """Whether it asks for several samples, or for answers to several prompts: texts, or lists of token ids."""
    try:
        if (_samples.validate_python(fields.get("n")) or 1) > 1:
            return True
    except pydantic.ValidationError:  # vLLM refuses the request
        return False
    prompt = fields.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and all(isinstance(one, str | list) for one in prompt)


def _carrier(body: bytes) -> _CarryingBody | None:
    """The fields of a body that carries a job; None for any other, which is vLLM's."""
    fields = _read(body, JOB_KEY)
    params = transfer_params(fields)
    if params.get(JOB_KEY) is None or params.get("do_remote_decode") is not True:
        return None
    model = fields.get("model")
    return _CarryingBody(params[JOB_KEY], model.encode(errors="replace").decode() if isinstance(model, str) else "")


def _read(body: bytes, key: str) -> dict[str, Any]:
    """The fields of a body as vLLM reads them, whose JSON may have NaN, lone surrogates, or another encoding; empty
    where it can't be read, is no object, or has this key nowhere."""
    if not (key.encode() in body or b"\\u" in body or b"\0" in body):  # escaped, or in UTF-16
        return {}
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
