# SPDX-License-Identifier: Apache-2.0
"""The loads of `vllm-pd bench router`, `policies` and `dp`, as their command lines have them. Imports nothing heavy:
`vllm-pd --help` needs them."""
from dataclasses import dataclass
from typing import Annotated

from vllm_pd.settings.options import Option


@dataclass(frozen=True)
class RouterLoad:
    """What is sent to each router, and what its workers publish."""
    requests: Annotated[int, Option("How many requests, one at a time, of each kind.")] = 500
    tokens: Annotated[int, Option("How many tokens each answer has.")] = 16
    prompt_tokens: Annotated[int, Option("About how long each prompt is.")] = 256
    clients: Annotated[int, Option("Of the closed loop.")] = 32
    streams: Annotated[int, Option("How many clients read paced streams.")] = 16
    rounds: Annotated[int, Option("How many slices of time each router gets in a phase.")] = 5
    slice_s: Annotated[float, Option("How long a slice is.")] = 2.0
    block_size: Annotated[int, Option(
        "Have the workers publish KV events, made up, of blocks of so many tokens; 0: none.")] = 0
    seed: Annotated[int, Option("Of the prompts and of the order.")] = 0


@dataclass(frozen=True)
class ConversationShape:
    """The conversations that are held. Lengths in words, about two tokens each; times in seconds."""
    conversations: Annotated[int, Option("How many.")] = 20
    conversations_per_s: Annotated[float, Option("How many begin in a second.")] = 0.5
    system_prompts: Annotated[int, Option("How many different ones.")] = 6
    system_words: Annotated[int, Option("Their length, about half of their tokens.")] = 140
    popularity: float = 1.0  # exponent of the Zipf law by which system prompts are chosen
    turns: Annotated[int, Option("Questions in each.")] = 3
    question_words: int = 12
    answer_tokens: int = 12
    pause_s: float = 4.0  # mean of an exponential
    seed: Annotated[int, Option("Of the conversations and of the order.")] = 0


@dataclass(frozen=True)
class DpLoad:
    """What every group of data-parallel ranks gets."""
    bursts: Annotated[int, Option("How many requests, one at a time, from idle to idle.")] = 30
    requests: Annotated[int, Option("How many requests a round under load has.")] = 60
    rounds: Annotated[int, Option("How many rounds under load, of which the median counts.")] = 5
    seed: Annotated[int, Option("Of the random prompts.")] = 0
