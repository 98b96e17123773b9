# SPDX-License-Identifier: Apache-2.0
"""Parsing addresses that users write: where a socket listens, and where a broker is.

Without a key, only addresses of this machine's loopback are accepted.
"""
import ipaddress
import itertools
import re
from typing import Any
from urllib.parse import urlsplit

from vllm_pd.errors import ConfigError
from vllm_pd.rpc.locality import address_towards, is_own, resolve
from vllm_pd.rpc.nats_address import SCHEMES

EXAMPLE_BROKER = "tcp://127.0.0.1:5700"
EXAMPLE_NATS = "nats://127.0.0.1:4222"
EXAMPLE_BIND = "tcp://127.0.0.1:0"
AUTO = "auto"  # as the host to listen at
KEYS_CURE = "run vllm-pd keys FILE and give every broker and engine that file, or stay on 127.0.0.1"
CREDENTIALS_CURE = "write nats_credentials, the file of a NATS user, or stay on 127.0.0.1"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,62}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,62}[A-Za-z0-9])?)*")


def parse_endpoint(key: str, value: Any, *, keyed: bool = False) -> tuple[str, int]:
    """(host, port) of `tcp://HOST:PORT`, to connect to. HOST is an address of the loopback (`localhost` is 127.0.0.1)
    or, where `keyed`, of any network, or a name, which is not looked up; one of IPv6 has brackets there, and none in
    what is returned. Raises ConfigError naming `key`."""
    host, port = _split(key, value, ("tcp",), EXAMPLE_BROKER)
    return _allowed(key, value, host, None if keyed else f"the sockets need a key: {KEYS_CURE}"), port


def parse_bind(key: str, value: Any, *, any_port: bool = False, keyed: bool = False,
               broker: str = "") -> tuple[str, int]:
    """(address, port) of `tcp://HOST:PORT`, to listen at. As `parse_endpoint`, but a name is looked up: HOST becomes an
    address of this machine. With `any_port`, port 0 or `*` means any free one and is returned as 0. With `broker`, a
    URL that has been parsed, `auto` or `tcp://auto:PORT` is the address of this machine that leads there."""
    example = EXAMPLE_BIND if any_port else EXAMPLE_BROKER
    is_auto = broker and value == AUTO
    host, port = _split(key, f"tcp://{AUTO}:0" if is_auto else value, ("tcp",), example, any_port=any_port)
    if broker and host == AUTO:
        host = _towards(key, value, broker)
    elif keyed and is_name(host):  # without keys it would have to be one of the loopback
        host = own_address(key, value, host)
    return _allowed(key, value, host, None if keyed else f"the sockets need a key: {KEYS_CURE}", name=False), port


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
        host = _allowed(key, value, host, None if keyed else f"NATS needs credentials: {CREDENTIALS_CURE}")
        urls.append(url_of(host, port, scheme))
    return ",".join(urls)


def url_of(host: str, port: int, scheme: str = "tcp") -> str:
    """The URL of an address or a name."""
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def hosts_of(broker: str) -> list[str]:
    """The hosts of the URLs of a broker, without brackets."""
    return [urlsplit(url).hostname for url in broker.split(",")]


def look_up_broker(broker: str) -> dict[str, list[str]]:
    """The addresses of each host of a broker's URLs. Unknown names are left out; raises ConfigError where all are."""
    found, errors = {}, []
    for host in hosts_of(broker):
        try:
            found[host] = resolve("broker", broker, host)
        except ConfigError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return found


def is_loopback(host: str) -> bool:
    """Whether this is an address of the loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_name(host: str) -> bool:
    """Whether this is in the form of a host's name."""
    return bool(_NAME.fullmatch(host)) and not host.rpartition(".")[2].isdigit()


