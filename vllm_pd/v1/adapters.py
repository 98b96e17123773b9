# SPDX-License-Identifier: Apache-2.0
"""Which LoRA adapters an engine has, by the digest of their files.

vLLM's front end names an adapter and its path; EngineCore learns of it when it is loaded (`add_lora`: `--lora-modules`,
the route, a resolver), or by its first request. It is noted here then. D names the digest in its job; a prefill engine
lists the digests of what its own front end has loaded, and computes a job with a LoRARequest of its own over that
path: a path never comes from a peer. That request is named by the digest, because V1's block hashes have the name and
the path of an adapter, and not its content.

A name and a path stand for the files that were there when they were noted. Where these have changed since, V1's own
prefix cache may have blocks of both: requests with that adapter stay here until the engine is restarted. (vLLM itself
says to load changed files from a new path.) Jobs are computed with what was loaded last: by another digest, so under
another name.
"""
from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_pd.model.adapters import FilesState, digest_adapter, state_of_adapter
from vllm_pd.protocol.scope import MAX_ADAPTERS, adapter_scope

if TYPE_CHECKING:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.request import LoRARequest

logger = logging.getLogger("vllm.pd")

FIRST_ID = 1 << 30  # of our own LoRARequests; those of front ends count from 1
MAX_NOTED = 4096  # names and paths; prompts with further ones stay here
LOOK_S = 1.0  # for how long the files of an adapter count as unchanged


class _Adapter(NamedTuple):
    """An adapter whose files these are, and the number of our LoRARequest for it. `is_3d`: as the front end says."""
    path: str
    is_3d: bool
    state: FilesState
    digest: bytes
    number: int


class AdapterBook:
    """The adapters of one engine. Used from its step loop only. `config` None: LoRA is off. `changed`, if set, gets
    what a prefill engine's registry entry is to list, when that is another."""

    def __init__(self, config: LoRAConfig | None) -> None:
        self.changed: Callable[[tuple[str, ...]], None] | None = None
        self.max_loras = 0 if config is None else config.max_loras
        self._settings = "" if config is None else f"{config.lora_dtype} {sorted(config.target_modules or ())}"
        self._named: dict[tuple[str, str], _Adapter | None] = {}  # by name and path; None: stays here, see above
        self._offered: dict[bytes, _Adapter] = {}  # by digest, the last one at the end
        self._looked: dict[str, tuple[float, FilesState]] = {}  # by path: when its files were looked at
        self._numbers = FIRST_ID

    def load(self, request: LoRARequest, load: Callable[[LoRARequest], bool]) -> bool:
        """Have V1 `load` this adapter, maybe in the place of other files, and note what was loaded."""
        before = self._state(request.lora_path, now=True)
        is_loaded = load(request)
        found = known = self._named.get(_key(request))
        if known is None or known.state != before:
            found = self._read(request)
            if found is not None and found.state != before:
                found = None  # written meanwhile
            for other in [one for one in (known, *self._offered.values()) if one is not None and one != found
                          and one.path == request.lora_path and one.state != before]:
                self._forget(other)
            if _key(request) not in self._named:
                self._name(request, found)
        if found is not None and self._offered.get(found.digest) != found:
            self._offered.pop(found.digest, None)
            self._offered[found.digest] = found
            self._announce()
        return is_loaded

    def digest(self, request: LoRARequest) -> bytes:
        """Of the adapter of a client's request; empty where no other engine can have its KV."""
        if _key(request) not in self._named:
            self._name(request, self._read(request))
        known = self._named.get(_key(request))
        return known.digest if known is not None and self._is_unchanged(known) else b""

    def request(self, digest: bytes, make: Callable[..., LoRARequest]) -> LoRARequest:
        """With which a job is computed. `make` is vLLM's class. Raises ValueError where this engine has loaded none
        with this digest."""
        known = self._offered.get(digest)
        if known is None or not self._is_unchanged(known):
            raise ValueError(f"no LoRA adapter with the digest {digest.hex()[:16]} is loaded here, or its files have "
                             "changed since: load it by --lora-modules or /v1/load_lora_adapter")
        return make(lora_name=f"pd-{digest.hex()}", lora_int_id=known.number, lora_path=known.path,
                    is_3d_lora_weight=known.is_3d)

    def scopes(self) -> tuple[str, ...]:
        """Those whose jobs can be done here: the last MAX_ADAPTERS that were loaded."""
        return tuple(map(adapter_scope, list(self._offered)[-MAX_ADAPTERS:]))

    def _name(self, request: LoRARequest, found: _Adapter | None) -> None:
        if len(self._named) >= MAX_NOTED:
            return
        self._named[_key(request)] = found
        if found is None:
            logger.warning("LoRA adapter %r is in no folder here (%s): its prompts stay with this engine",
                           request.lora_name, request.lora_path)

    def _read(self, request: LoRARequest) -> _Adapter | None:
        """None where it is no folder of this host."""
        folder = Path(request.lora_path).expanduser()
        try:
            state = state_of_adapter(folder)
            digest = digest_adapter(folder, f"{self._settings} {request.is_3d_lora_weight}")
        except OSError:
            return None
        self._numbers += 1
        self._looked[request.lora_path] = time.monotonic(), state
        return _Adapter(request.lora_path, request.is_3d_lora_weight, state, digest, self._numbers)

    def _is_unchanged(self, known: _Adapter) -> bool:
        if self._state(known.path) == known.state:
            return True
        self._forget(known)
        return False

    def _forget(self, known: _Adapter) -> None:
        """Its files have changed."""
        for key in [key for key, one in self._named.items() if one == known]:
            logger.warning("the files of LoRA adapter %r in %s have changed: its prompts stay with this engine; load "
                           "changed files from a new path", *key)
            self._named[key] = None
        if self._offered.get(known.digest) == known:
            del self._offered[known.digest]
            self._announce()

    def _state(self, path: str, now: bool = False) -> FilesState:
        """Of the files there, as of LOOK_S ago at most; empty where there are none."""
        time_s = time.monotonic()
        looked_at, found = self._looked.get(path, (float("-inf"), ()))
        if now or time_s - looked_at >= LOOK_S:
            try:
                found = state_of_adapter(Path(path).expanduser())
            except OSError:
                found = ()
            self._looked[path] = time_s, found
        return found

    def _announce(self) -> None:
        if self.changed is not None:
            self.changed(self.scopes())


def _key(request: LoRARequest) -> tuple[str, str]:
    return request.lora_name, request.lora_path


def watch_adapters(engine: Any, book: AdapterBook) -> None:
    """From now on the book notes what this EngineCore loads for its front end."""
    add = engine.add_lora

    @functools.wraps(add)  # by whose signature V1 decodes what its front end sends
    def add_lora(lora_request: LoRARequest) -> bool:
        return book.load(lora_request, add)

    engine.add_lora = add_lora
