# SPDX-License-Identifier: Apache-2.0
"""A digest of a LoRA adapter's files, by which two engines know the same adapter, whatever it is called and wherever it
lies: its configuration whole, and its weights as `vllm_pd.model.weights` reads those of a model."""
from __future__ import annotations

import hashlib
from pathlib import Path

from vllm_pd.model.weights import digest_weights, state_of_weights

CONFIG_FILE = "adapter_config.json"

FilesState = tuple[tuple[str, int, int], ...]


def state_of_adapter(folder: Path) -> FilesState:
    """(name, size in bytes, time of the last change in ns) of each file that the adapter is read from. Raises OSError
    where there is none."""
    status = (folder / CONFIG_FILE).stat()
    return ((CONFIG_FILE, status.st_size, status.st_mtime_ns), *state_of_weights(folder))


def digest_adapter(folder: Path, settings: str) -> bytes:
    """32 bytes. `settings`: what else decides how an engine applies the adapter. Raises OSError for a file that can't
    be read."""
    config = (folder / CONFIG_FILE).read_bytes()
    parts = settings.encode(), hashlib.sha256(config).digest(), digest_weights(folder)
    return hashlib.sha256(b"\0".join(parts)).digest()
