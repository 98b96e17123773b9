# SPDX-License-Identifier: Apache-2.0
"""The errors that a user or an operator may see. Each message names the key, the value and what to do."""
from collections.abc import Sequence


class PDError(Exception):
    """Root of every error that this package raises on purpose."""


class ConfigError(PDError):
    """A setting that can't be used. Raised before anything starts."""

    def __init__(self, key: str, value: object, cure: str):
        super().__init__(f"{key}={value!r} can't be used: {cure}")
        self.key = key
        self.value = value
        self.cure = cure

    def __reduce__(self) -> tuple:
        """Upstream pickles a worker's error on its way to the engine."""
        return type(self), (self.key, self.value, self.cure)


class MissingPackage(PDError):
    """A package that only some hosts need is not installed on this one."""

    def __init__(self, modules: Sequence[str], cure: str):
        super().__init__(f"{', '.join(modules)} {'is' if len(modules) == 1 else 'are'} not installed: {cure}")
        self.modules = modules
        self.cure = cure

    def __reduce__(self) -> tuple:
        return type(self), (self.modules, self.cure)


class PeerMismatch(PDError):
    """Two engines whose KV caches, or two programs whose protocols, don't fit each other."""

    def __init__(self, key: str, ours: object, theirs: object):
        super().__init__(
            f"{key} differs: ours is {ours!r}, theirs is {theirs!r}; start both engines with the same {key}")
        self.key = key
        self.ours = ours
        self.theirs = theirs

    def __reduce__(self) -> tuple:
        return type(self), (self.key, self.ours, self.theirs)


class UnmappableSplit(PDError):
    """A pair of parallel layouts between which no KV block can be mapped."""


class TransferError(PDError):
    """A transfer, or the peer it went to, failed. Ends one attempt or one peer, never an engine."""


class PeerNotAdded(TransferError):
    """The transport can't connect to a peer that it was to move blocks from or to. None has moved."""


class ControlError(PDError):
    """The control thread can't start or has ended."""


class OtherProtocol(ControlError):
    """What listens at an address has another protocol version than this program."""

    def __init__(self, kind: str, address: str, ours: int, theirs: int):
        super().__init__(f"protocol differs: this program has {ours}, the {kind} at {address} has {theirs}: install "
                         "one release of vllm-pd at both")
