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
from vllm_pd.rpc.addresses import hosts_of, is_loopback, is_name, parse_bind, parse_endpoint, url_of
from vllm_pd.rpc.keys import Keys

DEFAULT_FOLDER = f"/dev/shm/vllm-pd-store-{os.geteuid()}"  # /dev/shm is all users'
DEFAULT_MEMORY_GIB = 4.0
DEFAULT_FILE_GIB = 32.0
DEFAULT_PINNED_GIB = 0.25
DIGEST_KEY = "weights_digest"  # of both connectors' settings
EXAMPLE_DIGEST = "write the 64 digits, 0 to 9 and a to f, that vllm-pd digest FOLDER prints of the same weights"
_DIGEST = re.compile("[0-9a-f]{64}")
DEFAULT_WAIT_S = 2.0
DEFAULT_STAGING_MIB = 64.0
MAX_HOSTS = 64
KEYS = ("folder", "memory_gib", "file_folder", "file_gib", "pinned_gib", "listen", "hosts", "keys", "wait_s",
        "staging_mib")
FAR_KEYS = frozenset(("listen", "hosts"))
_FAR_CURE = "write hosts, the other hosts' addresses, too, or leave it out"
_EXAMPLE = "tcp://10.0.0.5:5900"
_MOST = {"wait_s": 60, "staging_mib": 2**20}  # of other numbers 2**20


@dataclass(frozen=True)
class StoreSettings:
    """Where the store is and how large. `file_folder` None: there is no file tier. `pinned_gib`: of host memory that a
    rank with its cache on a GPU pins, and of that GPU's, for blocks on their way. `listen`: where this engine serves
    the arena to other hosts; `hosts`: where those do, with commas between them; None: neither. Made by `parse`."""
    folder: str = DEFAULT_FOLDER
    memory_gib: float = DEFAULT_MEMORY_GIB
    file_folder: str | None = None
    file_gib: float = DEFAULT_FILE_GIB
    pinned_gib: float = DEFAULT_PINNED_GIB
    listen: str | None = None
    hosts: str | None = None
    keys: str | None = None
    wait_s: float = DEFAULT_WAIT_S
    staging_mib: float = DEFAULT_STAGING_MIB

    @classmethod
    def parse(cls, values: Mapping[str, Any], engines_keys: str | None = None) -> StoreSettings:
        """Raises ConfigError for a key that is unknown, of a wrong type or out of bounds. Of the files that are named,
        only `keys` is read; `engines_keys` are in its place if it is not given."""
        values = dict(values)
        for key, value in values.items():
            if key not in KEYS:
                raise ConfigError(key, value, f"there is no such key: write one of {', '.join(KEYS)}")
            if key.endswith("_gib") or key in _MOST:
                _check_size(key, value)
            elif key in ("listen", "hosts", "keys"):
                if not isinstance(value, str):
                    raise ConfigError(key, value, "it must be a string")
            elif not isinstance(value, str) or not value.startswith("/"):
                raise ConfigError(key, value, f"it must be a folder with its whole path, like {DEFAULT_FOLDER}")
        if "file_gib" in values and "file_folder" not in values:
            raise ConfigError("file_gib", values["file_gib"], "there is no file tier: write file_folder, too")
        values |= _parse_far(values, engines_keys)
        return cls(**values)

    @classmethod
    def parse_connector(cls, values: Mapping[str, Any]) -> tuple[StoreSettings, str | None]:
        """The settings of a PDStoreConnector, and its `weights_digest`, None without one. Raises as `parse`."""
        rest = {key: value for key, value in values.items() if key != DIGEST_KEY}
        return cls.parse(rest), check_digest(values[DIGEST_KEY]) if DIGEST_KEY in values else None

    @property
    def is_far(self) -> bool:
        """Whether this engine serves other hosts, or asks them."""
        return self.listen is not None or bool(self.other_hosts)

    @property
    def other_hosts(self) -> tuple[str, ...]:
        """The addresses of `hosts`, which `parse` leaves without that of `listen`: a fleet may give all engines one
        list. Another name of this machine may still be among them (`vllm_pd.store.beyond.far`)."""
        return tuple(filter(None, (self.hosts or "").split(",")))

    @property
    def staging_bytes(self) -> int:
        """The memory into which other hosts write."""
        return int(self.staging_mib * 2**20)

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
    if not 0 < value <= _MOST.get(key, 2**20):
        raise ConfigError(key, value, f"it must be above 0 and at most {_MOST.get(key, 2**20)}, like 4")


def _parse_far(values: Mapping[str, Any], engines_keys: str | None) -> dict[str, Any]:
    """The valid forms of `listen`, `hosts` and `keys`, as far as they are given. Raises ConfigError."""
    for key in ("wait_s", "staging_mib"):
        if key in values and "hosts" not in values:
            raise ConfigError(key, values[key], f"no other host is asked: {_FAR_CURE}")
    if not FAR_KEYS & values.keys():
        if "keys" in values:
            raise ConfigError("keys", values["keys"], "nothing here speaks to other hosts: write listen or hosts, too, "
                              "or leave it out")
        return {}
    found: dict[str, Any] = {"keys": values.get("keys", engines_keys)}
    is_keyed = found["keys"] is not None
    if is_keyed:
        Keys.load(found["keys"])
    if "listen" in values:
        found["listen"] = url_of(*parse_bind("listen", values["listen"], keyed=is_keyed))
    if "hosts" in values:
        own = None  # `listen` as it is written there: a name, perhaps, which is an address by now
        if "listen" in values:
            own = url_of(*parse_endpoint("listen", values["listen"], keyed=is_keyed))
        found["hosts"] = ",".join(url for url in _parse_hosts(values["hosts"], is_keyed)
                                  if url not in (own, found.get("listen")))
    hosts = hosts_of(",".join(filter(None, (found.get("listen"), found.get("hosts")))))
    if is_loopback(hosts[0]) and not all(is_loopback(host) or is_name(host) for host in hosts):
        key = "listen" if "listen" in values else "hosts"
        raise ConfigError(key, values[key], f"other machines can't write to {hosts[0]}: write an address of this "
                          "machine by which they reach it")
    return found


def _parse_hosts(value: str, is_keyed: bool) -> list[str]:
    urls = [url_of(*parse_endpoint("hosts", one.strip(), keyed=is_keyed)) for one in value.split(",")]
    if len(urls) > MAX_HOSTS or len(set(urls)) < len(urls):
        raise ConfigError("hosts", value, f"write at most {MAX_HOSTS} addresses, each once, with commas between them, "
                          f"like {_EXAMPLE}")
    return urls
