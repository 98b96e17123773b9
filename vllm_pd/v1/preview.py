# SPDX-License-Identifier: Apache-2.0
"""What an engine would say at its start, from its command line alone: a program of its own, which
`vllm-pd doctor --for` runs (`vllm_pd.ops.for_command`).

vLLM parses the line and makes the configuration as `vllm serve` does; our part of that (`vllm_pd.v1.claim`) refuses it
or takes it over, as at a start. Nothing is listed here a second time. Two things differ: what only this machine or the
model's files decide is asked as far as no port and no weights are needed (`_Host`), and vLLM looks for models in the
hub's cache alone.

vLLM is imported once, then each line is looked at in a fork of the program, so that it has a command line of its own,
which the checks look at, too.
"""
from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from vllm_pd.errors import ConfigError, MissingPackage, PDError
from vllm_pd.protocol.messages import Fingerprint, Member
from vllm_pd.protocol.scope import MAX_MEDIA_BYTES
from vllm_pd.v1.required import check_once

if TYPE_CHECKING:
    import argparse

    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.v1.request import Request

    from vllm_pd.settings.engine import PDConfig

LINES, REPLY, ERROR = "lines.json", "reply-{}", ".error"  # files of the folder that the program is given
PRELOADED = ("vllm.entrypoints.cli.serve", "vllm._aiter_ops", "vllm_pd.v1.connector")  # each line would import them
STORE_CONNECTOR = "PDStoreConnector"
PYDANTIC_LINK = "For further information visit"
SALT_CHARS = 1 << 16  # more than any job carries


class Refusal(msgspec.Struct, frozen=True):
    """Why something can't be, and what to do about it."""
    fact: str
    cure: str

    @classmethod
    def of(cls, error: PDError) -> Refusal:
        """That of an error of ours."""
        if isinstance(error, ConfigError):
            return cls(f"{error.key}={error.value!r} can't be used", error.cure)
        if isinstance(error, MissingPackage):
            return cls(f"not installed: {', '.join(error.modules)}", error.cure)
        return cls(f"vllm refuses it: {error}", "change the line as that says: it is vLLM's own error, and comes "
                   "without disaggregation, too; `vllm serve` with this line logs more about it")


class _VllmError(PDError):
    """vLLM itself refuses the configuration."""


class Preview(msgspec.Struct):
    """What became of one command line. Exactly one of `usage`, `refusal` and `engine` is set."""
    usage: str = ""  # vLLM's own message, if this is no command line of it
    refusal: Refusal | None = None
    engine: str = ""  # what it would be
    device: str = ""  # of which vLLM made the configuration
    is_guessed: bool = False  # there is no device here, so it was made for the CPU
    member: Member | None = None  # as it would register, as far as that is known; None without PDConnector
    broker: str = ""
    backend: str = ""  # of attention, if the line names one
    stays: list[str] = []  # prompts that no peer prefills
    here: list[Refusal] = []  # of this machine
    weights: Refusal | None = None  # there are none here


def main() -> None:
    """Look at the lines of a folder, one list of words each, and leave one reply of each there."""
    folder = Path(sys.argv[1])
    lines = json.loads((folder / LINES).read_text())
    is_guessed = _choose_platform()
    for module in PRELOADED:
        with contextlib.suppress(ImportError):  # a line that needs it says so
            importlib.import_module(module)
    with contextlib.suppress(PDError):  # likewise
        check_once()
    running = 0
    for number, words in enumerate(lines):
        if running == (os.cpu_count() or 1):
            os.wait()
            running -= 1
        if os.fork() == 0:
            _reply(folder / REPLY.format(number), words, is_guessed)
        running += 1
    for _ in range(running):
        os.wait()


def _reply(file: Path, words: list[str], is_guessed: bool) -> NoReturn:
    """Look at one line, in a process for it alone, and end that."""
    try:
        sys.argv = ["vllm", "serve", *words]
        preview = preview_line(words)
        preview.is_guessed = is_guessed
        part = file.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(preview))
        part.rename(file)
    except BaseException:
        file.with_suffix(ERROR).write_text(traceback.format_exc())
    finally:
        os._exit(0)  # whatever vLLM would do at an exit is the program's


