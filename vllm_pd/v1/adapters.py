# SPDX-License-Identifier: Apache-2.0
"""Which LoRA adapters an engine has, by the digest of their files.

vLLM's front end names an adapter and its path, and EngineCore learns of it when it is loaded (`add_lora`:
`--lora-modules`, the route, a resolver). It is noted here then. D names the digest in its job. A prefill engine lists
the digests of what its front end has loaded, and computes a job with the LoRARequest of that load: nothing more is
loaded because of a peer, and no path comes from one.

vLLM's workers may read the files of an adapter again at any step, and its prefix cache knows the adapter by name and
path only. So a name and a path stand for the files that were there at the first load, for as long as the process
lives: where these have changed, prompts with that adapter stay here and no job is computed with it, until it is loaded
by another name or from another path. The same goes for a number (`lora_int_id`) under which two were loaded, for the
workers do not load the second one while they have the first, and for an adapter that a request used before any load.
"""
from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_pd.model.adapters import Look
from vllm_pd.protocol.scope import MAX_ADAPTERS, adapter_scope
from vllm_pd.v1.adapter_files import AdapterFiles, AdapterReader

if TYPE_CHECKING:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.pd")

MAX_NOTED = 1 << 16  # numbers, and pairs of name and path; what comes after them stays here

_Key = tuple[str, str]  # name and path
NOBODY: _Key = "", ""  # of a number under which a load has failed


@dataclass
class _Adapter:
    """What a name and a path stand for. `request`: of the last load. `files` None: not known since when it is in use.
    `stays`: nothing is computed with it for others, or by others."""
    request: LoRARequest
    files: AdapterFiles | None
    stays: bool


