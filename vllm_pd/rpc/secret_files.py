# SPDX-License-Identifier: Apache-2.0
"""Files that an operator names: a secret, or certificates. They are read with a bound, and nothing that is no regular
file is waited for: /dev/zero has no end, and a pipe no beginning.

A secret must be its owner's alone. One that root owns may also be read by a group, or by all if it has no write
permission at all, where nobody but root can change it or its folder: so Kubernetes mounts a Secret.
"""
import os
import stat
from pathlib import Path

from vllm_pd.errors import ConfigError

ROOTS_MODES = (0o440, 0o640, 0o444)


def read_file(key: str, path: str, most_bytes: int, cure: str) -> tuple[bytes, os.stat_result]:
    """The content and state of a regular file. Raises ConfigError, naming `key`, where it can't be read or is longer
    than `most_bytes`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise ConfigError(key, path, f"it is no file: {cure}")
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read(most_bytes + 1)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise ConfigError(key, path, f"{getattr(error, 'strerror', None) or error}: {cure}") from error
    if len(content) > most_bytes:
        raise ConfigError(key, path, f"it has more than {most_bytes} bytes: {cure}")
    return content, state


def read_secret(key: str, path: str, most_bytes: int, cure: str) -> str:
    """The text of a secret file. Raises ConfigError, also where others than its owner may use it; see the module."""
    content, state = read_file(key, path, most_bytes, cure)
    folder = Path(path).resolve().parent
    try:
        problem = problem_of_mode(state, folder.stat())
    except OSError as error:  # it was replaced meanwhile
        raise ConfigError(key, path, f"{folder}: {error.strerror}: {cure}") from error
    if problem:
        raise ConfigError(key, path, f"others than its owner may use it (mode {stat.S_IMODE(state.st_mode):04o}): "
                          f"{problem.format(folder=folder)}")
    return content.decode(errors="replace")


def problem_of_mode(file: os.stat_result, folder: os.stat_result) -> str:
    """What to do about a secret that not only its owner can use, with `{folder}` for its folder's name; empty where
    nothing is to be done."""
    mode = stat.S_IMODE(file.st_mode)
    if not mode & 0o077:
        return ""
    if file.st_uid != 0:
        return "run chmod 600 on it (others may read only a file of root's)"
    if mode not in ROOTS_MODES:
        return "run chmod 600 on it, or chmod 440 for a group (Kubernetes: defaultMode: 0440)"
    if folder.st_uid != 0 or folder.st_mode & 0o022 and not folder.st_mode & stat.S_ISVTX:
        return "run chmod 600 on it, as others than root can change its folder {folder}"
    return ""
