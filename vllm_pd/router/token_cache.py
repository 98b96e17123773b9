# SPDX-License-Identifier: Apache-2.0
"""A cache of token ids, so that only new text is tokenised: a chat's next prompt is its previous one and a little more.

A tokenizer looks for its special tokens first, and tokenises the text between two of them independently. So a text can
be split before each special token, and the segments' ids, one after the other, are the ids of the text. The ids of the
segments used last (system prompts, earlier turns) are kept, up to `MAX_KEPT_CHARS`. A text is not split before a
special token that depends on the text before it (`single_word`) or takes a space from it (`lstrip`).

`TokenCache.partial` tokenises only the first part of a prompt, see `vllm_pd.router.deferred`. It may have to stop
inside a segment, and then stops between two words, where most tokenizers begin a new token. `can_cut_between_words`
checks on sample texts that a tokenizer does.
"""
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

MAX_KEPT_CHARS = 16 << 20  # of text; with its ids about twice as many bytes
ENTRY_CHARS = 128  # what the rest of an entry takes, in characters of text
MIN_REST_RATIO = 3  # a text is cut only if what is left is so many times what is tokenised now

SAMPLES = 3  # places in a text
SAMPLE_CHARS = 40  # at each of them
SAMPLE_TEXT = (
    "One of the best things about the end of the year is that it can be as quiet as you want it to be, at least for a "
    "while. In the case of the United States it is not clear what will happen in the future, and there is a lot to do. "
    "Es ist nicht so, dass es in der Stadt an der Elbe zu viele von den Leuten gibt, die das auch sagen. "
    "Il y a une partie de la ville que l'on ne voit pas, et c'est la plus belle de toutes. "
    "Lo que no se puede decir de una vez se dice en la noche, por lo que es de los que lo son. "
    "Это было не так, как мы думали, и в том числе для того, чтобы он не был один. def f(x): return x if x else None")

Encode = Callable[[list[str]], list[Sequence[int]]]  # texts -> the token ids of each

_BETWEEN_WORDS = re.compile(r"[^\W\d_](?= [^\W\d_])")


class PartialTokens(NamedTuple):
    """The first ids of a text, and an estimate of how many ids the whole text has."""
    ids: Sequence[int]
    tokens: int


def place_to_cut(text: str, chars: int) -> int | None:
    """The first index between two words from `chars` on, at most 2 * `chars`. None where there is none, or where too
    little of the text is left behind it."""
    if len(text) < (1 + MIN_REST_RATIO) * chars:
        return None
    found = _BETWEEN_WORDS.search(text, chars - 1, 2 * chars)
    return None if found is None else found.end()


class AddedToken(Protocol):
    """An added token of a tokenizer, as the `tokenizers` library describes it."""
    content: str
    single_word: bool  # it is not recognised inside a word
    lstrip: bool  # it takes the space before it
    normalized: bool  # it is looked for after the other added tokens, in the text between them


def estimated(ids: Sequence[int], text: str, start: int, encode: Encode) -> PartialTokens:
    """`ids` are those of text[:start]. The tokens of the rest are estimated from `SAMPLES` short parts of it."""
    step = (len(text) - start) // SAMPLES
    sample = " ".join(text[at:at + SAMPLE_CHARS] for at in range(start + step // 2, start + SAMPLES * step, step))
    [sample_ids] = encode([sample])
    return PartialTokens(ids, len(ids) + round((len(text) - start) * len(sample_ids) / len(sample)))


def can_cut_between_words(encode: Encode) -> bool:
    """Whether a text may be cut between words with this tokenizer: at each such place of `SAMPLE_TEXT` the text before
    the cut has the same ids by itself as within the whole text."""
    [whole] = encode([SAMPLE_TEXT])
    starts = encode([SAMPLE_TEXT[:found.end()] for found in _BETWEEN_WORDS.finditer(SAMPLE_TEXT)])
    return all(list(ids) == list(whole[:len(ids)]) for ids in starts)


class TokenCache:
    """The cache of one tokenizer. `added` are all its added tokens. `encode` returns the ids of each of several texts,
    without special tokens before and after them. Safe to use from several threads."""

    def __init__(self, added: Iterable[AddedToken], encode: Encode,
                 max_kept_chars: int = MAX_KEPT_CHARS) -> None:
        self._encode = encode
        first = sorted((token for token in added if token.content and not token.normalized),
                       key=lambda token: -len(token.content))  # the longest match at a place wins
        self._special = re.compile("|".join(re.escape(token.content) for token in first)) if first else None
        self._split_before = frozenset(token.content for token in first if not token.single_word and not token.lstrip)
        self._kept: OrderedDict[str, array] = OrderedDict()
        self._max_kept_chars = max_kept_chars
        self._lock = threading.Lock()
        self.kept_chars = 0

    def ids(self, text: str) -> array:
        """The ids of the whole text. Raises whatever `encode` raises."""
        segments = self._split(text)
        return self._ids(segments, self._cached(segments))

    def partial(self, text: str, chars: int) -> PartialTokens | None:
        """The ids of the start of the text, up to about `chars` into its first long segment that is not cached. None
        where there is no such segment or no place to cut it, or where more than 4 * `chars` of short segments that are
        not cached come before it. Raises whatever `encode` raises."""
        segments = self._split(text)
        cached = self._cached(segments)
        start = new_chars = 0
        for index, segment in enumerate(segments):
            if cached[index] is None:
                end = place_to_cut(segment, chars)
                if end is not None:
                    break
                new_chars += len(segment)
                if new_chars > 4 * chars:
                    return None
            start += len(segment)
        else:
            return None
        ids = self._ids(segments[:index], cached[:index])
        ids.extend(self._encode([segment[:end]])[0])
        return estimated(ids, text, start + end, self._encode)

    def _ids(self, segments: list[str], cached: list[array | None]) -> array:
        """The ids of these segments, one after the other. `cached` has those that are known, None for the others, which
        are tokenised and then kept."""
        missing = list(dict.fromkeys(segment for segment, ids in zip(segments, cached, strict=True) if ids is None))
        if missing:
            new = dict(zip(missing, (array("I", ids) for ids in self._encode(missing)), strict=True))
            self._keep(new)
            cached = [new[segment] if ids is None else ids for segment, ids in zip(segments, cached, strict=True)]
        joined = array("I")
        for ids in cached:
            joined.extend(ids)
        return joined

    def _cached(self, segments: list[str]) -> list[array | None]:
        with self._lock:
            cached = [self._kept.get(segment) for segment in segments]
            for segment, ids in zip(segments, cached, strict=True):
                if ids is not None:
                    self._kept.move_to_end(segment)
        return cached

    def _split(self, text: str) -> list[str]:
        if self._special is None:
            return [text]
        starts = [0, *(match.start() for match in self._special.finditer(text)
                       if match.start() and match.group() in self._split_before), len(text)]
        return [text[start:end] for start, end in zip(starts, starts[1:], strict=False)]

    def _keep(self, new: dict[str, array]) -> None:
        with self._lock:
            for segment, ids in new.items():
                size = ENTRY_CHARS + len(segment)
                if segment not in self._kept and size <= self._max_kept_chars:
                    self._kept[segment] = ids
                    self.kept_chars += size
            while self.kept_chars > self._max_kept_chars:
                self.kept_chars -= ENTRY_CHARS + len(self._kept.popitem(last=False)[0])
