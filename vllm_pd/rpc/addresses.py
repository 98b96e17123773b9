# SPDX-License-Identifier: Apache-2.0
"""Parsing addresses that users write: where a socket listens, and where a broker is.

Without a key, only addresses of this machine's loopback are accepted.
"""
import ipaddress
import re
from typing import Any

from vllm_pd.errors import ConfigError
from vllm_pd.rpc.nats_address import SCHEMES

EXAMPLE_BROKER = "tcp://127.0.0.1:5700"
EXAMPLE_NATS = "nats://127.0.0.1:4222"
KEYS_CURE = "run vllm-pd keys FILE and give every broker and engine that file, or stay on 127.0.0.1"
CREDENTIALS_CURE = "write nats_credentials, the file of a NATS user, or stay on 127.0.0.1"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,62}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,62}[A-Za-z0-9])?)*")


def parse_endpoint(key: str, value: Any, *, any_port: bool = False, keyed: bool = False) -> tuple[str, int]:
    """(host, port) of `tcp://HOST:PORT`. HOST is an IPv4 address of the loopback (`localhost` is 127.0.0.1) or, where
    `keyed`, of any network. It may be a name in an address to connect to, but not in one to listen at.

    `any_port` is for addresses to listen at: port 0 or `*` then means any free one and is returned as 0. Raises
    ConfigError naming `key`.
    """
    host, port = _split(key, value, ("tcp",), "tcp://127.0.0.1:0" if any_port else EXAMPLE_BROKER, any_port=any_port)
    if is_loopback(host):
        return host, port
    if not keyed:
        raise ConfigError(key, value, f"beyond this machine's loopback the sockets need a key: {KEYS_CURE}")
    return _reachable(key, value, host, name_allowed=not any_port), port


def parse_nats(key: str, value: str, *, keyed: bool = False) -> str:
    """The normalised form of a comma-separated list of NATS servers. Raises ConfigError naming `key`."""
    _refuse_password(key, value, EXAMPLE_NATS)
    parts = [part.strip() for part in value.split(",")]
    scheme = parts[0].partition("://")[0]
    urls = []
    for part in parts:
        if scheme in SCHEMES and not part.startswith(scheme + "://"):
            like = ",".join(f"{scheme}://{one.rpartition('://')[2]}" for one in parts)
            raise ConfigError(key, value, f"write {scheme}:// before each server, like {like}")
        host, port = _split(key, part, SCHEMES, EXAMPLE_NATS)
        if not is_loopback(host):
            if not keyed:
                raise ConfigError(key, value, f"beyond this machine's loopback NATS needs credentials: "
                                  f"{CREDENTIALS_CURE}")
            host = _reachable(key, part, host, name_allowed=True)
        urls.append(f"{scheme}://{host}:{port}")
    return ",".join(urls)


def is_loopback(host: str) -> bool:
    """Whether this is an IPv4 address of the loopback."""
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def _split(key: str, value: Any, schemes: tuple[str, ...], example: str, *, any_port: bool = False) -> tuple[str, int]:
    cure = f"write it like {example}"
    if not isinstance(value, str):
        raise ConfigError(key, value, f"it must be a string: {cure}")
    _refuse_password(key, value, example)
    scheme, separator, rest = value.partition("://")
    host, colon, port_text = rest.rpartition(":")
    if scheme not in schemes or not separator or not colon or not host:
        raise ConfigError(key, value, cure)
    if not re.fullmatch("[0-9]{1,9}", port_text) and not (any_port and port_text == "*"):
        raise ConfigError(key, value, f"its port is not a number: {cure}")
    port = 0 if port_text == "*" else int(port_text)
    if not (0 if any_port else 1) <= port <= 65535:
        raise ConfigError(key, value, f"its port is outside 1..65535: {cure}")
    return "127.0.0.1" if host == "localhost" else host, port


def _refuse_password(key: str, value: str, example: str) -> None:
    """Checked before all else, so that no error message, and no log, shows the password."""
    if "@" in value:
        raise ConfigError(key, "***@" + value.rpartition("@")[2], f"it holds a password, which does not belong there: "
                          f"write it like {example}")


def _reachable(key: str, value: str, host: str, *, name_allowed: bool) -> str:
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        if name_allowed and _NAME.fullmatch(host) and not host.rpartition(".")[2].isdigit():
            return host
        raise ConfigError(key, value, f"{host} is no IPv4 address{' and no name' if name_allowed else ''}: write the "
                          f"one by which the other machines reach it") from None
    if address.is_unspecified or address.is_multicast:
        raise ConfigError(key, value, f"nobody can reach {host}: write the address by which the other machines reach "
                          f"this one")
    return host