def _choose_platform() -> bool:
    """Without a device vLLM makes no configuration. Have it make one for the CPU, as `vllm bench` does. Returns whether
    that was needed."""
    from vllm import platforms
    if not platforms.current_platform.is_unspecified():
        return False
    from vllm.platforms.cpu import CpuPlatform
    platforms.current_platform = CpuPlatform()
    return True


def preview_line(words: list[str]) -> Preview:
    """What `vllm serve` with these words would say. `sys.argv` must have them, too."""
    from vllm.platforms import current_platform

    from vllm_pd.v1.claim import rehearse
    preview, host = Preview(device=current_platform.device_type), _Host()
    rehearse(host.ask)
    name = ""
    try:
        arguments = _parse(words, preview)
        if arguments is None:
            return preview
        name = arguments.model
        _find_model("model", name, arguments.revision)
        drafter = (arguments.speculative_config or {}).get("model")
        if drafter is not None and "/" in drafter:
            _find_model("speculative_config.model", drafter, arguments.speculative_config.get("revision"))
        _describe(_make_config(arguments), preview, "" if Path(name).exists() else name)
    except PDError as error:
        preview.refusal = Refusal.of(error)
    preview.here = host.refusals
    preview.weights = host.weights if Path(name).exists() else None  # a start downloads those of a hub's model
    return preview


def _parse(words: list[str], preview: Preview) -> argparse.Namespace | None:
    """By vLLM's own parser for `vllm serve`. None, and the message is in the preview, if it takes them for none.
    Raises ConfigError: making the parser loads the plugin, which looks at the command line."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    parser = FlexibleArgumentParser(prog="vllm")
    below = parser.add_subparsers(dest="subparser")
    (serve, ) = [command for command in cmd_init() if command.name == "serve"]
    serve.subparser_init(below)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            arguments = parser.parse_args(["serve", *words])
            serve.validate(arguments)
    except SystemExit as end:
        _, found, message = said.getvalue().partition(": error: ")
        message = " ".join(message.partition(PYDANTIC_LINK)[0].split())
        preview.usage = (f"vllm: error: {message}" if found and end.code else
                         "vllm serve says something with that, and ends")
        return None
    except PDError:
        raise
    except Exception as error:  # what a flag's value or a file of flags is not
        preview.usage = f"vllm: error: {_words_of(error)}"
        return None
    if arguments.model_tag is not None:
        arguments.model = arguments.model_tag
    return arguments


def _find_model(key: str, name: str, revision: str | None) -> None:
    """The model's configuration must be on this machine. Raises ConfigError."""
    if Path(name).exists():
        return
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    try:
        found = [try_to_load_from_cache(name, file, revision=revision) for file in ("config.json", "params.json")]
    except HFValidationError:  # a path, or a URL
        raise ConfigError(key, name, "there is no such folder here, so nothing about the model can be known: write one "
                          "that has its config.json, or a model of the hub") from None
    if not any(isinstance(one, str) for one in found):
        raise ConfigError(key, name, "it is neither a folder here nor in the hub's cache, and nothing is downloaded "
                          "now, so nothing about the model can be known: write a folder that has its config.json, or "
                          f"download that file first: hf download {name} config.json")