class AdapterBook:
    """The adapters of one engine. Used from its step loop only. `config` None: LoRA is off. `is_offering`: whether it
    computes jobs with them."""

    def __init__(self, config: LoRAConfig | None, reader: AdapterReader, is_offering: bool) -> None:
        self.max_loras = 0 if config is None else config.max_loras
        self._most_offered = 0 if config is None or not is_offering else min(config.max_cpu_loras, MAX_ADAPTERS)
        self._settings = "" if config is None else f"{config.lora_dtype} {sorted(config.target_modules or ())}"
        self._reader = reader
        self._adapters: dict[_Key, _Adapter] = {}  # the last one that was loaded at the end
        self._keys: dict[int, _Key] = {}  # by number: what was loaded or used under it first

    def load(self, request: LoRARequest, load: Callable[[LoRARequest], bool]) -> bool:
        """Have V1 `load` this adapter, and note what was loaded. Looks at the files, as the load does."""
        try:
            look = self._reader.look(_folder(request))
        except (OSError, ValueError):  # the latter for what is no path
            look = None  # `load` says what is wrong, or knows the path as a name of a hub
        is_loaded = False
        try:
            is_loaded = load(request)
        finally:
            if is_loaded:
                self._note(request, look, is_load=True)
            else:
                self._note_failure(request.lora_int_id)
        return is_loaded

    def note_use(self, request: LoRARequest) -> None:
        """A client's request has this adapter."""
        self._note(request, None, is_load=False)

    def digest(self, request: LoRARequest) -> bytes:
        """Of the adapter of a client's request: the same for as long as the process lives, once it is known; empty
        until then, and where no other engine can have its KV."""
        found = self._find(request)
        return b"" if found is None or found.files is None else found.files.digest

    def is_usable(self, request: LoRARequest) -> bool:
        """Whether its digest says what it is now."""
        return self._is_usable(self._find(request))

    def request(self, digest: bytes) -> LoRARequest:
        """With which a job is computed. Raises ValueError where this engine has none for this digest at the moment."""
        for one in self._offered():
            if one.files.digest == digest:
                return one.request
        raise ValueError(f"no LoRA adapter with the digest {digest.hex()[:16]} is offered here, or its files have "
                         "changed or can't be looked at")

    def scopes(self) -> tuple[str, ...]:
        """Those whose jobs can be done here."""
        return tuple(dict.fromkeys(adapter_scope(one.files.digest) for one in self._offered()))

    def fits(self, adapter: LoRARequest, others: Iterable[Request]) -> bool:
        """Whether a batch of the `others` may have this adapter, too."""
        used = {one.lora_request.lora_int_id for one in others if one.lora_request is not None}
        return len(used | {adapter.lora_int_id}) <= self.max_loras

    def look(self) -> None:
        """Have the files of all adapters looked at now."""
        self._reader.ask()

    def unchanged_since(self, request: LoRARequest, since: float) -> bool | None:
        """Whether its files were unchanged from its load on, at least until the time `since` of the monotonic clock;
        None: not known yet."""
        found = self._find(request)
        if found is None or found.files is None or found.stays or found.files.have_changed:
            return False
        return True if found.files.unchanged_at > since else None

    def _offered(self) -> list[_Adapter]:
        """The last ones that were loaded, as many as the workers keep in memory: no job makes them read files again
        that clients' prompts need no more."""
        if not self._most_offered:
            return []
        return list(filter(self._is_usable, list(self._adapters.values())[:-self._most_offered - 1:-1]))

    def _is_usable(self, one: _Adapter | None) -> bool:
        return (one is not None and one.files is not None and not one.stays
                and one.files.are_unchanged(self._reader.clock()))

    def _find(self, request: LoRARequest) -> _Adapter | None:
        key = _key(request)
        return self._adapters.get(key) if self._keys.get(request.lora_int_id) == key else None

    def _note(self, request: LoRARequest, look: Look | None, is_load: bool) -> None:
        """A request with this adapter has come, or is to be loaded: remember by which number and files."""
        number, key = request.lora_int_id, _key(request)
        first = self._keys.get(number, key)
        if first != key:
            for one in (first, key):
                self._stay(one, f"the number {number} was used for {first} and {key}")
            look = None
        if number in self._keys and key in self._adapters:
            self._note_again(request, look, is_load)
        elif len(self._keys) + len(self._adapters) < MAX_NOTED:
            self._keys.setdefault(number, key)
            if key in self._adapters:
                self._note_again(request, look, is_load)
            else:
                self._adapters[key] = self._made(request, look)
            if len(self._keys) + len(self._adapters) >= MAX_NOTED:
                logger.warning("so many LoRA adapters were loaded that prompts of further ones stay with this engine "
                               "until it is restarted")

    def _note_failure(self, number: int) -> None:
        """A load under this number has failed. Some workers may have what was loaded, or a part of it, in the place of
        what they had: nothing is ever computed with that number for others."""
        self._stay(self._keys.get(number, NOBODY), f"a load under its number {number} has failed")
        if number in self._keys or len(self._keys) + len(self._adapters) < MAX_NOTED:
            self._keys[number] = NOBODY

    def _made(self, request: LoRARequest, look: Look | None) -> _Adapter:
        files = None
        if look is None:
            logger.warning("LoRA adapter %r (%s) is in no folder that can be looked at, or was not loaded before its "
                           "first use: its prompts stay with this engine", *_key(request))
        else:
            live = [key for key, one in self._adapters.items() if not one.stays]
            if len(live) >= MAX_ADAPTERS:
                self._stay(live[0], f"{MAX_ADAPTERS} were loaded since")
            files = self._reader.watch(_folder(request), f"{self._settings} {request.is_3d_lora_weight}", look)
        return _Adapter(_plain(request), files, stays=files is None)

    def _note_again(self, request: LoRARequest, look: Look | None, is_load: bool) -> None:
        key = _key(request)
        known = self._adapters[key]
        if not is_load or known.stays:
            return
        if (look or known.files.look) != known.files.look or (
                request.is_3d_lora_weight != known.request.is_3d_lora_weight):
            self._stay(key, "its files have changed")
            return
        known.request = _plain(request)
        self._adapters[key] = self._adapters.pop(key)

    def _stay(self, key: _Key, reason: str) -> None:
        known = self._adapters.get(key)
        if known is None or known.stays:
            return
        known.stays = True
        self._reader.unwatch(known.files)
        logger.warning("prompts of LoRA adapter %r (%s) stay with this engine from now on: %s; load it by another name "
                       "or from another path", *key, reason)


def _key(request: LoRARequest) -> _Key:
    return request.lora_name, request.lora_path


def _folder(request: LoRARequest) -> Path:
    """As vLLM finds it."""
    return Path(os.path.expanduser(request.lora_path))


def _plain(request: LoRARequest) -> LoRARequest:
    """The same without `load_inplace`, with which the workers would load it at each step."""
    return msgspec.structs.replace(request, load_inplace=False)


def watch_adapters(engine: Any, book: AdapterBook) -> None:
    """From now on the book notes what this EngineCore loads for its front end."""
    add = engine.add_lora

    @functools.wraps(add)  # by whose signature V1 decodes what its front end sends
    def add_lora(lora_request: LoRARequest) -> bool:
        return book.load(lora_request, add)

    engine.add_lora = add_lora
