# SPDX-License-Identifier: Apache-2.0
"""A router's settings, and their checks."""
import dataclasses
import ipaddress
import math
import os
import re
import urllib.parse
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from vllm_pd.broker.members import Access
from vllm_pd.errors import ConfigError
from vllm_pd.protocol.metaserver import is_metaserver
from vllm_pd.rpc.addresses import is_loopback, is_name, own_address, parse_endpoint, refuse_unbracketed, url_of
from vllm_pd.rpc.locality import resolve
from vllm_pd.rpc.nats_address import NatsAddress
from vllm_pd.settings.options import Option

API_KEY_VARIABLE = "VLLM_API_KEY"
OPERATOR_KEY_VARIABLE = "VLLM_PD_OPERATOR_KEY"
NO_TOKENIZER = "none"
MAX_TRIES = 3
METASERVER_PATH = "/v1/metaserver"
MAX_DNS_NAMES = 16
_EXAMPLE_WORKER = "http://127.0.0.1:8001"
_EXAMPLE_DNS = "engines.default.svc.cluster.local:8000, or srv:_http._tcp.engines.default.svc.cluster.local"
_SRV = re.compile(r"_(?P<service>[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)\._tcp\.(?P<name>.+)", re.IGNORECASE)
MAX_NAME_CHARS = 253
MAX_URL_CHARS = 2048
MAX_SHOWN_CHARS = 80  # of a value in an error
_ENDPOINT = re.compile(r"tcp://[^,/]+:0*[1-9]\d*|ipc://[^,]+")
_POSITIVE = ("probe_interval_s", "probe_timeout_s", "connect_timeout_s", "tokenize_timeout_s", "registry_period_s",
             "expected_s", "retry_after_s", "header_timeout_s", "body_timeout_s", "write_timeout_s", "idle_timeout_s",
             "prefill_timeout_s", "dns_period_s", "dns_timeout_s", "file_period_s")
_COUNTS = {"max_in_flight": 1, "max_body_bytes": 1, "tokenize_threads": 1, "max_connections": 1, "max_bodies_bytes": 1}


class RequestOrder(StrEnum):
    """Which engine gets a request first."""
    DECODE_FIRST = "decode-first"  # it asks a prefill engine itself, or does not
    PREFILL_FIRST = "prefill-first"  # its answer says where the KV is, which the decode engine gets with the request


@dataclass(frozen=True)
class DnsSource:
    """What one --worker-dns asks for. `text`: as it was written. `port` is None where the name is asked for SRV, whose
    answers have the ports. `scheme`: of the workers' URLs."""
    text: str
    name: str
    port: int | None
    scheme: str = "http"


