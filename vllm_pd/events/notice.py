# SPDX-License-Identifier: Apache-2.0
"""Where an engine's events are: the answer to `GET /pd/events` on its front end.

Engine and front end may be two processes of one user on one machine. Both know the configuration. Only the engine knows
the address of its side socket, its epoch and the ports it has chosen; it writes these to a file whose name both can
derive from the configuration.
"""
from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vllm_pd.events import reach
from vllm_pd.protocol.messages import Count, Text
from vllm_pd.rpc.codec import UNREADABLE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.pd")

PATH = "/pd/events"
MAX_FILE_BYTES = 4096
MAX_NOTICE_BYTES = 65536


class SideNotice(msgspec.Struct, frozen=True):
    """The content of the engine's file."""
    side: Text
    epoch: Text
    events: Text = ""
    replay: Text | None = None


class EventsNotice(msgspec.Struct, frozen=True):
    """The answer to `GET /pd/events`. A host `*` or `0.0.0.0` in an address means the host that was asked. `events` is
    empty where the publisher connects instead of listening, or listens at an unknown port (V1 with port 0). Without
    `side` (V1) there are no snapshots, only vLLM's events and, with `replay`, their replay. Each of the `ranks`
    data-parallel ranks behind this front end has its own publisher, at the ports given here plus its rank, and reports
    its load at its own address in `loads`, which is empty where none does."""
    events: Text
    block_size: Count
    replay: Text | None = None
    topic: Text = ""
    side: Text | None = None
    epoch: Text | None = None
    ranks: Count = 1
    loads: list[Text] = []

    @classmethod
    def decode(cls, body: bytes) -> EventsNotice | None:
        """The notice in this response body; None where it is invalid."""
        try:
            return msgspec.json.decode(body, type=cls)
        except UNREADABLE:
            return None


def leave(path: Path, notice: SideNotice) -> Path | None:
    """Write the engine's file at `path`, which is returned; the caller gives it to `remove` at the end. None where it
    can't be written, which is logged: the engine works without it."""
    try:
        return _write(path, notice)
    except OSError as error:
        logger.error("%s can't report where the side socket is: %s; snapshots and load will not be found", PATH, error)
        return None


def remove(path: Path | None) -> None:
    """Remove what `leave` has left."""
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()


def _write(path: Path, notice: SideNotice) -> Path:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(msgspec.json.encode(notice))
        os.replace(name, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return path


def find(config: VllmConfig, own_ranks: bool = False) -> EventsNotice:
    """The answer for the engine with this configuration, as far as this process can know it. `own_ranks`: this front
    end has only the data-parallel ranks of its host, from the configuration's `data_parallel_rank` on; otherwise it has
    all of them."""
    events, parallel = config.kv_events_config, config.parallel_config
    side = read(path_of(config))
    own_rank = parallel.data_parallel_rank if own_ranks else 0
    ranks = 1 if side else parallel.data_parallel_size_local if own_ranks else parallel.data_parallel_size
    endpoint, replay = events.endpoint, events.replay_endpoint
    if side is not None:
        endpoint, replay = side.events or endpoint, side.replay or replay
    known = reach.listens(endpoint) and not reach.lacks_port(endpoint)
    return EventsNotice(events=reach.of_rank(endpoint, own_rank) if known else "",
                        replay=reach.of_rank(replay, own_rank) if replay and not reach.lacks_port(replay) else None,
                        topic=events.topic, block_size=config.cache_config.block_size or 0,
                        side=side.side if side else None, epoch=side.epoch if side else None, ranks=ranks)


def path_of(config: VllmConfig) -> Path:
    """The file of the V0 engine with this configuration."""
    from vllm import envs
    events = config.kv_events_config
    name = hashlib.sha256(f"{config.instance_id}|{events.endpoint}".encode()).hexdigest()[:32]
    return Path(envs.VLLM_RPC_BASE_PATH) / f"vllm-pd-events-{name}"


def read(path: Path) -> SideNotice | None:
    """The content of the file; None where there is none that belongs to this user."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            state = os.fstat(stream.fileno())
            if not stat.S_ISREG(state.st_mode) or state.st_uid != os.getuid():
                return None
            return msgspec.json.decode(stream.read(MAX_FILE_BYTES), type=SideNotice)
    except (OSError, *UNREADABLE):
        return None
