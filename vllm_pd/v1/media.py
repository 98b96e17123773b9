# SPDX-License-Identifier: Apache-2.0
"""Prompts with images, video or audio between two engines: which of them go, and what a job makes of what comes.

D keeps the request with all that vLLM knows of its media: it names the blocks by V1's own identifiers, computes
positions (M-RoPE), and runs the encoder itself where the last token is of an item. A job names each item by the digest
of its encoded data, which P gets with the grant. P's own names for items are made of these digests. So two items are
one for P only if they are equal, whichever ids clients have given them, and P's cache of its front end is not touched.
"""
from __future__ import annotations

import hashlib
import json
import logging
import secrets
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from vllm_pd.protocol.messages import Role
from vllm_pd.protocol.scope import (
    MAX_MEDIA_BYTES,
    MAX_MEDIA_ITEMS,
    MAX_MODALITY_CHARS,
    NOBODYS,
    MediaItem,
    PromptScope,
    media_scope,
)
from vllm_pd.v1.media_codec import (
    FieldHead,
    ItemHead,
    ListPart,
    MediaFault,
    NumberPart,
    Part,
    TensorHead,
    describe,
    digest,
    item_parts,
    make_item,
)

if TYPE_CHECKING:
    from vllm.config import MultiModalConfig, VllmConfig
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.pd")

FORMAT = 1  # of `media_codec`, and of P's names for items
NO_OTHERS = (MediaItem(NOBODYS, "none", 0, 1, 1), )  # of a prompt that no other engine can have
_OF_PIXELS = ("float64", "float32", "float16", "bfloat16", "uint8")
_FROM_CLIENT = "embeds"  # in the name of a field: the client has run the encoder itself
_SHARED = "address"  # a field in place of all others: the workers have the item, in memory that the front end shares


