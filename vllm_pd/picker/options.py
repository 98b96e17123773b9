# SPDX-License-Identifier: Apache-2.0
"""A picker's settings, and their checks."""
import dataclasses
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vllm_pd.errors import ConfigError
from vllm_pd.router.options import RequestOrder, RouterOptions
from vllm_pd.rpc.addresses import is_name, own_address
from vllm_pd.settings.options import Option, option_of

MAX_FALLBACKS = 8
MAX_STREAMS = 1 << 16


@dataclass(frozen=True)
class PickerOptions(RouterOptions):
    """The settings of a picker: those of a router by which it chooses, and the picker's own. What a router does with
    clients' connections and answers a gateway does here, so those settings are no options; they have no effect."""
    port: Annotated[int, Option("Where to listen for gRPC, the gateway's and that of health checks.")] = 9002
    host: Annotated[str, Option("The address to listen at.")] = "127.0.0.1"
    metrics_port: Annotated[int, Option("Where to serve /metrics and /health by HTTP; 0 for nowhere.")] = 9090
    health_port: Annotated[int, Option(
        "Where else to answer gRPC health checks, without TLS, as Kubernetes asks for them; 0 for nowhere.")] = 0
    tls_cert: Annotated[str | None, Option(
        "The file with the certificate for --port; without one it has no TLS.", metavar="PATH")] = None
    tls_key: Annotated[str | None, Option("The file with its key.", metavar="PATH")] = None
    tls_client_ca: Annotated[str | None, Option(
        "Serve only gateways whose certificate is signed by one in this file.", metavar="PATH")] = None
    fallbacks: Annotated[int, Option(
        "How many more engines to name for each request, for gateways that go on to the next one.")] = 0
    max_streams: Annotated[int, Option(
        "How many requests may be open, from their beginning to the end of their answer.")] = 8192
    order: Annotated[RequestOrder, Option(
        "Only decode-first: a gateway sends each request to one engine.",
        parse=lambda text: text.replace("_", "-"))] = RequestOrder.DECODE_FIRST
    body_timeout_s: Annotated[float, Option(
        "How long a gateway may take to send a request, from the beginning of its stream.")] = 60.0
    unready_s: Annotated[float, Option(
        "How long requests are still accepted after SIGTERM, while health checks fail.")] = 2.0
    grace_s: Annotated[float, Option("How long open requests may take after that.")] = 30.0
    max_in_flight: Annotated[int, option_of(RouterOptions, "max_in_flight")] = 1024
    worker_api_key: Annotated[str | None, Option(
        "The key that the picker sends to engines in its own requests; default $VLLM_API_KEY.")] = None
    prefill_workers: tuple[str, ...] = ()
    metaserver: str | None = None
    api_key: str | None = None
    operator_key: str | None = None
    max_connections: int = 8192
    header_timeout_s: float = 10.0
    write_timeout_s: float = 30.0
    idle_timeout_s: float = 65.0
    timeout_s: float = 600.0
    stream_timeout_s: float = 300.0
    continue_streams: bool = False
    prefill_timeout_s: float = 120.0

    def checked(self) -> "PickerOptions":
        """The settings with defaults filled in and URLs normalised. Raises ConfigError for the first invalid one."""
        if self.order != RequestOrder.DECODE_FIRST:
            raise ConfigError("--order", str(self.order), "a picker changes no request and sends none to two engines: "
                              "leave it out, or use `vllm-pd router`")
        for flag, name, least, most in (("--metrics-port", "metrics_port", 0, 65535),
                                        ("--health-port", "health_port", 0, 65535),
                                        ("--fallbacks", "fallbacks", 0, MAX_FALLBACKS),
                                        ("--max-streams", "max_streams", 1, MAX_STREAMS)):
            if not least <= getattr(self, name) <= most:
                raise ConfigError(flag, getattr(self, name), f"write {least} to {most}")
        ports = [port for port in (self.port, self.metrics_port, self.health_port) if port]
        if len(set(ports)) < len(ports):
            raise ConfigError("--port", self.port, "give --port, --metrics-port and --health-port different numbers")
        self._check_tls()
        # A router beyond the loopback needs a key of its clients. A gateway has none to send: TLS does that here.
        checked = RouterOptions.checked(dataclasses.replace(self, host="127.0.0.1"), operator_key_variable=None)
        return dataclasses.replace(checked, host=_address(self.host))

    def _check_tls(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert", self.tls_cert, "give --tls-cert and --tls-key together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("--tls-client-ca", self.tls_client_ca, "it needs --tls-cert and --tls-key")
        if self.tls_cert is not None:
            _read("--tls-cert", self.tls_cert)
            _read("--tls-key", self.tls_key)
            try:  # gRPC itself would only say that it can't listen
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(self.tls_cert, self.tls_key, password=lambda: "")
            except (ssl.SSLError, ValueError) as error:
                raise ConfigError("--tls-cert", self.tls_cert, f"it is no PEM certificate with the key of --tls-key "
                                  f"({error}): write the files of a pair, a key without a password") from None
        if self.tls_client_ca is not None:
            _read("--tls-client-ca", self.tls_client_ca)
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(self.tls_client_ca)
            except ssl.SSLError as error:
                raise ConfigError("--tls-client-ca", self.tls_client_ca, f"no certificate is in it ({error}): write a "
                                  "PEM file") from None

    def tls_files(self) -> tuple[bytes, bytes, bytes | None] | None:
        """(certificate, key, the clients' authority or None); None without TLS. Raises ConfigError."""
        if self.tls_cert is None:
            return None
        ca = None if self.tls_client_ca is None else _read("--tls-client-ca", self.tls_client_ca)
        return _read("--tls-cert", self.tls_cert), _read("--tls-key", self.tls_key), ca


def _read(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(key, path, f"it can't be read ({error.strerror}): write the path of a PEM file") from None


def _address(host: str) -> str:
    """The address to listen at. Raises ConfigError."""
    address = "127.0.0.1" if host == "localhost" else own_address("--host", host, host) if is_name(host) else host
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        raise ConfigError("--host", host, "write an address or a name of this machine, like 0.0.0.0") from None
