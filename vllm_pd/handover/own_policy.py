# SPDX-License-Identifier: Apache-2.0
"""The class of the setting `policy` (`decisions.policy.OwnPolicy`): loaded, tried once, and not trusted with a step."""
from __future__ import annotations

import importlib
import logging
import time

from vllm_pd.decisions.policy import OwnPolicy, PolicyConfig, PolicyInput, worth
from vllm_pd.errors import ConfigError

logger = logging.getLogger("vllm.pd")

SAID_EVERY_S = 60.0
SLOW_S = 0.01  # of the step loop, for one answer
_TRIED = PolicyInput(prompt_tokens=2000, cached_tokens=16, blocks=124, can_go_remote=True, attempts_made=0,
                     time_left_s=60.0, broker_up=True, prefill_peers=2, queue_length=1, parked_blocks=10,
                     total_blocks=10_000, parked_requests=1, total_requests=256, whole_blocks=124)
_CURE = ("write module.Class of a class that has __init__(self, config) and wants_peer(self, prompt) -> bool, and that "
         "this process can import (PYTHONPATH): docs/configuration.md#a-policy-of-your-own")


class GuardedPolicy:
    """An operator's policy that decides nothing where it fails: then the built-in rule does, and the log says so, once
    in SAID_EVERY_S. `now` is that of the caller's clock."""

    def __init__(self, own: OwnPolicy, name: str, config: PolicyConfig) -> None:
        self._own = own
        self._name = name
        self._config = config
        self._said_at = float("-inf")

    def wants_peer(self, prompt: PolicyInput) -> bool:
        """Its answer; that of the built-in rule where it has none."""
        began = time.monotonic()
        try:
            answer = self._own.wants_peer(prompt)
            problem = "" if isinstance(answer, bool) else f"returned {answer!r:.100}, which is no bool"
        except Exception as error:
            answer, problem = False, f"raised {error!r:.200}"
        took_s = time.monotonic() - began
        if took_s > SLOW_S and not problem:
            self._say(began, f"took {took_s * 1e3:.0f} ms, for which all requests of this engine waited")
        if not problem:
            return answer
        self._say(began, f"{problem}; the built-in rule decides")
        return worth(prompt, self._config).remote

    def _say(self, now: float, what: str) -> None:
        if now >= self._said_at + SAID_EVERY_S:
            self._said_at = now
            logger.error("policy %s: wants_peer %s (said once a minute at most)", self._name, what)


def load_policy(name: str | None, config: PolicyConfig) -> GuardedPolicy | None:
    """The class of this name, made with the engine's bounds and asked once; None without a name. Raises ConfigError."""
    if name is None:
        return None
    module, _, class_name = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), class_name)
    except Exception as error:  # whatever its module does while it is imported
        raise ConfigError("policy", name, f"it can't be imported ({error!r:.200}): {_CURE}") from error
    if not isinstance(found, type):
        raise ConfigError("policy", name, f"it is no class: {_CURE}")
    try:
        own = found(config)
        answer = own.wants_peer(_TRIED)
    except Exception as error:
        raise ConfigError("policy", name, f"a first question to it raised {error!r:.200}: {_CURE}") from error
    if not isinstance(answer, bool):
        raise ConfigError("policy", name, f"wants_peer returned {answer!r:.100}, which is no bool: {_CURE}")
    return GuardedPolicy(own, name, config)
