# SPDX-License-Identifier: Apache-2.0
"""The settings of the KV store: `store` in those of PDConnector, or all of `kv_connector_extra_config` with
PDStoreConnector.
"""
from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_pd.errors import ConfigError

DEFAULT_FOLDER = f"/dev/shm/vllm-pd-store-{os.geteuid()}"  # /dev/shm is all users'
DEFAULT_MEMORY_GIB = 4.0
DEFAULT_FILE_GIB = 32.0
DEFAULT_PINNED_GIB = 0.25
DIGEST_KEY = "weights_digest"  # of both connectors' settings
EXAMPLE_DIGEST = "write the 64 digits, 0 to 9 and a to f, that vllm-pd digest FOLDER prints of the same weights"
_DIGEST = re.compile("[0-9a-f]{64}")
KEYS = ("folder", "memory_gib", "file_folder", "file_gib", "pinned_gib")


@dataclass(frozen=True)
class StoreSettings:
    """Where the store is and how large. `file_folder` None: there is no file tier. `pinned_gib`: of host memory that a
    rank with its cache on a GPU pins, and of that GPU's, for blocks on their way. Made by `parse`."""
    folder: str = DEFAULT_FOLDER
    memory_gib: float = DEFAULT_MEMORY_GIB
    file_folder: str | None = None
    file_gib: float = DEFAULT_FILE_GIB
    pinned_gib: float = DEFAULT_PINNED_GIB

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> StoreSettings:
        """Raises ConfigError for a key that is unknown, of a wrong type or out of bounds. Opens no file."""
        for key, value in values.items():
            if key not in KEYS:
                raise ConfigError(key, value, f"there is no such key: write one of {', '.join(KEYS)}")
            if key.endswith("_gib"):
                _check_size(key, value)
            elif not isinstance(value, str) or not value.startswith("/"):
                raise ConfigError(key, value, f"it must be a folder with its whole path, like {DEFAULT_FOLDER}")
        if "file_gib" in values and "file_folder" not in values:
            raise ConfigError("file_gib", values["file_gib"], "there is no file tier: write file_folder, too")
        return cls(**values)

    @classmethod
    def parse_connector(cls, values: Mapping[str, Any]) -> tuple[StoreSettings, str | None]:
        """The settings of a PDStoreConnector, and its `weights_digest`, None without one. Raises as `parse`."""
        rest = {key: value for key, value in values.items() if key != DIGEST_KEY}
        return cls.parse(rest), check_digest(values[DIGEST_KEY]) if DIGEST_KEY in values else None

    @property
    def memory_bytes(self) -> int:
        """The size of the arena."""
        return int(self.memory_gib * 2**30)

    @property
    def pinned_bytes(self) -> int:
        """The size of each of the two buffers of a rank whose cache is on a GPU."""
        return int(self.pinned_gib * 2**30)

    @property
    def file_bytes(self) -> int:
        """The bound of the file tier."""
        return int(self.file_gib * 2**30)


def check_digest(value: Any) -> str:
    """This value of `weights_digest`. Raises ConfigError."""
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ConfigError(DIGEST_KEY, value, f"it must be a SHA-256 digest: {EXAMPLE_DIGEST}")
    return value


def _check_size(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ConfigError(key, value, "it must be a number, without quotes, like 4")
    if not 0 < value <= 2**20:
        raise ConfigError(key, value, "it must be above 0 and at most 1048576, like 4")
