# SPDX-License-Identifier: Apache-2.0
"""B103 at the server's port: what a request may ask for, and what is refused before vLLM begins to answer."""
import asyncio
import json

import pytest

from tests.peers.test_front_door import LOCAL, run
from vllm_pd.frontend.asked import SHOWN_BYTES, AskedMiddleware, place_refusal

DEEP = 100_000
OTHERS = ['"fast"', '"REMOTE"', '""', "null", "true", "1", "-1.5e300", "9" * 10_000, '["remote"]', '{"auto":"auto"}',
          '"' + "x" * 1_000_000 + '"', "[" * 500 + "]" * 500, r'"\u0000"']
SERVED = ['{"kv_transfer_params":{"pd":"remote"}}', '{"kv_transfer_params":{"pd":"local"}}', '{"pd":"fast"}',
          '{"kv_transfer_params":{"pd":"auto","blocks":[4]}}', r'{"kv_transfer_params":{"p\u0064":"\u0072emote"}}',
          '{"kv_transfer_params":{"pd":"fast"},"kv_transfer_params":{"pd":"local"}}',  # the last one counts in vLLM too
          '{"kv_transfer_params":null}', '{"kv_transfer_params":{}}', "{}"]
VLLMS = ["", "{", "[]", "1", "\\", '{"kv_transfer_params":"fast"}', '{"kv_transfer_params":[{"pd":"fast"}]}',
         '{"kv_transfer_params":{"pd":' + "[" * DEEP + "]" * DEEP + "}}", '{"a":' * DEEP,
         '{"kv_transfer_params":{"pd":', r'{"kv_transfer_params":{"pd":"\ud800"}}',
         '{"a":NaN,"kv_transfer_params":{"pd":"fast"}}']  # no JSON: OTHER


def asks_for(value: str) -> bytes:
    return f'{{"prompt": "a", "max_tokens": 1, "kv_transfer_params": {{"pd": {value}}}}}'.encode()


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: value[:12])
def test_b103_a_place_that_does_not_exist_is_refused_with_its_key_its_value_and_a_cure(value):
    text = place_refusal(asks_for(value))
    assert text.startswith(f"kv_transfer_params.pd={value[:SHOWN_BYTES]}") and len(text) < 200
    assert text.endswith('can\'t be used: write one of "remote", "local", "auto", or leave it out')


@pytest.mark.parametrize("body", [*SERVED, *VLLMS], ids=lambda body: body[:40])
def test_b103_all_else_is_left_to_vllm(body):
    assert place_refusal(body.encode()) is None
    assert place_refusal(b"\xff" + body.encode() + b"\x00") is None


def test_b103_the_server_refuses_it_and_serves_the_others(tmp_path):
    async def body(served):
        status, said, headers = await served.ask("POST", "/v1/completions", asks_for('"fast"'))
        assert (status, said["code"], said["object"]) == (400, 400, "error") and '"fast"' in said["message"]
        assert headers[b"content-type"] == b"application/json"
        for place in ("remote", "local", "auto"):
            status, said, _ = await served.ask("POST", "/v1/completions", asks_for(f'"{place}"'))
            assert status == 200 and said["asked"]["kv_transfer_params"] == {"pd": place}
        assert served.drain.open_requests == 0

    run(body, tmp_path)


def test_b103_the_key_is_asked_for_before_a_body_is_read(tmp_path):
    async def body(served):
        application = served.app.build_middleware_stack()
        while not isinstance(application, AskedMiddleware):
            names.append(type(application).__name__)
            application = getattr(application, "app", None) or application._app

    names = []
    run(body, tmp_path, asks={"api_token": "secret"})
    assert "AuthenticationMiddleware" in names and "DrainMiddleware" in names


@pytest.mark.parametrize("method, content_type", [("GET", b"application/json"), ("POST", b"multipart/form-data")])
def test_b103_no_other_body_is_kept(method, content_type):
    scope = {"type": "http", "method": method, "headers": [(b"content-type", content_type)]}
    seen = []

    async def application(scope, receive, send):
        seen.append(receive)

    asyncio.run(AskedMiddleware(application)(scope, "receive", None))
    assert seen == ["receive"]


def test_b103_the_application_gets_the_messages_as_they_came():
    first = {"type": "http.request", "body": asks_for('"remote"')[:20], "more_body": True}
    second = {"type": "http.request", "body": asks_for('"remote"')[20:]}
    gone = {"type": "http.disconnect"}
    for messages in ([first, second, gone], [first, gone], [gone]):
        assert passed_on(messages) == messages
    assert json.loads(first["body"] + second["body"])["kv_transfer_params"] == {"pd": "remote"}


def passed_on(messages):
    """What an application behind the middleware receives."""
    seen, left = [], list(messages)

    async def application(scope, receive, send):
        for _ in messages:
            seen.append(await receive())

    async def receive():
        return left.pop(0)

    asyncio.run(AskedMiddleware(application)({"type": "http", "method": "POST", "headers": LOCAL}, receive, None))
    return seen
