# SPDX-License-Identifier: Apache-2.0
"""The requests of `vllm-pd doctor --try URL`: see `vllm_pd.ops.trial`.

The engine that had the first request is asked about that one by its id, so the traffic of others is in no figure.
Behind a router the answer's header names that engine.
"""
from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from vllm_pd.errors import ConfigError
from vllm_pd.ops import trial
from vllm_pd.ops.finding import Finding
from vllm_pd.ops.options import TRY, TrialOptions
from vllm_pd.ops.pages import MIB, Page, PageReader, api_key, authorization
from vllm_pd.ops.trial import Answer, ModelList, PromptReport, ServedModel, TrialFailed
from vllm_pd.router.options import parse_worker

CONNECT_S = 5.0
PAGE_S = 10.0
COUNTED_S = 10.0  # until all is known about a request that has its answer
POLL_S = 0.1
MAX_PAGE_BYTES = 4 * MIB
MAX_ANSWER_BYTES = 256 * MIB  # on V0 with a log probability for each token of the prompt
SHOWN_CHARS = 300  # of what a server says
_START = "start the engine, or write the URL at which it answers, as curl would take it: http://HOST:8000"
_NO_ENGINE = "write the URL of a decode engine of vllm-pd or of its router; a proxy in front may hide paths below /pd"
_KEY = "give its key: --api-key, or $VLLM_API_KEY"
_ENGINE_KEY = f"{_KEY}; of an engine behind a router --worker-api-key"


def try_engine(options: TrialOptions) -> list[Finding]:
    """The findings of one trial. Raises ConfigError for options that can't be used."""
    return asyncio.run(_Trial(options).run())


