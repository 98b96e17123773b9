# SPDX-License-Identifier: Apache-2.0
"""How ranks meet: two all-gathers, by which all choose the same rim. Shared memory where every rank finds rank 0's
files and can watch every other's process, the network otherwise.
"""
import os
import shutil
from typing import TYPE_CHECKING, TypeVar

import msgspec
import zmq

from vllm_pd.dp.coordinator import CoordinatorServer
from vllm_pd.dp.interface import EXCHANGE_BYTES, Abort, Exchange, GroupFailed, Member, Settings, Wake
from vllm_pd.dp.member import end_process, log
from vllm_pd.dp.rpc import RpcMember
from vllm_pd.dp.shm import Board, ShmMember, open_pidfds
from vllm_pd.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_Told = TypeVar("_Told", bound=msgspec.Struct)


class _Offer(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others first. `machine` differs wherever processes can't watch each other. Only rank 0
    names a folder, "" where there is none."""
    settings: Settings
    machine: str
    pid: int
    folder: str


class _Shared(msgspec.Struct, frozen=True, array_like=True):
    """Whether a rank has found and can watch all others."""
    shared: bool


class _Coordinator(msgspec.Struct, frozen=True, array_like=True):
    """Where the coordinator is and the key of its door; said by rank 0."""
    address: str = ""
    server_key: bytes = b""


def join(rank: int, size: int, host: str, *, wake: Wake, exchange: Exchange, abort: Abort = end_process,
         settings: Settings | None = None, shared_memory: bool = True) -> Member:
    """This process's member of the group. Blocks until all ranks are there. Raises GroupFailed, ConfigError.

    `host`: see vllm_pd.dp. `shared_memory` false on any rank has all of them use the network.
    """
    settings = check(settings or Settings())
    if not 0 <= rank < size:
        raise ConfigError("data_parallel_rank", rank, f"it must be at least 0 and less than data_parallel_size={size}")
    member = _share(rank, size, exchange, settings, wake, abort, shared_memory)
    return member or _connect(rank, size, host, exchange, settings, wake, abort)


def check(settings: Settings) -> Settings:
    """The settings. Raises ConfigError."""
    if settings.horizon < 1:
        raise ConfigError("horizon", settings.horizon, "at least the next step must be agreed on, so take 1 or more")
    for key in ("timeout_s", "stall_s", "join_s", "grace_s"):
        if not 0 < getattr(settings, key) <= 86400:
            raise ConfigError(key, getattr(settings, key), "take more than 0 and at most 86400 seconds")
    return settings


def _compare(ours: Settings, theirs: Settings, peer: int) -> None:
    """Raises ConfigError unless they are the same."""
    for key in Settings.__struct_fields__:
        mine, other = getattr(ours, key), getattr(theirs, key)
        if mine != other:
            raise ConfigError(f"additional_config.dp_sync.{key}", mine,
                              f"rank {peer} has {key}={other!r}; start all ranks with the same")


def over(group: "ProcessGroup") -> Exchange:
    """An all-gather of byte strings over the ranks' process group on the CPU."""
    import torch
    from torch.distributed import ReduceOp, all_reduce

    def exchange(mine: bytes) -> list[bytes]:
        board = torch.zeros(group.size(), 2 + EXCHANGE_BYTES, dtype=torch.int32)
        row = len(mine).to_bytes(2, "little") + mine.ljust(EXCHANGE_BYTES, b"\0")
        board[group.rank()] = torch.tensor(list(row), dtype=torch.int32)
        all_reduce(board, op=ReduceOp.MAX, group=group)
        rows = [bytes(row) for row in board.tolist()]
        return [row[2:2 + int.from_bytes(row[:2], "little")] for row in rows]

    return exchange


def _share(rank: int, size: int, exchange: Exchange, settings: Settings, wake: Wake, abort: Abort,
           wanted: bool) -> ShmMember | None:
    """A member by shared memory, if all ranks can be."""
    folder = _folder(size) if rank == 0 and wanted else ""
    board, pidfds = None, {}
    try:
        offers = _all(exchange, _Offer(settings, _machine() if wanted else f"network only {rank}", os.getpid(), folder))
        for peer, offer in enumerate(offers):
            _compare(settings, offer.settings, peer)
        if offers[0].folder and len({offer.machine for offer in offers}) == 1:
            board, pidfds = _open(offers, rank)
        everyone = all(one.shared for one in _all(exchange, _Shared(board is not None)))
        if board is None or not everyone:
            return None
        member = ShmMember(board, pidfds, settings, wake, abort)
        board, pidfds = None, {}
        return member
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)  # all have it open, or will do without
        if board is not None:
            board.close()
        for pidfd in pidfds.values():
            os.close(pidfd)


def _connect(rank: int, size: int, host: str, exchange: Exchange, settings: Settings, wake: Wake,
             abort: Abort) -> RpcMember:
    """A member by the network."""
    coordinator, mine = None, _Coordinator()
    if rank == 0:
        public, secret = zmq.curve_keypair()
        coordinator = CoordinatorServer(size, host, settings, (public, secret))
        mine = _Coordinator(coordinator.address, public)
    member = None
    try:
        door = _all(exchange, mine)[0]
        member = RpcMember(rank, size, door.address, door.server_key, settings, wake, abort, coordinator)
        member.wait_joined()
    except BaseException:
        if member is not None:
            member.close()
        elif coordinator is not None:
            coordinator.close()
        raise
    return member


def _all(exchange: Exchange, mine: _Told) -> list[_Told]:
    """The same kind of word from every rank, in order."""
    packed = msgspec.msgpack.encode(mine)
    if len(packed) > EXCHANGE_BYTES:
        raise GroupFailed(f"{mine} takes {len(packed)} bytes, more than {EXCHANGE_BYTES}")
    try:
        return [msgspec.msgpack.decode(theirs, type=type(mine)) for theirs in exchange(packed)]
    except msgspec.MsgspecError as error:
        raise GroupFailed(f"a rank speaks another language: {error}; run the same version on all") from error


def _machine() -> str:
    """Equal for processes that can watch each other: the same boot of the same kernel, the same process ids."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def _folder(size: int) -> str:
    """A new group's files, "" where they can't be had."""
    try:
        return Board.create(size)
    except OSError as error:
        log.warning("no shared memory for the data-parallel group (%s); it uses the network", error)
        return ""


def _open(offers: list[_Offer], rank: int) -> tuple[Board | None, dict[int, int]]:
    """The board and the other processes, or nothing: then the network has to do."""
    try:
        board = Board(offers[0].folder, rank, len(offers))
    except OSError:
        return None, {}
    try:
        return board, open_pidfds([offer.pid for offer in offers], rank)
    except OSError:
        board.close()
        return None, {}
