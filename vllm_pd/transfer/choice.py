# SPDX-License-Identifier: Apache-2.0
"""Which transport an engine has, by its setting `transport`."""
from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Self

import msgspec

from vllm_pd.errors import ConfigError
from vllm_pd.transfer.nixl import kept

if TYPE_CHECKING:
    import torch

    from vllm_pd.transfer.layout import CacheDescription
    from vllm_pd.transfer.transport import Transport


class TransportKind(StrEnum):
    """The values of the setting `transport`."""
    NIXL = "nixl"
    TORCH = "torch"


class TransportChoice(msgspec.Struct, frozen=True, array_like=True):
    """A transport, and the address at which its sockets listen."""
    kind: TransportKind = TransportKind.NIXL
    host: str = "127.0.0.1"

    @classmethod
    def of(cls, transport: str, host: str) -> Self:
        """From a valid value of the setting."""
        return cls(TransportKind(transport), host)

    def check_device(self, device_type: str) -> None:
        """Raises ConfigError if this transport does not carry a cache on devices of this type of torch."""
        if self.kind is TransportKind.TORCH and device_type != "cpu":
            raise ConfigError("transport", self.kind.value, f"it does not carry a cache on {device_type}, because a "
                              "peer that stops would end this engine: write nixl")

    def make(self, name: str, caches: list[torch.Tensor], description: CacheDescription, receives: bool) -> Transport:
        """The transport called `name` (`rank_name`) of a rank with these caches. `receives`: whether peers write into
        them. What peers reach without our help is `kept`. Raises TransferError."""
        if self.kind is TransportKind.TORCH:
            from vllm_pd.transfer.torch.transport import TorchTransport
            return TorchTransport(name, caches, description, self.host, receives)
        from vllm_pd.transfer.nixl.generations import NixlGenerations
        # Its thread lets a peer's write end while this engine computes; the one who writes is better off without.
        transport = NixlGenerations(name, caches, description, progress_thread=receives, host=self.host)
        kept.keep(name, caches)
        return transport


NIXL = TransportChoice()
