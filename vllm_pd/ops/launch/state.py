# SPDX-License-Identifier: Apache-2.0
"""The state file of a `vllm-pd up` that runs, for the commands that want the addresses of its engines."""

import json
from dataclasses import dataclass
from pathlib import Path

from vllm_pd.errors import ConfigError

CURE = "write the file that `vllm-pd up --state FILE` wrote; it is there once all engines are healthy"


@dataclass(frozen=True)
class UpState:
    """The base URLs of a fleet. `router` is empty where there is none."""
    decode: tuple[str, ...]
    prefill: tuple[str, ...]
    router: str

    @property
    def entries(self) -> tuple[str, ...]:
        """Where clients send their requests: the router, or else the decode engines."""
        return (self.router, ) if self.router else self.decode

    @classmethod
    def read(cls, path: Path) -> "UpState":
        """Of a file that `Fleet` has written. Raises ConfigError naming `--state`."""
        try:
            written = json.loads(path.read_bytes())
            urls = {role: tuple(str(engine["url"]) for engine in written["engines"] if engine["role"] == role)
                    for role in ("decode", "prefill")}
            router = written.get("router", {}).get("url", "")
        except (OSError, ValueError) as error:
            raise ConfigError("--state", str(path), f"{error}: {CURE}") from None
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigError("--state", str(path), f"not a state file ({error!r}): {CURE}") from None
        if not urls["decode"]:
            raise ConfigError("--state", str(path), f"it names no decode engine: {CURE}")
        return cls(urls["decode"], urls["prefill"], router)