@dataclass(frozen=True)
class RouterOptions:
    """The settings of a router. Those with an `Option` are options of `vllm-pd router`.

    All times are in seconds. `max_in_flight` is per worker. `expected_s`: for so long a block counts as held by the
    worker that its prompt was sent to, unless the worker's events report it before.
    """
    port: Annotated[int, Option("Where to listen.")] = 8000
    host: Annotated[str, Option("The address to listen at; beyond the loopback it needs --api-key.")] = "127.0.0.1"
    workers: Annotated[tuple[str, ...], Option(
        "The base URL of an engine, like http://127.0.0.1:8001; may be repeated.", flag="--worker")] = ()
    worker_dns: Annotated[tuple[str, ...], Option(
        "A DNS name of decode engines, each of whose addresses is one, like NAME:8000 for a headless service of "
        "Kubernetes, or srv:_http._tcp.NAME, whose SRV records have the ports; looked up again every 5 s; may be "
        "repeated.", metavar="NAME:PORT|srv:NAME")] = ()
    dns_server: Annotated[str | None, Option(
        "The address of the server for --worker-dns, and its port if it is not 53. Default: those of "
        "/etc/resolv.conf.", metavar="ADDRESS[:PORT]")] = None
    workers_file: Annotated[str | None, Option(
        "A file with the base URL of a decode engine on each line, read again when it has changed.",
        metavar="PATH")] = None
    events: Annotated[tuple[str, ...], Option(
        "Where the KV events of that engine are, if it has no /pd/events to ask, like a stock vLLM; may be repeated, "
        "also for each data-parallel rank.", flag="--worker-events", metavar="URL=EVENTS[,REPLAY]")] = ()
    order: Annotated[RequestOrder, Option(
        "decode-first, or prefill-first: a prefill engine computes each prompt before a decode engine gets the "
        "request.", parse=lambda text: text.replace("_", "-"))] = RequestOrder.DECODE_FIRST
    prefill_workers: Annotated[tuple[str, ...], Option(
        "The base URL of a prefill engine, for --order prefill-first or --metaserver; may be repeated.",
        flag="--prefill-worker")] = ()
    metaserver: Annotated[str | None, Option(
        "The URL by which decode engines reach this router's /v1/metaserver: each may post the job of a prompt there, "
        "for a prefill engine of the router's choice.", metavar="URL")] = None
    block_size: Annotated[int | None, Option(
        "The tokens in a KV block of --worker-events; default: as the events say.")] = None
    broker: Annotated[str | None, Option("Also use the decode engines that are registered at this broker.")] = None
    access: Access = Access()
    tokenizer: Annotated[str | None, Option(
        "The model or folder with the tokenizer for prompts; `none` for no prefix overlap. Default: the engines' "
        "model.")] = None
    api_key: Annotated[str | None, Option("The key that clients must send; default $VLLM_API_KEY.")] = None
    operator_key: Annotated[str | None, Option(
        "The key for POST and DELETE /workers; default $VLLM_PD_OPERATOR_KEY. Without one they are refused with "
        "--api-key, and else for this machine only.")] = None
    worker_api_key: Annotated[str | None, Option("The key that the router sends to engines, not the client's.")] = None
    max_in_flight: Annotated[int, Option("How many requests an engine may have open at a time.")] = 1024
    max_body_bytes: Annotated[int, Option("The largest body of a request.")] = 32 << 20
    max_bodies_bytes: Annotated[int, Option("The largest sum of the bodies of all open requests.")] = 1 << 30
    max_connections: Annotated[int, Option("How many connections all clients together may have.")] = 8192
    unready_s: Annotated[float, Option(
        "How long requests are still accepted after SIGTERM, while /health answers 503.")] = 2.0
    grace_s: Annotated[float, Option("How long open requests may take after that.")] = 30.0
    header_timeout_s: Annotated[float, Option("How long a client may take to send a header.")] = 10.0
    body_timeout_s: Annotated[float, Option("How long a client may take to send a body.")] = 60.0
    write_timeout_s: Annotated[float, Option("How long a client may read nothing of its answer.")] = 30.0
    idle_timeout_s: Annotated[float, Option("How long a connection may be idle between two requests.")] = 65.0
    timeout_s: Annotated[float, Option(
        "How long an engine may take to the first byte of an answer; 0 for no limit.")] = 600.0
    stream_timeout_s: Annotated[float, Option(
        "How long an engine may send nothing in the middle of an answer; 0 for no limit.")] = 300.0
    continue_streams: Annotated[bool, Option(
        "Go on at another engine with a stream that breaks, where docs/router.md says that it can.")] = False
    prefill_timeout_s: Annotated[float, Option(
        "How long a prefill engine may take to compute a prompt, with --order prefill-first.")] = 120.0
    connect_timeout_s: float = 3.0
    probe_interval_s: Annotated[float, Option("Probe an engine that has sent nothing for this long.")] = 5.0
    probe_timeout_s: Annotated[float, Option("How long an engine may take to generate the token of a probe.")] = 15.0
    probe_backoff_s: tuple[float, float] = (0.25, 30.0)  # first, longest
    retry_after_s: float = 1.0
    tokenize_timeout_s: float = 0.25
    tokenize_threads: int = 2
    registry_period_s: float = 1.0
    registry_timeout_s: float = 5.0
    registry_patience_s: float = 10.0  # a registered engine may be missing from the registry for so long
    dns_period_s: float = 5.0
    dns_timeout_s: float = 3.0  # of one question to all servers together
    file_period_s: float = 1.0
    expected_s: float = 5.0

    def checked(self, operator_key_variable: str | None = OPERATOR_KEY_VARIABLE) -> "RouterOptions":
        """The settings with defaults filled in and URLs normalised. `operator_key_variable`: None where no variable
        of the environment has that key. Raises ConfigError for the first invalid one."""
        if not 1 <= self.port <= 65535:
            raise ConfigError("--port", self.port, "write 1 to 65535")
        api_key = _key("--api-key", self.api_key, API_KEY_VARIABLE)
        operator_key = _key("--operator-key", self.operator_key, operator_key_variable)
        if operator_key is not None and operator_key == api_key:
            raise ConfigError("--operator-key", "***", "write another key than --api-key, which clients have")
        host = _checked_host(self.host, keyed=api_key is not None)
        for name in _POSITIVE:
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(_flag(name), value, "write a number of seconds above 0")
        for name in ("timeout_s", "stream_timeout_s", "unready_s", "grace_s"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                none = ", or 0 for no bound" if name.endswith("timeout_s") else " that is not below 0"
                raise ConfigError(_flag(name), value, f"write a number of seconds{none}")
        for name, least in _COUNTS.items():
            if getattr(self, name) < least:
                raise ConfigError(_flag(name), getattr(self, name), f"write {least} or more")
        workers = _parse_workers("--worker", self.workers)
        prefill_workers = _parse_workers("--prefill-worker", self.prefill_workers, workers)
        if self.block_size is not None and self.block_size < 1:
            raise ConfigError("--block-size", self.block_size, "write the workers' own block size")
        self.access.load_keys()  # raises for a file that is none
        if self.broker is not None:
            _check_broker(self.broker, self.access)
        self._check_dns()
        for value in self.events:
            parse_events("--worker-events", value)
        order = _parse_order(self.order, prefill_workers, self.broker, self.metaserver)
        if self.metaserver is not None:
            _check_metaserver(self.metaserver, order, bool(prefill_workers) or self.broker is not None)
        return dataclasses.replace(self, host=host, workers=workers, prefill_workers=prefill_workers, order=order,
                                   api_key=api_key, operator_key=operator_key)

    @property
    def asks_prefills(self) -> bool:
        """Whether prefill engines are workers, too."""
        return self.order == RequestOrder.PREFILL_FIRST or self.metaserver is not None

    def _check_dns(self) -> None:
        sources = [parse_dns("--worker-dns", value) for value in self.worker_dns]
        if len(sources) > MAX_DNS_NAMES:
            raise ConfigError("--worker-dns", self.worker_dns[MAX_DNS_NAMES], f"write {MAX_DNS_NAMES} names at most")
        for number, source in enumerate(sources):
            if source in sources[:number]:
                raise ConfigError("--worker-dns", source.text, "it is given twice: write each name once")
            if source.port is None and self.broker is not None:
                raise ConfigError("--worker-dns", source.text, "SRV records name engines, and the registry has their "
                                  "addresses, so one engine would count as two: leave out --broker or this name")
        if self.dns_server is not None:
            parse_dns_server("--dns-server", self.dns_server)
            if not sources:
                raise ConfigError("--dns-server", self.dns_server, "no name is looked up: add --worker-dns, or leave "
                                  "it out")

    @property
    def key_for_workers(self) -> str | None:
        """The API key that the router sends to workers in its own requests, such as probes."""
        return self.worker_api_key if self.worker_api_key is not None else self.api_key


def parse_worker(key: str, url: object) -> str:
    """A worker's base URL, which is also its name. Raises ConfigError naming `key`."""
    cure = f"write it like {_EXAMPLE_WORKER}"
    if not isinstance(url, str) or "@" in url:
        raise ConfigError(key, "***" if isinstance(url, str) else url, cure)
    url = url.strip()
    shown = url if len(url) <= MAX_SHOWN_CHARS else url[:MAX_SHOWN_CHARS] + "..."
    if len(url) > MAX_URL_CHARS:
        raise ConfigError(key, shown, f"it is longer than {MAX_URL_CHARS} characters: {cure}")
    if not url.isprintable() or " " in url:
        raise ConfigError(key, shown, f"it has a blank or a control character in it: {cure}")
    if not url.lower().startswith(("http://", "https://")):
        raise ConfigError(key, shown, cure)
    try:
        refuse_unbracketed(key, url)
        parts = urllib.parse.urlsplit(url)
        port = parts.port
        host = _usual_form(parts.hostname or "")
    except ConfigError as error:
        raise ConfigError(key, shown, error.cure) from None
    except ValueError as error:
        raise ConfigError(key, shown, f"{str(error)[:MAX_SHOWN_CHARS]}: {cure}") from None
    if not host or port == 0 or parts.query or parts.fragment:
        raise ConfigError(key, shown, cure)
    port = port or (443 if parts.scheme == "https" else 80)
    return url_of(host, port, parts.scheme) + parts.path.rstrip("/")


def _usual_form(host: str) -> str:
    """Of an address of IPv6, which can be written in many ways. Raises ValueError for one that is none."""
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host)
    return str(address.ipv4_mapped or address)


