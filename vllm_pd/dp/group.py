# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group meet: two all-gathers, after which all of them use the same backend. They use shared memory
if every rank can open rank 0's files and watch the processes of all others, otherwise the network. A CPU that may
change the order of loads and stores, like ARM, always gets the network: the shared page relies on that order. What the
user has set must be equal on all ranks, `shared_memory` too; what a host can do may differ.
"""
import os
import shutil
from typing import TYPE_CHECKING, TypeVar

import msgspec
import zmq

from vllm_pd.dp.coordinator import CoordinatorServer
from vllm_pd.dp.interface import EXCHANGE_BYTES, Abort, Exchange, GroupFailed, GroupMember, SyncSettings, Wake
from vllm_pd.dp.member import end_process, log
from vllm_pd.dp.rpc import RpcMember
from vllm_pd.dp.shm import SharedPage, ShmMember, open_pidfds
from vllm_pd.errors import ConfigError
from vllm_pd.peer.liveness.process import host_id

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_Message = TypeVar("_Message", bound=msgspec.Struct)

DP_SYNC = "additional_config.dp_sync"
_ORDERED_CPU = "x86_64"  # every process sees another's stores, and does its own loads, in the order of the program


class _RankOffer(msgspec.Struct, frozen=True, array_like=True):
    """The first message of a rank to the others. `machine` is equal for processes that can watch each other. `folder`
    holds rank 0's shared files; "" on other ranks, or if there are none."""
    settings: SyncSettings
    machine: str
    pid: int
    folder: str
    release: str  # of this package
    shared_memory: bool = True  # as the user has set it, whatever this host can do


class _SharingVote(msgspec.Struct, frozen=True, array_like=True):
    """Whether a rank has opened the shared files and can watch all other ranks."""
    shared: bool


class _CoordinatorAddress(msgspec.Struct, frozen=True, array_like=True):
    """The coordinator's address and public key. Empty on all ranks but rank 0."""
    address: str = ""
    server_key: bytes = b""


def join(rank: int, size: int, host: str, *, wake: Wake, exchange: Exchange, abort: Abort = end_process,
         settings: SyncSettings | None = None, shared_memory: bool = True, named: str = DP_SYNC,
         release: str = "") -> GroupMember:
    """Join the group of `size` ranks as `rank`. Blocks until all ranks are there. Raises GroupFailed, ConfigError.

    For the other parameters see vllm_pd.dp. `shared_memory`: false has the ranks use the network, also where they need
    not; it must be the same on all ranks. `named`: where the user has written the settings. `release`: of this package,
    which must be the same on all ranks.
    """
    settings = check(settings or SyncSettings(), named)
    if not 0 <= rank < size:
        raise ConfigError("data_parallel_rank", rank, f"it must be at least 0 and less than data_parallel_size={size}")
    member = _share(rank, size, exchange, settings, wake, abort, shared_memory, named, release)
    return member or _connect(rank, size, host, exchange, settings, wake, abort)


def check(settings: SyncSettings, named: str = DP_SYNC) -> SyncSettings:
    """Return the settings if their values are usable. Raises ConfigError."""
    if settings.horizon < 1:
        raise ConfigError(f"{named}.horizon", settings.horizon, "use 1 or more: ranks agree on the next step at least")
    for key in ("timeout_s", "stall_s", "join_s", "grace_s"):
        if not 0 < getattr(settings, key) <= 86400:
            raise ConfigError(f"{named}.{key}", getattr(settings, key), "use more than 0 and at most 86400 seconds")
    return settings


def check_call_wait(settings: SyncSettings, named: str = DP_SYNC) -> None:
    """Raises ConfigError for a `call_wait_s` that can't be."""
    if settings.call_wait_s is not None and not 0 <= settings.call_wait_s <= 86400:
        raise ConfigError(f"{named}.call_wait_s", settings.call_wait_s,
                          "use 0 (each rank makes its calls at once, alone) to 86400 seconds")


def over(group: "ProcessGroup") -> Exchange:
    """An all-gather of byte strings over the ranks' process group, on the CPU."""
    import torch
    from torch.distributed import ReduceOp, all_reduce

    def exchange(mine: bytes) -> list[bytes]:
        table = torch.zeros(group.size(), 2 + EXCHANGE_BYTES, dtype=torch.int32)  # per rank: length, bytes, padding
        row = len(mine).to_bytes(2, "little") + mine.ljust(EXCHANGE_BYTES, b"\0")
        table[group.rank()] = torch.tensor(list(row), dtype=torch.int32)
        all_reduce(table, op=ReduceOp.MAX, group=group)
        rows = [bytes(row) for row in table.tolist()]
        return [row[2:2 + int.from_bytes(row[:2], "little")] for row in rows]

    return exchange


