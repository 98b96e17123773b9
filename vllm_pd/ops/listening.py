# SPDX-License-Identifier: Apache-2.0
"""Where the processes of this host's engines listen, beside what docs/configuration.md promises ("Ports").

A socket at the loopback or at the address of `bind` is promised. One elsewhere is judged by what is known of it: the
ports of the HTTP server and of KV events are in the engine's command line; where its KV transport listens, the engine
says; and what is left is judged by its address. A stock vLLM opens sockets by itself as well: torch's store at all
addresses, gloo at the address of this machine's name, and a queue of vLLM between machines at the address of its route.
No setting of ours moves them to `bind`, so they are named, and no fault.
"""
from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import psutil

from vllm_pd.ops.finding import Finding
from vllm_pd.ops.launch.serve_args import value_of
from vllm_pd.ops.orders import introduce
from vllm_pd.ops.paths import ANSWER_S, Ask
from vllm_pd.peer.liveness.process import host_id, is_visible, start_time
from vllm_pd.protocol.messages import Member, Process
from vllm_pd.rpc.addresses import is_loopback
from vllm_pd.rpc.locality import address_towards
from vllm_pd.rpc.tcp import listening

DEVICES = "UCX_NET_DEVICES"
_FAR = ("8.8.8.8", "2001:4860:4860::8888")  # vLLM's own address is the one from which it would connect there
_RULES = 'docs/configuration.md, "Ports", has the rules of a firewall'


class Opener(StrEnum):
    """What has opened a socket that listens beyond the address of `bind`."""
    HTTP = "the HTTP server, as --host has it"
    EVENTS = "KV events, as --kv-events-config has them"
    DEVICES = f"the KV transport, as {DEVICES} has it"
    STORE = "torch's store, or a socket of vLLM at all addresses"
    GLOO = "gloo of torch, or a queue of vLLM between machines, at this machine's own address"
    KV = "the KV transport, which obeys everybody who reaches it"
    UNKNOWN = "nothing of vllm-pd, vLLM or torch is known to listen there"


PROMISED = frozenset({Opener.HTTP, Opener.EVENTS, Opener.DEVICES})
STOCK = frozenset({Opener.STORE, Opener.GLOO})


@dataclass(frozen=True)
class Promise:
    """What is known of an engine's sockets. `host`: the address of `bind`. `kv`: the URLs where its ranks listen now.
    `own`: this machine's addresses that torch and vLLM take."""
    host: str
    http: frozenset[int] = frozenset()
    events: frozenset[int] = frozenset()
    kv: frozenset[str] = frozenset()
    devices_chosen: bool = False
    own: frozenset[str] = frozenset()


def find_opener(url: str, promise: Promise) -> Opener | None:
    """What listens at `tcp://ADDRESS:PORT`; None for the loopback and the address of `bind`, where all may be."""
    parts = urlsplit(url)
    address = ipaddress.ip_address(parts.hostname)
    host = str(getattr(address, "ipv4_mapped", None) or address)
    if is_loopback(host) or host == promise.host:
        return None
    if parts.port in promise.http:
        return Opener.HTTP
    if parts.port in promise.events:
        return Opener.EVENTS
    if url in promise.kv:
        return Opener.DEVICES if promise.devices_chosen else Opener.KV
    if address.is_unspecified:
        return Opener.STORE
    if host in promise.own:
        return Opener.GLOO
    return Opener.DEVICES if promise.devices_chosen else Opener.UNKNOWN  # of an agent that is to be destroyed


@dataclass
class Seen:
    """The sockets of an engine's processes: by URL, who listens there. Those of `hidden` processes can't be seen."""
    sockets: dict[str, list[int]] = field(default_factory=dict)
    hidden: list[tuple[int, str]] = field(default_factory=list)  # pid, user

    def beyond(self, promise: Promise) -> dict[str, Opener]:
        """Those beyond the address of `bind`."""
        found = {url: find_opener(url, promise) for url in sorted(self.sockets)}
        return {url: opener for url, opener in found.items() if opener is not None}


def look(pids: Iterable[int]) -> Seen:
    """Where these processes listen. Those that have ended are left out."""
    seen = Seen()
    for pid in pids:
        try:
            for url in listening(pid):
                seen.sockets.setdefault(url, []).append(pid)
        except psutil.AccessDenied:
            seen.hidden.append((pid, _user(pid)))
        except psutil.NoSuchProcess:
            continue
    return seen


def check_listening(members: Sequence[Member], ask: Ask) -> Iterator[Finding]:
    """Each engine of this host: what it listens at, and what of it is not promised. `ask` is for those of which
    something listens at an address that may be its KV transport's."""
    for member in members:
        if is_visible(member):
            yield from _check_engine(member, ask)
        elif member.host_id and member.host_id.partition("/")[0] == host_id().partition("/")[0]:
            yield Finding("listens", f"{introduce(member)}: its processes can't be seen: in a container of this "
                          "machine, or hidden from this user",
                          hint="run `vllm-pd doctor --broker ADDRESS` in that container, or as root")


def promise_of(pids: Sequence[int], host: str, server: Sequence[str] = ()) -> Promise:
    """What is known of an engine with these processes without asking it. `server`: its command line."""
    environment: dict[str, str] = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            environment |= _environment(psutil.Process(pid))
    port = value_of("--port", server) or ""
    return Promise(host, frozenset({int(port)} if port.isdigit() else ()), event_ports(server),
                   devices_chosen=bool(environment.get(DEVICES)), own=frozenset(_own_addresses(environment)))


