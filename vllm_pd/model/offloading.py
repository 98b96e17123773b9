# SPDX-License-Identifier: Apache-2.0
"""Flags of vLLM with which it does not come to a connector of ours while it makes the configuration.

`--kv-offloading-size`: vLLM puts its own connector in the place of ours, and says nothing. The engine would serve, and
work with no other: refused. `--[no-]disable-hybrid-kv-cache-manager`: vLLM need not ask our class whether it can be
with that manager, so our part of the configuration would not be made: the plugin imports the class itself.

The rewritten configuration still has our settings. It can be looked at if our connector's class was imported before
(`vllm_pd.v1.claim`): vLLM does that where it uses full CUDA graphs, else it never asks for the class. So the plugin
looks at the command line, too, and at the file that its `--config` names. A Python program has neither.
"""
from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm_pd.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_OPTION = re.compile(r"--kv[-_]offloading[-_]size(?:=(.*))?", re.DOTALL)
_HYBRID = re.compile(r"--(no[-_])?(disable[-_]h[-_a-z]*)")
_HYBRID_FLAG = "disable-hybrid-kv-cache-manager"
MOST_CHARS = 1 << 20  # of such a file
_OURS = "broker"  # the key that every configuration of PDConnector has


def check_offloading(config: VllmConfig) -> None:
    """Raises ConfigError for a configuration in which vLLM has replaced PDConnector."""
    transfer, size = config.kv_transfer_config, config.cache_config.kv_offloading_size
    if size is None or transfer is None:
        return
    written = transfer.kv_connector_extra_config
    if _OURS in written or any(one.get("kv_connector") == "PDConnector" for one in written.get("connectors", ())):
        raise _refusal("PDConnector", size)


def check_command_line(connectors: Iterable[str]) -> None:
    """Raises ConfigError where this process's command line, or the file that its --config names, names one of these
    connectors and asks for offloading."""
    words = _words()
    sizes = [found[1] or "".join(words[place + 1:place + 2])
             for place, one in enumerate(words) if (found := _OPTION.fullmatch(one))]
    for connector in connectors if sizes else ():
        if is_named(connector):
            raise _refusal(connector, sizes[-1])


def hybrid_flag() -> bool | None:
    """Whether this process's command line turns the hybrid KV cache manager on or off, or else the file that its
    --config names; None: neither has such a flag."""
    values = [found[1] is not None for one in _words() if (found := _HYBRID.fullmatch(one))
              and _HYBRID_FLAG.startswith(found[2].replace("_", "-"))]  # argparse takes a flag's beginning for it
    return values[-1] if values else None


def is_named(word: str) -> bool:
    """Whether this process's command line, or the file that its --config names, has this word, as the name of a
    connector or of a setting."""
    return any(re.search(rf"\b{word}\b", one) for one in (*sys.argv, *_config_files()))


def _words() -> list[str]:
    """The options of the files that vLLM reads them from, as vLLM adds them, and then the command line, which wins."""
    words: list[str] = []
    for text in _config_files():
        import yaml  # as vLLM does; a process without --config does not
        with contextlib.suppress(yaml.YAMLError):  # vLLM says so
            options = yaml.safe_load(text)
            for key, value in options.items() if isinstance(options, dict) else ():
                if isinstance(value, bool):
                    if value or "_" not in key:  # it knows no --no-like_this, and leaves that out
                        words.append(f"--{key}" if value else f"--no-{key}")
                elif not isinstance(value, (dict, list)):
                    words += [f"--{key}", str(value)]
    return words + sys.argv


def _config_files() -> list[str]:
    """What the files say that vLLM reads options from."""
    found = []
    for place, one in enumerate(sys.argv):
        name = one.removeprefix("--config=") if one.startswith("--config=") else None
        if one == "--config":
            name = "".join(sys.argv[place + 1:place + 2])
        if name:
            with contextlib.suppress(OSError, UnicodeDecodeError), open(name, encoding="utf-8") as file:  # vLLM says so
                found.append(file.read(MOST_CHARS))
    return found


def _refusal(connector: str, size: object) -> ConfigError:
    cure = "" if connector != "PDConnector" else (
        "; to have both, write --kv-transfer-config '{\"kv_connector\": \"MultiConnector\", \"kv_role\": \"kv_both\", "
        '"kv_connector_extra_config": {"connectors": [{"kv_connector": "PDConnector", ...}, {"kv_connector": '
        '"OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": '
        f"{_bytes(size)}}}}}]}}}}'")
    return ConfigError("kv_offloading_size", size, "remove it, or remove --kv-transfer-config: vLLM would put its own "
                       f'connector in the place of "kv_connector": "{connector}"{cure}')


def _bytes(gib: object) -> object:
    """The same size in bytes, as OffloadingConnector takes it; BYTES where it is no number."""
    try:
        return int(float(gib) * (1 << 30))
    except ValueError:
        return "BYTES"