def own_address(key: str, value: str, name: str) -> str:
    """The address of this machine that a name stands for; of several one that is not of the loopback. Raises
    ConfigError."""
    found = resolve(key, value, name)
    own = sorted(filter(is_own, found), key=is_loopback)
    if not own:
        raise ConfigError(key, value, f"{name} is {', '.join(found)}, and no interface of this machine has that "
                          "address: write one of its own")
    return own[0]


def refuse_unbracketed(key: str, url: str) -> None:
    """Raises ConfigError for a URL with an address of IPv6 that has no brackets."""
    rest = url.partition("://")[2].partition("/")[0]
    if rest.count(":") > 1 and "[" not in rest:
        raise ConfigError(key, url, "write an address of IPv6 in brackets, and the port behind them, like "
                          f"{url.partition('://')[0]}://[fd00::5]:5700")


def _towards(key: str, value: str, broker: str) -> str:
    found = look_up_broker(broker)
    for address in itertools.chain(*found.values()):
        if own := address_towards(address):
            return own
    raise ConfigError(key, value, f"this machine has no route to the broker at {', '.join(found)}: mend that, or write "
                      "an address of this machine, like tcp://10.0.0.6:0")


def _split(key: str, value: Any, schemes: tuple[str, ...], example: str, *, any_port: bool = False) -> tuple[str, int]:
    """(host, port) of `SCHEME://HOST:PORT`, whose form is checked here; which hosts are allowed, the callers decide. An
    address is returned in its usual form and without brackets, `localhost` as 127.0.0.1, port `*` as 0. `example` is
    for the errors. Raises ConfigError naming `key`."""
    cure = f"write it like {example}"
    if not isinstance(value, str):
        raise ConfigError(key, value, f"it must be a string: {cure}")
    _refuse_password(key, value, example)
    scheme, separator, rest = value.partition("://")
    if scheme in schemes:
        refuse_unbracketed(key, value)
    found = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^\[\]:]+)):(.*)", rest)
    if scheme not in schemes or not separator or found is None:
        raise ConfigError(key, value, cure)
    bracketed, plain, port_text = found.groups()
    if not re.fullmatch("[0-9]{1,9}", port_text) and not (any_port and port_text == "*"):
        raise ConfigError(key, value, f"its port is not a number: {cure}")
    port = 0 if port_text == "*" else int(port_text)
    if not (0 if any_port else 1) <= port <= 65535:
        raise ConfigError(key, value, f"its port is outside 1..65535: {cure}")
    if bracketed and _parsed(bracketed) is None:
        raise ConfigError(key, value, f"{bracketed} is no address of IPv6: write one, like [fd00::5], or a name, "
                          "without brackets")
    host = bracketed or plain
    return "127.0.0.1" if host == "localhost" else str(_parsed(host) or host), port


def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """As an address; None for anything else. One of IPv4 that is written as one of IPv6 is what it stands for."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _refuse_password(key: str, value: str, example: str) -> None:
    """Checked before all else, so that no error message, and no log, shows the password."""
    if "@" in value:
        raise ConfigError(key, "***@" + value.rpartition("@")[2], f"it holds a password, which does not belong there: "
                          f"write it like {example}")


def _allowed(key: str, value: str, host: str, lack: str | None, *, name: bool = True) -> str:
    """`host`, where it may be used: it is of the loopback, or there is no `lack` of what is needed beyond it, and the
    other machines can reach it. `name`: it may be a name."""
    if is_loopback(host):
        return host
    if lack is not None:
        found = "" if host in value else f"it is {host}; "
        raise ConfigError(key, value, f"{found}beyond this machine's loopback {lack}")
    address = _parsed(host)
    if address is None and not (name and is_name(host)):
        raise ConfigError(key, value, f"{host} is no address and no name: write the one by which the other machines "
                          "reach it")
    if address is not None and (address.is_unspecified or address.is_multicast or address.is_link_local):
        raise ConfigError(key, value, f"the other machines can't reach {host}: write the address by which they reach "
                          "this one")
    return host
