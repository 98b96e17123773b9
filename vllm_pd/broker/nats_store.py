# SPDX-License-Identifier: Apache-2.0
"""What a fleet keeps on a JetStream server: a bucket with its members, and a stream of jobs.

The first engine makes both, in memory, and in a cluster on REPLICAS of its servers. An operator who wants other storage
or replicas makes them beforehand, and they are used as they are. Every method belongs to the one event loop that `open`
ran in. They raise `AWAY`: the server is gone, or refuses; the connection is then of no more use.
"""
import asyncio
import collections
import contextlib
import datetime
import functools
import hashlib
import json
import logging
import math
import re
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api

from vllm_pd.broker.nats_reach import NatsServers, insist
from vllm_pd.protocol import messages as m
from vllm_pd.protocol.fields import stable_values
from vllm_pd.rpc.nats_address import NatsAddress

logger = logging.getLogger("vllm.pd")

REQUEST_S = 2.0
RETRY_S = 0.05
PING_S = 2
WATCH_S = 60.0
PULL_HEARTBEAT_S = 0.5
MEMBER_KEPT_S = 3600.0  # longer than any engine may be silent; who is silent for how long, each engine sees by itself
MEMBER_BYTES = 1 << 20
JOBS_KEPT_S = 86400.0
MAX_JOBS = 4096
MAX_JOBS_BYTES = 64 << 20
ACK_WAIT_S = 5.0
MAX_DELIVER = 32
CONSUMER_KEPT_S = 3600.0
REPLICAS = 3  # two would be lost with either: more than half must be there
NAME_TAKEN = 10058  # the server's code for a stream that somebody else has just made
NO_PEERS = 10005  # and where not so many servers of a cluster can hold it
PEERS_TRIES, PEERS_WAIT_S = 10, 0.5
STORE_FAILED = 10077  # the server's code for a message that a stream has no room for
AWAY = (nats.errors.Error, OSError, asyncio.TimeoutError, ssl.SSLError, EOFError)

T = TypeVar("T")

_SAFE = re.compile(r"[A-Za-z0-9-]{1,64}")
_STATUS = "Status"
TIMED_OUT, HEARTBEAT = "408", "100"


class Unsuitable(nats.errors.Error):
    """What is on the server is not what it has to be."""


@dataclass(frozen=True)
class BucketEntry:
    """A change in the bucket. `frame` is None where the entry was taken away."""
    key: str
    frame: bytes | None
    stamp_s: float


@dataclass(frozen=True)
class KeptStream:
    """How a server keeps a stream: on how many servers, and how many of these have all of it now. `in_cluster`: it is
    one of a cluster."""
    name: str
    replicas: int
    current: int
    in_cluster: bool

    @classmethod
    def of(cls, info: dict[str, Any]) -> "KeptStream":
        """Of what the server says of it (the library's older releases leave the names of the cluster out)."""
        cluster = info.get("cluster") or {}
        others = [one for one in cluster.get("replicas") or () if one.get("current") and not one.get("offline")]
        has_leader = bool(cluster.get("leader")) or not cluster.get("name")
        replicas = info["config"].get("num_replicas", 1)  # others may be there still where somebody has just taken some
        return cls(info["config"]["name"], replicas, min(replicas, has_leader + len(others)), bool(cluster.get("name")))


@dataclass(frozen=True)
class Kept:
    """What a fleet has on a NATS server, and how many servers of its cluster clients know; at least 1."""
    streams: tuple[KeptStream, ...]
    servers: int


def token(name: str) -> str:
    """A name as a part of a subject: as it is, or its digest."""
    return name if _SAFE.fullmatch(name) else "_" + hashlib.sha256(name.encode(errors="replace")).hexdigest()[:40]


