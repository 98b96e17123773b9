# SPDX-License-Identifier: Apache-2.0
"""Errors as JSON, in the form of vLLM's own. Since 0.10.1 that is OpenAI's, in an object `error`; before, it was flat.
On the paths of the Messages API it is Anthropic's, in answers and in streams."""
from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection
from enum import Enum, auto
from http import HTTPStatus

from vllm_pd.model.installation import find_installation

MESSAGES = "/v1/messages"
_FIRST_NESTED = (0, 10, 1)
_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)(?!\d*\.?dev)")  # a build without tags is 0.1.dev1


class ErrorForm(Enum):
    """The form of an error on all paths but those of the Messages API."""
    NESTED = auto()
    FLAT = auto()


def form_of_versions(versions: Collection[str]) -> ErrorForm:
    """The form of engines of these versions of vLLM: FLAT if all have it. Versions that can't be read don't count."""
    known = [tuple(map(int, found.groups())) for found in map(_RELEASE.match, versions) if found is not None]
    return ErrorForm.FLAT if known and max(known) < _FIRST_NESTED else ErrorForm.NESTED


@functools.cache
def installed_form() -> ErrorForm:
    """The form of the vLLM that is installed here."""
    return form_of_versions([find_installation().vllm or ""])


def error_body(status: HTTPStatus, text: str, form: ErrorForm, path: str = "") -> bytes:
    """The body of an answer to a request for `path`."""
    return json.dumps(_as_anthropic(status, text) if _is_messages(path) else
                      {"object": "error", **_fields(status, text)} if form is ErrorForm.FLAT else
                      {"error": _fields(status, text)}).encode()


def error_event(status: HTTPStatus, text: str, form: ErrorForm, path: str = "") -> bytes:
    """The event with which a stream of server-sent events for `path` ends."""
    if _is_messages(path):
        return b"event: error\ndata: " + json.dumps(_as_anthropic(status, text)).encode() + b"\n\n"
    flat = {"object": "error"} if form is ErrorForm.FLAT else {}
    return b"data: " + json.dumps({"error": {**flat, **_fields(status, text)}}).encode() + b"\n\n"


def _is_messages(path: str) -> bool:
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def _fields(status: HTTPStatus, text: str) -> dict[str, object]:
    return {"message": text, "type": status.phrase, "param": None, "code": status.value}


def _as_anthropic(status: HTTPStatus, text: str) -> dict[str, object]:
    return {"type": "error", "error": {"type": status.phrase, "message": text}}
