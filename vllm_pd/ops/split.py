# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd plan`: prints which rank of a prefill engine sends what to which rank of a decode engine. Asks no engine."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from vllm_pd.errors import ConfigError, UnmappableSplit
from vllm_pd.settings.options import Option, flag_of

if TYPE_CHECKING:
    from vllm_pd.transfer.ranks.split import ParallelSplit, Sending

STAGES_REFUSED = "an engine of V0 with more than one pipeline stage is refused at its start (pipeline_parallel_size)"


@dataclass(frozen=True)
class SplitOptions:
    """The command line of `vllm-pd plan`: two engines and the model that both serve."""
    prefill_tp: Annotated[int, Option("--tensor-parallel-size of the prefill engine.")] = 1
    decode_tp: Annotated[int, Option("--tensor-parallel-size of the decode engine.")] = 1
    prefill_pp: Annotated[int, Option("--pipeline-parallel-size of the prefill engine.")] = 1
    decode_pp: Annotated[int, Option("--pipeline-parallel-size of the decode engine.")] = 1
    kv_heads: Annotated[int, Option("KV heads of the model: num_key_value_heads; 1 with MLA.")] = 8
    layers: Annotated[int, Option("Layers of the model: num_hidden_layers.")] = 32


@dataclass(frozen=True)
class SplitReport:
    """What `vllm-pd plan` says: the sendings, and the ranks of the prefill engine that send nothing."""
    options: SplitOptions
    sendings: list[Sending]
    idle: list[int]

    def share(self, sending: Sending) -> float:
        """The part of all bytes that are sent."""
        return _size(sending) / sum(map(_size, self.sendings))

    @property
    def refused(self) -> str:
        """Which engines don't do this, and why; empty if all do."""
        return STAGES_REFUSED if max(self.options.prefill_pp, self.options.decode_pp) > 1 else ""

    def lines(self) -> list[str]:
        """As a table."""
        options = self.options
        rows = [("P rank", "D rank", "layers", "KV heads", "of all bytes")]
        rows += [(str(each.prefill_rank), str(each.decode_rank), _numbers(each.layers), _numbers(each.heads),
                  f"{self.share(each):.2%}") for each in self.sendings]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{options.kv_heads} KV heads, {options.layers} layers; prefill: TP {options.prefill_tp}, PP "
                 f"{options.prefill_pp}; decode: TP {options.decode_tp}, PP {options.decode_pp}"]
        lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                  for row in rows]
        if self.idle:
            lines.append(f"P ranks that send nothing, because others hold the same heads: {_listed(self.idle)}")
        if self.refused:
            lines.append(f"V1 only: {self.refused}.")
        return lines

    def as_json(self) -> dict[str, Any]:
        """For --json. Ranges are [first, last]."""
        options = self.options
        return {"kv_heads": options.kv_heads, "layers": options.layers,
                "prefill": {"tp": options.prefill_tp, "pp": options.prefill_pp},
                "decode": {"tp": options.decode_tp, "pp": options.decode_pp},
                "sendings": [{"prefill_rank": each.prefill_rank, "decode_rank": each.decode_rank,
                              "layers": [each.layers[0], each.layers[-1]], "heads": [each.heads[0], each.heads[-1]],
                              "share": round(self.share(each), 6)} for each in self.sendings],
                "idle_prefill_ranks": self.idle, "refused": self.refused}


def report(options: SplitOptions) -> SplitReport:
    """Who sends what to whom. Raises ConfigError for values that vLLM, or the mapping, does not have."""
    from vllm_pd.transfer.ranks.split import ParallelSplit, sendings

    for field in SplitOptions.__dataclass_fields__:
        if getattr(options, field) < 1:
            raise ConfigError(flag_of(field), getattr(options, field), "write 1 or more")
    prefill = ParallelSplit(options.prefill_tp, options.prefill_pp)
    decode = ParallelSplit(options.decode_tp, options.decode_pp)
    _check("prefill", prefill, options)
    _check("decode", decode, options)
    try:
        found = sendings(prefill, decode, options.layers, options.kv_heads)
    except UnmappableSplit as error:
        raise ConfigError("--decode-tp", options.decode_tp, str(error)) from error
    senders = {each.prefill_rank for each in found}
    return SplitReport(options, found, [rank for rank in range(prefill.tp * prefill.pp) if rank not in senders])


def _check(name: str, split: ParallelSplit, options: SplitOptions) -> None:
    from vllm_pd.transfer.plan import head_range
    from vllm_pd.transfer.ranks.split import layer_range

    for key, value, check in (("tp", split.tp, lambda: head_range(0, split.tp, options.kv_heads)),
                              ("pp", split.pp, lambda: layer_range(0, split.pp, options.layers))):
        try:
            check()
        except UnmappableSplit as error:
            raise ConfigError(f"--{name}-{key}", value, str(error)) from error


def _size(sending: Sending) -> int:
    return len(sending.layers) * len(sending.heads)


def _numbers(numbers: range) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}..{numbers[-1]}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
