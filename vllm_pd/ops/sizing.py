# SPDX-License-Identifier: Apache-2.0
"""`vllm-pd plan --model`: how many engines, and how fast a link, a load needs. Asks no engine.

What an engine can do is measured, not known: its speeds are options. Everything else follows from the shape of the
model's KV cache.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from vllm_pd.errors import ConfigError
from vllm_pd.ops.split import SplitOptions
from vllm_pd.settings.options import Option, flag_of

BUSY = 0.8  # of its time an engine that others wait for may work: at 1 the queue has no end
LEAST = 1e-3  # of a speed or a link
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}
WINDOWS = ("full_attention", "sliding_attention")  # counted alike: of a window layer V1 keeps less, so this is too much
OTHER_SHAPES = ("hybrid_override_pattern", "attn_layer_period", "attn_type_list", "multi_query", "block_configs",
                "layers_block_type", "linear_attn_config", "full_attention_interval", "index_topk")


@dataclass(frozen=True)
class SizingOptions:
    """The command line: a model, what clients ask for, and what one engine was measured to do."""
    model: Annotated[str, Option("A folder with the model's config.json: print what a load needs in place of the table "
                                 "of ranks.", metavar="FOLDER")] = ""
    dtype: Annotated[str, Option("Type of the KV cache: float32, float16, bfloat16 or fp8.")] = "bfloat16"
    block_size: Annotated[int, Option("Tokens of a KV block.")] = 16
    tokens_per_s: Annotated[float, Option("Prompt tokens a second that prefill engines are to compute, of all clients "
                                          "together, without prefix hits.")] = 10_000.0
    prompt_tokens: Annotated[float, Option("Mean length of those prompts, in tokens.")] = 2_000.0
    answer_tokens: Annotated[float, Option("Mean length of an answer, in tokens.")] = 200.0
    prefill_speed: Annotated[float, Option("Prompt tokens a second of one prefill engine, as measured.")] = 0.0
    decode_speed: Annotated[float, Option("Answer tokens a second of one decode engine at the ITL that you want, as "
                                          "measured.")] = 0.0
    link_gbit_s: Annotated[float, Option("The link of one engine, in Gbit/s.")] = 0.0


@dataclass(frozen=True)
class ModelCache:
    """What a token has in the KV cache: `heads` x `content` elements in each of `layers`."""
    layers: int
    heads: int
    content: int
    words: str

    def token_bytes(self, dtype: str) -> int:
        """Bytes of one token in all layers."""
        return self.layers * self.heads * self.content * DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class Sizing:
    """What the load needs. `prefill` and `decode`: engines, None where their speed was not given."""
    options: SizingOptions
    shape: ModelCache

    @property
    def token_bytes(self) -> int:
        """Bytes of KV a token."""
        return self.shape.token_bytes(self.options.dtype)

    @property
    def bytes_per_s(self) -> float:
        """From all prefill engines to all decode engines."""
        return self.token_bytes * self.options.tokens_per_s

    @property
    def prompts_per_s(self) -> float:
        """Of all clients."""
        return self.options.tokens_per_s / self.options.prompt_tokens

    @property
    def prefill(self) -> int | None:
        """Prefill engines, each busy for BUSY of its time."""
        return _engines(self.options.tokens_per_s, self.options.prefill_speed)

    @property
    def decode(self) -> int | None:
        """Decode engines, likewise."""
        return _engines(self.prompts_per_s * self.options.answer_tokens, self.options.decode_speed)

    @property
    def link_shares(self) -> dict[str, float]:
        """The part of its link that an engine needs: a prefill engine while it computes without a pause, a decode
        engine on average. Above 1 the link is what prompts wait for. Only of those whose speed is known."""
        link = self.options.link_gbit_s * 1e9 / 8
        needs = {"prefill": self.options.prefill_speed * self.token_bytes,
                 "decode": self.bytes_per_s / self.decode if self.decode else 0.0}
        return {name: need / link for name, need in needs.items() if need and link}

    @property
    def transfer_s(self) -> float | None:
        """A mean prompt alone on the link."""
        link = self.options.link_gbit_s
        return self.token_bytes * self.options.prompt_tokens * 8 / (link * 1e9) if link else None

    @property
    def parked_s(self) -> float | None:
        """How long a prompt waits at its decode engine, on average: its turn, its prefill, its transfer.

        The turn is that of one queue with one server and equal prompts (Pollaczek-Khinchine, M/D/1): at a load of
        `busy` it takes busy / (2 (1 - busy)) prefills. Several engines that share a queue wait less; prompts of
        different lengths wait longer, by the factor 1 + v^2, v their standard deviation over their mean."""
        if self.prefill is None:
            return None
        one_s = self.options.prompt_tokens / self.options.prefill_speed
        busy = self.options.tokens_per_s / (self.prefill * self.options.prefill_speed)
        return one_s * (1 + busy / (2 * (1 - busy))) + (self.transfer_s or 0.0)

    @property
    def parked_blocks(self) -> int | None:
        """Blocks that all decode engines together keep for prompts on their way (Little's law)."""
        if self.parked_s is None:
            return None
        blocks = math.ceil(self.options.prompt_tokens / self.options.block_size)
        return math.ceil(self.prompts_per_s * self.parked_s * blocks)

    def lines(self) -> list[str]:
        """As printed."""
        options, gb = self.options, 1e9
        lines = [f"KV of a token: {self.token_bytes:,} bytes ({self.shape.words}, {options.dtype})",
                 f"KV of a prompt of {options.prompt_tokens:,.0f} tokens: "
                 f"{self.token_bytes * options.prompt_tokens / 1e6:,.0f} MB",
                 f"between prefill and decode engines at {options.tokens_per_s:,.0f} tokens/s: "
                 f"{self.bytes_per_s / gb:,.2f} GB/s ({self.bytes_per_s * 8 / gb:,.1f} Gbit/s)"]
        if self.prefill is None:
            lines.append("prefill engines: give --prefill-speed, as measured: prompt tokens a second of one")
        else:
            parked_bytes = self.parked_blocks * options.block_size * self.token_bytes
            lines += [f"prefill engines: {self.prefill}, each busy for at most {BUSY:.0%} of its time",
                      f"blocks that wait at decode engines for their KV: {self.parked_blocks:,} of "
                      f"{options.block_size} tokens, {parked_bytes / gb:,.1f} GB in all"]
        if self.decode is None:
            lines.append("decode engines: give --decode-speed, as measured: answer tokens a second of one")
        else:
            lines.append(f"decode engines: {self.decode}, likewise")
        if self.prefill and self.decode:
            lines.append(f"prefill to decode: 1 to {self.decode / self.prefill:,.1f}")
        if self.transfer_s is not None:
            lines.append(f"a prompt's transfer at {options.link_gbit_s:g} Gbit/s: {self.transfer_s * 1e3:,.1f} ms")
        for name, share in self.link_shares.items():
            enough = "enough" if share <= BUSY else "little room" if share < 1 else "NOT enough"
            lines.append(f"a {name} engine needs {share:.0%} of its link: {enough}")
        return lines

    def as_json(self) -> dict[str, Any]:
        """For --json. Times in seconds."""
        return {"token_bytes": self.token_bytes, "bytes_per_s": self.bytes_per_s, "prefill_engines": self.prefill,
                "decode_engines": self.decode, "parked_blocks": self.parked_blocks, "parked_s": self.parked_s,
                "transfer_s": self.transfer_s, "link_shares": self.link_shares}


def size(options: SizingOptions) -> Sizing:
    """What the load needs. Raises ConfigError."""
    if options.dtype not in DTYPE_BYTES:
        raise ConfigError("--dtype", options.dtype, f"write one of {', '.join(DTYPE_BYTES)}")
    for field in ("block_size", "tokens_per_s", "prompt_tokens", "answer_tokens"):
        _require(field, getattr(options, field), 0 < getattr(options, field) < math.inf, "above 0")
    for field in ("prefill_speed", "decode_speed", "link_gbit_s"):
        value = getattr(options, field)
        _require(field, value, value == 0 or LEAST <= value < math.inf, f"of {LEAST:g} or more, or leave it out")
    return Sizing(options, read_shape(Path(options.model)))


def refuse_mix(split: SplitOptions, load: SizingOptions) -> None:
    """`vllm-pd plan` does one of two things. Raises ConfigError for options of the one with those of the other, which
    would be ignored. `split`: the options of the table of ranks."""
    ignored, cure = ((split, "it is of the table of ranks: leave out --model, or this") if load.model else
                     (load, "it says what a load needs: add --model FOLDER, or leave it out"))
    for field in dataclasses.fields(ignored):
        if getattr(ignored, field.name) != field.default:
            raise ConfigError(flag_of(field.name), getattr(ignored, field.name), cure)


def read_shape(folder: Path) -> ModelCache:
    """The shape of the KV cache of the model in this folder. Raises ConfigError where there is none, and for a model
    whose KV is no multiple of its tokens."""
    file = folder / "config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("--model", str(folder), f"{error}: write a folder with the model's config.json") from error
    text = found.get("text_config", found) if isinstance(found, dict) else None
    if not isinstance(text, dict):
        raise ConfigError("--model", str(folder), f"{file} is no configuration of a model: it has no keys")
    return shape_of(text, str(folder))


def shape_of(config: Mapping[str, Any], model: str) -> ModelCache:
    """The shape by a model's configuration. Raises ConfigError naming `model`."""
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind not in WINDOWS for kind in kinds):
        raise ConfigError("--model", model, f"its layer_types are {kinds!r:.200}: only models whose layers all have KV "
                          f"of each token ({', '.join(WINDOWS)}) are sized: compute it by hand")
    if unknown := [key for key in OTHER_SHAPES if config.get(key)]:
        raise ConfigError("--model", model, f"its config.json has {unknown[0]}, so its layers have KV of several "
                          "shapes, or none: compute it by hand")
    layers = _number(config, model, "num_hidden_layers")
    if config.get("kv_lora_rank"):
        content = _number(config, model, "kv_lora_rank") + _number(config, model, "qk_rope_head_dim")
        return ModelCache(layers, 1, content, f"{layers} layers, MLA with {content} elements")
    heads = _number(config, model, "num_attention_heads")
    size = (_number(config, model, "head_dim") if config.get("head_dim") is not None
            else _number(config, model, "hidden_size") // heads)
    if size < 1:
        raise ConfigError("--model", model, f"its {heads} heads are more than its hidden_size: it has no head_dim")
    kv_heads = _number(config, model, "num_key_value_heads") if "num_key_value_heads" in config else heads
    return ModelCache(layers, kv_heads, 2 * size, f"{layers} layers, {kv_heads} KV heads of {size}")


def _engines(work: float, speed: float) -> int | None:
    return math.ceil(work / (speed * BUSY)) if speed else None


def _number(config: Mapping[str, Any], model: str, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError("--model", model, f"its config.json has no {key} above 0, but {value!r}")
    return value


def _require(field: str, value: float, good: bool, wanted: str) -> None:
    if not good:
        raise ConfigError(flag_of(field), value, f"write a number {wanted}")
