# SPDX-License-Identifier: Apache-2.0
"""What decides, beside its tokens, whose KV a prompt may use: its `PromptScope`.

Equal tokens of two scopes are two prompts, for every cache, hold and twin. An engine of an older release reads no scope
from a job, and would compute the tokens alone. So a job with a scope goes to nobody who does not say in the registry
that it reads all of it (`PromptScope.needs`, `Member.scopes`), and D grants a claim only if that names the scope
(`Claim.scope`): then P has read it, whatever became of the job on its way.
"""
import hashlib
from collections.abc import Collection
from typing import Annotated

import msgspec

from vllm_pd.protocol.fields import stable_values

MAX_SALT_BYTES = 512  # in UTF-8
MAX_SCOPES = 256  # in the entry of one engine
MAX_ADAPTERS = 128  # of them
DIGEST_BYTES = 32
NOBODYS = bytes(DIGEST_BYTES)  # the digest of an adapter that no other engine can have
SALT = "salt"


def adapter_scope(digest: bytes) -> str:
    """What an engine lists in `Member.scopes` that has the LoRA adapter with this digest."""
    return f"lora:{digest.hex()[:DIGEST_BYTES]}"


class PromptScope(msgspec.Struct, frozen=True, array_like=True):
    """`salt`: that of the request (vLLM's `cache_salt`); only prompts with the same one share KV. Empty: none.
    `adapter`: the digest of the files of its LoRA adapter (`vllm_pd.model.adapters`). Empty: the base model."""
    salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT_BYTES)] = ""
    adapter: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)] = b""

    @property
    def needs(self) -> frozenset[str]:
        """What a prefill engine must be able to read: among `Member.scopes`."""
        return frozenset([*([SALT] if self.salt else ()), *([adapter_scope(self.adapter)] if self.adapter else ())])

    def is_read_by(self, scopes: Collection[str]) -> bool:
        """Whether an engine with these `Member.scopes` can do a job of this scope."""
        return self.needs.issubset(scopes)

    @property
    def digest(self) -> bytes:
        """Names it: 32 bytes, of which nobody can make two scopes with the same. Empty where there is nothing in it."""
        values = stable_values(self)
        return hashlib.sha256(msgspec.msgpack.encode(values)).digest() if values else b""


NO_SCOPE = PromptScope()


def fits_salt(salt: str) -> bool:
    """Whether a job can carry this salt: no longer than MAX_SALT_BYTES, and text that has a form in UTF-8."""
    try:
        return len(salt.encode()) <= MAX_SALT_BYTES
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
