# SPDX-License-Identifier: Apache-2.0
"""V1's real schedulers with prompts that have images, over the memory of tests/v1/simulated.py.

An image is a table of bytes. The encoder makes a number of it for each token of its placeholder that gets an embedding,
and keeps these by the image's identifier, as V1's model runner does. A step reads them there: one that is missing, or
of another image, is an error at once. What a token of an image is to the model is that number, in place of its id.
"""
import hashlib
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from tests.v1.simulated import PEER, Engine, FakeProtocol, ScopedTokens, WrongRead, request_seed, seed_of
from vllm_pd.protocol import actions
from vllm_pd.protocol.messages import Attempt, Role
from vllm_pd.protocol.scope import MediaItem, PromptScope
from vllm_pd.v1.binding import V1Handover
from vllm_pd.v1.media import MediaBook
from vllm_pd.v1.media_codec import ItemHead, describe, item_parts, make_item

ENCODER = "settings"
PLACE = 7  # the token id in each placeholder
WIDTH = 4  # of an image, in bytes


class Image(NamedTuple):
    """An image in a prompt, at these tokens. `mask`: which of them get an embedding; None: all."""
    offset: int
    length: int
    item: MultiModalKwargsItem
    name: str
    mask: torch.Tensor | None = None

    @property
    def feature(self) -> MultiModalFeatureSpec:
        """As the front end gives it to EngineCore."""
        return MultiModalFeatureSpec(data=self.item, modality="image", identifier=self.name,
                                     mm_position=PlaceholderRange(self.offset, self.length, self.mask))


def pixels(content: int) -> MultiModalKwargsItem:
    """What the processor makes of the image with this content."""
    rows = torch.frombuffer(bytearray(random.Random(content).randbytes(3 * WIDTH)), dtype=torch.uint8)
    return MultiModalKwargsItem({"pixels": MultiModalFieldElem(data=rows.reshape(3, WIDTH),
                                                               field=MultiModalBatchedField())})


def image(offset: int, length: int, content: int, name: str | None = None, holes: bool = False) -> Image:
    """`name`: the client's own id for it, else one of its content. `holes`: the first token and each third
    after it get no embedding."""
    mask = torch.arange(length) % 3 != 0 if holes else None
    return Image(offset, length, pixels(content), name or f"image {content} {length} {holes}", mask)


def with_images(tokens: Sequence[int], images: Sequence[Image]) -> list[int]:
    """The prompt, with the placeholders in it."""
    found = list(tokens)
    for one in images:
        found[one.offset:one.offset + one.length] = [PLACE] * one.length
    return found


def embeddings(item: MultiModalKwargsItem, count: int) -> list[int]:
    """What the encoder makes of it."""
    data = item["pixels"].data.numpy().tobytes()
    return [-1 - zlib.crc32(data + bytes([index & 255, index >> 8])) for index in range(count)]


def places(feature: MultiModalFeatureSpec) -> list[tuple[int, int]]:
    """(position in the prompt, number of the embedding) of each token that gets one."""
    place = feature.mm_position
    marked = [True] * place.length if place.is_embed is None else place.is_embed.tolist()
    at = [place.offset + index for index, is_one in enumerate(marked) if is_one]
    return [(position, number) for number, position in enumerate(at)]


def see(token_ids: Sequence[int], features: Sequence[MultiModalFeatureSpec], seed: int) -> ScopedTokens:
    """What the model sees of these tokens."""
    found = ScopedTokens(token_ids, seed)
    for one in features:
        made = embeddings(one.data, one.mm_position.get_num_embeds())
        for position, number in places(one):
            if position < len(found):
                found[position] = made[number]
    return found


def carried(scope: PromptScope, media: Sequence[bytes]) -> list[MultiModalFeatureSpec]:
    """What a job carries, as it says."""
    found = []
    for one, data in zip(scope.media, media, strict=True):
        assert hashlib.sha256(data).digest() == one.digest and len(data) == one.size
        _, item, mask = make_item(data, one.length)
        found.append(MultiModalFeatureSpec(data=item, modality=one.modality, identifier=one.digest.hex(),
                                           mm_position=PlaceholderRange(one.offset, one.length, mask)))
    return found


def job_of(images: Sequence[Image], salt: str = "") -> tuple[PromptScope, tuple[bytes, ...]]:
    """The scope and the media of a job with these."""
    media = tuple(b"".join(item_parts(one.item, one.feature.mm_position)) for one in images)
    items = tuple(MediaItem(hashlib.sha256(data).digest(), "image", one.offset, one.length, len(data))
                  for one, data in zip(images, media, strict=True))
    return PromptScope(salt, b"", items, ENCODER if items else ""), media


