# SPDX-License-Identifier: Apache-2.0
"""The files that a benchmark writes: checked before it starts, and replaced as a whole."""

import argparse
import contextlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from vllm_pd.errors import ConfigError


def require_file(key: str, path: Path | None) -> None:
    """Raises ConfigError naming `key` where `path` can't be written as a file."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(key, str(path), "that is a folder: write the name of a file")
    if not path.parent.is_dir():
        raise ConfigError(key, str(path), "there is no such folder: make it, or write another file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(key, str(path), "it may not be written: write another file")


def argument_file(text: str) -> Path:
    """The value of an argparse option that names a file to write: its `type`. Raises ArgumentTypeError."""
    try:
        require_file("file", Path(text))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text!r} can't be used: {error.cure}") from None
    return Path(text)


def require_picture(key: str, path: Path | None) -> None:
    """The same for a picture, which also needs what draws it."""
    require_file(key, path)
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(key, str(path), "matplotlib, which draws it, is not installed: `pip install matplotlib`, or "
                          "leave the option out")


def write_json(path: Path, value: Any) -> None:
    """Replaces the file as a whole, so that what was there stays where this fails. Raises OSError."""
    text = json.dumps(value) + "\n"
    if path.is_symlink() or path.exists() and not path.is_file():  # like /dev/stdout
        path.write_text(text)
        return
    unfinished = path.with_name(f"{path.name}.part")
    try:
        unfinished.write_text(text)
        os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
