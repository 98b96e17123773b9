# SPDX-License-Identifier: Apache-2.0
"""Tokenising what was not there before: a chat's next prompt is its last one, which was tokenised, and a little more.

A tokenizer looks for its special tokens first, and treats what stands between two of them by itself. So a text can be
cut before each special token, and the pieces' ids, one after the other, are those of the text. What pieces that have
come before (system prompts, earlier turns) gave is kept, for the last used ones, up to `MAX_KEPT_CHARS`. Nothing is
cut before a special token on which the text before it has a say, or which has one on that.
"""
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

MAX_KEPT_CHARS = 16 << 20  # of text; with its ids about twice as many bytes


class Special(Protocol):
    """One of the tokenizer's added tokens, as the library describes it."""
    content: str
    single_word: bool  # not within a word
    lstrip: bool  # the space before it belongs to it
    normalized: bool  # looked for later, in what the others have left


class Pieces:
    """Of one tokenizer: `added` are all its added tokens, `encode` gives the ids of each of several texts, without
    anything before and after them. Safe to use from several threads."""

    def __init__(self, added: Iterable[Special], encode: Callable[[list[str]], list[Sequence[int]]],
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
        with self._lock:
            found = [self._kept.get(piece) for piece in pieces]
            for piece, known in zip(pieces, found, strict=True):
                if known is not None:
                    self._kept.move_to_end(piece)
        missing = list(dict.fromkeys(piece for piece, known in zip(pieces, found, strict=True) if known is None))
        if missing:
            new = dict(zip(missing, (array("I", ids) for ids in self._encode(missing)), strict=True))
            self._keep(new)
            found = [new[piece] if known is None else known for piece, known in zip(pieces, found, strict=True)]
        whole = array("I")
        for known in found:
            whole.extend(known)
        return whole

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