class MediaProtocol(FakeProtocol):
    """Knows what a job carries."""

    def __init__(self, role: Role) -> None:
        super().__init__(role)
        self.media: dict[Attempt, tuple[bytes, ...]] = {}
        self.has_room = True

    def submit(self, attempt, token_ids, block_ids, cached_blocks, avoid, deadline_s, priority, scope, media=()):
        super().submit(attempt, token_ids, block_ids, cached_blocks, avoid, deadline_s, priority, scope)
        self.media[attempt] = media
        seen = see(token_ids, carried(scope, media), seed_of(scope.salt, scope.adapter))
        self.jobs[attempt] = seen, *self.jobs[attempt][1:]

    def takes_media(self, media_bytes):
        return self.has_room


def patterns() -> dict[str, ItemHead]:
    """What an image of the model consists of."""
    return {"image": describe(pixels(0), PlaceholderRange(0, 1))[0]}


class MediaEngine(Engine):
    """`room`: how many embeddings its encoder makes in a step, and keeps. `longest`: of an image that the model takes,
    in tokens. `book`, `protocol`: in place of its own."""

    def __init__(self, folder: Path, in_flight: int = 1, *, role: str = "kv_both", room: int = 96,
                 book: MediaBook | None = None, own_tokens: int = 0, protocol: Any = None, **more: Any) -> None:
        self.room = room
        self.book = book or MediaBook(ENCODER, own_tokens, patterns() if role == "kv_producer" else {})
        self._features: dict[str, list[MultiModalFeatureSpec]] = {}  # as the workers have them
        self.encoded: dict[str, list[int]] = {}  # by identifier, as they keep them
        self.images_encoded = 0
        super().__init__(folder, in_flight, role=role, protocol=protocol or MediaProtocol(Role(role)), **more)

    def make_binding(self, *arguments: Any) -> V1Handover:
        self.scheduler.max_num_encoder_input_tokens = self.room
        self.scheduler.encoder_cache_manager = EncoderCacheManager(self.room)
        return V1Handover(*arguments, self.book)

    def seen(self, request: Request) -> ScopedTokens:
        return see(request.prompt_token_ids, request.mm_features, request_seed(request))

    def ask(self, request_id: str, given: Sequence[int], *images: Image, **more: Any) -> Request:
        """A client's prompt with these images in it."""
        return self.add(request_id, with_images(given, images), mm_features=[one.feature for one in images], **more)

    def media_job(self, tokens: Sequence[int], *images: Image, number: int = 0, cached_blocks: int = 0, salt: str = "",
                  scope: PromptScope | None = None, media: tuple[bytes, ...] | None = None) -> Attempt:
        """A job of a peer. `scope`, `media`: in place of the right ones."""
        given, is_right = with_images(tokens, images), scope is None and media is None
        of_job = job_of(images, salt)
        scope, media = of_job[0] if scope is None else scope, of_job[1] if media is None else media
        attempt = self.prefill(given, scope, media, number, cached_blocks)
        if is_right and all(one.item.keys() == {"pixels"} for one in images):
            self.expect(attempt, given, scope, media)
        return attempt

    def prefill(self, tokens: list[int], scope: PromptScope, media: tuple[bytes, ...], number: int = 0,
                cached_blocks: int = 0) -> Attempt:
        attempt = Attempt(PEER, "r", number)
        blocks = -(-len(tokens) // self.block_size)
        self.tell(actions.Prefill(attempt, tokens, list(range(100 + cached_blocks, 100 + blocks)), cached_blocks,
                                  list(range(100, 100 + cached_blocks)), PEER, scope=scope, media=media))
        return attempt

    def expect(self, attempt: Attempt, tokens: list[int], scope: PromptScope, media: Sequence[bytes]) -> ScopedTokens:
        """What is right of what this job sends."""
        right = see(tokens, carried(scope, media), seed_of(scope.salt))
        self._jobs[str(attempt)] = right
        return right

    def run_workers(self, output, work: list[tuple]) -> ModelRunnerOutput:
        for name in output.free_encoder_mm_hashes:
            self.encoded.pop(name, None)
        for one in output.scheduled_new_reqs:
            self._features[one.req_id] = one.mm_features
        for request_id, numbers in output.scheduled_encoder_inputs.items():
            for one in (self._features[request_id][number] for number in numbers):
                if one.data is not None:
                    self.images_encoded += 1
                    self.encoded[one.identifier] = embeddings(one.data, one.mm_position.get_num_embeds())
        assert sum(map(len, self.encoded.values())) <= self.room
        return super().run_workers(output, work)

    def _compute(self, request_id: str, start: int, count: int, block_ids: list[int], known: list[int],
                 is_chunk: bool) -> list[int]:
        for one in self._features.get(request_id, ()):
            for position, number in places(one):
                if start <= position < start + count:
                    made = self.encoded.get(one.identifier)
                    if made is None:
                        raise WrongRead(f"{request_id}: no output of the encoder for {one.identifier}")
                    if made[number] != known[position]:
                        raise WrongRead(f"{request_id}: {one.identifier} is another image")
        return super()._compute(request_id, start, count, block_ids, known, is_chunk)

    def check_at_rest(self, errors: int = 0) -> None:
        super().check_at_rest(errors)
        manager = self.scheduler.encoder_cache_manager
        assert not manager.request_cached_ids and manager.num_freeable_slots == manager.cache_size