class MediaBook:
    """The media of one engine's prompts, and of jobs. Used from its step loop; `note` in any thread.

    `encoder`: see `encoder_name`; empty: prompts with media stay here. `own_tokens`: how many at the end of each prompt
    a job leaves out. `patterns`: by modality, what an item of this engine's model consists of; empty: it computes no
    jobs with media."""

    def __init__(self, encoder: str = "", own_tokens: int = 0, patterns: Mapping[str, ItemHead] | None = None) -> None:
        self.encoder = encoder
        self._own_tokens = own_tokens
        self._patterns = dict(patterns or {}) if encoder else {}
        # In the names of jobs' items: V1 knows pictures by name, and a client may choose the names of its own.
        self._secret = secrets.token_hex(16)
        self._items: weakref.WeakKeyDictionary[Request, tuple[MediaItem, ...]] = weakref.WeakKeyDictionary()

    # The decode engine.

    def note(self, request: Request) -> tuple[MediaItem, ...]:
        """Look at the media of a client's request, which takes a millisecond for each megabyte or two, unless that was
        done before. Returns the items as a job names them; `NO_OTHERS` where none can."""
        items = self._items.get(request)
        if items is None:
            try:
                items = self._look(request)
            except MediaFault as fault:
                logger.debug("the prompt of request %s stays here, for its media: %s", request.request_id, fault)
                items = NO_OTHERS
            self._items[request] = items
        return items

    def can_go(self, request: Request) -> bool:
        """Whether a job can carry the media of this request."""
        return request.lora_request is None and self.note(request) is not NO_OTHERS

    def encoded(self, request: Request) -> tuple[bytes, ...]:
        """The data of each item of a request whose media can go."""
        return tuple(b"".join(item_parts(one.data, one.mm_position)) for one in request.mm_features)

    def _look(self, request: Request) -> tuple[MediaItem, ...]:
        features, items, before, left = request.mm_features, [], 0, MAX_MEDIA_BYTES
        if not self.encoder or len(features) > MAX_MEDIA_ITEMS:
            raise MediaFault(f"{len(features)} items, with the settings {self.encoder!r}")
        for one in features:
            place = one.mm_position
            if one.data is None or _SHARED in one.data or len(one.modality) > MAX_MODALITY_CHARS:
                raise MediaFault("the data of an item is not here, or it is of a kind with a long name")
            if any(_FROM_CLIENT in name for name in one.data):
                raise MediaFault("an item is what a client's own encoder has made")
            if not before <= place.offset < place.offset + place.length <= request.num_prompt_tokens - self._own_tokens:
                raise MediaFault("two items overlap, or the last one is in no job as a whole")
            before = place.offset + place.length
            parts = item_parts(one.data, place)
            if (left := left - sum(memoryview(part).nbytes for part in parts)) < 0:
                raise MediaFault(f"more than {MAX_MEDIA_BYTES} bytes")
            found, size = digest(parts)
            items.append(MediaItem(found, one.modality, place.offset, place.length, size))
        return tuple(items)

    # The prefill engine.

    def scopes(self) -> tuple[str, ...]:
        """Those whose jobs can be done here."""
        return tuple(media_scope(modality, self.encoder) for modality in self._patterns)

    def features(self, scope: PromptScope, media: tuple[bytes, ...], tokens: int,
                 scheduler: Scheduler) -> list[MultiModalFeatureSpec]:
        """The media of a job of so many tokens, as V1 wants them of a request. Raises ValueError for what is not as the
        scope says, or is nothing that this engine's model takes."""
        if not scope.media:
            return []
        if scope.encoder != self.encoder or len(media) != len(scope.media):
            raise ValueError("its media are of other settings, or not all there")
        before, found = 0, []
        for item, data in zip(scope.media, media, strict=True):
            if not before <= item.offset < item.end <= tokens:
                raise ValueError(f"its item at token {item.offset} overlaps another one, or the end")
            before = item.end
            found.append(self._feature(item, data, scheduler))
        return found

    def _feature(self, item: MediaItem, data: bytes, scheduler: Scheduler) -> MultiModalFeatureSpec:
        pattern = self._patterns.get(item.modality)
        if pattern is None:
            raise ValueError(f"this engine takes no {item.modality!r}")
        if hashlib.sha256(data).digest() != item.digest:
            raise ValueError(f"the data of its item at token {item.offset} has another digest")
        head, made, mask = make_item(data, item.length)
        if (difference := _difference(pattern, head)) is not None:
            raise ValueError(f"its item at token {item.offset} is none of this model: {difference}")
        place = PlaceholderRange(item.offset, item.length, mask)
        room = min(scheduler.max_num_encoder_input_tokens, scheduler.encoder_cache_manager.cache_size)
        if (embeds := place.get_num_embeds()) > room:
            raise ValueError(f"its item at token {item.offset} has {embeds} embeddings; this engine's encoder makes "
                             f"{room} at most")
        if scheduler.scheduler_config.disable_chunked_mm_input and item.length > scheduler.max_num_scheduled_tokens:
            raise ValueError(f"its item at token {item.offset} has {item.length} tokens, which no step computes whole")
        name = f"pd-{self._secret}-{item.modality}-{item.length}-{item.digest.hex()}"
        return MultiModalFeatureSpec(data=made, modality=item.modality, identifier=name, mm_position=place)


def make_media_book(config: VllmConfig, role: Role, own_tokens: int, is_on: bool) -> MediaBook:
    """That of an engine; one that is not `is_on` keeps all its media. Of a prefill engine this makes vLLM's dummy
    items, as V1 did to profile the model. One that decodes, too, takes no jobs with media: the encoder computes an item
    at once, and clients' tokens would wait for it."""
    encoder = encoder_name(config) if is_on else ""
    patterns: dict[str, ItemHead] = {}
    if encoder and role is Role.PREFILL:
        try:
            patterns = _patterns(config)
        except Exception:  # of any model's own code
            logger.warning("this engine takes no jobs with media: it can't be seen what its model wants", exc_info=True)
    return MediaBook(encoder, own_tokens, patterns)