def _make_config(arguments: argparse.Namespace) -> VllmConfig:
    """As a server makes it. Raises _VllmError, ConfigError where the plugin refuses it or was not asked."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from vllm_pd.v1.plugin import CONNECTOR
    from vllm_pd.v1.settings import read_settings
    try:
        config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
    except PDError:
        raise
    except Exception as error:  # vLLM raises whatever it likes
        raise _VllmError(_words_of(error)) from error
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == CONNECTOR:
        read_settings(config)  # raises where the plugin did not come to it
    return config


def _words_of(error: Exception) -> str:
    """The message of an error of vLLM in one line; of pydantic's without what surrounds it."""
    from pydantic import ValidationError
    said = str(error)
    if isinstance(error, ValidationError):
        said = "; ".join(one["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
                         for one in error.errors())
    return " ".join(said.split()) or type(error).__name__


class _Host:
    """In place of `vllm_pd.v1.claim.check_host`: without binding a named port, a NIXL agent, or weights."""

    def __init__(self) -> None:
        self.refusals: list[Refusal] = []
        self.weights: Refusal | None = None

    def ask(self, config: VllmConfig, ours: PDConfig) -> None:
        """What can be asked here. Raises ConfigError for weights that can never be distinguished from a peer's."""
        from vllm_pd.extras import require_extra
        from vllm_pd.model.checks import check_bind, check_meeting
        from vllm_pd.model.fingerprint import pin_files
        from vllm_pd.rpc.nats_address import NatsAddress
        self._note(lambda: check_bind(ours.bind))
        self._note(lambda: check_meeting(ours.bind, ours.broker))
        if NatsAddress.is_url(ours.broker):
            self._note(lambda: require_extra("nats"))
        for model, load in _models(config):
            try:
                pin_files(model, load, ours.weights_digest if model is config.model_config else None)
            except ConfigError as error:
                if error.key != "model" or not Path(model.model).is_dir():
                    raise
                self.weights = Refusal.of(error)

    def _note(self, check: Callable[[], None]) -> None:
        try:
            check()
        except PDError as error:
            self.refusals.append(Refusal.of(error))


def _models(config: VllmConfig) -> Iterator[tuple[ModelConfig, LoadConfig]]:
    """Those whose weights are loaded, and how."""
    from vllm_pd.model.drafter import keeps_kv
    yield config.model_config, config.load_config
    if keeps_kv(config):
        drafting = config.speculative_config
        yield drafting.draft_model_config, drafting.draft_load_config or config.load_config


def _describe(config: VllmConfig, preview: Preview, hub_name: str) -> None:
    """What an engine with this configuration, which was not refused, would be. `hub_name`: of a model of the hub, in
    whose place vLLM has put the folder of its cache. Raises ConfigError."""
    from vllm_pd.settings.engine import PDConfig
    from vllm_pd.v1.plugin import CONNECTOR
    from vllm_pd.v1.settings import read_settings
    model, parallel, transfer = config.model_config, config.parallel_config, config.kv_transfer_config
    connector = None if transfer is None else transfer.kv_connector
    if connector == STORE_CONNECTOR:
        _check_store(config)
        preview.engine = f"{STORE_CONNECTOR}, {model.architecture}: it shares blocks, and hands no prompt over"
        return
    if connector != CONNECTOR:
        raise ConfigError("kv_connector", connector, f"write \"kv_connector\": \"{CONNECTOR}\" into "
                          "--kv-transfer-config: as it is, this engine would serve, and work with no other of vllm-pd")
    settings = read_settings(config)
    ours = PDConfig.parse(settings.kv_role, settings.extra)
    preview.broker = ours.broker
    backend = config.attention_config.backend
    preview.backend = "" if backend is None else backend.name
    preview.member = Member("preview", ours.role, "", known_fingerprint(config, ours, hub_name))
    parts = [settings.kv_role, model.architecture, str(model.dtype).removeprefix("torch."),
             f"TP {parallel.tensor_parallel_size}", f"PP {parallel.pipeline_parallel_size}"]
    if parallel.data_parallel_size > 1:
        parts.append(f"DP {parallel.data_parallel_size}")
    if config.speculative_config is not None:
        parts.append(f"drafts by {config.speculative_config.method}")
    preview.engine = f"{', '.join(parts)}; broker {ours.broker}"
    if ours.role.decodes:
        preview.stays = list(stays_here(config, ours))


def _check_store(config: VllmConfig) -> None:
    """As this connector does once it is made."""
    from vllm_pd.model.store_checks import check_storing
    from vllm_pd.settings.store import StoreSettings
    check_storing(config)
    StoreSettings.parse_connector(config.kv_transfer_config.kv_connector_extra_config or {})


def known_fingerprint(config: VllmConfig, ours: PDConfig, hub_name: str) -> Fingerprint:
    """The engine's fingerprint, as far as it is known before the model is loaded, so that two of them may be compared:
    without the weights of a folder, in place of which a hub's model has name and commit, and with the backend and the
    layout left to vLLM unless the line says other."""
    from vllm import envs

    from vllm_pd.model.drafter import drafter_layers
    from vllm_pd.protocol.rows import BlockRows
    from vllm_pd.transfer.layout import Layout
    from vllm_pd.v1.fingerprint import CacheShape, fingerprint
    model, cache = config.model_config, config.cache_config
    order = envs.VLLM_KV_CACHE_LAYOUT or "HN"
    layout = Layout.KV_HEADS_FIRST if order.index("H") < order.index("N") else Layout.KV_TOKENS_FIRST
    layers = model.get_total_num_hidden_layers() + drafter_layers(config)
    shape = CacheShape(str(model.dtype).removeprefix("torch."), cache.block_size, layers, layout)
    found = fingerprint(_without_weights(config), shape, "", BlockRows(cache.block_size, _windows(config)),
                        f"recurrent, num_speculative_tokens {config.num_speculative_tokens}"
                        if model.has_inner_state else "")
    name = f" of {hub_name} at {Path(model.model).name}" if hub_name else ""
    return msgspec.structs.replace(found, model=found.model + name, transport=ours.transport)


def _without_weights(config: VllmConfig) -> VllmConfig:
    """The configuration, as if no weights of a folder were loaded: they would be read to tell two models apart."""
    from vllm_pd.model.fingerprint import is_elsewhere
    config, drafting = copy.copy(config), copy.copy(config.speculative_config)
    load = dataclasses.replace(config.load_config, load_format="dummy")
    if drafting is not None and drafting.draft_model_config is not None:
        own = drafting.draft_load_config or config.load_config
        drafting.draft_load_config = load if Path(drafting.draft_model_config.model).exists() else own
    config.speculative_config = drafting
    if Path(config.model_config.model).exists() or is_elsewhere(config.model_config, config.load_config):
        config.load_config = load
    return config


def _windows(config: VllmConfig) -> tuple[int, ...]:
    """Whether layers with a window are in groups of their own: one of each, which is enough to see who does other."""
    if config.scheduler_config.disable_hybrid_kv_cache_manager or config.model_config.has_inner_state:
        return ()
    model = config.model_config.hf_text_config
    window = getattr(model, "sliding_window", None)
    return (0, window) if window and "sliding_attention" in (getattr(model, "layer_types", None) or ()) else ()


def stays_here(config: VllmConfig, ours: PDConfig) -> Iterator[str]:
    """The kinds of prompts that this engine would hand over to nobody: `vllm_pd.v1.features` is asked about one of
    each that this configuration can have, and the settings about short ones."""
    from vllm_pd.v1.adapters import AdapterBook
    from vllm_pd.v1.features import can_go_remote
    from vllm_pd.v1.media import MediaBook, encoder_name
    if ours.decides_by_time:
        yield "prompts that it computes sooner itself (max_local_prefill_tokens auto)"
    else:
        yield (f"prompts with up to {ours.max_local_prefill_tokens} tokens that are not cached "
               "(max_local_prefill_tokens)")
    book, media = AdapterBook(config.lora_config, None, False), MediaBook(encoder_name(config) if ours.media else "")
    for name, request in _samples(config):
        if not can_go_remote(request, book, media):
            yield name


def _samples(config: VllmConfig) -> Iterator[tuple[str, Request]]:
    """One request of each kind that may matter, and its name."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    def request(params: dict[str, Any] | None = None, tokens: list[int] | None = None, **more: Any) -> Request:
        made = SamplingParams(max_tokens=1, **(params or {}))
        return Request("preview", [1] if tokens is None else tokens, made, None, **more)

    yield "plain prompts", request()
    yield "prompts whose tokens' logprobs are asked for (prompt_logprobs)", request({"prompt_logprobs": 1})
    yield "prompts that are to read no prefix cache", request({"skip_reading_prefix_cache": True})
    yield "prompts with a cache_salt longer than a job carries", request(cache_salt="x" * SALT_CHARS)
    yield "prompts that are still coming in (streaming input)", request(resumable=True)
    if config.model_config.is_multimodal_model:
        yield "prompts with images, audio or video", request(mm_features=[_media(1)])
        yield (f"prompts with more than {MAX_MEDIA_BYTES >> 20} MiB of images, audio or video",
               request(mm_features=[_media(MAX_MEDIA_BYTES)]))
    if config.model_config.enable_prompt_embeds:
        yield "prompts of embeddings", request(prompt_embeds=_embeds())


def _media(size: int) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
    return MultiModalFeatureSpec(data=MultiModalKwargsItem.dummy(size), modality="image", identifier="preview",
                                 mm_position=PlaceholderRange(offset=0, length=1))


def _embeds() -> Any:
    import torch
    return torch.zeros(1, 1)
