# SPDX-License-Identifier: Apache-2.0
"""How a NATS server is reached. Needs no NATS library, so that a configuration can be checked without one."""
import re
import ssl
from dataclasses import dataclass
from typing import Any

from vllm_pd.errors import ConfigError
from vllm_pd.rpc.secret_files import read_file, read_secret

DEFAULT_PREFIX = "vllm_pd"
_MAX_BYTES = 1 << 16
_MAX_CERTIFICATES_BYTES = 1 << 24  # a system's own have a quarter of a megabyte
_SEED = re.compile(r"SU[A-Z2-7]{56}")
_CURE = "write the file that nsc generate creds made, or one with the seed of an nkey"
_PEM = "write the name of a PEM file"

SCHEMES = ("nats", "tls")


@dataclass(frozen=True)
class NatsAddress:
    """`urls` are servers of one cluster. `credentials` is a file: what `nsc` writes for a user (a token and a seed), or
    an nkey's seed alone. `ca` is a file with the certificates that `tls://` trusts; without it the system's."""
    urls: tuple[str, ...]
    prefix: str = DEFAULT_PREFIX
    credentials: str | None = None
    ca: str | None = None

    @staticmethod
    def is_url(broker: str) -> bool:
        """Whether a broker's address is one of NATS."""
        return broker.partition("://")[0] in SCHEMES

    @classmethod
    def of(cls, broker: str, prefix: str, credentials: str | None, ca: str | None) -> "NatsAddress":
        """From the settings of an engine, which have been checked."""
        return cls(tuple(broker.split(",")), prefix, credentials, ca)

    def options(self) -> dict[str, Any]:
        """For `nats.connect`. Raises OSError where the credentials can't be read any more."""
        options: dict[str, Any] = {}
        if self.credentials is not None:
            try:
                seed = read_seed(read_secret("nats_credentials", self.credentials, _MAX_BYTES, _CURE))
            except ConfigError as error:
                raise OSError(str(error)) from error
            options = {"user_credentials": self.credentials} if seed is None else {"nkeys_seed_str": seed}
        if self.urls[0].startswith("tls://"):
            options["tls"] = ssl.create_default_context(cafile=self.ca)
        return options


def read_seed(text: str) -> str | None:
    """The seed, where a credentials file holds nothing else."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return lines[0] if len(lines) == 1 and _SEED.fullmatch(lines[0]) else None


def check_credentials(key: str, path: str) -> None:
    """Raises ConfigError, naming `key`, where the file can't be read, can be read by others, or is none of a user's."""
    text = read_secret(key, path, _MAX_BYTES, _CURE)
    if read_seed(text) is None and not ("BEGIN NATS USER JWT" in text and _SEED.search(text)):
        raise ConfigError(key, path, f"it holds no NATS user: {_CURE}")


def check_encrypted(key: str, path: str, broker: str) -> None:
    """Raises ConfigError, naming `key`, where certificates are given for a connection that uses none."""
    if broker.startswith("nats://"):
        raise ConfigError(key, path, "nats:// is not encrypted and no certificate is checked: write tls:// before each "
                          f"server, or leave out {key}")


def check_certificates(key: str, path: str) -> None:
    """Raises ConfigError, naming `key`, where the file holds no certificate."""
    read_file(key, path, _MAX_CERTIFICATES_BYTES, _PEM)
    try:
        ssl.create_default_context(cafile=path)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(key, path, f"{getattr(error, 'strerror', None) or error}: {_PEM}") from error
