# SPDX-License-Identifier: Apache-2.0
"""B115 on V1's real schedulers: prompts with images go remote, every answer is that of one engine, and no image is
taken for another, whatever clients call it. The memory under it, and the encoder: tests/v1/media.py. What a job carries
as bytes: tests/v1/test_media_codec.py. Real engines: tests/v1_engines/test_real_media.py.
"""
import random
import types
from types import SimpleNamespace

import msgspec
import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem, MultiModalSharedField
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request, RequestStatus

from tests.v1.media import ENCODER, MediaEngine, image, job_of, with_images
from tests.v1.simulated import BLOCK_SIZE, WrongRead
from tests.v1.test_hazards import PARKED, end, prompt
from tests.v1.test_holds import ASKS, HOLD
from tests.v1.test_scopes import sampling
from vllm_pd.handover.jobs import JobStage
from vllm_pd.protocol.actions import Cancelled, Released
from vllm_pd.protocol.holds import hold_params
from vllm_pd.protocol.scope import MAX_MEDIA_BYTES, MAX_MEDIA_ITEMS, PromptScope, media_scope
from vllm_pd.v1 import binding as binding_module
from vllm_pd.v1 import media as media_module
from vllm_pd.v1.adapter_files import AdapterReader
from vllm_pd.v1.adapters import AdapterBook
from vllm_pd.v1.connector import PDConnector
from vllm_pd.v1.engine_access import EngineAccess, _sparing
from vllm_pd.v1.features import can_go_remote, scope_of
from vllm_pd.v1.media import NO_OTHERS, MediaBook, encoder_name

IMAGES = media_scope("image", ENCODER)


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level("CRITICAL", logger="vllm.pd")


@pytest.fixture
def d(model_folder, in_flight):
    return MediaEngine(model_folder, in_flight, role="kv_consumer")


@pytest.fixture
def p(model_folder, in_flight):
    return MediaEngine(model_folder, in_flight, role="kv_producer")


def stays(engine, reason: str = "feature") -> bool:
    end(engine)
    return not engine.protocol.jobs and ["decision", "local", reason] in engine.counted()


# The decode engine.


@pytest.mark.parametrize("salt", [None, "s"])
def test_b115_a_job_carries_the_images_of_its_request(d, salt):
    images = image(5, 20, 1), image(40, 30, 2, holes=True)
    d.ask("a", prompt(100), *images, cache_salt=salt)
    d.run()
    attempt = d.attempt("a")
    assert (d.protocol.scopes[attempt], d.protocol.media[attempt]) == job_of(images, salt or "")
    d.prefilled("a")
    end(d)
    assert not d.images_encoded, "its last token is of no image"


def test_b115_equal_prompts_with_other_images_are_no_twins(d):
    one = prompt(100)
    for name, content in zip("abcd", (1, 2, 1, None), strict=True):
        d.ask(name, one, *([image(5, 20, content)] if content else []))
    d.run()
    assert [attempt.request_id for attempt in d.protocol.jobs] == ["a", "b", "d"], "c waits for a"
    for name in "abd":
        d.prefilled(name)
    end(d)
    assert len(d.protocol.jobs) == 3 and d.cached["c"] == 6 * BLOCK_SIZE and d.cached["b"] == 0


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("end_at", [100, 99, 101])
def test_b115_an_image_at_the_last_token_is_encoded_on_d_too(d, end_at, holes):
    d.ask("a", prompt(max(100, end_at)), image(end_at - 20, 20, 1, holes=holes))
    d.run()
    d.prefilled("a")
    end(d)
    assert d.images_encoded == (end_at >= 100) and d.tokens_computed == 4


@pytest.mark.parametrize("end_at, goes", [(99, True), (100, False)])
def test_b115_an_image_that_a_job_would_cut_stays_on_d(model_folder, end_at, goes):
    """Jobs of models with windows or states leave out the last token."""
    d = MediaEngine(model_folder, role="kv_consumer", own_tokens=1)
    d.ask("a", prompt(100), image(end_at - 20, 20, 1))
    if goes:
        d.run()
        assert d.status("a") is PARKED
        d.prefilled("a")
        end(d)
    else:
        assert stays(d)


