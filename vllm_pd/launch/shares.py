# SPDX-License-Identifier: Apache-2.0
"""Which cores or GPUs each of the engines of one machine gets."""
from collections.abc import Sequence

from vllm_pd.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
MEMORY = 0.8  # of a GPU, for all engines that share it


def parse_numbered(key: str, text: str) -> tuple[int, ...]:
    """The numbers in `0,1`, each once; none in an empty text. Raises ConfigError naming `key`."""
    try:
        numbers = tuple(int(number) for number in text.split(",") if text)
    except ValueError:
        raise ConfigError(key, text, "write numbers, like 0,1") from None
    if min(numbers, default=0) < 0 or len(set(numbers)) < len(numbers):
        raise ConfigError(key, text, "write each number once, from 0 on, like 0,1")
    return numbers


def split_evenly(numbers: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """`count` disjoint shares of these GPUs or cores, as equal as possible; all empty where there are fewer of them
    than shares."""
    if len(numbers) < count:
        return [()] * count
    ordered = sorted(numbers)
    edges = [len(ordered) * i // count for i in range(count + 1)]
    return [tuple(ordered[start:end]) for start, end in zip(edges, edges[1:], strict=False)]


def gpu_shares(gpus: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """The GPUs of each of `count` engines: shares of them, or one that several engines use."""
    return [share or (gpus[number % len(gpus)], ) for number, share in enumerate(split_evenly(gpus, count))]


def gpu_env(gpus: Sequence[int]) -> dict[str, str]:
    """The environment of an engine that has these GPUs."""
    return {VISIBLE: ",".join(map(str, gpus))}


def gpu_arguments(gpus: Sequence[int], sharing: int, given: Sequence[str]) -> tuple[str, ...]:
    """What an engine that has these GPUs, as have `sharing` engines, needs on its command line, beside what is
    `given`: a tensor-parallel rank on each, and its part of their memory."""
    names = {argument.partition("=")[0].replace("_", "-") for argument in given}
    ranks = len(gpus) > 1 and not names & {"--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"}
    memory = sharing > 1 and "--gpu-memory-utilization" not in names
    return ((("--tensor-parallel-size", str(len(gpus))) if ranks else ())
            + (("--gpu-memory-utilization", f"{MEMORY / sharing:.2f}") if memory else ()))