@functools.lru_cache(maxsize=256)
def group(fingerprint: m.Fingerprint) -> str:
    """Engines of one group can send KV to each other: those whose fingerprints are equal, but for numbers of ranks and
    stages all of which fit each other."""
    tp, pp = fingerprint.tp, fingerprint.pp
    same = msgspec.structs.replace(
        fingerprint, tp=1 if fingerprint.layout in m.SPLIT_LAYOUTS and tp.bit_count() == 1 and not fingerprint.states
        else tp,
        pp=1 if 0 < pp <= fingerprint.layers else pp)
    return hashlib.sha256(msgspec.msgpack.encode(stable_values(same))).hexdigest()[:24]


def is_status(delivered: Msg) -> bool:
    """Whether this is what the server says of a pull, instead of a job."""
    return bool(delivered.headers) and _STATUS in delivered.headers


def status(said: Msg) -> str:
    """The status of a pull, as a number."""
    return said.headers[_STATUS]


def origin(delivered: Msg) -> tuple[float, int] | None:
    """(the server's stamp in seconds, how often it has been delivered) of a job; None where it is from no queue."""
    try:
        return delivered.metadata.timestamp.timestamp(), delivered.metadata.num_delivered
    except (nats.errors.Error, ValueError, IndexError, OverflowError):
        return None


