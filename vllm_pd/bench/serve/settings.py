# SPDX-License-Identifier: Apache-2.0
"""The command line of `vllm-pd bench serve`, checked in `choices`. It imports only what `vllm-pd` imports anyway."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from vllm_pd.errors import ConfigError
from vllm_pd.ops.launch.plan import UpOptions
from vllm_pd.settings.options import Option, option_of


class ServeLoad(StrEnum):
    """The loads, by the name on the command line."""
    CHAT_LONG = "chat+long"  # steady chats, and long prompts that arrive at random
    CONCURRENCY = "concurrency"  # a closed loop of more and more streams
    RATE = "rate"  # an open loop of more and more requests a second
    CONVERSATIONS = "conversations"  # several turns each, with shared system prompts
    TRACE = "trace"  # the prompts of a file, at the rates


@dataclass(frozen=True)
class TracedPrompt:
    """A prompt of a trace, and about how many tokens its answer has."""
    name: str
    prompt: str
    answer_tokens: int


def parse_numbers(key: str, kind: type, texts: Iterable[str]) -> tuple[Any, ...]:
    """The numbers of an option that may be repeated, each once. Raises ConfigError naming `key`."""
    found = []
    for text in texts:
        try:
            found.append(kind(text))
        except ValueError:
            found.append(kind(0))
        if not 0 < found[-1] < math.inf:
            raise ConfigError(key, text, f"write {'a whole number' if kind is int else 'a number'} above 0")
    return tuple(dict.fromkeys(found))


def parse_load(text: str) -> ServeLoad:
    """A load by its name. Raises ConfigError."""
    if text not in set(ServeLoad):
        raise ConfigError("--load", text, f"write one of {', '.join(ServeLoad)}")
    return ServeLoad(text)


@dataclass(frozen=True)
class LoadShape:
    """The sizes of a load. Lengths in tokens, times in seconds."""
    load: Annotated[ServeLoad, Option("chat+long, concurrency, rate, conversations or trace.",
                                      parse=parse_load)] = ServeLoad.CHAT_LONG
    duration_s: Annotated[float, Option("How long requests are sent, for each arm, round and point.")] = 60.0
    streams: Annotated[tuple[int, ...], Option(
        "How many chats run all the time; may be repeated. Default 4; with --load concurrency 1, 2, 4 and 8.",
        flag="--stream", parse=lambda texts: parse_numbers("--stream", int, texts))] = ()
    rates: Annotated[tuple[float, ...], Option(
        "Requests a second, or conversations that begin; may be repeated. Default 0.25, 0.5, 1 and 2; 0.5 for "
        "conversations.", flag="--rate", parse=lambda texts: parse_numbers("--rate", float, texts))] = ()
    short_tokens: Annotated[int, Option("About how long a short prompt is, or what is said in a conversation.")] = 40
    answer_tokens: Annotated[int, Option("How long the answer to a short prompt is.")] = 60
    long_tokens: Annotated[int, Option("About how long a long prompt is.")] = 1300
    long_answer_tokens: Annotated[int, Option("How long the answer to a long prompt is.")] = 8
    long_every_s: Annotated[float, Option("Beside the chats: one long prompt in so many seconds on average.")] = 7.0
    long_share: Annotated[float, Option("In a sweep: the share of the requests that have a long prompt.")] = 0.1
    conversations: Annotated[int, Option("How many.")] = 20
    turns: Annotated[int, Option("Questions in each conversation.")] = 3
    system_prompts: Annotated[int, Option("How many different ones the conversations begin with.")] = 4
    system_tokens: Annotated[int, Option("About how long a system prompt is.")] = 200
    pause_s: Annotated[float, Option("Between an answer and the next question, on average.")] = 2.0
    seed: Annotated[int, Option("Of the prompts, their times and the order of the arms.")] = 0
    trace: tuple[TracedPrompt, ...] = ()

    @property
    def values(self) -> tuple[float, ...]:
        """The number of streams, or the requests a second, of each point."""
        if self.load is ServeLoad.CHAT_LONG:
            return self.streams or (4, )
        if self.load is ServeLoad.CONCURRENCY:
            return self.streams or (1, 2, 4, 8)
        return self.rates or ((0.5, ) if self.load is ServeLoad.CONVERSATIONS else (0.25, 0.5, 1.0, 2.0))


@dataclass(frozen=True)
class ServeBench:
    """The command line of `vllm-pd bench serve`. `programs`: what to start as `serve` and `broker`, for tests."""
    model: Annotated[str, Option("The model, as `vllm serve` takes it; left out with --url, --state or --export.",
                                 argument=True)] = ""
    arms: Annotated[tuple[str, ...], Option(
        "What to compare: alone, pd, mixed-rr, mixed-kv (mixed: both), chunked-N (chunked: 64, 256 and 1024), single, "
        "pd-first, nixl (both V1); may be repeated. Default: alone, pd, mixed-rr and chunked-256.", flag="--arm")] = ()
    prefill: Annotated[int, Option("How many prefill engines `pd` has.")] = 1
    decode: Annotated[int, Option("How many decode engines `pd` has; mixed and chunked have as many engines as both "
                                  "together.")] = 1
    pd: Annotated[Mapping[str, Any], option_of(UpOptions, "pd")] = field(default_factory=dict)
    rounds: Annotated[int, Option("How many times each arm has its turn.")] = 3
    cores: Annotated[str, Option("The cores that the engines of an arm share; default: all.", metavar="0,1")] = ""
    load_cores: Annotated[str, Option("Where this program, brokers and routers run.", metavar="2,3")] = ""
    gpus: Annotated[str, Option("The GPUs that the engines of an arm share; default: the first of "
                                "CUDA_VISIBLE_DEVICES, or 0.", metavar="0,1")] = ""
    engine: Annotated[str, Option("v0 or v1: what must be installed; default: whatever is.")] = ""
    url: Annotated[str, Option("Instead of arms: the base URL of a fleet that runs.")] = ""
    state: Annotated[Path | None, Option("Instead of arms: the state file of a `vllm-pd up` that runs.")] = None
    load: LoadShape = LoadShape()
    trace: Annotated[Path | None, Option("The prompts of --load trace: a ShareGPT file. Each is sent once.")] = None
    export: Annotated[Path | None, Option("Only write the load as a ShareGPT file.")] = None
    ttft_slo: Annotated[float, Option("Goodput counts requests whose first token came within so many ms ...")] = 2000.0
    itl_slo: Annotated[float, Option("... and every further one within so many ms of the one before it.")] = 250.0
    warm_up: Annotated[int, Option("How many short and how many long requests go to each engine that clients may ask, "
                                   "before the load. They do not count.")] = 2
    compare: Annotated[str, Option("What must be the same from every arm: tokens, or text for engines that tell no "
                                   "token ids.")] = "tokens"
    port: Annotated[int, Option("Port of an arm's first engine or router, the others follow; 0: free ones.")] = 0
    timeout_s: Annotated[float, Option("How long the engines of an arm may take to start.")] = 600.0
    serve_args: Annotated[Sequence[str], option_of(UpOptions, "serve_args")] = ()
    programs: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def given(self) -> bool:
        """Whether a fleet is measured that runs already."""
        return bool(self.url) or self.state is not None

    @property
    def token_ids(self) -> bool:
        """Whether answers are compared token by token."""
        return self.compare == "tokens"