def parse_events(key: str, value: str) -> tuple[str, str, str | None]:
    """(worker, events, replay or None) of `URL=EVENTS[,REPLAY]`. Raises ConfigError naming `key`."""
    url, equals, endpoints = value.partition("=")
    events, _, replay = endpoints.partition(",")
    if not equals or not all(_ENDPOINT.fullmatch(one) for one in (events, *([replay] if replay else []))):
        raise ConfigError(key, value, f"write it like {_EXAMPLE_WORKER}=tcp://127.0.0.1:5557,tcp://127.0.0.1:5558 "
                          "(the endpoint of its events, and that of their replay, if it has one)")
    return parse_worker(key, url), events, replay or None


def parse_dns(key: str, value: str) -> DnsSource:
    """What `NAME:PORT` or `srv:_SERVICE._tcp.NAME` asks for. Raises ConfigError naming `key`."""
    cure = f"write it like {_EXAMPLE_DNS}"
    kind, colon, rest = value.partition(":")
    if colon and kind == "srv":
        found = _SRV.fullmatch(rest)
        if found is None or not is_dns_name(found["name"], len(rest)):
            raise ConfigError(key, value, cure)
        return DnsSource(value, rest.lower(), None, "https" if found["service"].lower() == "https" else "http")
    name, _, port = value.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise ConfigError(key, value, f"it needs a port, 1 to 65535: {cure}")
    if not is_dns_name(name, len(name)):
        address = _is_address(name)
        raise ConfigError(key, value, f"{name} is an address: write --worker http://{value}" if address else cure)
    return DnsSource(value, name.lower(), int(port))


