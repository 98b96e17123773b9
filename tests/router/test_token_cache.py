# SPDX-License-Identifier: Apache-2.0
"""That a text cut before special tokens has the ids of the whole text, whatever the tokenizer is made of."""
import os
import random
import subprocess
import sys
import threading

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from vllm_pd.router.token_cache import ENTRY_CHARS, SAMPLE_CHARS, SAMPLES, TokenCache, can_cut_between_words

PLAIN = (AddedToken("<|a|>", special=True, normalized=False), AddedToken("<|b|>", special=True, normalized=False))
KINDS = {
    "plain": PLAIN,
    "takes spaces before": (AddedToken("<|a|>", special=True, normalized=False, lstrip=True), PLAIN[1]),
    "takes spaces after": (AddedToken("<|a|>", special=True, normalized=False, rstrip=True), PLAIN[1]),
    "whole words": (AddedToken("<|a|>", special=True, normalized=False, single_word=True), PLAIN[1]),
    "normalized": (AddedToken("<|a|>", special=True, normalized=True), PLAIN[1]),
    "one in another": (*PLAIN, AddedToken("x<|a|>b", special=True, normalized=False)),
    "one in another, whole words": (*PLAIN, AddedToken("x<|a|>b", special=True, normalized=False, single_word=True)),
    "one over the other": (*PLAIN, AddedToken("x<|", special=True, normalized=False)),
    "one over the other, takes spaces": (*PLAIN, AddedToken("x<|", special=True, normalized=False, lstrip=True)),
    "one begins like another": (*PLAIN, AddedToken("<|a|>x", special=True, normalized=False, lstrip=True)),
    "begins with a space that one takes": (AddedToken("<|b|>", special=True, normalized=False, rstrip=True),
                                           AddedToken(" <|a|>", special=True, normalized=False)),
}
LETTERS = ["<|a|>", "<|b|>", "<|", "|>", "<|a", " ", "  ", "\n", "a", "b", "x", "A", "é", "ab", "xab", "x<|", "|><|a"]


