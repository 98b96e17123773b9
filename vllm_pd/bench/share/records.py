# SPDX-License-Identifier: Apache-2.0
"""Reads the JSON values of a trace, JSON lines or one list, one by one: the file may be larger than the memory."""
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import msgspec

from vllm_pd.errors import ConfigError

CHUNK_CHARS = 1 << 20
MAX_RECORD_BYTES = 64 << 20
SHOWN_CHARS = 60
FORMATS = "give JSON lines or one JSON list; docs/benchmarks.md, \"How repetitive is my traffic?\", has the formats"


class TraceRecord(NamedTuple):
    """One value of a trace, and the number of the line where it begins."""
    line: int
    value: Any


def brief(value: object) -> str:
    """The beginning of a value, for an error."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."


def refused(path: Path, line: int, value: object, cure: str) -> ConfigError:
    """The error for a value of a trace."""
    return ConfigError(f"{path}, line {line}", brief(value), cure)


def read_records(path: Path) -> Iterator[TraceRecord]:
    """The values of the file. Raises ConfigError, which names file, line, value and cure, for what can't be read."""
    try:
        with path.open("rb") as file:
            start = file.read(CHUNK_CHARS).removeprefix(b"\xef\xbb\xbf").lstrip()
        if start.startswith(b"["):
            with path.open(encoding="utf-8-sig") as file:
                yield from _ListReader(path, file).records()
        else:
            yield from _read_lines(path)
    except OSError as error:
        raise ConfigError("FILE", str(path), f"it can't be read ({error.strerror}): give a file") from None


def _read_lines(path: Path) -> Iterator[TraceRecord]:
    """The values of JSON lines, read one line at a time; empty lines are skipped. Raises ConfigError for a line that
    has more than MAX_RECORD_BYTES or is no JSON."""
    number = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_RECORD_BYTES + 1):
            number += 1
            if len(line) > MAX_RECORD_BYTES:
                raise refused(path, number, line[:200].decode(errors="replace"),
                               f"a line may have {MAX_RECORD_BYTES} bytes; {FORMATS}")
            line = line.removeprefix(b"\xef\xbb\xbf").strip()
            if not line:
                continue
            try:
                yield TraceRecord(number, msgspec.json.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise refused(path, number, line[:200].decode(errors="replace"), f"{error}: {FORMATS}") from None


class _ListReader:
    """Reads the elements of one JSON list."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path = path
        self._file = file
        self._buffer = ""
        self._at = 0  # where the next character is
        self._line = 1  # the one of that character
        self._decoder = json.JSONDecoder()

    def records(self) -> Iterator[TraceRecord]:
        """The elements. The list must be all there is in the file."""
        self._expect("[")
        if self._peek() == "]":
            self._advance(1)
        else:
            while True:
                self._peek()
                yield self._element()
                if self._expect(",]") == "]":
                    break
        if self._peek():
            raise self._error("nothing may come after the list")

    def _element(self) -> TraceRecord:
        """The next element. Where it does not end in what has been read, reads on and parses it again: more may also
        come after a number that could end there. Raises ConfigError."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._at)
            except (json.JSONDecodeError, RecursionError) as error:
                if not self._read_more():  # else the element may only not be complete yet
                    raise self._error(getattr(error, "msg", "nested too deeply")) from None
                continue
            if end == len(self._buffer) and self._read_more():
                continue  # a number may go on
            record = TraceRecord(self._line, value)
            self._advance(end - self._at)
            return record

    def _expect(self, characters: str) -> str:
        found = self._peek()
        if not found or found not in characters:
            raise self._error(f"expected {' or '.join(characters)}")
        self._advance(1)
        return found

    def _peek(self) -> str:
        """The next character that is no space; empty at the end of the file."""
        while True:
            while self._at < len(self._buffer):
                if not self._buffer[self._at].isspace():
                    return self._buffer[self._at]
                self._advance(1)
            if not self._read_more():
                return ""

    def _advance(self, count: int) -> None:
        self._line += self._buffer.count("\n", self._at, self._at + count)
        self._at += count

    def _read_more(self) -> bool:
        """Reads as much again as is still needed; False at the end of the file or where an element is too long."""
        left = len(self._buffer) - self._at
        try:
            more = "" if left > MAX_RECORD_BYTES else self._file.read(max(CHUNK_CHARS, left))
        except UnicodeDecodeError as error:
            raise self._error(f"what follows is not UTF-8 ({error.reason})") from None
        if more:
            self._buffer = self._buffer[self._at:] + more
            self._at = 0
        return bool(more)

    def _error(self, problem: str) -> ConfigError:
        return refused(self._path, self._line, self._buffer[self._at:self._at + 200], f"{problem}: {FORMATS}")
