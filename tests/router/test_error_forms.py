# SPDX-License-Identifier: Apache-2.0
"""B60, B80: the routes of today's vLLM are forwarded, and the router's own errors have the form of its engines'."""
import json
from http import HTTPStatus

import aiohttp
import pytest

from tests.fakes.faulty_engine import Fault, FaultyEngine, serving
from vllm_pd.frontend.errors import ErrorForm, error_body, form_of_versions

FIELDS = {"message", "type", "param", "code"}


def of_version(version):
    def make():
        engine = FaultyEngine()
        engine.version = version
        return engine
    return make


@pytest.mark.parametrize("versions, form", [
    ([], ErrorForm.NESTED), (["", "a build"], ErrorForm.NESTED), (["0.9.2"], ErrorForm.FLAT),
    (["0.9.2+pd1.cpu", "0.10.0rc1"], ErrorForm.FLAT), (["0.10.1"], ErrorForm.NESTED),
    (["0.32.0+cpu"], ErrorForm.NESTED), (["0.9.2", "0.33.0"], ErrorForm.NESTED),
    (["0.1.dev1+g123"], ErrorForm.NESTED), (["0.9.2", ""], ErrorForm.FLAT)])
def test_b80_the_form_follows_the_versions(versions, form):
    assert form_of_versions(versions) is form


@pytest.mark.parametrize("version", ["0.9.2", "0.32.0", ""])
async def test_b80_an_error_of_the_router_has_the_form_of_its_engines(version):
    async with serving(1, make=of_version(version), max_body_bytes=1000) as (served, [engine]):
        answers = [await served.ask(prompt="x" * 2000), await served.ask(path="/no/such/path")]
        engine.fault = Fault.HANG_UP
        answers.append(await served.ask())
        assert [answer.status for answer in answers] == [413, 404, 503]
        for answer in answers:
            said = answer.json
            if version == "0.9.2":
                assert said.pop("object") == "error" and said.keys() == FIELDS
            else:
                assert said.keys() == {"error"} and said["error"].keys() == FIELDS
                said = said["error"]
            assert said["code"] == answer.status and said["type"] == HTTPStatus(answer.status).phrase


@pytest.mark.parametrize("version, more", [("0.9.2", {"object"}), ("0.32.0", set())])
async def test_b80_a_stream_ends_with_an_error_of_the_engines_form(version, more):
    async with serving(1, make=of_version(version)) as (served, [engine]):
        engine.fault = Fault.BREAK
        error = (await served.ask(True)).events[-1]["error"]
        assert error.keys() == FIELDS | more and error["code"] == 502


async def test_b80_errors_of_the_messages_api_are_anthropics():
    async with serving(1, make=of_version("0.32.0"), max_body_bytes=1000) as (served, [engine]):
        answer = await served.ask(path="/v1/messages", prompt="x" * 2000)
        assert answer.status == 413 and answer.json["type"] == "error"
        assert answer.json["error"].keys() == {"type", "message"}
        engine.fault = Fault.BREAK
        last = (await served.ask(True, path="/v1/messages")).body.rstrip().split(b"\n\n")[-1]
        event, data = last.split(b"\n")
        assert event == b"event: error" and json.loads(data.removeprefix(b"data: "))["type"] == "error"
    assert json.loads(error_body(HTTPStatus.NOT_FOUND, "x", ErrorForm.FLAT, "/v1/messagesother"))["object"] == "error"


@pytest.mark.parametrize("path", [
    "/v1/messages", "/v1/messages/count_tokens", "/v1/audio/transcriptions", "/v1/audio/translations",
    "/inference/v1/generate", "/v1/chat/completions/batch", "/v1/chat/completions/render", "/v2/embed"])
async def test_b60_the_routes_of_todays_vllm_are_forwarded(path):
    async with serving(1, make=of_version("0.32.0")) as (served, [engine]):
        assert (await served.ask(path=path)).status == 200
        assert [target for target, *_ in engine.asked] == [path]
        for operators in ("/sleep", "/pause", "/update_weights", "/collective_rpc", "/server_info", "/invocations"):
            assert (await served.ask(path=operators)).status == 404


async def test_b60_audio_passes_as_it_came_to_an_engine_that_has_its_model():
    form = (b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
            + b"\0\xff\r\n" * 1000 + b"\r\n--b--\r\n")
    async with serving(2) as (served, engines):
        for worker, model in zip(served.router.workers, ("m", "whisper"), strict=True):
            worker.models = worker.base_models = frozenset((model, ))
        for engine in engines:
            engine.raw = (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", True)
        for _ in range(3):
            async with aiohttp.ClientSession() as session, session.post(
                    served.url + "/v1/audio/transcriptions", data=form,
                    headers={"content-type": "multipart/form-data; boundary=b"}) as response:
                assert response.status == 200
        assert not engines[0].asked and len(engines[1].asked) == 3
        for _, headers, body in engines[1].asked:
            assert body == form and headers["content-type"] == "multipart/form-data; boundary=b"
