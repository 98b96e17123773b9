# SPDX-License-Identifier: Apache-2.0
"""The options of `vllm-pd doctor --try`, `vllm-pd top` and `vllm-pd trace`, which the command needs before it needs the
rest of them."""
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
class PlannerOptions:
    """The options of `vllm-pd planner` beside those of the broker."""
    ttft_ms: Annotated[float, Option("The time to the first token that clients are to see.")] = 2000.0
    itl_ms: Annotated[float, Option("The time between two tokens that clients are to see.")] = 50.0
    use: Annotated[float, Option("How busy an engine is to be, of 1.")] = 0.8
    hold_s: Annotated[float, Option("Want fewer engines when as many were not needed for this long.")] = 300.0
    most: Annotated[int, Option("Want at most so many engines of a role.")] = 64
    flip: Annotated[bool, Option("Have engines that were started as kv_both change between prefill and decode; without "
                                 "it the changes are only said.")] = False
    cool_down_s: Annotated[float, Option("Change no engine for so long after any change.")] = 30.0
    flips_per_hour: Annotated[int, Option("Change at most so many engines an hour.")] = 240
    at_once: Annotated[int, Option("Change at most so many engines at a time; 0: half of them.")] = 0
    interval_s: Annotated[float, Option("How often the engines are read.", flag="--interval")] = 10.0
    host: Annotated[str, Option("Where /metrics is.")] = "127.0.0.1"
    port: Annotated[int, Option("The port of /metrics.")] = 9470
    once: Annotated[bool, Option("Read twice, print one decision, and end.")] = False

    def checked(self) -> PlannerOptions:
        """These options. Raises ConfigError for one that can't be used."""
        for flag, value, least, most in (
                ("--ttft-ms", self.ttft_ms, 1.0, 3.6e6), ("--itl-ms", self.itl_ms, 0.1, 6e4),
                ("--use", self.use, 0.05, 1.0), ("--hold-s", self.hold_s, 0.0, 86400.0), ("--most", self.most, 1, 4096),
                ("--cool-down-s", self.cool_down_s, 1.0, 86400.0), ("--flips-per-hour", self.flips_per_hour, 1, 3600),
                ("--at-once", self.at_once, 0, 64),
                ("--port", self.port, 1, 65535),
                ("--interval", self.interval_s, MIN_INTERVAL_S, MAX_INTERVAL_S)):
            if not least <= value <= most:  # nan neither
                raise ConfigError(flag, value, f"write {least:g} to {most:g}")
        if self.flip and self.once:
            raise ConfigError("--flip", True, "leave --once out: a change is seen to its end")
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