def other_kind(**fields) -> MultiModalKwargsItem:
    return MultiModalKwargsItem({name: MultiModalFieldElem(data=value, field=MultiModalSharedField(batch_size=1))
                                 for name, value in fields.items()})


LARGE = torch.zeros(MAX_MEDIA_BYTES // 2, dtype=torch.uint8)


@pytest.mark.parametrize("images, fields", [
    ([image(5, 20, 1)._replace(item=None)], {}),
    ([image(5, 20, 1)._replace(item=other_kind(image_embeds=torch.zeros(2)))], {}),
    ([image(5, 20, 1)._replace(item=other_kind(address=3, monotonic_id=4))], {}),
    ([image(5, 20, 1)._replace(item=other_kind(pixels=torch.zeros(2, dtype=torch.complex64)))], {}),
    ([image(5, 20, 1), image(24, 20, 2)], {}),
    ([image(at, 1, at) for at in range(MAX_MEDIA_ITEMS + 1)], {}),
    ([image(at, 20, 1)._replace(item=other_kind(pixels=LARGE)) for at in (5, 30)], {}),
    ([image(5, 20, 1)], {"lora_request": LoRARequest("adapter", 1, "/nowhere")}),
], ids=["not here", "embeddings", "shared memory", "dtype", "overlap", "many", "large", "adapter"])
def test_b115_what_no_job_carries_stays_on_d(images, fields):
    book, adapters = MediaBook(ENCODER), AdapterBook(None, AdapterReader(lambda: None), is_offering=False)
    asked = Request("a", with_images(prompt(100), images), SamplingParams(max_tokens=4), None, **fields,
                    mm_features=[one.feature for one in images])
    assert not can_go_remote(asked, adapters, book) and not book.can_go(asked)
    if not fields:
        assert scope_of(asked, adapters, book) == PromptScope(media=NO_OTHERS, encoder=ENCODER), "nobody else's"
    plain = Request("b", [1, 2], SamplingParams(max_tokens=4), None)
    assert can_go_remote(plain, adapters, book)


@pytest.mark.parametrize("book", [MediaBook(), MediaBook("")])
def test_b115_images_stay_on_d_where_its_settings_say_so(model_folder, book):
    d = MediaEngine(model_folder, role="kv_consumer", book=book)
    d.ask("a", prompt(100), image(5, 20, 1))
    assert stays(d)


def test_b115_images_stay_on_d_while_too_many_are_under_way(d):
    d.protocol.has_room = False
    d.ask("a", prompt(100), image(5, 20, 1))
    assert stays(d, "cap")
    d.protocol.has_room = True
    d.ask("b", prompt(100), image(5, 20, 2))
    d.run()
    d.prefilled("b")
    end(d)


def test_b115_a_prompt_with_images_is_neither_kept_nor_read_from_a_hold(model_folder, in_flight):
    holder = MediaEngine(model_folder, in_flight, role="kv_producer")
    holder.ask("a", prompt(100), image(5, 20, 1), params=sampling(ASKS))
    end(holder)
    assert not holder.protocol.held
    reader = MediaEngine(model_folder, in_flight, role="kv_consumer")
    reader.ask("a", prompt(100), image(5, 20, 1), params=sampling(hold_params(HOLD)))
    reader.run()
    assert not reader.protocol.claimed and reader.attempt("a")
    reader.prefilled("a")
    end(reader)


@pytest.mark.parametrize("plant", [False, True])
def test_b115_b8_a_request_that_is_preempted_later_has_its_images(model_folder, in_flight, monkeypatch, plant):
    """V1 leaves out of what the workers get what is computed. `plant`: it is left at that."""
    if plant:
        monkeypatch.setattr(binding_module, "restore_media", lambda new_requests, scheduler: None)
    d = MediaEngine(model_folder, in_flight, role="kv_consumer", blocks=17, caching=False)
    for name, content in zip("ab", (1, 2), strict=True):
        d.ask(name, prompt(100), image(5, 20, content), tokens=60)
    d.run()
    for name in "ab":
        d.prefilled(name)
    if plant:
        with pytest.raises(WrongRead, match="no output of the encoder"):
            d.run()
        return
    end(d)
    assert d.images_encoded, "none was preempted"


# The prefill engine.


def send(p, tokens, images, number, salt=""):
    """A job, whose blocks are checked. Returns how many tokens were computed."""
    before, tokens = p.tokens_computed, with_images(tokens, images)
    scope, media = job_of(images, salt)
    attempt = p.prefill(tokens, scope, media, number)
    right = p.expect(attempt, tokens, scope, media)
    p.run()
    p.check_sent(attempt, right)
    p.transfer.end(str(attempt))
    p.run()
    return p.tokens_computed - before


def test_b115_p_lists_what_it_computes(model_folder, p):
    p.run()
    p.binding._apply_updates()
    assert p.protocol.listed_scopes == ("salt", IMAGES)
    both = MediaEngine(model_folder)
    both.binding._apply_updates()
    assert both.protocol.listed_scopes == (), "its clients' tokens would wait for the encoder"


def test_b115_jobs_share_blocks_of_equal_images_only(p):
    one, rest = prompt(100), 100 - 6 * BLOCK_SIZE
    several = [[], [image(5, 20, 1)], [image(5, 20, 2)], [image(5, 20, 1, holes=True)], [image(6, 20, 1)]]
    assert [send(p, one, images, number) for number, images in enumerate(several)] == [100] * 5
    again = [send(p, one, images, 10 + number) for number, images in enumerate(several)]
    assert again == [rest] * 5
    assert send(p, one, several[1], 20, "salt") == 100
    p.check_at_rest()


def test_b115_two_images_that_clients_have_given_one_name_are_two(model_folder, in_flight, p):
    """At P, which has jobs of two Ds: each knows one of them."""
    one = prompt(100)
    for number, content in enumerate((1, 2, 1)):
        d = MediaEngine(model_folder, in_flight, role="kv_consumer")
        d.ask("a", one, image(5, 20, content, name="mine"))
        hand_over(d, p, "a", number)
        end(d)
    p.check_at_rest()


def test_b115_clients_of_p_and_jobs_share_no_image(p):
    one = prompt(100)
    p.ask("client", one, image(5, 20, 1, name="mine"))
    p.run()
    assert send(p, one, [image(5, 20, 2)], 1) == 100
    assert len(p.encoded) == 2 and "mine" in p.encoded
    p.check_answers()
    p.check_at_rest()


def test_b115_no_client_can_name_an_image_as_jobs_do(p):
    """One that knows the digest of another one's image, and the form of the names."""
    one = prompt(100)
    assert send(p, one, [image(5, 20, 2)], 1) == 100
    [name] = p.encoded
    other = MediaBook(ENCODER, patterns={"image": None})
    assert p.book._secret in name and other._secret not in name and len(other._secret) == 32


@pytest.mark.parametrize("room", [20, 33, 64])
@pytest.mark.parametrize("batch_tokens", [16, 33, 128])
@pytest.mark.parametrize("chunks", [False, True])
def test_b115_images_around_the_borders_of_steps(model_folder, in_flight, room, batch_tokens, chunks):
    """Chunks that end within an image, and images that wait for room at the encoder."""
    p = MediaEngine(model_folder, in_flight, role="kv_producer", room=room, batch_tokens=batch_tokens,
                    push_chunks=chunks)
    for number, at in enumerate((0, 1, 12, 15, 16, 17, 60, 79, 80)):
        images = [image(at, 20, number), image(at + 20, 17, 50 + number, holes=True), image(at + 60, 20, number)]
        send(p, prompt(170), images, number)
    p.check_at_rest()


@pytest.mark.parametrize("at", range(1, 8))
def test_b115_a_job_that_is_cancelled_leaves_nothing_at_the_encoder(model_folder, in_flight, at):
    p = MediaEngine(model_folder, in_flight, role="kv_producer", batch_tokens=16)
    attempt = p.media_job(prompt(170), image(5, 20, 1), image(60, 60, 2))
    for _ in range(at):
        p.turn()
    p.tell(Cancelled(attempt))
    p.run()
    p.check_at_rest()
    send(p, prompt(170), [image(5, 20, 1), image(60, 60, 2)], 1)
    p.check_at_rest()


def lost(p, attempt):
    p.run()
    p.check_at_rest()
    return ("failed", attempt) in p.protocol.calls and p.binding.prefill_jobs.find(attempt) is None


SCOPE, MEDIA = job_of([image(5, 20, 1), image(40, 20, 2)])


def changed(**fields):
    return msgspec.structs.replace(SCOPE, media=(msgspec.structs.replace(SCOPE.media[0], **fields), SCOPE.media[1]))


@pytest.mark.parametrize("scope, media", [
    (SCOPE, MEDIA[::-1]), (SCOPE, (MEDIA[0][:-1] + b"x", MEDIA[1])), (SCOPE, MEDIA[:1]), (SCOPE, ()),
    (changed(digest=bytes(32)), MEDIA), (changed(modality="video"), MEDIA), (changed(offset=30), MEDIA),
    (changed(offset=1 << 20), MEDIA), (changed(length=90), MEDIA),
    (msgspec.structs.replace(SCOPE, media=SCOPE.media[::-1]), MEDIA[::-1]),
    (msgspec.structs.replace(SCOPE, encoder="others"), MEDIA),
], ids=["swapped", "changed", "one", "none", "digest", "modality", "overlap", "beyond", "long", "order", "settings"])
def test_b115_media_that_are_not_what_the_scope_says_end_the_job(p, scope, media):
    assert lost(p, p.media_job(prompt(100), scope=scope, media=media))


def of(item, length=20):
    return [image(5, length, 1)._replace(item=item)]


@pytest.mark.parametrize("images", [
    of(other_kind(pixels=torch.zeros(3, 4, dtype=torch.uint8))), of(image(5, 20, 1).item, 200),
    of(MultiModalKwargsItem({"pixels": MultiModalFieldElem(data=torch.zeros(3, 4), field=image(0, 1, 1).item[
        "pixels"].field)})),
    of(MultiModalKwargsItem({"pixels": MultiModalFieldElem(data=torch.zeros(3, dtype=torch.uint8), field=image(
        0, 1, 1).item["pixels"].field)})),
    of(MultiModalKwargsItem({**image(5, 20, 1).item, "more": image(5, 20, 1).item["pixels"]})),
], ids=["kind", "too many embeddings", "dtype", "dimensions", "fields"])
def test_b115_an_item_that_this_model_does_not_take_ends_the_job(p, images):
    """Else it would end the engine, or wait for ever."""
    assert lost(p, p.media_job(prompt(300), *images))


def test_b115_the_data_of_a_job_is_kept_once(p):
    attempt = p.media_job(prompt(100), image(5, 20, 1))
    p.binding._apply_updates()
    job = p.binding.prefill_jobs._jobs[attempt]
    assert job.state is JobStage.COMPUTING and job.prefill.media == ()
    p.run()
    p.transfer.end(str(attempt))
    p.run()
    p.check_at_rest()


class Untouchable:
    """The cache that mirrors the front end's."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} of the front end's cache")


def test_b115_a_job_goes_past_the_cache_of_the_front_end(model_folder):
    """It is what P's front end believes it to be, and another thread's."""
    p = MediaEngine(model_folder, role="kv_producer")
    core = SimpleNamespace(scheduler=p.scheduler, mm_receiver_cache=Untouchable(), request_block_hasher=p.hasher)
    access = EngineAccess(core)
    p.binding.prefill_jobs._access = SimpleNamespace(takes_requests=True, add=access.add)
    assert send(p, prompt(100), [image(5, 20, 1)], 0) == 100
    p.check_at_rest()


def test_b115_media_of_clients_are_looked_at_where_requests_are_read(d, monkeypatch):
    """Not in the step loop, and once. A connector that is yet to be bound looks at none."""
    looks, item_parts = [], media_module.item_parts
    monkeypatch.setattr(media_module, "item_parts", lambda *one: looks.append(one) or item_parts(*one))
    connector = object.__new__(PDConnector)
    connector.binding = None
    engine = SimpleNamespace(scheduler=SimpleNamespace(get_kv_connector=lambda: connector))
    read = EngineCoreRequest("a", with_images(prompt(100), [image(5, 20, 1)]), [image(5, 20, 1).feature],
                             SamplingParams(max_tokens=4), None, 0.0, None, None, None)
    prepare = types.MethodType(_sparing(lambda core, request: (Request.from_engine_core_request(request, d.hasher), 0),
                                        PDConnector), engine)
    assert prepare(read)[1] == 0 and not looks
    connector.binding = d.binding
    made, _ = prepare(read)
    assert len(looks) == 1
    d.prompts["a"], d.wanted["a"] = d.seen(made), 4
    d.scheduler.add_request(made)
    d.run()
    assert d.status("a") is PARKED and len(looks) == 2, "once more, for the bytes"
    d.prefilled("a")
    end(d)


def test_b115_no_prefix_with_images_is_read_from_d(model_folder, in_flight):
    p = MediaEngine(model_folder, in_flight, role="kv_producer", prefix_reads="always")
    attempts = [p.media_job(prompt(100), number=0, cached_blocks=3), p.media_job(prompt(100), image(5, 20, 1), number=1,
                                                                                cached_blocks=3)]
    p.binding._apply_updates()
    assert [p.binding.prefill_jobs.wants_prefix(attempt, 0) for attempt in attempts] == [True, False]


# Both.


def hand_over(d, p, request_id, number):
    """What P computes of D's last attempt for this request, as far as it is right, comes to D."""
    d.run()
    attempt = d.attempt(request_id)
    tokens, _, cached_blocks = d.protocol.jobs[attempt]
    request = d.scheduler.requests[request_id]
    scope, media = d.protocol.scopes[attempt], d.protocol.media[attempt]
    job = p.prefill(request.prompt_token_ids[:len(tokens)], scope, media, number, cached_blocks)
    assert p.expect(job, request.prompt_token_ids[:len(tokens)], scope, media) == tokens
    p.run()
    p.check_sent(job, tokens)
    p.transfer.end(str(job))
    p.run()
    d.prefilled(request_id)


def storm(folder, in_flight, seed, requests=60):
    """Prompts of a few beginnings with a few images, of D's clients; P computes them, is slow, or drops them. Returns
    how many were handed over."""
    draw = random.Random(seed)
    d = MediaEngine(folder, in_flight, role="kv_consumer", blocks=draw.choice((40, 64)), room=draw.choice((48, 96)))
    p = MediaEngine(folder, in_flight, role="kv_producer", blocks=draw.choice((48, 64)), room=draw.choice((32, 64)),
                    batch_tokens=draw.choice((17, 33, 128)), push_chunks=draw.random() < 0.5,
                    prefix_reads="never")
    beginnings = [[draw.randrange(10, 900) for _ in range(300)] for _ in range(3)]
    jobs, taken, done = {}, set(), 0
    for number in range(requests):
        images, at = [], draw.randrange(0, 30)
        while len(images) < 4 and draw.random() < 0.7:
            length = draw.choice((3, 16, 17, 30))
            images.append(image(at, length, draw.randrange(3), holes=draw.random() < 0.3))
            at += length + draw.choice((0, 1, 20))
        tokens = draw.choice(beginnings)[:max(at, draw.randrange(20, 260))]
        d.ask(f"r{number}", tokens, *images, tokens=draw.choice((1, 4, 40)), cache_salt=draw.choice((None, None, "s")))
        for _ in range(draw.randrange(4)):
            if d.has_work():
                d.turn()
        for attempt in d.protocol.jobs.keys() - taken:
            taken.add(attempt)
            seen, _, cached_blocks = d.protocol.jobs[attempt]
            request = d.scheduler.requests.get(attempt.request_id)
            if request is None:
                continue
            scope, media = d.protocol.scopes[attempt], d.protocol.media[attempt]
            given = request.prompt_token_ids[:len(seen)]
            job = p.prefill(given, scope, media, len(taken), cached_blocks)
            assert p.expect(job, given, scope, media) == seen
            jobs[attempt] = job
        if draw.random() < 0.15:
            d.abort(f"r{draw.randrange(number + 1)}")
        if jobs and draw.random() < 0.1:
            p.tell(Cancelled(draw.choice(list(jobs.values()))))
        done += advance(d, p, jobs, draw.randrange(6))
    for _ in range(4000):
        if not (jobs or d.has_work() or p.has_work()):
            break
        if d.has_work():
            d.turn()
        for attempt in d.protocol.jobs.keys() - taken:
            taken.add(attempt)
            d.lost(attempt)
            d.tell(Released(attempt))
        done += advance(d, p, jobs, 3)
    d.run()
    p.run()
    d.check_answers()
    d.check_at_rest()
    p.check_at_rest()
    return done


def advance(d, p, jobs, turns):
    """P makes some steps; what it has computed comes to D, and what it has dropped does not. Returns how many came."""
    done = 0
    for _ in range(turns):
        if p.has_work():
            p.turn()
    for attempt, job in list(jobs.items()):
        request = d.scheduler.requests.get(attempt.request_id)
        is_wanted = attempt not in d.protocol.aborted and request is not None and (
            request.status is RequestStatus.WAITING_FOR_REMOTE_KVS)
        if str(job) in p.transfer.open_writes:
            p.check_sent(job, p._jobs[str(job)])
            p.transfer.end(str(job))
            del jobs[attempt]
            if is_wanted:
                d.prefilled(attempt.request_id)
                done += 1
            else:
                d.tell(Released(attempt))
        elif any(call[1] == job and call[0] in ("failed", "ended") for call in p.protocol.calls):
            del jobs[attempt]
            if is_wanted:
                d.lost(attempt)
            d.tell(Released(attempt))
    return done


@pytest.mark.parametrize("seed", range(8))
def test_b115_b1_many_prompts_with_images(model_folder, in_flight, seed):
    """Prefix hits on both sides, aborts, preemption, chunks that end in an image, fallbacks: tokens are those of one
    engine, and the encoder's cache is at rest."""
    assert storm(model_folder, in_flight, seed) >= 5


def by_client_name(book, scope, media, tokens, scheduler):
    """P names images as its peers' clients do."""
    found = RIGHT(book, scope, media, tokens, scheduler)
    for one in found:
        one.identifier = "mine"
    return found


RIGHT = MediaBook.features


def test_b115_p_that_went_by_clients_names_would_be_found(p, monkeypatch):
    monkeypatch.setattr(MediaBook, "features", by_client_name)
    one = prompt(100)
    send(p, one, [image(5, 20, 1)], 0)
    with pytest.raises(WrongRead):
        send(p, one, [image(5, 20, 2)], 1)


def test_b115_p_that_ignored_media_would_be_found(p, monkeypatch):
    monkeypatch.setattr(MediaBook, "features", lambda *arguments: [])
    with pytest.raises(WrongRead):
        send(p, prompt(100), [image(5, 20, 1)], 0)


# Settings.


def config(**fields):
    media = {"language_model_only": False, "mm_encoder_only": False, "video_pruning_rate": None,
             "mm_encoder_fp8_scale_path": None, "mm_processor_kwargs": None, "mm_encoder_attn_dtype": None,
             "mm_device_do_normalize": True}
    model = {"is_multimodal_model": True, "is_encoder_decoder": False, "is_mm_prefix_lm": False}
    rest = {"speculative_config": None, "ec_transfer_config": None}
    for group in (media, model, rest):
        group.update({key: fields.pop(key) for key in list(fields) if key in group})
    assert not fields
    return SimpleNamespace(model_config=SimpleNamespace(**model, multimodal_config=SimpleNamespace(**media)), **rest)


@pytest.mark.parametrize("fields", [
    {"is_multimodal_model": False}, {"is_encoder_decoder": True}, {"is_mm_prefix_lm": True},
    {"language_model_only": True},
    {"mm_encoder_only": True}, {"video_pruning_rate": 0.5}, {"speculative_config": object()},
    {"ec_transfer_config": object()}])
def test_b115_media_stay_with_an_engine_of_these_settings(fields):
    assert encoder_name(config()) and encoder_name(config(**fields)) == ""


def test_b115_two_engines_must_agree_on_what_the_encoder_gets(tmp_path):
    scales = [tmp_path / name for name in ("one", "two", "same")]
    for path, content in zip(scales, ("1", "2", "1"), strict=True):
        path.write_text(content)
    names = [encoder_name(config(**fields)) for fields in (
        {}, {"mm_processor_kwargs": {"num_crops": 4}}, {"mm_encoder_attn_dtype": "fp8"},
        {"mm_device_do_normalize": False},
        *({"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": str(path)} for path in scales))]
    assert len(set(names)) == 6 and names[-1] == names[-3], "not by where a file is"
    assert encoder_name(config(mm_processor_kwargs={"device": "cuda"})) == names[0], "nor by who makes it"
    assert encoder_name(config(video_pruning_rate=0.0)) == names[0]
