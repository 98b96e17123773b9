# SPDX-License-Identifier: Apache-2.0
"""Envoy with an endpoint picker: the configurations of docs/picker.md, and Envoy as a process."""
import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from _behind.gateways import envoy_command, installed_gateways

from vllm_pd.bench.servers import HOST

HEADER = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET_HINT = "envoy.lb.subset_hint"


class EnvoyBodyMode(StrEnum):
    """How Envoy shows the picker the bodies of requests."""
    DUPLEX = "FULL_DUPLEX_STREAMED"
    BUFFERED = "BUFFERED"


def picker_envoy_config(port: int, picker: int, mode: EnvoyBodyMode, *, engines: Sequence[int] = (),
                        subset: Sequence[str] | None = None, response_mode: str = "NONE",
                        tls: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Envoy at `port` of this machine, with a picker at the port `picker`. By default it sends each request to the
    address in the header. With `engines` (ports) it knows these itself, takes the address from metadata, goes on to the
    next one where an engine can't be reached, and tells the picker which has answered. `subset`: the endpoints to pick
    from. `tls`: the validation context for the picker's certificate."""
    filters: list[dict[str, Any]] = []
    if subset is not None:
        filters.append(_filter("set_metadata", "set_metadata.v3.Config", {"metadata": [
            {"metadata_namespace": SUBSET_HINT, "value": {f"{HEADER}-subset": list(subset)}}]}))
    filters.append(_filter("ext_proc", "ext_proc.v3.ExternalProcessor", {
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},  # without a timeout, which were that of an answer
        "failure_mode_allow": False, "message_timeout": "5s",
        "processing_mode": {"request_header_mode": "SEND", "request_body_mode": mode.value,
                            "request_trailer_mode": "SEND", "response_header_mode": "SEND",
                            "response_body_mode": response_mode, "response_trailer_mode": "SEND"},
        "metadata_options": {"forwarding_namespaces": {"untyped": ["envoy.lb", SUBSET_HINT]},
                             "receiving_namespaces": {"untyped": ["envoy.lb"]}}}))
    filters.append(_filter("router", "router.v3.Router", {}))
    route: dict[str, Any] = {"cluster": "engines", "timeout": "0s"}
    if engines:
        route["retry_policy"] = {"retry_on": "connect-failure,refused-stream,retriable-status-codes",
                                 "retriable_status_codes": [503], "num_retries": 3}
    manager = {
        "@type": _type("extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": "vllm", "stream_idle_timeout": "600s", "http_filters": filters,
        "route_config": {"virtual_hosts": [{
            "name": "vllm", "domains": ["*"],
            "response_headers_to_add": [{"header": {"key": "x-upstream", "value": "%UPSTREAM_HOST%"}}],
            "routes": [{"match": {"prefix": "/"}, "route": route}]}]}}
    pick_cluster: dict[str, Any] = {
        "name": "picker", "type": "STATIC", "connect_timeout": "2s",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": _type("extensions.upstreams.http.v3.HttpProtocolOptions"), "explicit_http_config": {
                "http2_protocol_options": {"connection_keepalive": {"interval": "10s", "timeout": "5s"}}}}},
        "circuit_breakers": {"thresholds": [{"max_requests": 16384, "max_pending_requests": 16384}]},
        "load_assignment": {"cluster_name": "picker", "endpoints": [{"lb_endpoints": [_endpoint(picker)]}]}}
    if tls is not None:
        pick_cluster["transport_socket"] = {"name": "envoy.transport_sockets.tls", "typed_config": {
            "@type": _type("extensions.transport_sockets.tls.v3.UpstreamTlsContext"),
            "common_tls_context": {"validation_context": tls}}}
    return {"static_resources": {
        "listeners": [{"address": _address(port), "per_connection_buffer_limit_bytes": 33554432, "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}]}],
        "clusters": [pick_cluster, _known_engines(engines) if engines else _any_engines()]}}


def _any_engines() -> dict[str, Any]:
    return {"name": "engines", "type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED", "connect_timeout": "2s",
            "upstream_connection_options": _keepalive(), "circuit_breakers": _breakers(),
            "original_dst_lb_config": {"use_http_header": True, "http_header_name": HEADER}}


def _known_engines(ports: Sequence[int]) -> dict[str, Any]:
    key = {"key": "envoy.lb", "path": [{"key": HEADER}]}
    policy = {"@type": _type("extensions.load_balancing_policies.override_host.v3.OverrideHost"),
              "override_host_sources": [{"metadata": key}],
              "selected_host_key": {"key": "envoy.lb", "path": [{"key": SERVED}]},
              "fallback_policy": {"policies": [{"typed_extension_config": {
                  "name": "envoy.load_balancing_policies.round_robin", "typed_config": {
                      "@type": _type("extensions.load_balancing_policies.round_robin.v3.RoundRobin")}}}]}}
    return {"name": "engines", "type": "STATIC", "connect_timeout": "2s",
            "upstream_connection_options": _keepalive(), "circuit_breakers": _breakers(),
            "load_balancing_policy": {"policies": [{"typed_extension_config": {
                "name": "envoy.load_balancing_policies.override_host", "typed_config": policy}}]},
            "load_assignment": {"cluster_name": "engines", "endpoints": [{
                "lb_endpoints": [_endpoint(port) for port in ports]}]}}


def start_envoy_command(config: Mapping[str, Any], folder: Path) -> list[str]:
    """The command for an Envoy with this configuration, which is written into `folder`. Raises ConfigError where none
    is installed."""
    file = folder / "envoy.json"
    file.write_text(json.dumps(config, indent=1))
    return envoy_command(installed_gateways(), file)


def _filter(name: str, kind: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": f"envoy.filters.http.{name}",
            "typed_config": {"@type": _type(f"extensions.filters.http.{kind}"), **config}}


def _breakers() -> dict[str, Any]:
    return {"thresholds": [{"max_connections": 16384, "max_requests": 16384, "max_pending_requests": 16384,
                            "max_retries": 1024}]}


def _keepalive() -> dict[str, Any]:
    """An engine whose machine is gone without a word has lost its connections in a minute."""
    return {"tcp_keepalive": {"keepalive_time": 30, "keepalive_interval": 10, "keepalive_probes": 3}}


def _endpoint(port: int) -> dict[str, Any]:
    return {"endpoint": {"address": _address(port)}}


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": HOST, "port_value": port}}


def _type(name: str) -> str:
    return f"type.googleapis.com/envoy.{name}"
