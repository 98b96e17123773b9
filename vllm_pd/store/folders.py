# SPDX-License-Identifier: Apache-2.0
"""The folders of the store must be this user's own: others could put anything into them, or take their names away."""
import os
import stat
from pathlib import Path

from vllm_pd.errors import ConfigError


def require_own(key: str, value: str, folder: Path) -> None:
    """Raises ConfigError, naming `key` and its `value`, for a folder that is a link, belongs to another user, or that
    all users may write to. Raises OSError where there is none."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(key, value, f"{folder} is a link or belongs to another user, who could put anything into it: "
                          "choose another folder")
    if status.st_mode & stat.S_IWOTH:
        raise ConfigError(key, value, f"all users may write to {folder} (mode {stat.S_IMODE(status.st_mode):04o}): "
                          "write a new folder in it, or run chmod 700 on it if nothing else uses it")