def encoder_name(config: VllmConfig) -> str:
    """Names what two engines must agree on before media go from one to the other, beside the model: 16 hexadecimal
    digits. Empty: those of this engine stay here."""
    model = config.model_config
    ours: MultiModalConfig | None = model.multimodal_config if model.is_multimodal_model else None
    if (ours is None or model.is_encoder_decoder or ours.language_model_only or ours.mm_encoder_only
            or ours.video_pruning_rate  # which tokens are there is known when the encoder has run
            or config.speculative_config is not None  # what a drafter makes of media was not tried
            or model.is_mm_prefix_lm  # a step that ends in an item computes its first tokens without its last ones
            or config.ec_transfer_config is not None):  # outputs of encoders come from elsewhere
        return ""
    scales = ours.mm_encoder_fp8_scale_path
    given = {key: value for key, value in (ours.mm_processor_kwargs or {}).items() if key != "device"}
    settings = [FORMAT, given, ours.mm_encoder_attn_dtype, bool(ours.mm_device_do_normalize),
                hashlib.sha256(Path(scales).read_bytes()).hexdigest() if scales else ""]
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _patterns(config: VllmConfig) -> dict[str, ItemHead]:
    """What an item of each modality consists of that the engine takes."""
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.encoder_budget import MultiModalBudget
    budget = MultiModalBudget(config, MULTIMODAL_REGISTRY, enable_cache=False)
    found = {}
    for modality in budget.mm_max_toks_per_item:
        ((_, item), *_) = budget.get_dummy_encoder_profile_inputs(modality, 1)
        found[modality] = describe(item, PlaceholderRange(0, 1))[0]
    return found


def _difference(pattern: ItemHead, head: ItemHead) -> str | None:
    """In what an item is none of this pattern, as far as that can be seen; None: in nothing."""
    ours, theirs = ({one.name: one for one in each.fields} for each in (pattern, head))
    if ours.keys() != theirs.keys():
        return f"fields {sorted(theirs)}, not {sorted(ours)}"
    return next((f"field {name!r}" for name, one in ours.items() if not _is_alike(one, theirs[name])), None)


def _is_alike(ours: FieldHead, theirs: FieldHead) -> bool:
    is_same_kind = (ours.kind, ours.keeps_on_cpu) == (theirs.kind, theirs.keeps_on_cpu)
    return is_same_kind and (ours.kind == "shared" or ours.number == theirs.number) and _is_part_alike(
        ours.data, theirs.data, ours.kind == "flat" and not ours.number)


def _is_part_alike(ours: Part, theirs: Part, is_of_rows: bool) -> bool:
    """`is_of_rows`: vLLM puts items one below the other, so the rows of a table must be as wide."""
    if isinstance(ours, TensorHead) and isinstance(theirs, TensorHead):
        is_table = is_of_rows and len(ours.shape) == 2 and ours.dtype in _OF_PIXELS
        return (ours.dtype == theirs.dtype and len(ours.shape) == len(theirs.shape)
                and (not is_table or ours.shape[1] == theirs.shape[1]))
    if isinstance(ours, NumberPart) and isinstance(theirs, NumberPart):
        return type(ours.value) is type(theirs.value)
    if isinstance(ours, ListPart) and isinstance(theirs, ListPart):
        return all(_is_part_alike(ours.parts[0], one, False) for one in theirs.parts) if ours.parts else True
    return False


def restore_media(new_requests: list[NewRequestData], scheduler: Scheduler) -> None:
    """A step was scheduled that begins with these requests: have the workers get all data of their media. V1 leaves out
    what a prefix hit covers, and so what a peer has computed. But if such a request is preempted later, the first model
    runner does not get it again, looks for what its encoder has never made, and ends its engine. The second one gets
    all of a request that is resumed."""
    for one in new_requests if not scheduler.use_v2_model_runner else ():
        if one.mm_features:
            one.mm_features = scheduler.requests[one.req_id].mm_features
