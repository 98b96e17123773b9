# SPDX-License-Identifier: Apache-2.0
"""Tokenising what was not there before: a chat's next prompt is its last one, which was tokenised, and a little more.

A tokenizer looks for its special tokens first, and treats what stands between two of them by itself. So a text can be
cut before each special token, and the pieces' ids, one after the other, are those of the text. What pieces that have
come before (system prompts, earlier turns) gave is kept, for the last used ones, up to `MAX_KEPT_CHARS`. Nothing is
cut before a special token on which the text before it has a say, or which has one on that.

A prompt's beginning can be had by itself, for who need not know the rest yet. Where it ends in the middle of a piece it
ends between two words: most tokenizers begin anew at the space before a word. Whether one does is tried on a sample
(`parts_between_words`).
"""
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

MAX_KEPT_CHARS = 16 << 20  # of text; with its ids about twice as many bytes
WORTH = 3  # what is left for later is at least so many times what is done now

SAMPLES = 3  # places
SAMPLE_CHARS = 40  # at each
WORDS = (
    "One of the best things about the end of the year is that it can be as quiet as you want it to be, at least for a "
    "while. In the case of the United States it is not clear what will happen in the future, and there is a lot to do. "
    "Es ist nicht so, dass es in der Stadt an der Elbe zu viele von den Leuten gibt, die das auch sagen. "
    "Il y a une partie de la ville que l'on ne voit pas, et c'est la plus belle de toutes. "
    "Lo que no se puede decir de una vez se dice en la noche, por lo que es de los que lo son. "
    "Это было не так, как мы думали, и в том числе для того, чтобы он не был один. def f(x): return x if x else None")

_BETWEEN_WORDS = re.compile(r"[^\W\d_](?= [^\W\d_])")


class PartialTokens(NamedTuple):
    """Of a text: its first ids, and how many it will have in all, a guess."""
    ids: Sequence[int]
    tokens: int


def place_to_cut(text: str, chars: int) -> int | None:
    """Between two words, after `chars` of a text or a little more; None where no such place is near, or where what
    follows is not worth it."""
    if len(text) < (1 + WORTH) * chars:
        return None
    found = _BETWEEN_WORDS.search(text, chars - 1, 2 * chars)
    return None if found is None else found.end()


class AddedToken(Protocol):
    """One of the tokenizer's added tokens, as the library describes it."""
    content: str
    single_word: bool  # not within a word
    lstrip: bool  # the space before it belongs to it
    normalized: bool  # looked for later, in what the others have left


def sample(text: str, start: int) -> str:
    """A little of the text from `start` on, from places all over it, by which its length in tokens is guessed."""
    step = (len(text) - start) // SAMPLES
    return " ".join(text[at:at + SAMPLE_CHARS] for at in range(start + step // 2, start + SAMPLES * step, step))


def guess(sampled: str, ids: Sequence[int], chars: int) -> int:
    """How many tokens so many characters have, if they are as this sample with these ids."""
    return round(chars * len(ids) / len(sampled))


def parts_between_words(encode: Callable[[list[str]], list[Sequence[int]]]) -> bool:
    """Whether this tokenizer's texts can be cut between words: at each such place of the sample what stands before has
    the ids that it has in the whole."""
    [whole] = encode([WORDS])
    beginnings = encode([WORDS[:found.end()] for found in _BETWEEN_WORDS.finditer(WORDS)])
    return all(list(ids) == list(whole[:len(ids)]) for ids in beginnings)


class TokenCache:
    """Of one tokenizer: `added` are all its added tokens, `encode` gives the ids of each of several texts, without
    anything before and after them. Safe to use from several threads."""

    def __init__(self, added: Iterable[AddedToken], encode: Callable[[list[str]], list[Sequence[int]]],
                 max_kept_chars: int = MAX_KEPT_CHARS) -> None:
        self._encode = encode
        first = sorted((token for token in added if token.content and not token.normalized),
                       key=lambda token: -len(token.content))  # the longest that begins at a place is meant there
        self._special = re.compile("|".join(re.escape(token.content) for token in first)) if first else None
        self._cut_before = frozenset(token.content for token in first if not token.single_word and not token.lstrip)
        self._kept: OrderedDict[str, array] = OrderedDict()
        self._max_kept_chars = max_kept_chars
        self._lock = threading.Lock()
        self.kept_chars = 0

    def ids(self, text: str) -> array:
        """Those of the whole text. Raises whatever `encode` raises."""
        pieces = self._cut(text)
        return self._ids(pieces, self._known(pieces))

    def beginning(self, text: str, chars: int) -> PartialTokens | None:
        """What is known of its beginning, and of what is not short pieces and about `chars` of the first long one. None
        where there is none, or no place to cut it. Raises whatever `encode` raises."""
        pieces = self._cut(text)
        found = self._known(pieces)
        at = room = 0
        for number, piece in enumerate(pieces):
            if found[number] is None:
                end = place_to_cut(piece, chars)
                if end is not None:
                    break
                room += len(piece)
                if room > 4 * chars:
                    return None
            at += len(piece)
        else:
            return None
        later = sample(text, at + end)
        new, sampled = self._encode([piece[:end], later])
        ids = self._ids(pieces[:number], found[:number])
        ids.extend(new)
        return PartialTokens(ids, len(ids) + guess(later, sampled, len(text) - at - end))

    def _ids(self, pieces: list[str], found: list[array | None]) -> array:
        """Of pieces of which so much is known."""
        missing = list(dict.fromkeys(piece for piece, known in zip(pieces, found, strict=True) if known is None))
        if missing:
            new = dict(zip(missing, (array("I", ids) for ids in self._encode(missing)), strict=True))
            self._keep(new)
            found = [new[piece] if known is None else known for piece, known in zip(pieces, found, strict=True)]
        whole = array("I")
        for known in found:
            whole.extend(known)
        return whole

    def _known(self, pieces: list[str]) -> list[array | None]:
        with self._lock:
            found = [self._kept.get(piece) for piece in pieces]
            for piece, known in zip(pieces, found, strict=True):
                if known is not None:
                    self._kept.move_to_end(piece)
        return found

    def _cut(self, text: str) -> list[str]:
        if self._special is None:
            return [text]
        starts = [0, *(match.start() for match in self._special.finditer(text)
                       if match.start() and match.group() in self._cut_before), len(text)]
        return [text[start:end] for start, end in zip(starts, starts[1:], strict=False)]

    def _keep(self, new: dict[str, array]) -> None:
        with self._lock:
            for piece, ids in new.items():
                if piece not in self._kept and len(piece) <= self._max_kept_chars:
                    self._kept[piece] = ids
                    self.kept_chars += len(piece)
            while self.kept_chars > self._max_kept_chars:
                self.kept_chars -= len(self._kept.popitem(last=False)[0])
