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
MAX_MEDIA_ITEMS = 64  # of one prompt
MAX_MEDIA_BYTES = 24 << 20  # of all of these: they go to P in one frame, with the grant
MAX_MODALITY_CHARS = 32


def adapter_scope(digest: bytes) -> str:
    """What an engine lists in `Member.scopes` that has the LoRA adapter with this digest."""
    return f"lora:{digest.hex()[:DIGEST_BYTES]}"


def media_scope(modality: str, encoder: str) -> str:
    """What an engine lists in `Member.scopes` that computes jobs with items of this modality, if it makes of their data
    what `encoder` names."""
    return f"media:{encoder}:{modality}"


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """One image, video or piece of audio of a prompt. `digest`: the SHA-256 of its encoded data, of `size` bytes, which
    goes to P with the grant. It is in the place of `length` tokens from the token `offset` on."""
    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    modality: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_MODALITY_CHARS)]
    offset: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    length: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_MEDIA_BYTES)]

    @property
    def end(self) -> int:
        """The first token after it."""
        return self.offset + self.length


class PromptScope(msgspec.Struct, frozen=True, array_like=True):
    """`salt`: that of the request (vLLM's `cache_salt`); only prompts with the same one share KV. Empty: none.
    `adapter`: the digest of the files of its LoRA adapter (`vllm_pd.model.adapters`). Empty: the base model. `media`:
    the items in its prompt. `encoder`: the digest of what else decides the KV of these, empty where there are none."""
    salt: Annotated[str, msgspec.Meta(max_length=MAX_SALT_BYTES)] = ""
    adapter: Annotated[bytes, msgspec.Meta(max_length=DIGEST_BYTES)] = b""
    media: Annotated[tuple[MediaItem, ...], msgspec.Meta(max_length=MAX_MEDIA_ITEMS)] = ()
    encoder: Annotated[str, msgspec.Meta(max_length=DIGEST_BYTES)] = ""

    @property
    def needs(self) -> frozenset[str]:
        """What a prefill engine must be able to read: among `Member.scopes`."""
        return frozenset([*([SALT] if self.salt else ()), *([adapter_scope(self.adapter)] if self.adapter else ()),
                          *(media_scope(item.modality, self.encoder) for item in self.media)])

    @property
    def media_bytes(self) -> int:
        """How large the encoded data of its media is."""
        return sum(item.size for item in self.media)

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