class _Trial:
    """One trial. Belongs to its event loop."""

    def __init__(self, options: TrialOptions) -> None:
        self._options = options = options.checked()
        self._url = parse_worker(TRY, options.url).removesuffix("/v1")
        self._key = authorization(api_key("--api-key", options.api_key))
        self._worker_key = (authorization(api_key("--worker-api-key", options.worker_api_key))
                            if options.worker_api_key is not None else self._key)
        self._findings: list[Finding] = []

    async def run(self) -> list[Finding]:
        """What there is to say, up to the first thing that makes the rest impossible."""
        self._pages = PageReader(CONNECT_S)
        try:
            await self._compare()
        except TrialFailed as failed:
            self._findings.append(failed.finding)
        return self._findings

    async def _compare(self) -> None:
        """Have a prompt prefilled by a peer, and look at what the engine reports of it. If it was, have the same prompt
        computed there alone, and compare the tokens. Adds findings as it goes. Raises TrialFailed."""
        model = trial.choose_model(await self._list_models(), self._options.model)
        tokens = trial.prompt_length(self._options.prompt_tokens, model)
        is_router = await self._is_router()
        if not is_router:
            await self._status(self._url, self._key)
        self._findings.append(Finding("server", f"{'router' if is_router else 'engine'} {self._url}, model {model.id}"))
        prompt = await self._make_prompt(model.id, tokens)
        name = secrets.token_hex(16)
        page, took_s = await self._complete(trial.request_body(model.id, prompt, "remote", {}), name)
        remote = self._read_answer(page, took_s)
        worker = self._engine_of(page) if is_router else self._url
        report = await self._report(worker, name, self._worker_key if is_router else self._key)
        degraded = ""
        if not report.went_remote:
            degraded = await self._status(worker, self._worker_key if is_router else self._key)
        self._findings += trial.judge_remote(report, degraded, took_s)
        if report.went_remote:
            self._findings.append(trial.judge_tokens(remote, await self._answer_alone(model.id, prompt)))

    async def _list_models(self) -> Sequence[ServedModel]:
        page = await self._read(f"{self._url}/v1/models", self._key)
        if page.status == HTTPStatus.UNAUTHORIZED:
            raise _failed("server", f"{self._url} asks for a key", _KEY)
        return self._decode(page, ModelList, f"{self._url}/v1/models").data

    async def _is_router(self) -> bool:
        page = await self._read(f"{self._url}/workers", self._key)
        return page.status == HTTPStatus.OK and b'"workers"' in page.body

    async def _status(self, url: str, key: Mapping[str, str]) -> str:
        """Why the engine there says that it has nobody to work with; empty where it has somebody."""
        page = await self._read(f"{url}/pd/status", key)
        if page.status == HTTPStatus.UNAUTHORIZED:
            raise _failed("server", f"{url}/pd/status asks for a key", _ENGINE_KEY)
        if page.status == HTTPStatus.NOT_FOUND:
            version = await self._read(f"{url}/version", key)
            if version.status == HTTPStatus.OK and b'"version"' in version.body:
                raise TrialFailed(trial.no_flag(url))
            raise _failed("server", f"{url} is no vLLM: it has neither /pd/status nor /version", _NO_ENGINE)
        return self._decode(page, _Status, f"{url}/pd/status").degraded or ""

    async def _make_prompt(self, model: str, tokens: int) -> list[int]:
        """A prompt of so many tokens that nobody has sent before."""
        draw, words = random.Random(secrets.randbits(128)), tokens
        while True:  # a number has at least one token in any vocabulary
            body = {"model": model, "prompt": trial.draw_text(draw, words), "add_special_tokens": True}
            page = await self._read(f"{self._url}/tokenize", self._key, body)
            found = self._decode(page, _Tokens, f"{self._url}/tokenize").tokens
            if len(found) >= tokens:
                return found[:tokens]
            if words >= 4 * tokens:
                raise _failed("server", f"/tokenize makes {len(found)} tokens of {words} numbers", _NO_ENGINE)
            words *= 2

    async def _answer_alone(self, model: str, prompt: list[int]) -> Answer:
        """The answer without any prefill engine, and without the blocks of the prompt that are cached. A salt names
        other blocks (V1). V0 refuses salts; there a request for the prompt's log probabilities uses no cached block."""
        page, took_s = await self._complete(trial.request_body(model, prompt, "local", {
            "cache_salt": secrets.token_hex(16)}), secrets.token_hex(16))
        if page.status == HTTPStatus.BAD_REQUEST and b"cache_salt" in page.body:
            page, took_s = await self._complete(trial.request_body(model, prompt, "local", {"prompt_logprobs": 0}),
                                                secrets.token_hex(16))
        return self._read_answer(page, took_s)

    async def _complete(self, body: dict[str, Any], name: str) -> tuple[Page, float]:
        began_s = time.monotonic()
        page = await self._read(f"{self._url}/v1/completions", {**self._key, "x-request-id": name,
                                                               "x-vllm-pd-explain": "1"}, body,
                                self._options.answer_timeout_s, MAX_ANSWER_BYTES)
        return page, time.monotonic() - began_s

    def _read_answer(self, page: Page, took_s: float) -> Answer:
        if page.status != HTTPStatus.OK:
            cure = ("an engine that drains, or a fleet without a free one, refuses: `vllm-pd status --broker ADDRESS`"
                    if page.status == HTTPStatus.SERVICE_UNAVAILABLE else "it says what to change")
            raise _failed("answer", f"{self._url}/v1/completions: {page.status}, {_shown(page)}", cure)
        try:
            return trial.read_answer(page.body, took_s)
        except (ValueError, msgspec.MsgspecError) as error:
            raise _failed("answer", f"{self._url}/v1/completions: not a completion with log probabilities ({error}): "
                          f"{_shown(page)}", _NO_ENGINE) from error

    def _engine_of(self, page: Page) -> str:
        """The URL of the engine to which the router gave the request."""
        worker = page.header("x-vllm-pd-worker")
        try:
            return parse_worker("x-vllm-pd-worker", worker)
        except ConfigError as error:
            raise _failed("server", f"the router {self._url} does not say which engine had the request: {worker}",
                          "write the URL of a decode engine; a proxy may be between") from error

    async def _report(self, url: str, name: str, key: Mapping[str, str]) -> PromptReport:
        """What the engine there knows of the request, once that is all."""
        deadline_s = time.monotonic() + COUNTED_S
        while True:
            page = await self._read(f"{url}/pd/prompts/{name}", key)
            if page.status == HTTPStatus.UNAUTHORIZED:
                raise _failed("server", f"{url}/pd/prompts asks for a key", _ENGINE_KEY)
            late = time.monotonic() > deadline_s
            if page.status == HTTPStatus.OK:
                report = self._decode(page, PromptReport, f"{url}/pd/prompts")
                if late or report.is_complete:
                    return report
            elif page.status != HTTPStatus.NOT_FOUND or late:
                raise _failed("remote", f"{url} does not know this request: {page.status}, {_shown(page)}",
                              "is vllm-pd of the same release there? An engine whose weights were replaced decides "
                              "about no prompt, and a proxy may drop X-Request-Id")
            await asyncio.sleep(POLL_S)

    async def _read(self, url: str, headers: Mapping[str, str], body: dict[str, Any] | None = None,
                    timeout_s: float | None = None, max_bytes: int = MAX_PAGE_BYTES) -> Page:
        timeout_s = timeout_s or PAGE_S
        try:
            sent = None if body is None else msgspec.json.encode(body)
            return await self._pages.read(url, timeout_s, max_bytes, sent, headers)
        except TimeoutError:
            raise _failed("server", f"{url}: no answer within {timeout_s:g} s", "a firewall may drop, or the engine is "
                          "stopped or busy: --answer-timeout-s is for the two answers") from None
        except OSError as error:
            raise _failed("server", f"{url}: {error}", _START) from error

    def _decode(self, page: Page, kind: type, where: str) -> Any:
        if page.status == HTTPStatus.OK:
            try:
                return msgspec.json.decode(page.body, type=kind)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                pass
        raise _failed("server", f"{where} is not what a vLLM answers: {page.status}, {_shown(page)}", _NO_ENGINE)


class _Status(msgspec.Struct):
    incarnation: str
    degraded: str | None = None


class _Tokens(msgspec.Struct):
    tokens: list[int]


def _failed(check: str, fact: str, cure: str) -> TrialFailed:
    return TrialFailed(Finding(check, fact, cure))


def _shown(page: Page) -> str:
    text = page.body[:4 * SHOWN_CHARS].decode(errors="replace")
    return text[:SHOWN_CHARS] or "nothing"
