# SPDX-License-Identifier: Apache-2.0
"""The settings of `vllm-pd bench share`, and their checks. Imports nothing heavy: `vllm-pd --help` needs them."""
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vllm_pd.errors import ConfigError
from vllm_pd.settings.options import Option

UNITS = ("words", "bytes")


def _parse_counts(texts: Sequence[str]) -> tuple[int, ...]:
    try:
        return tuple(map(int, texts))
    except ValueError:
        raise ConfigError("--cache-blocks", " ".join(texts), "write numbers of blocks, like 4096") from None


@dataclass(frozen=True)
class ShareBench:
    """What is measured. Numbers of tokens are of words or bytes where there is no tokenizer."""
    file: Annotated[Path, Option("The trace: JSON lines of prompts, ShareGPT's JSON, or an access log as JSON lines.",
                                 argument=True, metavar="FILE")]
    tokenizer: Annotated[str | None, Option("The model or folder with the tokenizer for texts.")] = None
    unit: Annotated[str | None, Option(
        "Without --tokenizer, what of a text counts as a token: words (default) or bytes.")] = None
    block_size: Annotated[int, Option("How many tokens a KV block has.")] = 16
    cache_blocks: Annotated[tuple[int, ...], Option(
        "How many KV blocks the cache of each engine has; may be repeated. Default: 10, 30 and 100 % of the trace's "
        "distinct blocks.", parse=_parse_counts)] = ()
    engines: Annotated[int, Option("How many decode engines the router chooses from.")] = 2
    min_count: Annotated[int, Option("Only prefixes that at least so many prompts begin with.")] = 2
    min_tokens: Annotated[int, Option("Only prefixes of at least so many tokens.")] = 16
    prefixes: Annotated[int, Option("How many of them are listed.")] = 5
    max_tokens: Annotated[int, Option("Read no more tokens of prompts and answers than this. It bounds the memory: 10 "
                                      "million take up to 640 MiB, and a tokenizer 520 MiB more.")] = 10_000_000

    def checked(self) -> "ShareBench":
        """The settings with defaults filled in. Raises ConfigError for the first invalid one."""
        if self.tokenizer is not None and self.unit is not None:
            raise ConfigError("--unit", self.unit, "leave it out: texts are counted with --tokenizer")
        if self.unit not in (None, *UNITS):
            raise ConfigError("--unit", self.unit, f"write one of {', '.join(UNITS)}")
        for name in ("block_size", "engines", "min_count", "min_tokens", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError("--" + name.replace("_", "-"), getattr(self, name), "write 1 or more")
        if self.prefixes < 0:
            raise ConfigError("--prefixes", self.prefixes, "write 0 or more")
        if any(blocks < 1 for blocks in self.cache_blocks):
            raise ConfigError("--cache-blocks", min(self.cache_blocks), "write 1 or more")
        if self.tokenizer is None and self.unit is None:
            return dataclasses.replace(self, unit=UNITS[0])
        return self