def event_ports(server: Sequence[str], ranks: int = 64) -> frozenset[int]:
    """The ports of `--kv-events-config` in a command line, with those of data-parallel ranks after each."""
    try:
        events: Any = json.loads(value_of("--kv-events-config", server) or "{}")
        urls = [urlsplit(str(events[key]).replace("*", "0.0.0.0")) for key in ("endpoint", "replay_endpoint")
                if events.get(key)]
        first = [url.port for url in urls if url.port]
    except (ValueError, AttributeError):
        return frozenset()
    size = value_of("--data-parallel-size", server) or value_of("-dp", server) or ""
    count = min(ranks, int(size)) if size.isdigit() else 1
    return frozenset(port + rank for port in first for rank in range(count))


def _check_engine(member: Member, ask: Ask) -> Iterator[Finding]:
    """At which of its sockets an engine listens beyond what was promised."""
    pids, server = _processes(member)
    if not pids:  # it has ended, and the registry does not know that yet
        return
    promise, seen = promise_of(pids, _host(member.address), server), look(pids)
    promise = replace(promise, http=promise.http | _ports(member.http))
    beyond = seen.beyond(promise)
    if not PROMISED.union({Opener.STORE}).issuperset(beyond.values()):  # it may be the KV transport's
        answer = ask({member.incarnation: ()}, ANSWER_S).get(member.incarnation)
        promise = replace(promise, kv=frozenset(answer.listens if answer else ()))
        beyond = seen.beyond(promise)
    for pid, user in seen.hidden:
        yield Finding("listens", f"{introduce(member)}: process {pid} is of {user}: its sockets can't be seen",
                      hint=f"run this as {user}, or as root")
    for url, opener in beyond.items():
        if opener not in PROMISED:
            yield _describe(member, url, opener, seen.sockets[url])
    if not (seen.hidden or set(beyond.values()) - PROMISED):
        more = "".join(f"; {_where(url)}: {opener}" for url, opener in beyond.items())
        yield Finding("listens", f"{introduce(member)}: {len(seen.sockets) - len(beyond)} sockets at {promise.host} or "
                      f"the loopback{more}")


def _describe(member: Member, url: str, opener: Opener, pids: Sequence[int]) -> Finding:
    processes = f"process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"
    fact = f"{introduce(member)}: {processes} at {_where(url)}, beyond {_host(member.address)}: {opener}"
    if opener in STOCK:
        return Finding("listens", fact, hint=f"stock vLLM and torch do that: drop what comes in there; {_RULES}")
    cure = (f"set {DEVICES} to the interfaces that KV is meant for, and start the engine again" if opener is Opener.KV
            else "find out what of that process it is, such as another plugin")
    return Finding("listens", fact, f"{cure}; until then drop what comes in there: {_RULES}")


def _processes(member: Member) -> tuple[list[int], list[str]]:
    """The engine's processes and their children, and its server's command line, as far as its server can be found: it
    is the parent of the others, and listens at the port in the registry."""
    pids = [process.pid for process in member.processes if _is_there(process)]
    for pid in list(pids):
        try:
            pids += [child.pid for child in psutil.Process(pid).children(recursive=True)]
        except psutil.Error:
            continue
    for pid in dict.fromkeys(pids):
        try:
            parent = psutil.Process(pid).parent()
            for process in (psutil.Process(pid), parent):
                if process is not None and _ports(member.http) & {urlsplit(url).port for url in listening(process.pid)}:
                    return list(dict.fromkeys([*pids, process.pid])), process.cmdline()
        except psutil.Error:
            continue
    return list(dict.fromkeys(pids)), []


def _is_there(process: Process) -> bool:
    """Whether that process runs, and no other one has its number by now."""
    try:
        return start_time(process.pid) == process.start_time
    except OSError:
        return False


def _environment(process: psutil.Process) -> dict[str, str]:
    """With which it was started. One that has given itself a title, as vLLM's have, may have written over it: then that
    of the process that has started it. Raises psutil.Error."""
    found = (one.environ() for one in (process, *process.parents()))
    return next(filter(None, found), {})


def _own_addresses(environment: Mapping[str, str]) -> Iterator[str]:
    """Where gloo and vLLM listen with this environment: at the addresses of the interface that is named, or of this
    machine's name; at the one that is named, or from which this machine would connect to another network."""
    named = environment.get("GLOO_SOCKET_IFNAME")
    if named:
        yield from (one.address.partition("%")[0] for name in named.split(",")
                    for one in psutil.net_if_addrs().get(name, ()) if one.family in (socket.AF_INET, socket.AF_INET6))
    else:
        yield from _named_addresses()
    yield from filter(None, [environment.get("VLLM_HOST_IP")] if environment.get("VLLM_HOST_IP")
                      else map(address_towards, _FAR))


@functools.lru_cache(maxsize=1)
def _named_addresses() -> tuple[str, ...]:
    """Those of this machine's name."""
    try:
        return tuple({where[0] for *_, where in socket.getaddrinfo(socket.gethostname(), 0)})
    except OSError:
        return ()


def _ports(url: str) -> frozenset[int]:
    """The port of an HTTP URL of the registry."""
    try:
        parts = urlsplit(url)
        return frozenset({parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)} - {0})
    except ValueError:
        return frozenset()


def _host(url: str) -> str:
    return urlsplit(url).hostname or ""


def _where(url: str) -> str:
    return url.removeprefix("tcp://")


def _user(pid: int) -> str:
    try:
        return psutil.Process(pid).username()
    except (psutil.Error, KeyError):
        return "another user"
