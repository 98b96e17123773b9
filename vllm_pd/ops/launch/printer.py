# SPDX-License-Identifier: Apache-2.0
"""Prints the lines of several processes, in a thread of its own, in the order of `put`.

`put` never blocks and never fails: a process stops when nobody reads its output, and `vllm-pd up` must be able to end
while nobody reads its own. A line is lost if it can't be printed, or if there is no space for it because the reader
has stopped reading. Lost lines are counted and said.
"""

import collections
import os
import sys
import threading
from collections.abc import Callable

MAX_UNPRINTED_BYTES = 16 << 20
LAST_PRINTED_S = 5.0
Say = Callable[[str, str], None]


def say_aloud(name: str, line: str) -> None:
    """Print a line of the process with this name. Not by `sys.stdout.write`: while nobody reads, that holds a lock, and
    the interpreter aborts if a thread holds it at the end."""
    text = f"[{name}] {line}\n".encode(sys.stdout.encoding, "backslashreplace")
    while text:
        text = text[os.write(sys.stdout.fileno(), text):]


class LinePrinter:
    """Prints lines with `say`, which may block and raise, until `close`. Any thread may `put`."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._lines: collections.deque[tuple[str, str]] = collections.deque()  # (name, line)
        self._bytes = 0  # of these lines
        self._lost = 0  # lines, since this was last said
        self._closed = False
        self._changed = threading.Condition()  # guards all above; never held while printing
        self._thread = threading.Thread(target=self._run, name="printer", daemon=True)
        self._thread.start()

    def put(self, name: str, line: str) -> None:
        """Print this line of the process with this name, later. Returns at once."""
        size = sys.getsizeof(line)
        with self._changed:
            if self._bytes + size > MAX_UNPRINTED_BYTES:
                self._lost += 1
                return
            self._lines.append((name, line))
            self._bytes += size
            self._changed.notify()

    def close(self, timeout_s: float = LAST_PRINTED_S) -> None:
        """Print what is left, for at most so long. What comes later is not printed."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        """The thread: prints one line after the other, until `close` and nothing is left. Before a line, and at the
        end, it says how many were lost since it last could."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._closed)
                lost, ended = self._lost, not self._lines
                name, line = self._lines.popleft() if self._lines else ("", "")
                self._bytes -= 0 if ended else sys.getsizeof(line)
            if lost and self._print("up", f"(lines that could not be printed: {lost})"):
                with self._changed:
                    self._lost -= lost
            if ended:
                return
            if not self._print(name, line):
                with self._changed:
                    self._lost += 1

    def _print(self, name: str, line: str) -> bool:
        try:
            self._say(name, line)
        except Exception:  # the disk is full, the reader has gone: the next line may succeed
            return False
        return True
