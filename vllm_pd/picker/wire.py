# SPDX-License-Identifier: Apache-2.0
"""The messages of Envoy's ext_proc as the endpoint-picker protocol uses them: what is read of them, and the answers.

The protocol is the Gateway API Inference Extension's (docs/proposals/004-endpoint-picker-protocol there). Pure.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from vllm_pd.picker.picking import PickRequest
from vllm_pd.router.responses import Headers, RouterResponse

if TYPE_CHECKING:
    from google.protobuf import struct_pb2

ENDPOINT = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
LB, SUBSET_HINT = "envoy.lb", "envoy.lb.subset_hint"  # namespaces of metadata
MAX_CHUNK_BYTES = 60_000  # of a streamed body: in some releases Envoy takes no more than 64 KiB in one message
MAX_HEADERS_BYTES = 1 << 20  # of one request
MAX_HEADERS = 1000
MAX_SUBSET = 1 << 14
OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD

DUPLEX = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED
WHOLE = (processing_mode_pb2.ProcessingMode.BUFFERED, processing_mode_pb2.ProcessingMode.BUFFERED_PARTIAL)


class BadMessage(Exception):
    """The peer does not speak this protocol, or exceeds a bound of it."""


@dataclass(frozen=True)
class StreamHead:
    """The first message of a stream: the request without its body. `ended`: it has none. `request_mode` and
    `response_mode`: how the gateway sends bodies; one that does not say so streams them in full duplex, which each has
    to be able to."""
    request: PickRequest
    ended: bool
    request_mode: int
    response_mode: int

    def without_headers(self) -> StreamHead:
        """The same without what only the choice needs."""
        return replace(self, request=replace(self.request, headers=[], subset=None))


def read_head(message: ext_proc.ProcessingRequest) -> StreamHead:
    """Raises BadMessage where it is no first message."""
    if message.WhichOneof("request") != "request_headers":
        raise BadMessage(f"a stream begins with request_headers, not {message.WhichOneof('request')}")
    if message.observability_mode:
        raise BadMessage("with observability_mode no engine can be picked: leave it out")
    headers = read_headers(message.request_headers)
    pseudo = {name: value for name, value in headers if name.startswith(b":")}
    path = pseudo.get(b":path", b"").partition(b"?")[0].decode("latin-1")
    method = pseudo.get(b":method", b"").decode("latin-1")
    modes = ((message.protocol_config.request_body_mode, message.protocol_config.response_body_mode)
             if message.HasField("protocol_config") else (DUPLEX, DUPLEX))
    kept = [(name, value) for name, value in headers if not name.startswith(b":")]
    request = PickRequest(method, path, kept, read_subset(message))
    return StreamHead(request, message.request_headers.end_of_stream, *modes)


def read_headers(message: ext_proc.HttpHeaders) -> Headers:
    """The headers, with names in lower case. Raises BadMessage where there are too many."""
    found = message.headers.headers
    if len(found) > MAX_HEADERS or message.ByteSize() > MAX_HEADERS_BYTES:
        raise BadMessage(f"a request has more than {MAX_HEADERS} headers, or {MAX_HEADERS_BYTES} bytes of them")
    return [(one.key.lower().encode(), one.raw_value or one.value.encode()) for one in found]


def read_status(headers: Headers) -> int:
    """The status of an answer; 0 where it has none."""
    text = next((value for name, value in headers if name == b":status"), b"")
    return int(text) if text.isdigit() and len(text) == 3 else 0


def read_subset(message: ext_proc.ProcessingRequest) -> frozenset[str] | None:
    """The endpoints from which the gateway lets the picker pick: a list of strings, or one string with commas. None
    where it says nothing. What is no string is none of the endpoints. Raises BadMessage for too many."""
    value = _metadata(message, SUBSET_HINT, SUBSET)
    if value is None:
        return None
    if value.WhichOneof("kind") == "string_value":
        named = [one.strip() for one in value.string_value.split(",", MAX_SUBSET + 1)]
    else:
        named = [one.string_value.strip() for one in value.list_value.values]
    if len(named) > MAX_SUBSET:
        raise BadMessage(f"{SUBSET} names more than {MAX_SUBSET} endpoints")
    return frozenset(named) - {""}


def read_served(message: ext_proc.ProcessingRequest) -> str | None:
    """The endpoint that has answered, where the gateway says so."""
    value = _metadata(message, LB, SERVED)
    return None if value is None else value.string_value or None


def waiting_for_body() -> ext_proc.ProcessingResponse:
    """The answer to request_headers where the engine is named with the body. It removes a client's own header: Envoy
    sends a request on without a body's message where trailers follow the head."""
    answer = ext_proc.ProcessingResponse()
    answer.request_headers.response.header_mutation.remove_headers.append(ENDPOINT)
    return answer


def picked_headers(endpoints: str) -> ext_proc.ProcessingResponse:
    """The answer to request_headers with the engine to send the request to."""
    answer = ext_proc.ProcessingResponse()
    _direct(answer, answer.request_headers.response, endpoints)
    return answer


def picked_body(endpoints: str) -> ext_proc.ProcessingResponse:
    """The same, to a request_body that came in one piece."""
    answer = ext_proc.ProcessingResponse()
    _direct(answer, answer.request_body.response, endpoints)
    return answer


def streamed_chunks(kind: str, body: bytes, last: bool) -> Iterator[ext_proc.ProcessingResponse]:
    """The messages that give a body back in full duplex. `kind`: request_body or response_body. `last`: the body ends
    here; else trailers or other parts follow."""
    starts = range(0, len(body), MAX_CHUNK_BYTES) or (0,)
    for start in starts:
        answer = ext_proc.ProcessingResponse()
        chunk = getattr(answer, kind).response.body_mutation.streamed_response
        chunk.body = body[start:start + MAX_CHUNK_BYTES]
        chunk.end_of_stream = last and start == starts[-1]
        yield answer


def unchanged(kind: str) -> ext_proc.ProcessingResponse:
    """The answer to a message of this kind whose part of the request or of the answer goes on as it is."""
    answer = ext_proc.ProcessingResponse()
    getattr(answer, kind).SetInParent()
    return answer


def refusal(answer: RouterResponse, reason: str) -> ext_proc.ProcessingResponse:
    """The answer to the client, in place of an engine's."""
    response = ext_proc.ProcessingResponse()
    immediate = response.immediate_response
    immediate.status.code = answer.status
    immediate.body = answer.body
    immediate.details = f"vllm_pd_{reason}"
    for name, value in answer.headers:
        _set(immediate.headers.set_headers.add(), name.decode(), value)
    return response


def _direct(answer: ext_proc.ProcessingResponse, response: ext_proc.CommonResponse, endpoints: str) -> None:
    """Name the engine in both places: in metadata, and in the header, over one that the client has sent. Routes may be
    chosen by the header."""
    answer.dynamic_metadata.fields[LB].struct_value.fields[ENDPOINT].string_value = endpoints
    _set(response.header_mutation.set_headers.add(), ENDPOINT, endpoints.encode())
    response.clear_route_cache = True


def _set(option: base_pb2.HeaderValueOption, name: str, value: bytes) -> None:
    option.append_action = OVERWRITE
    option.header.key = name
    option.header.raw_value = value


def _metadata(message: ext_proc.ProcessingRequest, namespace: str, key: str) -> struct_pb2.Value | None:
    known = message.metadata_context.filter_metadata
    if namespace not in known or key not in known[namespace].fields:
        return None
    return known[namespace].fields[key]