class Store:
    """One connection. `generation` names what is stored: another one means that everything from before is lost."""

    def __init__(self, client: Client, prefix: str, servers: NatsServers):
        self._client = client
        self._servers, self._server = servers, client.connected_url.netloc if client.connected_url else ""
        self._puts = 0
        self._js = client.jetstream(timeout=REQUEST_S)
        self._bucket_name, self._stream = f"{prefix}_members", f"{prefix}_jobs"
        self._subjects = f"{prefix}.jobs"
        self._ttl_allowed = False
        self._name = secrets.token_hex(8)
        self.generation = ""

    @classmethod
    async def open(cls, address: NatsAddress, on_close: Callable[[], None], on_error: Callable[[Exception], None], *,
                   make: bool = True, servers: NatsServers | None = None) -> "Store":
        """Connect, and make what is missing (or raise for it). `servers`: those of the address, as earlier connections
        found them. Raises AWAY."""
        async def closed() -> None:
            on_close()

        faults: collections.deque[Exception] = collections.deque(maxlen=1)

        async def error(fault: Exception) -> None:
            faults.append(fault)
            on_error(fault)

        servers = servers or NatsServers(address.urls, REQUEST_S)
        try:
            client = await nats.connect(
                list(servers.urls), name="vllm-pd", dont_randomize=True, allow_reconnect=False,
                connect_timeout=servers.connect_s, max_reconnect_attempts=1, reconnect_time_wait=RETRY_S,
                ping_interval=PING_S, error_cb=error, closed_cb=closed, disconnected_cb=closed, **address.options())
        except nats.errors.NoServersError as none:
            servers.connect_failed()
            raise ConnectionError(str(faults[-1]) if faults else str(none)) from none
        except AWAY:
            servers.connect_failed()
            raise
        store = cls(client, address.prefix, servers)
        try:
            await store._prepare(make)
        except BaseException:
            await store.close()
            raise
        return store

    @property
    def max_bytes(self) -> int:
        """The largest message that the server takes."""
        return self._client.max_payload - 1024

    async def close(self) -> None:
        """Close the connection. The library first sends what waits to be sent, and a server that can't be reached takes
        nothing, so this ends after `REQUEST_S` in any case."""
        self._servers.connection_ended(self._server)
        if not self._client.is_closed:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._client.close(), REQUEST_S)

    async def now_s(self) -> float:
        """What the server's clock shows."""
        return datetime.datetime.fromisoformat((await self._info(self._stream))["ts"]).timestamp()

    async def kept(self) -> Kept:
        """Where bucket and stream are kept."""
        streams = tuple(map(KeptStream.of, await self._infos()))
        known = {await _first_address(uri.hostname, uri.port) for uri in self._client.servers}
        in_cluster = any(stream.in_cluster for stream in streams)
        return Kept(streams, max(len(known), *(stream.current for stream in streams)) if in_cluster else 1)

    async def _infos(self) -> list[dict[str, Any]]:
        """What the server says of the bucket and of the stream."""
        return [await self._info(stream) for stream in ("KV_" + self._bucket_name, self._stream)]

    async def _info(self, stream: str) -> dict[str, Any]:
        """What the server says of a stream; the library's older releases leave some of it out."""
        reply = await self._insist(lambda: self._client.request(f"$JS.API.STREAM.INFO.{stream}", timeout=REQUEST_S))
        return json.loads(reply.data)

    async def _insist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """See `insist`."""
        return await insist(ask, REQUEST_S)

    async def _prepare(self, make: bool) -> None:
        """Open bucket and stream, and make what is missing; without `make`, raise Unsuitable for it, as for a stream
        that is no work queue. `generation` is made of the times at which both were created, so it changes when one was
        lost."""
        try:
            self._bucket = await self._insist(lambda: self._js.key_value(self._bucket_name))
        except nats.js.errors.NotFoundError as error:
            if not make:
                raise Unsuitable(f"there is no bucket {self._bucket_name}: no engine has ever been here") from error
            self._bucket = await self._replicated(lambda replicas: self._js.create_key_value(config=api.KeyValueConfig(
                bucket=self._bucket_name, ttl=MEMBER_KEPT_S, storage=api.StorageType.MEMORY,
                max_value_size=MEMBER_BYTES, replicas=replicas)))
        try:
            jobs = await self._insist(lambda: self._js.stream_info(self._stream))
        except nats.js.errors.NotFoundError as error:
            if not make:
                raise Unsuitable(f"there is no stream {self._stream}: no engine has ever been here") from error
            jobs = await self._replicated(lambda replicas: self._js.add_stream(api.StreamConfig(
                name=self._stream, subjects=[self._subjects + ".>"], retention=api.RetentionPolicy.WORK_QUEUE,
                storage=api.StorageType.MEMORY, discard=api.DiscardPolicy.NEW, discard_new_per_subject=True,
                max_msgs_per_subject=1, max_msgs=MAX_JOBS, max_bytes=MAX_JOBS_BYTES, max_age=JOBS_KEPT_S,
                allow_msg_ttl=True, num_replicas=replicas)))
        if jobs.config.retention != api.RetentionPolicy.WORK_QUEUE or jobs.config.max_msgs_per_subject != 1:
            raise Unsuitable(f"the stream {self._stream} is there, but it is no work queue with one message a subject: "
                             "delete it, or name another nats_prefix")
        self._ttl_allowed = bool(jobs.config.allow_msg_ttl)
        infos = await self._infos()
        if make:  # a reader, such as a router, connects every second
            _warn_of_one_server(map(KeptStream.of, infos))
        births = [info["created"] for info in infos]
        self.generation = hashlib.sha256(" ".join(births).encode()).hexdigest()[:32]

    async def _replicated(self, make: Callable[[int], Awaitable[T]]) -> T:
        """Make it on as many servers as can lose one; on one where there are not so many, or the account may not. A
        cluster that has just started finds its servers one by one."""
        for _ in range(PEERS_TRIES):
            try:
                return await make(REPLICAS)
            except nats.js.errors.APIError as error:
                if error.err_code == NAME_TAKEN:
                    raise
                if error.err_code != NO_PEERS:
                    break
            await asyncio.sleep(PEERS_WAIT_S)
        return await make(1)

    # Members.

    async def put_member(self, incarnation: str, frame: bytes) -> None:
        """Say that it is there. A repeated request is stored, and sent to all that watch, once."""
        self._puts += 1
        subject, once = f"$KV.{self._bucket_name}.{token(incarnation)}", {"Nats-Msg-Id": f"{self._name}.{self._puts}"}
        await self._insist(lambda: self._js.publish(subject, frame, headers=once))

    async def remove_member(self, incarnation: str) -> None:
        """Say that it is not."""
        await self._bucket.delete(token(incarnation))

    async def watch_members(self) -> AsyncIterator[BucketEntry | None]:
        """All entries, then None, then every change, for as long as the connection lasts."""
        watcher = await self._bucket.watchall()
        while True:
            try:
                entry = await watcher.updates(WATCH_S)
            except nats.errors.TimeoutError:  # nothing new; whether it still works, the echo of our own entry shows
                continue
            if entry is None:
                yield None
            else:
                yield BucketEntry(entry.key, None if entry.operation else entry.value, entry.created.timestamp())

    # Jobs.

    async def prepare_group(self, name: str) -> None:
        """Make the queue of a group."""
        config = api.ConsumerConfig(
            durable_name=name, filter_subject=f"{self._subjects}.{name}.>", ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_S, max_deliver=MAX_DELIVER, max_ack_pending=-1, inactive_threshold=CONSUMER_KEPT_S)
        await self._insist(lambda: self._js.add_consumer(self._stream, config))

    def _subject(self, name: str, attempt: m.Attempt) -> str:
        return f"{self._subjects}.{name}.{token(attempt.incarnation)}.{attempt.number}"

    async def put_job(self, name: str, job: m.Job, frame: bytes) -> int | None:
        """Queue it; its number in the stream, None where it is there already. Raises Full."""
        ttl_s = max(1, math.ceil(job.deadline_s)) if self._ttl_allowed else None
        try:
            ack = await self._js.publish(self._subject(name, job.attempt), frame, stream=self._stream, msg_ttl=ttl_s)
        except nats.js.errors.APIError as error:
            if error.err_code != STORE_FAILED:
                raise
            if "per subject" in (error.description or ""):
                return None
            raise Full(error.description) from error
        return ack.seq

    async def remove_job(self, number: int) -> None:
        """Take it out, if it is still there."""
        try:
            await self._js.delete_msg(self._stream, number)
        except nats.js.errors.BadRequestError:
            return  # it was done, or its time was over

    async def remove_jobs_of(self, name: str, attempt: m.Attempt) -> None:
        """The same, where the number is not known."""
        await self._js.purge_stream(self._stream, subject=self._subject(name, attempt))

    async def waiting(self, name: str) -> tuple[int, int]:
        """(jobs that no engine has got yet, the largest number that one has)."""
        info = await self._insist(lambda: self._js.consumer_info(self._stream, name))
        return info.num_pending or 0, info.delivered.stream_seq if info.delivered else 0

    async def all_waiting(self) -> int:
        """Jobs that no engine has got yet, of all groups."""
        info = await self._js.stream_info(self._stream)
        given = [one.num_ack_pending or 0 for one in await self._js.consumers_info(self._stream)]
        return max(0, info.state.messages - sum(given))

    async def listen(self, callback: Callable[[Msg], Awaitable[None]]) -> str:
        """Have jobs, and words about pulls, brought to `callback`. Returns where to."""
        inbox = self._client.new_inbox()
        await self._client.subscribe(inbox + ".*", cb=callback)
        return inbox

    async def pull(self, name: str, inbox: str, number: int, expires_s: float) -> None:
        """Ask for a job, to come within that time. Meanwhile a status HEARTBEAT comes each `PULL_HEARTBEAT_S`; where it
        does not, the server that knew of the request leads the queue no longer."""
        request = json.dumps({"batch": 1, "expires": int(expires_s * 1e9),
                              "idle_heartbeat": int(PULL_HEARTBEAT_S * 1e9)}).encode()
        await self._client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{name}", request,
                                   reply=f"{inbox}.{number}")


def _warn_of_one_server(streams: Iterable[KeptStream]) -> None:
    """Log which of these streams end with one server, although it is one of a cluster."""
    alone = [stream.name for stream in streams if stream.in_cluster and stream.replicas < REPLICAS]
    if alone:
        logger.warning("NATS is a cluster, but %s has fewer than %d replicas, and is gone while its server is: nats "
                       "stream update --replicas=%d", ", ".join(alone), REPLICAS, REPLICAS)


async def _first_address(host: str, port: int) -> tuple[str, int]:
    """Where that is, so that a server which is known by a name and by an address counts once. A name that can't be
    looked up is what it is."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return host, port
    return found[0][4][:2]


class Full(Exception):
    """The stream takes no more."""