def parse_dns_server(key: str, value: str) -> tuple[str, int]:
    """(address, port) of `ADDRESS` or `ADDRESS:PORT`; one of IPv6 may have brackets, and needs them with a port.
    Raises ConfigError naming `key`."""
    if _is_address(value):
        return value, 53
    found = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^\[\]:]+))(?::([0-9]{1,5}))?", value)
    address, port = ((found[1] or found[2]), int(found[3] or 53)) if found is not None else ("", 0)
    if not _is_address(address) or bool(found[1]) is not (":" in address) or not 1 <= port <= 65535:
        raise ConfigError(key, value, "write an address, like 10.96.0.10, 127.0.0.1:8600 or [fd00::a]:53")
    return address, port


def parse_worker_lines(key: str, text: str) -> tuple[str, ...]:
    """The workers' URLs in a file with one on each line. What follows a `#` that begins a line or comes after a blank
    is a comment. Raises ConfigError that names `key`, the line and the cure."""
    urls: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        url = re.sub(r"(^|\s)#.*", "", line).strip()
        if url:
            urls[parse_worker(f"{key}, line {number}", url)] = None
    return tuple(urls)


def is_dns_name(name: str, chars: int) -> bool:
    """Whether this is the name of a host, perhaps with a dot at its end. `chars`: the length of all that is asked
    for."""
    bare = name.removesuffix(".")
    return chars <= MAX_NAME_CHARS and is_name(bare) and max(map(len, bare.split("."))) <= 63


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return False
    return "[" not in text


