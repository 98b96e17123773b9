# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter's files: a look at them, which is another one after each change, and a digest of them, by which two
engines know the same adapter, whatever it is called and wherever it lies."""
from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")  # vLLM reads the first it finds
CHUNK_BYTES = 8 << 20


class FileLook(NamedTuple):
    """What is seen of a file, the folder, or a link on the way, without reading it. Whoever writes into a file moves
    its `ctime_ns`, which nobody can set back, and so does who renames it; one that is put in its place has another
    `inode`, perhaps of another `device`."""
    name: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


Look = tuple[FileLook, ...]


def look_at(folder: Path) -> Look:
    """All files that vLLM may read of the adapter in this folder, each behind the links that lead to it. Raises
    OSError where there is no configuration or no file with weights, or the file system answers with an error."""
    found = [_look_at_file(folder, CONFIG_FILE)]
    for name in WEIGHT_FILES:
        with contextlib.suppress(FileNotFoundError):
            found.append(_look_at_file(folder, name))
    if len(found) == 1:
        raise FileNotFoundError(errno.ENOENT, "no weights of an adapter", str(folder))
    whole = folder.absolute()
    links = [path for path in (*whole.parents, *(whole / one.name for one in found)) if path.is_symlink()]
    return (*found, *(_seen(str(path), path.lstat()) for path in (whole, *links)))


def digest_adapter(folder: Path, look: Look, settings: str, between: Callable[[], None] = lambda: None) -> bytes:
    """32 bytes, of each byte of the files of this look and of `settings`: what else decides how an engine applies them.
    Calls `between` after each CHUNK_BYTES. Raises OSError for a file that can't be read."""
    parts = [settings.encode()]
    for one in look:
        if one.name not in (CONFIG_FILE, *WEIGHT_FILES):
            continue
        content = hashlib.sha256()
        with open(folder / one.name, "rb") as opened:
            while chunk := opened.read(CHUNK_BYTES):
                content.update(chunk)
                between()
        parts += [one.name.encode(), content.digest()]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()


def _look_at_file(folder: Path, name: str) -> FileLook:
    status = (folder / name).stat()
    if not stat.S_ISREG(status.st_mode):  # to read from a pipe would never end
        raise OSError(errno.EINVAL, "no regular file", str(folder / name))
    return _seen(name, status)


def _seen(name: str, status: os.stat_result) -> FileLook:
    return FileLook(name, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