def made(added, normalizer=None, pre_tokenizer=None):
    """A BPE whose words depend on their neighbours: every pair of letters is a token of its own."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "▁", "é", "\n"]
    pairs = [(a, b) for a in "abx▁Ġ" for b in "abx▁Ġ"]
    vocabulary = {token: number for number, token in enumerate([*dict.fromkeys(alphabet), *map("".join, pairs)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [pair for pair in pairs], unk_token=None))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(added))
    return tokenizer


BUILDS = {
    "bytes": (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "bytes, space first": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "spaces as letters, at the start": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "spaces as letters, everywhere": (None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "normalized": (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None),
    "lower case": (normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()]),
                   pre_tokenizers.Split(Regex(r"\s+|\w+"), "isolated")),
}


def pieces_of(tokenizer, **more):
    asked = []

    def encode(texts):
        asked.extend(texts)
        return [one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    return TokenCache(tokenizer.get_added_tokens_decoder().values(), encode, **more), asked


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("build", BUILDS)
def test_the_pieces_ids_are_the_texts(build, kind):
    tokenizer = made(KINDS[kind], *BUILDS[build])
    pieces, asked = pieces_of(tokenizer)
    draw = random.Random(5)
    for _ in range(300):
        text = "".join(draw.choices(LETTERS, k=draw.randint(0, 12)))
        assert list(pieces.ids(text)) == tokenizer.encode(text, add_special_tokens=False).ids, text
    assert len(asked) == len(set(asked)), "nothing is tokenised twice"


@pytest.mark.parametrize("build", ["bytes", "bytes, space first", "spaces as letters, everywhere", "lower case"])
def test_a_beginning_is_that_of_the_whole(build):
    tokenizer = made(PLAIN, *BUILDS[build])
    draw = random.Random(7)
    for _ in range(200):
        pieces, asked = pieces_of(tokenizer)
        known = "".join(draw.choices(LETTERS, k=6)) + "x <|b|>ab"
        pieces.ids(known + "<|a|>")
        asked.clear()
        known += draw.choice(["", "<|a|>yes, of course", "<|a|>ab<|b|>ab<|a|>"])
        text = known + "<|a|>" * draw.randint(1, 2) + " ".join(draw.choices(["ab", "a", "x", "é", "xab"], k=60))
        begun = pieces.partial(text, 12)
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        assert list(begun.ids) == whole[:len(begun.ids)] and len(begun.ids) < len(whole), text
        assert sum(map(len, asked)) <= 24 + 25 + SAMPLES * (SAMPLE_CHARS + 1), "only that much is tokenised"
        assert abs(begun.tokens - len(whole)) < 0.5 * len(whole)


def test_a_beginning_is_not_worth_it_or_not_to_be_had():
    pieces, _ = pieces_of(made(PLAIN, *BUILDS["bytes"]))
    words = "ab " * 100
    assert pieces.partial(words, 76) is None, "what is left is too little"
    assert pieces.partial(words, 75) is not None
    assert pieces.partial("ab" * 200, 10) is None, "no place between words"
    assert pieces.partial("a. 1, " * 100, 10) is None
    assert pieces.partial("<|a|>a, b, c" * 100, 10) is None, "much of little pieces is done together"
    assert pieces_of(made(PLAIN, *BUILDS["bytes"]))[0].partial("ab " * 20 + "7" * 1000, 10).tokens > 700
    pieces.ids(words)
    assert pieces.partial(words, 10) is None, "all is known"


@pytest.mark.parametrize("build, parts", [
    ("bytes", True), ("bytes, space first", True), ("spaces as letters, everywhere", True), ("lower case", True),
    ("spaces as letters, at the start", False), ("normalized", False)])
def test_it_is_tried_whether_words_run_into_one_another(build, parts):
    tokenizer = made(PLAIN, *BUILDS[build])
    assert can_cut_between_words(lambda texts: [tokenizer.encode(text).ids for text in texts]) is parts


def test_only_what_is_new_is_tokenised():
    pieces, asked = pieces_of(made(PLAIN, *BUILDS["bytes"]))
    pieces.ids("s<|a|>one<|b|>")
    pieces.ids("s<|a|>one<|b|>two<|a|>three")
    assert asked == ["s", "<|a|>one", "<|b|>", "<|b|>two", "<|a|>three"]


def test_what_was_used_last_is_kept():
    pieces, asked = pieces_of(made(PLAIN, *BUILDS["bytes"]), max_kept_chars=3 * (ENTRY_CHARS + 8))
    for text in ("<|a|>111", "<|a|>222", "<|a|>333", "<|a|>111", "<|a|>444", "<|a|>111", "<|a|>222"):
        pieces.ids(text)
        assert pieces.kept_chars <= 3 * (ENTRY_CHARS + 8)
    assert asked == ["<|a|>111", "<|a|>222", "<|a|>333", "<|a|>444", "<|a|>222"]
    pieces.ids("x" * 400)
    assert pieces.kept_chars == 3 * (ENTRY_CHARS + 8), "what is too long leaves the others alone"


def test_what_beginnings_use_is_kept_too():
    pieces, asked = pieces_of(made(PLAIN, *BUILDS["bytes"]), max_kept_chars=400 + 10 * ENTRY_CHARS)
    pieces.ids("<|a|>system<|b|>")
    for number in range(50):
        pieces.ids(f"<|a|>{number} 111111")
        assert pieces.partial(f"<|a|>system<|b|>{number}" + " ab" * 60, 12) is not None
    assert asked.count("<|a|>system") == 1


def test_several_threads_may_ask():
    tokenizer = made(PLAIN, *BUILDS["bytes"])
    pieces, _ = pieces_of(tokenizer, max_kept_chars=50 + 5 * ENTRY_CHARS)
    texts = [f"<|a|>{number % 7}<|b|>{number % 11}" for number in range(300)]
    wanted = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    wrong = []

    def ask():
        wrong.extend(text for text, ids in zip(texts, wanted, strict=True) if list(pieces.ids(text)) != ids)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and pieces.kept_chars <= 50 + 5 * ENTRY_CHARS
    assert pieces.kept_chars == sum(ENTRY_CHARS + len(segment) for segment in pieces._kept)


def test_b80_many_short_segments_take_no_more_memory_than_a_long_one():
    pieces, _ = pieces_of(made(PLAIN, *BUILDS["bytes"]), max_kept_chars=1 << 20)
    for first in range(0, 100_000, 1000):
        pieces.ids("".join(f"<|a|>{number:05}" for number in range(first, first + 1000)))
    held = sys.getsizeof(pieces._kept) + sum(sys.getsizeof(one) for both in pieces._kept.items() for one in both)
    assert 1 << 19 < held < 4 << 20


def test_chats_of_a_model_have_the_librarys_ids():
    """In a process of its own, which can do without torch."""
    program = """if True:
        import os, sys
        from vllm_pd.router.tokenizer import LIBRARY
        os.environ.update(LIBRARY)
        from vllm_pd.router.tokenizer import Prompt, Tokenizer
        tokenizer = Tokenizer(sys.argv[1])
        said, asked = [], []
        encode = tokenizer.cache._encode
        tokenizer.cache._encode = lambda texts: asked.extend(texts) or encode(texts)
        for turn in range(5):
            said += [{"role": "user", "content": f"{turn} \u00e9 <|im_start|>? " * 20},
                     {"role": "assistant", "content": " \\n yes"}]
            whole = tokenizer._tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
            library = tokenizer._tokenizer(whole, add_special_tokens=False).input_ids
            assert list(tokenizer.tokens(Prompt(messages=said))) == library
        new = [*said, {"role": "user", "content": "Tell me at length of the capital of France and of its river. " * 9}]
        for prompt in (Prompt(messages=new), Prompt(prompt=new[-1]["content"])):
            begun = tokenizer.partial(prompt, 60)
            ids = list(tokenizer.tokens(prompt))
            assert 10 < len(begun.ids) < len(ids) and list(begun.ids) == ids[:len(begun.ids)]
            assert abs(begun.tokens - len(ids)) < 0.2 * len(ids)
        for prompt in (Prompt(prompt="a b"), Prompt(prompt=[1]), Prompt(prompt="a b " * 99, truncate_prompt_tokens=3)):
            assert tokenizer.partial(prompt, 60) is None
        del asked[-2:]
        assert len(asked) == len(set(asked)) and sum(map(len, asked)) < 1.2 * len(whole), "each turn once"
    """
    subprocess.run([sys.executable, "-c", program, os.environ["VLLM_PD_TINY_MODEL"]], check=True, timeout=300)
