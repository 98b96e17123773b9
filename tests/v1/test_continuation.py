# SPDX-License-Identifier: Apache-2.0
"""B65: what the router's continuation stands on in vLLM: the form of its events and requests, and that its detokenizer
says the same behind a prompt that holds the first part of an answer.
"""
import json
import random
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion import protocol as chat
from vllm.entrypoints.openai.completion import protocol as completion
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, SlowIncrementalDetokenizer

from tests.unit.test_continuation import CHAT, COMPLETIONS, PATHS, USAGE, after, asked
from vllm_pd.router.continuation import _COPIED, _READ, _WITHOUT_EFFECT, ContinuableStream

TEXTS = ["Two naïve cafés: 你好，世界 🦄🎉 — плохо", "  leading\n\n\t spaces", "👩‍👩‍👧‍👦 one family, ÿ ก็",
         "<|im_end|>hello<|im_start|>user\n"]


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama's: a space begins a word, and bytes of characters that have no token are tokens."""
    words = ["▁", "▁the", "▁cat", "the", "cat", "a", "b", "▁a", ".", "▁.", "é", "▁你", "好", "s", "▁s", "l", "o"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    made = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[],
                                unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                      decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def texts_of(kind: type, tokenizer, prompt: list[int], answer: list[int], **params) -> list[str]:
    """What each token of an answer adds to its text."""
    detokenizer = kind(tokenizer, SimpleNamespace(request_id="", prompt_token_ids=prompt, prompt_embeds=None,
                                                  sampling_params=SamplingParams(**params)))
    found = []
    for token in answer:
        before = len(detokenizer.output_text)
        detokenizer.update([token], False)
        found.append(detokenizer.output_text[before:])
    return found


def boundaries(kind: type, tokenizer, answers: list[list[int]], **params) -> tuple[int, int]:
    """(breaks after a token that brought text, those after which the rest has another text) of answers, each also cut
    in two at every such place."""
    tried = unequal = 0
    for answer in answers:
        for prompt in ([tokenizer.bos_token_id], answer[:5]):
            whole = texts_of(kind, tokenizer, prompt, answer, **params)
            for cut in range(1, len(answer)):
                if whole[cut - 1]:
                    tried += 1
                    rest = texts_of(kind, tokenizer, prompt + answer[:cut], answer[cut:], **params)
                    unequal += rest != whole[cut:]
    return tried, unequal


def drawn(tokenizer, count: int) -> list[list[int]]:
    """Texts with characters of several tokens, and tokens at random, of which half are bytes."""
    draw = random.Random(65)
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"][:40] for text in TEXTS]
    single = [token for token in range(len(tokenizer)) if len(tokenizer.convert_ids_to_tokens(token)) in (1, 6)]
    return rows + [[draw.choice(single) if draw.random() < 0.5 else draw.randrange(len(tokenizer)) for _ in range(15)]
                   for _ in range(count)]


@pytest.mark.parametrize("skip", [True, False], ids=["skip special", "with special"])
@pytest.mark.parametrize("which", ["bytes", "byte fallback"])
def test_b65_the_rest_has_the_same_text_after_any_token_with_text(which, skip):
    import os
    tokenizer = byte_fallback() if which == "byte fallback" else AutoTokenizer.from_pretrained(
        os.environ["VLLM_PD_TINY_MODEL"])
    answers = drawn(tokenizer, 30)
    tried, unequal = boundaries(FastIncrementalDetokenizer, tokenizer, answers, skip_special_tokens=skip)
    assert tried > 150 and not unequal
    if which == "bytes":
        assert not boundaries(SlowIncrementalDetokenizer, tokenizer, answers[:10], skip_special_tokens=skip)[1]


def test_b65_it_has_not_after_a_part_of_a_character():
    """Why such tokens are generated anew."""
    tokenizer = byte_fallback()
    unicorn = tokenizer("a🦄a", add_special_tokens=False)["input_ids"]
    at = unicorn.index(tokenizer.convert_tokens_to_ids("<0xA6>")) - 1  # behind its first two bytes
    whole = texts_of(FastIncrementalDetokenizer, tokenizer, [1], unicorn)
    assert "".join(whole[:at]) + "".join(texts_of(FastIncrementalDetokenizer, tokenizer, [1] + unicorn[:at],
                                                  unicorn[at:])) != "".join(whole)


@pytest.mark.parametrize("path", PATHS)
def test_b65_the_fields_are_those_of_vllm(path):
    known = set((chat.ChatCompletionRequest if path == CHAT else completion.CompletionRequest).model_fields)
    other = {"messages", "max_completion_tokens", "chat_template", "chat_template_kwargs", "add_generation_prompt",
             "continue_final_message", "documents", "parallel_tool_calls", "top_logprobs", "tool_choice",
             "include_reasoning"} if path == COMPLETIONS else {"prompt"}
    assert (_COPIED | _READ | set(_WITHOUT_EFFECT)) - other - known == {"best_of"}, "of earlier releases"
    assert set(_COPIED) <= set(completion.CompletionRequest.model_fields), "what a chat hands on, too"


@pytest.mark.parametrize("path", PATHS)
def test_b65_vllm_reads_the_continuation(path):
    target, body = after(path, 4, temperature=0, seed=1, top_k=5, min_tokens=7, **USAGE[2])
    read = completion.CompletionRequest(**body)
    assert target == COMPLETIONS and not read.model_extra and read.return_token_ids and read.stream
    assert read.to_sampling_params(read.max_tokens, {}).min_tokens == body["min_tokens"]


def events(ids: list[int] | None) -> list[tuple[str, bytes]]:
    """Events as vLLM's servers write them, with these token ids."""
    head = {"id": "x", "created": 5, "model": "m"}
    prompt = None if ids is None else [1, 2]
    made = [(CHAT, chat.ChatCompletionStreamResponse(**head, object="chat.completion.chunk", prompt_token_ids=prompt,
                                                     prompt_text=None, choices=[
        chat.ChatCompletionResponseStreamChoice(index=0, delta=chat.DeltaMessage(role="assistant", content=""),
                                                logprobs=None, finish_reason=None)])),
            (CHAT, chat.ChatCompletionStreamResponse(**head, object="chat.completion.chunk", choices=[
                chat.ChatCompletionResponseStreamChoice(index=0, delta=chat.DeltaMessage(content='"token_ids":[5]'),
                                                        logprobs=None, finish_reason=None, token_ids=ids)])),
            (CHAT, chat.ChatCompletionStreamResponse(**head, object="chat.completion.chunk", choices=[
                chat.ChatCompletionResponseStreamChoice(index=0, delta=chat.DeltaMessage(content=""), logprobs=None,
                                                        finish_reason="stop", stop_reason=None, token_ids=ids)])),
            *((COMPLETIONS, completion.CompletionStreamResponse(**head, object="text_completion", choices=[
                completion.CompletionResponseStreamChoice(
                    index=0, text=text, logprobs=None, finish_reason=reason, stop_reason=None,
                    prompt_token_ids=prompt if text else None, token_ids=ids)]))
              for text, reason in (("🦄", None), ("", "length")))]
    return [(path, b"data: " + one.model_dump_json(exclude_unset=True).encode() + b"\n\n") for path, one in made]


def test_b65_the_ids_are_taken_out_as_if_nobody_had_asked():
    streams = {path: ContinuableStream.of(path, json.dumps(asked(path)).encode()) for path in PATHS}
    for (path, sent), (_, wanted) in zip(events([7]), events(None), strict=True):
        assert streams[path].receive(sent) == wanted
    assert all(stream.end().endswith(b"data: [DONE]\n\n") for stream in streams.values()), "all were understood"


def test_b65_the_rest_looks_as_vllms_own():
    for path in PATHS:
        stream = ContinuableStream.of(path, json.dumps(asked(path)).encode())
        own = [one for of, one in events(None) if of == path]
        sent = [one for of, one in events([7]) if of == path]
        for event in sent[:-1]:
            assert stream.receive(event)
        stream.next_request()
        end = next(one for of, one in events([7]) if of == COMPLETIONS and b"length" in one).replace(b'"x"', b'"y"')
        assert stream.receive(end) == own[-1].replace(b"stop\"", b"length\"")