def _require_equal(ours: _RankOffer, theirs: _RankOffer, peer: int, named: str) -> None:
    """Raises ConfigError if rank `peer` has other settings, or another release."""
    if ours.release != theirs.release:
        raise ConfigError("vllm-pd", ours.release, f"rank {peer} has {theirs.release}: install one release everywhere")
    pairs = [(key, getattr(ours.settings, key), getattr(theirs.settings, key))
             for key in SyncSettings.__struct_fields__]  # fmt: skip
    for key, mine, other in [*pairs, ("shared_memory", ours.shared_memory, theirs.shared_memory)]:
        if mine != other:
            raise ConfigError(f"{named}.{key}", mine,
                              f"rank {peer} has {key}={other!r}; start all ranks with the same")


def _share(rank: int, size: int, exchange: Exchange, settings: SyncSettings, wake: Wake, abort: Abort,
           shared_memory: bool, named: str, release: str) -> ShmMember | None:
    """A member over shared memory. None if not all ranks can use it, or if the user wants none. For the parameters see
    `join`."""
    wanted = shared_memory and os.uname().machine == _ORDERED_CPU
    folder = _folder(size) if rank == 0 and wanted else ""
    page, pidfds = None, {}
    try:
        machine = (host_id() if wanted else "") or f"network only {rank}"
        mine = _RankOffer(settings, machine, os.getpid(), folder, release, shared_memory)
        offers = _gather(exchange, mine)
        for peer, offer in enumerate(offers):
            _require_equal(mine, offer, peer, named)
        if offers[0].folder and len({offer.machine for offer in offers}) == 1:
            page, pidfds = _open(offers, rank)
        unanimous = all(vote.shared for vote in _gather(exchange, _SharingVote(page is not None)))
        if page is None or not unanimous:
            return None
        member = ShmMember(page, pidfds, settings, wake, abort)
        page, pidfds = None, {}
        return member
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)  # all ranks have opened it, or will use the network
        if page is not None:
            page.close()
        for pidfd in pidfds.values():
            os.close(pidfd)


def _connect(rank: int, size: int, host: str, exchange: Exchange, settings: SyncSettings, wake: Wake,
             abort: Abort) -> RpcMember:
    """A member over the network. Rank 0 also starts the coordinator."""
    coordinator, mine = None, _CoordinatorAddress()
    if rank == 0:
        public, secret = zmq.curve_keypair()
        coordinator = CoordinatorServer(size, host, settings, (public, secret))
        mine = _CoordinatorAddress(coordinator.address, public)
    member = None
    try:
        server = _gather(exchange, mine)[0]
        member = RpcMember(rank, size, server.address, server.server_key, settings, wake, abort, coordinator)
        member.wait_joined()
    except BaseException:
        if member is not None:
            member.close()
        elif coordinator is not None:
            coordinator.close()
        raise
    return member


def _gather(exchange: Exchange, mine: _Message) -> list[_Message]:
    """The messages of all ranks, in order of rank. Raises GroupFailed."""
    packed = msgspec.msgpack.encode(mine)
    if len(packed) > EXCHANGE_BYTES:
        raise GroupFailed(f"{mine} takes {len(packed)} bytes, more than {EXCHANGE_BYTES}")
    try:
        return [msgspec.msgpack.decode(theirs, type=type(mine)) for theirs in exchange(packed)]
    except msgspec.MsgspecError as error:
        raise GroupFailed(f"can't read a rank's message: {error}; run the same version on all ranks") from error


def _folder(size: int) -> str:
    """A folder with the shared files of a new group, "" if they can't be created."""
    try:
        return SharedPage.create(size)
    except OSError as error:
        log.warning("no shared memory for the data-parallel group (%s): it uses the network", error)
        return ""


def _open(offers: list[_RankOffer], rank: int) -> tuple[SharedPage | None, dict[int, int]]:
    """The shared page and the pidfds of the other ranks. (None, {}) if either can't be had."""
    try:
        page = SharedPage(offers[0].folder, rank, len(offers))
    except OSError:
        return None, {}
    try:
        return page, open_pidfds([offer.pid for offer in offers], rank)
    except OSError:
        page.close()
        return None, {}