def _parse_workers(key: str, urls: tuple[str, ...], others: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The normalised URLs of option `key`, none of which is among `others`. Raises ConfigError."""
    parsed = tuple(parse_worker(key, url) for url in urls)
    for number, url in enumerate(parsed):
        if url in (*others, *parsed[:number]):
            raise ConfigError(key, url, "it is given twice: write each worker once")
    return parsed


def _parse_order(order: str, prefill_workers: tuple[str, ...], broker: str | None,
                 metaserver: str | None) -> RequestOrder:
    if order not in set(RequestOrder):
        raise ConfigError("--order", order, f"write one of {', '.join(RequestOrder)}")
    if order == RequestOrder.DECODE_FIRST and prefill_workers and metaserver is None:
        raise ConfigError("--prefill-worker", prefill_workers[0], "decode engines ask for prefills themselves: add "
                          f"--order {RequestOrder.PREFILL_FIRST.value} or --metaserver, or leave it out")
    if order == RequestOrder.PREFILL_FIRST and not prefill_workers and broker is None:
        raise ConfigError("--order", order, "no prefill engine is known: add --broker, or --prefill-worker for each")
    return RequestOrder(order)


def _check_metaserver(url: str, order: RequestOrder, knows_prefills: bool) -> None:
    """Raises ConfigError for a URL that engines would not post to, or posts that no prefill engine could get."""
    if not is_metaserver(url) or urllib.parse.urlsplit(url)[2:] != (METASERVER_PATH, "", ""):
        raise ConfigError("--metaserver", url[:MAX_SHOWN_CHARS] if "@" not in url else "***", "write where engines "
                          f"reach this router, like http://10.0.0.5:8000{METASERVER_PATH}")
    if order is RequestOrder.PREFILL_FIRST:
        raise ConfigError("--metaserver", url, "with --order prefill-first no decode engine posts: leave out one of "
                          "them")
    if not knows_prefills:
        raise ConfigError("--metaserver", url, "no prefill engine is known: add --broker, or --prefill-worker for each")


def _check_broker(broker: str, access: Access) -> None:
    if NatsAddress.is_url(broker):
        access.nats("--broker", broker)
    else:
        host, _ = parse_endpoint("--broker", broker, keyed=access.load_keys() is not None)
        resolve("--broker", broker, host)


def _key(option: str, given: str | None, variable: str | None) -> str | None:
    """The key of an option, or of the environment where the option is not given. Raises ConfigError for an empty one.
    """
    key = given if given is not None or variable is None else os.environ.get(variable) or None
    if key == "":
        raise ConfigError(option, "", "write a key, or leave the option out")
    return key


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _checked_host(host: str, *, keyed: bool) -> str:
    """The address to listen at."""
    address = "127.0.0.1" if host == "localhost" else own_address("--host", host, host) if is_name(host) else host
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise ConfigError("--host", host, "write an address or a name of this machine, like 127.0.0.1") from None
    if not keyed and not is_loopback(address):
        raise ConfigError("--host", host, "beyond this machine's loopback it needs a key: add --api-key, or stay on "
                          "127.0.0.1")
    return address
