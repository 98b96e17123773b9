# SPDX-License-Identifier: Apache-2.0
"""The key of a cluster: one CURVE pair that all its processes share.

Every process with the file is a member: a socket with a key encrypts, and connects to those with the same key only.
"""
import os
import re
from dataclasses import dataclass
from pathlib import Path

import zmq

from vllm_pd.errors import ConfigError
from vllm_pd.rpc.secret_files import read_secret

FILE_NAME = "vllm-pd.keys"
MAKE = "make one with vllm-pd keys FILE, and copy it to every machine of the cluster"
_MAX_BYTES = 4096
_Z85 = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_TEXT = """\
# The key of a vllm-pd cluster. Whoever can read this file can use, and overwrite, the KV cache of its engines.
public: {public}
secret: {secret}
"""


@dataclass(frozen=True)
class Keys:
    """Both halves, in Z85."""
    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"Keys(public={self.public!r})"

    @classmethod
    def load(cls, path: str, key: str = "keys") -> "Keys":
        """Raises ConfigError, naming `key`, where the file can't be read, can be read by others, or holds no key."""
        text = read_secret(key, path, _MAX_BYTES, MAKE)
        values = dict(re.findall(r"^(public|secret): (\S+)$", text, flags=re.MULTILINE))
        if not all(_Z85.fullmatch(values.get(half, "")) for half in ("public", "secret")):
            raise ConfigError(key, path, f"it holds no key: {MAKE}")
        keys = cls(values["public"].encode(), values["secret"].encode())
        try:
            public = zmq.curve_public(keys.secret)
        except zmq.ZMQError as error:  # a group of five characters is no number of 32 bits
            raise ConfigError(key, path, f"it holds no key: {MAKE}") from error
        if public != keys.public:
            raise ConfigError(key, path, f"its two halves do not belong together: {MAKE}")
        return keys

    @classmethod
    def make(cls, path: Path, key: str = "FILE") -> Path:
        """Write a new one for its owner alone, into the file or the folder of that name; returns the file's name.
        Raises ConfigError, naming `key`, where there is one already, or it can't be written."""
        file = path / FILE_NAME if path.is_dir() else path
        public, secret = zmq.curve_keypair()
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as error:
            raise ConfigError(key, str(file), "it is there already, and engines may use it: write another name, or "
                              "remove it yourself") from error
        except OSError as error:
            raise ConfigError(key, str(file), f"{error.strerror}: write a name in a folder that you may write to"
                              ) from error
        try:
            with os.fdopen(descriptor, "w") as stream:
                os.fchmod(descriptor, 0o600)
                stream.write(_TEXT.format(public=public.decode(), secret=secret.decode()))
        except OSError as error:  # the disk is full: a half of a file would be in the way of the next try
            file.unlink(missing_ok=True)
            raise ConfigError(key, str(file), f"{error.strerror}: make room, or write a name elsewhere") from error
        return file
