# SPDX-License-Identifier: Apache-2.0
"""The options of `vllm-pd doctor --try`, `vllm-pd top`, `vllm-pd trace` and `vllm-pd planner`, which the command needs
before it needs the rest of them."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vllm_pd.errors import ConfigError
from vllm_pd.settings.options import Option

TRY = "--try"
PROMPT_TOKENS = 1024
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.5, 3600.0
MAX_TRACE_S = 3600.0
MAX_WAIT_S = 86400.0


@dataclass(frozen=True)
class TrialOptions:
    """The options of `vllm-pd doctor --try`."""
    url: Annotated[str | None, Option(
        "Send instead one prompt to this decode engine or router, have a prefill engine compute it, and compare the "
        "answer with that of the decode engine alone.", flag=TRY, metavar="URL")] = None
    prompt_tokens: Annotated[int | None, Option(
        f"With --try: how long the prompt is. Default {PROMPT_TOKENS}, or what the model takes.")] = None
    model: Annotated[str | None, Option("With --try: the model's name, where several are served.")] = None
    api_key: Annotated[str | None, Option("With --try: the key that the URL asks for; default $VLLM_API_KEY.")] = None
    worker_api_key: Annotated[str | None, Option(
        "With --try of a router: the key that the engines ask for, if they have another one.")] = None
    answer_timeout_s: Annotated[float, Option("With --try: how long each of the two answers may take.")] = 300.0

    def checked(self) -> TrialOptions:
        """These options. Raises ConfigError for one that can't be used, or is of no use without --try."""
        if self.url is None:
            for flag, value in (("--prompt-tokens", self.prompt_tokens), ("--model", self.model),
                                ("--api-key", self.api_key and "***"),
                                ("--worker-api-key", self.worker_api_key and "***")):
                if value is not None:
                    raise ConfigError(flag, value, "it belongs to --try URL")
        if self.prompt_tokens is not None and self.prompt_tokens < 1:
            raise ConfigError("--prompt-tokens", self.prompt_tokens, "write 1 or more")
        if not 0 < self.answer_timeout_s <= 86400:  # nan neither
            raise ConfigError("--answer-timeout-s", self.answer_timeout_s, "write seconds above 0, 86400 at most")
        return self


@dataclass(frozen=True)
class TopOptions:
    """The options of `vllm-pd top` beside those of the broker."""
    once: Annotated[bool, Option("Print one table, of all since the engines' starts, and end; so it is where the "
                                 "output is no terminal.")] = False
    interval_s: Annotated[float, Option("How often the engines are read.", flag="--interval")] = 2.0
    api_key: Annotated[str | None, Option("The key that the engines ask for, to say why one is degraded; default "
                                          "$VLLM_API_KEY.")] = None

    def checked(self) -> TopOptions:
        """These options. Raises ConfigError for one that can't be used."""
        if not MIN_INTERVAL_S <= self.interval_s <= MAX_INTERVAL_S:
            raise ConfigError("--interval", self.interval_s, f"write {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g} seconds")
        return self


@dataclass(frozen=True)
class TraceOptions:
    """The options of `vllm-pd trace` beside those of the broker."""
    output: Annotated[Path, Option("The file to write.")] = Path("trace.json")
    seconds: Annotated[float, Option("For how long the engines are read.")] = 10.0
    state: Annotated[Path | None, Option("Read the engines that this state file of `vllm-pd up` names, in place of "
                                         "those that the broker knows.")] = None
    api_key: Annotated[str | None, Option("The key that the engines ask for; default $VLLM_API_KEY.")] = None

    def checked(self) -> TraceOptions:
        """These options. Raises ConfigError for one that can't be used."""
        if not 0 < self.seconds <= MAX_TRACE_S:  # nan neither
            raise ConfigError("--seconds", self.seconds, f"write seconds above 0, {MAX_TRACE_S:g} at most")
        return self


@dataclass(frozen=True)
class PlannerOptions:
    """The options of `vllm-pd planner` beside those of the broker."""
    flip: Annotated[bool, Option("Have engines that were started as kv_both change their role. Without it nothing is "
                                 "changed, and the log says what would be.", flag="--flip")] = False
    interval_s: Annotated[float, Option("How often to read all engines and decide.")] = 10.0
    ttft_target_ms: Annotated[float, Option("The time to the first token that clients shall have, on average."
                                            )] = 2000.0
    itl_target_ms: Annotated[float, Option("The time from one token to the next, likewise.")] = 50.0
    cool_down_s: Annotated[float, Option("After a change of an engine's role there is none for this long.")] = 30.0
    lower_after_s: Annotated[float, Option("How long one engine less must have been enough until one less is "
                                           "wanted.")] = 300.0
    host: Annotated[str, Option("The address at which /metrics is.")] = "127.0.0.1"
    port: Annotated[int, Option("The port of /metrics.")] = 5790
    api_key: Annotated[str | None, Option("The key that the engines ask for, to say why one is degraded; default "
                                          "$VLLM_API_KEY.")] = None

    def checked(self) -> PlannerOptions:
        """These options. Raises ConfigError for one that can't be used."""
        if not MIN_INTERVAL_S <= self.interval_s <= MAX_INTERVAL_S:
            raise ConfigError("--interval-s", self.interval_s, f"write {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}")
        for flag, value, most in (("--ttft-target-ms", self.ttft_target_ms, 3.6e6),
                                  ("--itl-target-ms", self.itl_target_ms, 3.6e6)):
            if not 0 < value <= most:  # nan neither
                raise ConfigError(flag, value, f"write milliseconds above 0, {most:,.0f} at most")
        for flag, value in (("--cool-down-s", self.cool_down_s), ("--lower-after-s", self.lower_after_s)):
            if not self.interval_s <= value <= MAX_WAIT_S:
                raise ConfigError(flag, value, f"write {self.interval_s:g} to {MAX_WAIT_S:,.0f}: an interval at least")
        if not 1 <= self.port <= 65535:
            raise ConfigError("--port", self.port, "write 1 to 65535")
        return self
